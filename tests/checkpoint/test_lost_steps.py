"""What was saved is there, and what was not is said: retries, readers beside writers, ends of processes, signals."""

from __future__ import annotations

import datetime
import enum
import errno
import json
import os
import random
import signal
import stat
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path, PosixPath
from typing import Any, BinaryIO

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import cases
import distributed
import fresh
from checkpoint_cases import wait_for
from fused_optim import FusedAdamW, load_optimizer_checkpoint, verify_checksums
from fused_optim.checkpoint import Checkpointer, extras, lock, metadata
from fused_optim.checkpoint import publish as manifest
from fused_optim.checkpoint import verify as checksums
from fused_optim.checkpoint.folders import LocalFolder, RemoteFolder, folder_at
from fused_optim.checkpoint.publish import MANIFEST
from fused_optim.tools.inspector import inspect_checkpoint
from native_cases import build, train, trained

REM16 = cases.MASTER["bfloat16+rem16"]


def opened(folder: Path | str, **options: Any) -> Checkpointer:
    return Checkpointer(*trained(REM16, torch.int8), folder, **{"sigterm": False, **options})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Broken(LocalFolder):
    """Raises ``error`` where something is done with files whose names end so."""

    def __init__(self, path: Path, error: OSError, suffix: str, reading: bool) -> None:
        super().__init__(path)
        self.how = error, suffix, reading

    def child(self, name: str) -> LocalFolder:
        return Broken(self.path / name, *self.how)

    def open(self, name: str, mode: str) -> BinaryIO:
        self._raise(name, "w" not in mode)
        return super().open(name, mode)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        self._raise(name, True)
        return super().read(name, start, length)

    def read_into(self, name: str, start: int, memory: memoryview) -> None:
        self._raise(name, True)
        super().read_into(name, start, memory)

    def _raise(self, name: str, reading: bool) -> None:
        error, suffix, when = self.how
        if reading == when and name.endswith(suffix):
            raise error


# --- failed saves ---------------------------------------------------------------------------------------------------


def full(folder: Path) -> Broken:
    return Broken(folder, OSError(errno.ENOSPC, "No space left on device"), ".distcp", reading=False)


@pytest.mark.parametrize("force", [True, False])
def test_a_failed_save_can_be_repeated(force: bool, tmp_path: Path) -> None:
    checkpointer = opened(tmp_path, every=1)
    checkpointer._directory.folder = full(tmp_path)
    checkpointer.save(1, force=force)
    with pytest.raises(RuntimeError, match=r"saving step 1 to .* failed: .*no room"):
        checkpointer.wait()
    assert names(tmp_path) == [lock.FILE]
    checkpointer._directory.folder = LocalFolder(tmp_path)
    checkpointer.save(1, force=force)
    checkpointer.close()
    assert checkpointer.steps() == [1] and names(tmp_path) == ["step-00000001"]


def number_of(checkpointer: Checkpointer, step: int) -> int:
    found = checkpointer._find(step).manifest
    assert found is not None
    return found.number


