"""A folder is one run's: others that save there are refused, and go on where it has ended, wherever it ran."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch

import cases
import fresh
from checkpoint_cases import wait_for
from fused_optim.checkpoint import Checkpointer, lock
from fused_optim.checkpoint import verify as checksums
from fused_optim.checkpoint.folders import Folder, folder_at
from fused_optim.checkpoint.lock import Lock
from fused_optim.checkpoint.saves import BackgroundSaves
from native_cases import trained

ELSEWHERE = {"host": "node7", "boot": "another", "pid": 1}
QUICK = {"BEAT": 0.05, "SILENCE": 1.0, "LOOK": 0.05}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, seconds in QUICK.items():
        monkeypatch.setattr(lock, name, seconds)
    yield
    while Other.made:
        Other.made.pop().fall_silent()


@pytest.fixture(params=["disk", "object store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    yield folder_at(tmp_path if request.param == "disk" else f"memory://{tmp_path}")
    fsspec.filesystem("memory").store.clear()


def opened(folder: Folder | Path | str, **options: Any) -> Checkpointer:
    return Checkpointer(*trained(cases.MASTER["bfloat16+rem16"], torch.int8), str(folder), sigterm=False, **options)


class Other(Lock):
    """Of a process on another machine."""

    made: ClassVar[list[Other]] = []

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self._about |= ELSEWHERE
        self.made.append(self)

    def fall_silent(self) -> None:
        self._released.set()
        if self._thread.is_alive():
            self._thread.join()


def refused(checkpointer: Checkpointer, step: int) -> str:
    checkpointer.save(step)
    with pytest.raises(RuntimeError) as raised:
        checkpointer.wait()
    return str(raised.value)


def contents(folder: Folder) -> dict[str, list[str]]:
    return {name: sorted(folder.child(name).names()) for name in folder.names() if name != lock.FILE}


def test_another_run_is_refused_until_it_falls_silent(folder: Folder) -> None:
    """Whether it writes just then or not; what it has left is put in order."""
    with opened(folder, keep=1) as checkpointer:
        checkpointer.save(1)
    other = Other(folder)
    other.take()
    draft = folder.child(f"{'.unfinished-' if folder.is_local else ''}step-00000002.0123abcd")
    draft.create()
    draft.write("__0_0.distcp", b"half")
    before = contents(folder)
    second = opened(folder, keep=1)
    assert second.load_latest() == 1
    message = refused(second, 2)
    assert f"{folder} belongs to another run, process 1 on node7 since 20" in message and "readonly=True" in message
    assert contents(folder) == before
    other.fall_silent()
    began = time.monotonic()
    second.save(3)
    second.wait()
    assert QUICK["SILENCE"] / 2 < time.monotonic() - began
    assert second.steps() == [3] and draft.names() == [] and len(contents(folder)) == 1
    second.close()
    assert lock.FILE not in folder.names()


@pytest.mark.parametrize("when", ["between saves", "while it writes", "before it removes"])
def test_a_run_that_was_silent_changes_nothing(when: str, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder was taken over meanwhile, and stays lost where the other one has ended."""
    first = opened(folder, keep=1)
    first.save(1)
    first.wait()
    kept = contents(folder)
    other = Other(folder)

    def stopped(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        for name, seconds in QUICK.items():
            monkeypatch.setattr(lock, name, seconds)
        first._directory._lock._released.set()  # type: ignore[union-attr]
        time.sleep(4 * QUICK["BEAT"])
        other.take()
        return do(*args, **kwargs)

    if when == "between saves":
        do: Any = BackgroundSaves._save
        monkeypatch.setattr(BackgroundSaves, "_save", stopped)
    elif when == "while it writes":
        do = checksums.write_file
        monkeypatch.setattr(checksums, "write_file", stopped)
    else:
        do = first._directory._prune
        monkeypatch.setattr(first._directory, "_prune", stopped)
    if when == "before it removes":  # the new one is there, and no other one goes
        first.save(2)
        first.wait()
        assert len(contents(folder)) == 2
    else:
        assert "was taken over while this process was silent, and belongs to process 1 on" in refused(first, 2)
        assert contents(folder) == kept
    left = contents(folder)
    assert "was taken over" in refused(first, 3)
    other.release()
    assert "belongs to nobody now" in refused(first, 4) and contents(folder) == left
    first.close()
    with opened(folder, keep=1) as next_one:
        next_one.save(5)
        next_one.wait()
        assert next_one.steps() == [5] and len(contents(folder)) == 1


def test_two_that_begin_at_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find nobody there: it is of the one that writes last."""
    first, other, write = opened(folder), Other(folder), Lock._write

    def late(self: Lock) -> None:
        if self is not other and other._beats == 0:
            write(other)
        write(self)

    monkeypatch.setattr(Lock, "_write", late)
    first.save(1)
    first.wait()
    with pytest.raises(ValueError, match="was taken over"):
        other.check()
    assert first.steps() == [1]
    first.close()


NOBODY = [b"", b"{", b'{"pid": 1e300, "boot": "x"}', b'{"since": "x", "pid": -1}', b"\xff"]


@pytest.mark.parametrize("content", NOBODY)
def test_what_says_nothing_is_silent(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SILENCE", 0.1)
    (tmp_path / lock.FILE).write_bytes(content)
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_who_can_be_seen_to_have_ended(tmp_path: Path) -> None:
    """No process of that number, or another one; this process knows of itself. Of other machines nothing is seen."""
    folder = folder_at(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as living:
        for about, ended in [
            ({}, True),
            ({"pid": living.pid, **lock._process(living.pid)}, False),
            ({"pid": living.pid, "started": "1"}, True),
            ({"pid": 2**22 + 1}, True),
            ({"pid": 2**70}, False),
            ({"boot": "another", "pid": 2**22 + 1}, False),
            ({"namespace": "another", "pid": 2**22 + 1}, False),
        ]:
            own = Lock(folder)
            own._about |= about
            own._write()
            assert lock._has_ended(own._read() or b"") == ended, about
        own = Lock(folder)
        own._about |= lock._process(living.pid)
        own._write()
        living.kill()
        living.wait()
    assert lock._has_ended(own._read() or b"")


def test_a_lock_that_was_removed_by_hand(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with all that is in the folder: nobody can have taken it over."""
    monkeypatch.setattr(lock, "SILENCE", 60.0)
    with opened(folder) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        for name in folder.names():
            folder.remove(name)
        checkpointer.save(2)
        checkpointer.wait()
        assert lock.FILE in folder.names() and checkpointer.steps() == [2]


def test_readers_have_no_lock(folder: Folder) -> None:
    with opened(folder) as checkpointer:
        checkpointer.save(1)
    for options in ({}, {"readonly": True}):
        with opened(folder, **options) as reader:
            assert reader.load_latest() == 1 and lock.FILE not in folder.names()


PROGRAM = """
import os, sys
import torch
from fused_optim import FusedAdamW
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint import lock
lock.BEAT, lock.SILENCE, lock.LOOK = 0.05, 0.5, 0.05
def made():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    return Checkpointer(model, FusedAdamW(model.parameters()), sys.argv[1], keep=1, sigterm=False)
"""


@pytest.mark.parametrize("end", ["", "if os.fork() == 0: sys.exit()\nos.wait()\nassert lock.FILE in os.listdir('.')"])
def test_the_end_of_the_process_lets_it_go(end: str, tmp_path: Path) -> None:
    """That of a child that was forked does not."""
    code = f"{PROGRAM}\nos.chdir(sys.argv[1])\nchild = made()\nchild.save(1)\nchild.wait()\n{end}"
    done = fresh.run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_process_that_is_stopped(tmp_path: Path) -> None:
    """A zombie beside a restart: what the restart has saved stays, and the zombie says why it saves no more."""
    code = f"{PROGRAM}\nrun = made()\nfor step in range(1, 100_000): run.save(step); run.wait()"
    process = subprocess.Popen([fresh.python(), "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "step-00000002")
    pid = lock._parsed((tmp_path / lock.FILE).read_bytes())["pid"]
    process_of_run = pid if isinstance(pid, int) else 0
    signal_to(process_of_run, signal.SIGSTOP)
    with opened(tmp_path, keep=1) as restart:
        restart.save(7)
        restart.wait()
        signal_to(process_of_run, signal.SIGCONT)
        assert process.stderr is not None and "was taken over while this process was silent" in process.stderr.read()
        assert process.wait(30) == 1 and restart.steps() == [7]


def signal_to(pid: int, number: signal.Signals) -> None:
    subprocess.run(["kill", f"-{number.value}", str(pid)], check=True)


def test_a_killed_run_is_followed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same machine nobody waits for a minute."""
    monkeypatch.setattr(lock, "SILENCE", 600.0)
    code = f"{PROGRAM}\nrun = made()\nrun.save(1)\nrun.wait()\nos.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -signal.SIGKILL
    assert (tmp_path / lock.FILE).exists()
    with opened(tmp_path) as restart:
        restart.save(2)
        restart.wait()
        assert restart.steps() == [2, 1]
