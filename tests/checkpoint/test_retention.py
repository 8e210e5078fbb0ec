"""Which checkpoints stay, and what it takes to find out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cases
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint.folders import LocalFolder, folder_at
from fused_optim.checkpoint.publish import CheckpointDirectory, ListedCheckpoint, Manifest
from native_cases import trained


def opened(folder: Path | str, **options: Any) -> Checkpointer:
    return Checkpointer(*trained(cases.MASTER["bfloat16+rem16"], torch.int8), folder, **{"sigterm": False, **options})


def save(checkpointer: Checkpointer, steps: Any) -> None:
    for step in steps:
        checkpointer.save(step)
    checkpointer.wait()


@pytest.fixture(params=["disk", "object store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "disk":
        yield tmp_path
    else:
        yield f"memory://{tmp_path}"
        fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"keep": 2}, [8, 7]),
        ({"keep": 1, "keep_every": 3}, [8, 6, 3]),
        ({"keep": None, "keep_every": 2}, [8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_what_stays(options: dict[str, Any], kept: list[int], folder: Any) -> None:
    checkpointer = opened(folder, **options)
    save(checkpointer, range(1, 5))
    checkpointer.close()
    checkpointer = opened(folder, **options)
    save(checkpointer, range(5, 9))
    assert checkpointer.steps() == kept
    assert opened(folder).load_latest() == 8


def found(name: str, step: int, number: int) -> ListedCheckpoint:
    return ListedCheckpoint(name, step, Manifest(step, number, 1, None, {}, {}, ""))


@given(
    steps=st.lists(st.integers(0, 12), max_size=20),
    newest=st.one_of(st.none(), st.integers(1, 5)),
    every=st.one_of(st.none(), st.integers(1, 4)),
)
def test_the_rule(steps: list[int], newest: int | None, every: int | None) -> None:
    """Against the words: of every step the last attempt; of these the newest, and the multiples."""
    written = [found(f"{step}.{number}", step, number) for number, step in enumerate(steps)]
    directory = CheckpointDirectory(folder_at("memory://rule"), newest, every)
    removed: list[str] = []
    with mock.patch.multiple(directory, _remove=removed.append, _check_owner=lambda: None):
        directory._prune(written[::-1])
    kept = {each.name for each in written} - {*removed}
    last = {each.step: each for each in written}
    order = [step for i, step in reversed(list(enumerate(steps))) if step not in steps[i + 1 :]]
    expected = {*order[:newest], *(step for step in order if every and step % every == 0)}
    assert kept == {last[step].name for step in expected}


class Counted(LocalFolder):
    calls: ClassVar[Counter[str]] = Counter()

    def child(self, name: str) -> LocalFolder:
        return Counted(self.path / name)

    def names(self) -> list[str]:
        self.calls["listings"] += 1
        return super().names()

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        self.calls[f"reads of {name}"] += 1
        return super().read(name, start, length)


@pytest.mark.parametrize("count", [1, 12])
def test_a_save_asks_for_as_much_however_many_there_are(count: int, tmp_path: Path) -> None:
    """One listing of the folder, and manifests that are not known yet."""
    save(opened(tmp_path, keep=None), range(count))
    checkpointer = opened(tmp_path, keep=None)
    checkpointer._directory.folder = Counted(tmp_path)
    checkpointer.save(100)
    checkpointer.wait()
    Counted.calls.clear()
    save(checkpointer, [101])
    assert Counted.calls == {
        "listings": 1,
        "reads of .metadata": 1,  # the one that was just written
        "reads of fused_optim_checkpoint.json": 1,
        "reads of fused_optim_checksums.json": 1,
    }