CHANGES: dict[str, Callable[[Checkpointer, Any, Any], Any]] = {
    "steps": lambda checkpointer, model, optimizer: train(model, optimizer, range(9)),
    "load": lambda checkpointer, model, optimizer: checkpointer.load(1, strict=False),
    "load and steps": lambda checkpointer, model, optimizer: (
        checkpointer.load_latest(),
        train(model, optimizer, range(9)),
    ),
    "a load of another step": lambda checkpointer, model, optimizer: checkpointer.load(2, model_only=True),
    "nothing": lambda checkpointer, model, optimizer: None,
}


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_exists_is_saved_as_it_is_now(change: str, force: bool, tmp_path: Path) -> None:
    """Its number says nothing about the model."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        for step in (2, 1):
            train(model, optimizer, range(step))
            checkpointer.save(step)
        checkpointer.wait()
        before = number_of(checkpointer, 1)
        CHANGES[change](checkpointer, model, optimizer)
        checkpointer.save(1, force=force)
        checkpointer.wait()
        assert number_of(checkpointer, 1) == before + 1
    read, read_optimizer = build(REM16, torch.int8)
    assert Checkpointer(read, read_optimizer, tmp_path, readonly=True).load(1) == 1
    assert all(map(torch.equal, read.parameters(), model.parameters()))


def test_an_earlier_failure_does_not_swallow_the_save_that_is_due(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path)
    checkpointer._directory.folder = full(tmp_path)
    checkpointer.save(1)
    while not checkpointer._saves[0].done():
        pass
    checkpointer._directory.folder = LocalFolder(tmp_path)
    with pytest.raises(RuntimeError, match="saving step 1"):
        checkpointer.save(2)
    checkpointer.close()
    assert checkpointer.steps() == [2]


def test_a_step_that_is_saved_again_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path)
    checkpointer.save(1)
    checkpointer.save(2)
    checkpointer.wait()
    checkpointer.load(1)
    train(checkpointer._states._model, checkpointer._states._optimizer, range(3))  # type: ignore[arg-type]
    checkpointer._directory.folder = full(tmp_path)
    checkpointer.save(2)
    with pytest.raises(RuntimeError, match="saving step 2"):
        checkpointer.wait()
    checkpointer._directory.folder = LocalFolder(tmp_path)
    assert checkpointer.steps() == [2, 1]
    before = (tmp_path / "step-00000002" / ".metadata").stat().st_ino
    checkpointer.save(2)
    checkpointer.close()
    assert checkpointer.steps() == [2, 1] and names(tmp_path) == ["step-00000001", "step-00000002"]
    assert (tmp_path / "step-00000002" / ".metadata").stat().st_ino != before


# --- resuming -------------------------------------------------------------------------------------------------------


def newer_manifest(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text()) | {"version": 99}
    (folder / MANIFEST).write_text(json.dumps(content))


def newer_torch(folder: Path) -> None:
    """And checksums of it."""
    content = (folder / metadata.FILE).read_bytes()
    (folder / metadata.FILE).write_bytes(content.replace(b"TensorProperties", b"TensorPropertieZ"))
    sums = json.loads((folder / checksums.FILE).read_text())
    sums["metadata"] = f"{zlib.crc32((folder / metadata.FILE).read_bytes()):08x}"
    (folder / checksums.FILE).write_text(json.dumps(sums))
    found = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    del found["crc"], found["version"]
    place = LocalFolder(folder)
    found |= {"files": place.sizes(), "checksums": manifest.crc_of_checksums(place)}
    manifest.write_manifest(place, manifest.Manifest(**found))


@pytest.mark.parametrize("change, match", [(newer_manifest, "update fused_optim"), (newer_torch, "by a newer torch")])
def test_what_is_newer_is_not_passed_over(change: Any, match: str, tmp_path: Path) -> None:
    checkpointer = opened(tmp_path)
    for step in (1, 2):
        checkpointer.save(step)
    checkpointer.close()
    change(tmp_path / "step-00000002")
    with pytest.raises(ValueError, match=match):
        opened(tmp_path).load_latest()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("file", [MANIFEST, ".metadata", "__0_0.distcp", checksums.FILE])
def test_what_cannot_be_opened_now_is_not_passed_over(code: int, file: str, tmp_path: Path) -> None:
    """It may be there again in a moment: training does not start from an earlier step, or from none."""
    checkpointer = opened(tmp_path)
    checkpointer.save(1)
    checkpointer.close()
    reader = opened(tmp_path)
    reader._directory.folder = Broken(tmp_path, OSError(code, os.strerror(code)), file, reading=True)
    with pytest.raises(OSError, match=os.strerror(code)):
        reader.load_latest()


def raise_on_one_rank(folder: str) -> str:
    reader = opened(folder)
    if torch.distributed.get_rank() == 1:
        reader._directory.folder = Broken(Path(folder), OSError(errno.EIO, "input/output"), ".distcp", reading=True)
    with pytest.raises((OSError, RuntimeError), match="input/output") as error:
        reader.load_latest()
    return str(error.value)


def test_what_one_rank_cannot_open_is_an_error_of_all(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path)
    checkpointer.save(1)
    checkpointer.close()
    first, second = distributed.run(2, raise_on_one_rank, str(tmp_path))
    assert "rank 1 failed" in first and "rank 1 failed" not in second


@pytest.mark.parametrize("summed", [True, False])
def test_folders_of_other_writers_are_resumed_from(
    summed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of ``dcp.save`` or ``convert``, under a checkpoint's name. They have no extras, and perhaps no checksums."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(7)
    train(model, optimizer, range(2, 4))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=tmp_path / "step-00000012")
    if summed:
        checksums.write_checksums(tmp_path / "step-00000012")
    other, fresh = build(REM16, torch.int8, fresh=True)
    reader = Checkpointer(other, fresh, tmp_path, sigterm=False, extra={"scheduler": Counter()})
    assert reader.steps() == [12, 7]
    with pytest.raises(ValueError, match="has no extra 'scheduler'"):
        reader.load_latest()
    caplog.clear()
    assert reader.load_latest(without=["scheduler"]) == 12
    assert ("step-00000012 has no manifest or checksums" in caplog.text) != summed
    assert all(torch.equal(other[name], param) for name, param in model.items())
    assert fresh.param_groups[0]["step"] == 4
    train(other, fresh, range(4, 5))
    reader.save(13)
    reader.close()
    assert reader.steps() == [13, 12, 7]


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_folders_of_runs_and_of_checkpoints_are_told_apart(kind: str, store: str, tmp_path: Path) -> None:
    """Each where the other one is meant is named, and nothing is written."""
    store = store if kind == "store" else str(tmp_path)
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, store, sigterm=False) as checkpointer:
        for step in (50, 60):
            checkpointer.save(step)
        checkpointer.wait()
        one = checkpointer.path(50)
    before = sorted(folder_at(one).names())
    for options in ({}, {"readonly": True}):
        with pytest.raises(ValueError, match=r"is a checkpoint: expected the folder of a run.* load\(50\) reads"):
            Checkpointer(model, optimizer, one, **options)
    assert sorted(folder_at(one).names()) == before
    for read in (
        load_optimizer_checkpoint,
        lambda *each: verify_checksums(each[2]),
        lambda *each: inspect_checkpoint(each[2]),
    ):
        with pytest.raises(
            FileNotFoundError, match=r"the folder of a run: name one of its 2 .* such as .*step-00000060"
        ):
            read(model, optimizer, store)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_folders_that_refuse_fsync(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFS and some of FUSE's do; errors of a disk are errors."""
    fsync = os.fsync

    def refuses(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuses)
    checkpointer = opened(tmp_path)
    checkpointer.save(1)
    with pytest.raises(RuntimeError, match="Input/output") if code == errno.EIO else nullcontext():
        checkpointer.close()
    assert checkpointer.steps() == ([] if code == errno.EIO else [1])


