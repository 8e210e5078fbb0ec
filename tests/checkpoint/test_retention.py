"""Which checkpoints stay, and what it takes to find out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cases
import distributed
from fused_optim import FusedAdamW
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint.storage import lock
from fused_optim.checkpoint.storage.directory import Found
from fused_optim.checkpoint.storage.folders import LocalFolder, folder_at
from fused_optim.checkpoint.storage.manifest import Manifest
from fused_optim.checkpoint.storage.retention import Retention
from native_cases import trained


def opened(folder: Path | str, **options: Any) -> Checkpointer:
    return Checkpointer(*trained(cases.MASTER["bfloat16+rem16"], torch.int8), folder, **{"sigterm": False, **options})


def count(folder: Path | str) -> int:
    """Of what is there beside the lock of the process that saves."""
    return len(set(folder_at(folder).names()) - {lock.FILE})


def save(checkpointer: Checkpointer, steps: Any, metrics: Any = None) -> None:
    for step in steps:
        checkpointer.save(step, metrics=None if metrics is None else {"loss": metrics[step], "unused": 1})
    checkpointer.wait()


@pytest.fixture(params=["disk", "object store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "disk":
        yield tmp_path
    else:
        yield f"memory://{tmp_path}"
        fsspec.filesystem("memory").store.clear()


LOSSES = {1: 5.0, 2: 1.0, 3: 4.0, 4: float("nan"), 5: 2.0, 6: 1.0, 7: 9.0, 8: 8.0}


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"keep": 2}, [8, 7]),
        ({"keep": 1, "keep_every": 3}, [8, 6, 3]),
        ({"keep": 2, "keep_best": ("loss", 2)}, [8, 7, 6, 2]),
        ({"keep": 1, "keep_best": ("loss", 1)}, [8, 2]),  # of equals the older one
        ({"keep": 1, "keep_best": ["loss", 2, "max"]}, [8, 7]),
        ({"keep": 1, "keep_every": 5, "keep_best": ("accuracy", 3)}, [8, 5]),
        ({"keep": None, "keep_best": ("loss", 1)}, [8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_what_stays(options: dict[str, Any], kept: list[int], folder: Any) -> None:
    checkpointer = opened(folder, **options)
    save(checkpointer, range(1, 5), LOSSES)
    checkpointer.close()
    checkpointer = opened(folder, **options)  # which knows of metrics what manifests say
    save(checkpointer, range(5, 9), LOSSES)
    assert checkpointer.steps() == kept
    assert opened(folder).load_latest() == 8


def test_pinned_ones_stay(folder: Any) -> None:
    checkpointer = opened(folder, keep=1)
    save(checkpointer, [1, 2])
    with pytest.raises(FileNotFoundError, match="no whole checkpoint of step 1"):
        checkpointer.pin(1)
    checkpointer.pin(2)
    save(checkpointer, [3, 4])
    assert checkpointer.steps() == [4, 2]
    checkpointer.close()
    checkpointer = opened(folder, keep=1)
    assert checkpointer.load(2) == 2
    checkpointer.save(5)
    checkpointer.save(2)  # once more
    checkpointer.wait()
    save(checkpointer, [6])
    assert sorted(checkpointer.steps()) == [2, 6]
    checkpointer.unpin(2)
    save(checkpointer, [7])
    assert checkpointer.steps() == [7]


@pytest.mark.parametrize("again", ["the same", "another one"])
def test_pins_go_over_to_the_step_that_is_saved_again(again: str, folder: Any) -> None:
    """On object stores every attempt has a folder of its own: of a step only the last one stays, and is pinned."""
    checkpointer = opened(folder, keep=1)
    save(checkpointer, [1])
    checkpointer.pin(1)
    first = checkpointer.path(1)
    if again == "another one":
        checkpointer.close()
        checkpointer = opened(folder, keep=1)
    save(checkpointer, [2, 1])
    second = checkpointer.path(1)
    save(checkpointer, [3, 4])
    assert checkpointer.steps() == [4, 1] and checkpointer.path(1) == second
    assert count(folder) == 2 and (first != second) == (not folder_at(folder).is_local)
    checkpointer.unpin(1)
    save(checkpointer, [5])
    assert checkpointer.steps() == [5] and count(folder) == 1


def test_pins_go_over_where_listings_are_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has written it knows by itself."""
    checkpointer = opened(f"memory://{tmp_path}", keep=1)
    save(checkpointer, [1])
    checkpointer.pin(1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._directory.folder, "names", list)
        save(checkpointer, [2, 1])
    last = checkpointer.path(1)
    save(checkpointer, [3, 4])
    assert checkpointer.steps() == [4, 1] and checkpointer.path(1) == last
    fsspec.filesystem("memory").store.clear()