def test_none_is_said_only_where_nothing_is(tmp_path: Path) -> None:
    assert opened(tmp_path).load_latest() is None
    (tmp_path / ".unfinished-step-00000001.0123abcd").mkdir()
    (tmp_path / "logs").mkdir()
    assert opened(tmp_path).load_latest() is None
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(ValueError, match="has 1 checkpoints, of which none is whole"):
        opened(tmp_path).load_latest()


def test_a_renamed_folder_is_named(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path)
    checkpointer.save(1)
    checkpointer.close()
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000009")
    with pytest.raises(ValueError, match="step-00000009: its manifest is of step 1; was the folder renamed"):
        opened(tmp_path).load_latest()


@pytest.mark.parametrize("how", ["renamed", "newer", "torn", "unreadable"])
def test_a_save_does_not_depend_on_other_checkpoints(how: str, tmp_path: Path) -> None:
    """Nor does it remove what it cannot read."""
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1)
    first = tmp_path / "step-00000001"
    if how == "renamed":
        first = first.rename(tmp_path / "step-00000009")
    elif how == "newer":
        newer_manifest(first)
    elif how == "torn":
        (first / MANIFEST).write_text("{")
    checkpointer = opened(tmp_path, keep=1)
    if how == "unreadable":
        checkpointer._directory.folder = Unreadable(tmp_path)
    for step in (2, 3):
        checkpointer.save(step)
    checkpointer.close()
    assert names(tmp_path) == sorted([first.name, "step-00000003"])


class Unreadable(LocalFolder):
    """Where the manifest of the first step cannot be read just now."""

    def child(self, name: str) -> LocalFolder:
        return Unreadable(self.path / name)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if name == MANIFEST and self.name == "step-00000001":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(name, start, length)


# --- object stores --------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    yield f"memory://{tmp_path.name}/run"
    if fsspec.filesystem("memory").exists(f"/{tmp_path.name}"):
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_a_save_that_fails_leaves_the_good_one_of_its_step(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = opened(store)
    checkpointer.save(1)
    checkpointer.wait()
    good = checkpointer.path(1)
    for method in ("open", "create", "write"):
        with monkeypatch.context() as patch:
            patch.setattr(RemoteFolder, method, raise_timeout)
            checkpointer.save(1)
            with pytest.raises(RuntimeError, match=r"saving step 1 to .* failed: timed out"):
                checkpointer.wait()
        assert checkpointer.steps() == [1] and checkpointer.path(1) == good
    checkpointer.save(1)
    checkpointer.close()
    assert checkpointer.path(1) != good and not folder_at(good).exists()
    assert len(folder_at(store).names()) == 1
    assert opened(store).load_latest() == 1


def raise_timeout(*_: Any) -> None:
    raise TimeoutError("timed out")


@pytest.mark.parametrize("lose", ["remove", "shorten"])
@pytest.mark.parametrize("kind", ["disk", "store"])
def test_what_vanishes_during_the_save_is_not_published(
    kind: str, lose: str, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is pruned for it."""
    folder = store if kind == "store" else str(tmp_path / "run")
    checkpointer = opened(folder, keep=1)
    checkpointer.save(1)
    checkpointer.wait()
    write_file = checksums.write_file

    def lose_a_file(draft: Any, sums: Any) -> dict[str, int]:
        content = draft.read("__0_0.distcp")
        draft.remove("__0_0.distcp")
        if lose == "shorten":
            draft.write("__0_0.distcp", content[:-1])
        return write_file(draft, sums)

    monkeypatch.setattr(checksums, "write_file", lose_a_file)
    checkpointer.save(2)
    with pytest.raises(RuntimeError, match=r"saving step 2 to .* failed: .*__0_0.distcp: expected \d+ bytes, found"):
        checkpointer.close()
    assert checkpointer.steps() == [1] and opened(folder).load_latest() == 1
    assert len(folder_at(folder).names()) == 1


# --- readers and writers ----------------------------------------------------------------------------------------------


def test_readonly(tmp_path: Path) -> None:
    reader = opened(tmp_path / "run", readonly=True, sigterm=True)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert reader.load_latest() is None and not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="readonly=True"):
        reader.save(1)


@pytest.mark.parametrize("spelling", ["text", "link"])
def test_two_that_save_need_two_folders(tmp_path: Path, spelling: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    first, second = opened(tmp_path / "run"), opened(str(tmp_path / ("run" if spelling == "text" else "link")))
    first.save(1)
    assert second.load_latest() in (1, None)
    with pytest.raises(ValueError, match="another Checkpointer saves in"):
        second.save(2)
    first.close()
    second.save(2)
    second.close()
    assert second.steps() == [2, 1]
    with pytest.raises(ValueError, match="was closed"):
        first.save(3)


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, True, np.bool_(True), 2.0, "2", torch.tensor(1.5), None])
def test_what_is_no_step_is_refused(step: Any, tmp_path: Path) -> None:
    checkpointer = opened(tmp_path / "run")
    with pytest.raises((TypeError, ValueError), match="step: expected a whole number"):
        checkpointer.save(step)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [3, np.int64(3), torch.tensor(3)])
def test_steps_of_other_libraries(step: Any, tmp_path: Path) -> None:
    with opened(tmp_path, every=3) as checkpointer:
        checkpointer.save(step)
    assert checkpointer.steps() == [3] and checkpointer.path(3) == str(tmp_path / "step-00000003")


OPTIONS = [{"keep": 2.5}, {"keep": True}, {"keep": 0}, {"every": -1}, {"every": "3"}, {"keep_every": 0}]


@pytest.mark.parametrize("options", [*OPTIONS, {"keep_every": 2.5}, {"format": "x"}], ids=str)
def test_other_options(options: dict[str, Any], tmp_path: Path) -> None:
    expected = f"{next(iter(options))}: expected {'' if 'format' in options else 'a whole number'}"
    with pytest.raises((TypeError, ValueError), match=expected):
        opened(tmp_path, **options)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative one stays where it was meant, whatever the process does."""
    monkeypatch.chdir(tmp_path)
    checkpointer = opened("run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpointer.save(1)
    checkpointer.close()
    assert names(tmp_path / "run") == ["step-00000001"] and names(tmp_path / "elsewhere") == []
    with pytest.raises(ValueError, match=r"s3:/bucket/run: a Path takes one of the slashes"):
        opened(Path("s3://bucket/run"))


# --- the end of the process -----------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from fused_optim import FusedAdamW, load_optimizer_checkpoint, verify_checksums
from fused_optim.checkpoint import Checkpointer, extras
from fused_optim.checkpoint.write import Saver

folder, how = sys.argv[1:]
if "ranks" in how:
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=0, world_size=1)


def made(name, **options):
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(8, 128)) for _ in range(20)])
    return Checkpointer(model, FusedAdamW(model.parameters()), f"{folder}/{name}", **{"sigterm": True, **options})