def test_unpinning_lets_all_attempts_go(folder: Any) -> None:
    """A process that ended while it saved again has left an earlier attempt pinned, too."""
    checkpointer = opened(folder, keep=1)
    save(checkpointer, [1])
    first = folder_at(checkpointer.path(1))
    checkpointer.pin(1)
    kept = {name: first.read(name) for name in first.names()}
    save(checkpointer, [2, 1])
    last = checkpointer.path(1)
    if not folder_at(folder).is_local:
        for name, content in kept.items():
            first.write(name, content)
    save(checkpointer, [3])
    assert sorted(checkpointer.steps()) == [1, 3] and checkpointer.path(1) == last
    assert count(folder) == (2 if folder_at(folder).is_local else 3)
    checkpointer.unpin(1)
    save(checkpointer, [4])
    assert checkpointer.steps() == [4] and count(folder) == 1


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"keep_every": 0}, ValueError, "keep_every: expected"),
        ({"keep_every": 2.5}, (TypeError, ValueError), "keep_every: expected"),
        ({"keep_best": "loss"}, ValueError, r"keep_best: expected \('loss', 3\)"),
        ({"keep_best": ("loss",)}, ValueError, r"keep_best: expected \('loss', 3\)"),
        ({"keep_best": ("loss", 3, "least")}, ValueError, r"keep_best: expected \('loss', 3\)"),
        ({"keep_best": ("loss", 0)}, ValueError, "keep_best: expected"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=match):
        opened(tmp_path, **options)


class Unready:
    """No number yet."""

    def __float__(self) -> float:
        raise KeyError("loss")


WRONG = [{"loss": "low"}, {"loss": "0.5"}, {"loss": torch.ones(2)}, {"loss": Unready()}, {1: 2.0}, [("loss", 1.0)]]


@pytest.mark.parametrize("metrics", WRONG)
def test_wrong_metrics(metrics: Any, tmp_path: Path) -> None:
    checkpointer = opened(tmp_path)
    with pytest.raises(TypeError, match="metrics: "):
        checkpointer.save(1, metrics=metrics)
    assert not list(tmp_path.iterdir())
    checkpointer.save(1, metrics={"loss": torch.tensor(2.0), "perplexity": 10**400})
    checkpointer.wait()
    assert checkpointer.steps() == [1]


def metrics_of_one_rank(folder: str, wrong: int) -> tuple[str, list[int]]:
    rank = torch.distributed.get_rank()
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(model, FusedAdamW(model.parameters()), folder, sigterm=False)
    error = ""
    try:
        checkpointer.save(1, metrics={"loss": "low" if rank == wrong else 1.0})
    except TypeError as caught:
        error = str(caught)
    checkpointer.save(2, metrics={"loss": 2.0})
    checkpointer.wait()
    return error, checkpointer.steps()


@pytest.mark.parametrize("wrong", [0, 1])
def test_metrics_of_one_rank(wrong: int, tmp_path: Path) -> None:
    """Those of the first rank count: all ranks raise where they are wrong; nobody asks the others."""
    for error, steps in distributed.run(2, metrics_of_one_rank, str(tmp_path), wrong):
        assert error.startswith("metrics: ") if wrong == 0 else not error
        assert steps == ([2] if wrong == 0 else [2, 1])


def found(name: str, step: int, number: int, metrics: dict[str, float]) -> Found:
    return Found(name, step, Manifest(step, number, 1, None, {}, {}, "", metrics=metrics))


@given(
    steps=st.lists(st.integers(0, 12), max_size=20),
    losses=st.lists(st.one_of(st.none(), st.floats(-4, 4)), min_size=20, max_size=20),
    newest=st.one_of(st.none(), st.integers(1, 5)),
    every=st.one_of(st.none(), st.integers(1, 4)),
    best=st.one_of(st.none(), st.integers(1, 4)),
)
def test_the_rule(
    steps: list[int], losses: list[float | None], newest: int | None, every: int | None, best: int | None
) -> None:
    """Against the words: of every step the last attempt; of these the newest, the multiples and the smallest losses."""
    written = [
        found(f"{step}.{number}", step, number, {} if loss is None else {"loss": loss})
        for number, (step, loss) in enumerate(zip(steps, losses, strict=False))
    ]
    kept = Retention.of(newest, every, None if best is None else ("loss", best)).keeps(written[::-1])
    last = {each.step: each for each in written}
    order = [step for i, step in reversed(list(enumerate(steps))) if step not in steps[i + 1 :]]
    measured = sorted(
        (each.manifest.metrics["loss"], step) for step, each in last.items() if each.manifest and each.manifest.metrics
    )
    expected = {*order[:newest], *(step for step in order if every and step % every == 0)}
    expected |= {step for _, step in measured[: best or 0]}
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