save = Saver.save


def late(*args, **kwargs):
    time.sleep(1.0)
    return save(*args, **kwargs)


Saver.save = late
"""
ENDS: dict[str, tuple[str, int, list[str]]] = {
    "exit": ("made('a').save(1)", 0, ["a"]),
    "exit of ranks": ("made('a').save(1)", 0, ["a"]),
    "an error": ("made('a').save(1)\nraise KeyError('mine')", 1, ["a"]),
    "sys.exit": ("made('a').save(1)\nsys.exit(3)", 3, ["a"]),
    "a failure": ("open(f'{folder}/b', 'w').close()\nmade('b').save(1)", 1, []),
    "a failure that was told": (
        "open(f'{folder}/b', 'w').close()\nc = made('b')\nc.save(1)\ntry:\n    c.wait()\nexcept RuntimeError: pass",
        0,
        [],
    ),
    "SIGTERM, two that save": (
        "a, b = made('a', every=100), made('b', every=100)\nfor i in range(1, 5):\n"
        "    if i == 2: os.kill(os.getpid(), signal.SIGTERM)\n    a.save(i)\n    b.save(i)",
        143,
        ["a", "b"],
    ),
    "SIGTERM and an error": (
        "try:\n    with made('a') as a:\n        a.save(1)\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        raise KeyError('mine')\nexcept KeyError: pass\nprint('goes on')",
        -15,
        ["a"],
    ),
    "SIGTERM after an earlier failure": (
        "open(f'{folder}/b', 'w').close()\nc = made('b', every=1)\nc.save(1)\ntime.sleep(2)\n"
        "os.remove(f'{folder}/b')\nos.kill(os.getpid(), signal.SIGTERM)\nc.save(2)",
        143,
        ["b"],
    ),
    "SIGTERM of a forked child": (
        "a = made('a')\nchild = os.fork()\nif not child:\n    time.sleep(60)\n    os._exit(0)\n"
        "os.kill(child, signal.SIGTERM)\nassert os.waitpid(child, 0)[1] == 15\na.save(1)",
        0,
        ["a"],
    ),
    "SIGTERM when nobody listens any more": (
        "a = made('a')\na.save(1)\na.close()\nos.kill(os.getpid(), signal.SIGTERM)\nprint('goes on')",
        -15,
        ["a"],
    ),
    "SIGTERM when a Checkpointer was forgotten": (
        "made('a', every=10)\nimport gc; gc.collect()\nos.kill(os.getpid(), signal.SIGTERM)\nprint('goes on')",
        -15,
        [],
    ),
}


# The usual run has one end of each kind.
USUAL_ENDS = ("exit", "SIGTERM, two that save", "SIGTERM of a forked child")


@pytest.mark.parametrize(
    "how", [how if how in USUAL_ENDS else pytest.param(how, marks=pytest.mark.long) for how in ENDS]
)
def test_the_end_of_the_process(how: str, tmp_path: Path) -> None:
    code, status, saved = ENDS[how]
    folder = tmp_path / "runs"
    folder.mkdir()
    done = fresh.run(SCRIPT + code, folder, how)
    text = done.stderr
    assert done.returncode == status and "goes on" not in done.stdout, text
    found = [name for name in names(folder) if (folder / name).is_dir() and list((folder / name).glob("step-*"))]
    assert found == saved, text
    for name in found:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(8, 128)) for _ in range(20)])
        with Checkpointer(model, FusedAdamW(model.parameters()), folder / name, sigterm=False) as reader:
            assert reader.load_latest() in (1, 2) and all(bool((param == 1).all()) for param in model)
    if status == 1 and not saved:
        assert "fused_optim: saving step 1 to" in text and "failed" in text


def destroy_before_the_end(folder: str, when: str) -> str:
    """A group that is destroyed while a save is under way. Each rank would then take itself for the only one."""
    model = nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=distributed.mesh())
    optimizer = FusedAdamW(model.parameters())
    checkpointer = Checkpointer(model, optimizer, folder, sigterm=False)
    reached, go = Path(folder) / "reached", threading.Event()
    method = {"at first": "_save", "in the middle": "_add_extras"}[when]
    saves = checkpointer._background
    own = getattr(saves, method)

    def wait_before(*args: Any) -> Any:
        reached.touch()
        assert go.wait(30)
        return own(*args)

    setattr(saves, method, wait_before)
    checkpointer.save(1)
    wait_for(reached)
    dist.destroy_process_group()
    go.set()
    with pytest.raises(RuntimeError, match=r"saving step 1 to .* failed") as error:
        checkpointer.close()
    return str(error.value)


@pytest.mark.parametrize("when", ["at first", "in the middle"])
def test_a_group_that_is_destroyed_before_the_save_ended(when: str, tmp_path: Path) -> None:
    """Nothing is published that only some ranks have written."""
    workers = distributed.Workers(2, "cpu")
    try:
        errors = workers.run(destroy_before_the_end, (str(tmp_path), when), 60)
    finally:
        workers.stop()
    assert not list(tmp_path.glob("step-*")), errors
    assert any("destroy_process_group()" in error for error in errors)


def close_leaves_nothing(folder: str) -> tuple[int, int, int]:
    def count() -> tuple[int, int, int]:
        groups = len(torch.distributed.distributed_c10d._world.pg_map)
        return groups, threading.active_count(), len(os.listdir("/proc/self/fd"))

    def run(step: int) -> None:
        checkpointer = opened(folder)
        checkpointer.save(step)
        checkpointer.close()

    run(1)
    before = count()
    for step in range(2, 6):
        run(step)
    after = count()
    return tuple(b - a for a, b in zip(before, after, strict=True))  # type: ignore[return-value]


def test_close_leaves_nothing(tmp_path: Path) -> None:
    """No process groups, and not more threads and descriptors with every Checkpointer."""
    for groups, threads, descriptors in distributed.run(2, close_leaves_nothing, str(tmp_path)):
        assert groups == 0 and threads <= 1 and descriptors <= 2


# --- extras ---------------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        *(np.float64(1.0), np.arange(3), np.random.default_rng(0), Color.RED, datetime.date(2026, 1, 2), Path("x")),
        *(range(3), frozenset({1}), slice(1, 2), deque([1]), lambda: 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_extras_that_could_not_be_loaded_are_refused(value: Any, tmp_path: Path) -> None:
    """At the first save, with the key's name; nothing is published."""
    checkpointer = opened(tmp_path, extra={"loader": Holder({"a": 1, "inner": [{"here": value}]})})
    checkpointer.save(1)
    with pytest.raises(RuntimeError, match=r"extra loader\.inner\.0\.here: expected tensors and plain"):
        checkpointer.close()
    assert not list(tmp_path.glob("step-*"))


class WithExtraState(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "where, key",
    [
        ("extra", r"extra loader\.best"),
        ("model", r"model\._extra_state\.best"),
        ("group", r"optimizer\.param_groups\.0\.best"),
        ("state", r"optimizer\.state\.weight\.best"),
    ],
)
def test_what_becomes_such_a_value_later_is_refused_then(where: str, key: str, tmp_path: Path) -> None:
    """As the best loss so far, which is None at first. The checkpoint that can be loaded stays."""
    holder, model = Holder({"best": None}), WithExtraState(4, 4)
    model.extra = {"best": None}
    optimizer = FusedAdamW([{"params": model.parameters(), "best": None}])
    optimizer.initialize_state()
    places = {"extra": holder.state, "model": model.extra, "group": optimizer.param_groups[0]}
    places["state"] = optimizer.state[model.weight]
    places["state"]["best"] = None
    with Checkpointer(model, optimizer, tmp_path, extra={"loader": holder}, keep=1, sigterm=False) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        for value in (np.float64(0.5), 0.5):
            places[where]["best"] = value
            checkpointer.save(2)
            if type(value) is not float:
                with pytest.raises(RuntimeError, match=rf"{key}: expected tensors and plain values .*numpy\.float64"):
                    checkpointer.wait()
                assert checkpointer.load(1, dry_run=True) == 1
        checkpointer.wait()
        assert checkpointer.steps() == [2] and checkpointer.load(2, dry_run=True) == 2


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="extra 'random_states': random_states=True saves one of that name"):
        opened(tmp_path, extra={"random_states": Holder({})}, random_states=True)


def test_extras_of_registered_classes_are_refused_too(tmp_path: Path) -> None:
    """Megatron-core, for one, registers paths as it is imported; who loads may not have imported it."""
    with torch.serialization.safe_globals([PosixPath, (Color, "elsewhere.Color")]):
        test_extras_that_could_not_be_loaded_are_refused(PosixPath("x"), tmp_path)


def test_extras_that_can_be_loaded(tmp_path: Path) -> None:
    state = {"a": (1, 2.5, None, True, "x", b"y", 1j), 3: [{"t": torch.arange(3)}], "s": {1, 2}, "o": OrderedDict(b=1)}
    with opened(tmp_path, extra={"loader": Holder(state)}) as checkpointer:
        checkpointer.save(1)
    reader = opened(tmp_path, extra={"loader": (holder := Holder({}))})
    assert reader.load_latest() == 1
    assert torch.equal(holder.state[3][0].pop("t"), torch.arange(3))  # type: ignore[index]
    del state[3][0]["t"]  # type: ignore[attr-defined, index]
    assert holder.state == state


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))]


def save_and_draw(folder: str) -> list[float]:
    seed = 10 + dist.get_rank()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    draw()
    checkpointer = opened(folder, random_states=True)
    checkpointer.save(1)
    checkpointer.wait()
    return draw()


def load_and_draw(folder: str) -> list[float]:
    assert opened(folder, random_states=True).load_latest() == 1
    return draw()


def test_random_states(tmp_path: Path) -> None:
    """Each rank goes on with its own numbers."""
    expected = distributed.run(2, save_and_draw, str(tmp_path))
    assert distributed.run(2, load_and_draw, str(tmp_path)) == expected and expected[0] != expected[1]
    with pytest.raises(ValueError, match="'random_states' was saved with different states on 2 ranks"):
        opened(tmp_path, random_states=True).load_latest()
    assert opened(tmp_path, random_states=True).load_latest(without=["random_states"]) == 1


# --- extras that are equal --------------------------------------------------------------------------------------------

EQUAL: dict[str, tuple[Any, Any]] = {
    "order of a dict": ({"a": 1, "b": {"c": 2, "d": [3]}}, {"b": {"d": [3], "c": 2}, "a": 1}),
    "order of a set": ({"seen": {"x", "y", "z", 1}}, {"seen": {1, "z", "y", "x"}}),
    "objects that are shared": ({"a": (t := [1, 2]), "b": t}, {"a": [1, 2], "b": [1, 2]}),
    "strides": ({"a": torch.arange(6).view(2, 3)}, {"a": torch.arange(6).view(2, 3).t().contiguous().t()}),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "numbers": ({"a": 1}, {"a": 1.0}),
    "truth": ({"a": 1}, {"a": True}),
    "signs": ({"a": 0.0}, {"a": -0.0}),
    "texts": ({"a": "1"}, {"a": 1}),
    "order of a list": ({"a": [1, 2]}, {"a": [2, 1]}),
    "lists and tuples": ({"a": [1, 2]}, {"a": (1, 2)}),
    "where they are": ({"a": [[1], 2]}, {"a": [[1, 2]]}),
    "keys and values": ({"a": "b"}, {"b": "a"}),
    "dtypes": ({"a": torch.zeros(4, dtype=torch.int8)}, {"a": torch.zeros(4, dtype=torch.uint8)}),
    "shapes": ({"a": torch.zeros(4)}, {"a": torch.zeros(2, 2)}),
    "none": ({"a": None}, {"a": 0}),
}


@pytest.mark.parametrize("name", [*EQUAL, *DIFFERENT])
def test_extras_are_equal_by_what_they_hold(name: str) -> None:
    one, other = (extras.pack("loader", state).digest for state in (EQUAL | DIFFERENT)[name])
    assert (one == other) == (name in EQUAL)


class Held:
    """Whatever it was given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def save_in_own_order(folder: str) -> None:
    keys = ["a", "b", "c"][:: 1 if dist.get_rank() else -1]
    with opened(folder, extra={"loader": Held({key: {"x", key} for key in keys})}) as checkpointer:
        checkpointer.save(1)


def test_extras_of_another_order_load_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    distributed.run(2, save_in_own_order, str(tmp_path))
    held = Held({})
    opened(tmp_path, extra={"loader": held}).load(1)
    assert held.state == {key: {"x", key} for key in "abc"}
