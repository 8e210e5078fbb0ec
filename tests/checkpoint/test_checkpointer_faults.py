"""Checkpointer and what goes wrong: full disks, folders that cannot be written, ranks that die, kills, SIGTERM, damage.

The newest whole checkpoint loads, nothing else is offered, and no failure goes unsaid. FUSED_OPTIM_TEST_KILLS says how
many kills.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist

import cases
import distributed
import fresh
from checkpoint_cases import kill_one_rank, wait_for
from distributed import Workers
from fused_optim.checkpoint import Checkpointer, lock
from fused_optim.checkpoint.folders import LocalFolder
from fused_optim.checkpoint.publish import MANIFEST
from killed_cases import Loss, check_newest, sharded, step_sharded
from native_cases import build, train, trained

KILLS = int(os.environ.get("FUSED_OPTIM_TEST_KILLS", "2"))
REM16 = cases.MASTER["bfloat16+rem16"]


def saved(folder: Path, *steps: int) -> None:
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, folder, keep=None, sigterm=False) as checkpointer:
        for before, step in zip((2, *steps), steps, strict=False):
            train(model, optimizer, range(before, step))
            checkpointer.save(step)


def loaded_step(folder: Path) -> int | None:
    """Into a fresh model, which is checked."""
    model, optimizer = build(REM16, torch.int8, fresh=True)
    step = Checkpointer(model, optimizer, folder, sigterm=False).load_latest()
    if step is not None:
        expected, expected_optimizer = trained(REM16, torch.int8)
        train(expected, expected_optimizer, range(2, step))
        assert all(torch.equal(model[name], param) for name, param in expected.items())
    return step


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != lock.FILE)


# --- damage -----------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 4', '"step": 9'))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a folder for the manifest": (MANIFEST, make_folder),
    "links in a circle for the tensors": ("__0_0.distcp", make_circle),
    "torn manifest": (MANIFEST, truncate),
    "empty manifest": (MANIFEST, lambda path: path.write_bytes(b"")),
    "another manifest": (MANIFEST, lambda path: path.write_text("[]")),
    "changed manifest": (MANIFEST, change_step),
    "no metadata": (".metadata", Path.unlink),
    "torn metadata": (".metadata", truncate),
    "flipped metadata": (".metadata", flip),
    "no tensors": ("__0_0.distcp", Path.unlink),
    "torn tensors": ("__0_0.distcp", truncate),
    "flipped tensors": ("__0_0.distcp", flip),
    "torn checksums": ("fused_optim_checksums.json", truncate),
    "flipped checksums": ("fused_optim_checksums.json", flip),
}


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saves")
    saved(folder, 3, 4)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_ones_are_passed_over(
    damage: str, two_saves: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", two_saves, folder], check=True)
    file, do = DAMAGES[damage]
    do(folder / "step-00000004" / file)
    assert loaded_step(folder) == 3
    assert any("checkpoint" in record.message and "step-00000004" in record.message for record in caplog.records)
    model, optimizer = build(REM16, torch.int8)
    checkpointer = Checkpointer(model, optimizer, folder, sigterm=False)
    before = {name: param.detach().clone() for name, param in model.items()}
    with pytest.raises((FileNotFoundError, ValueError, RuntimeError)):
        checkpointer.load(4)
    assert all(torch.equal(param, before[name]) for name, param in model.items()) and not optimizer.state
    do(folder / "step-00000003" / file)
    if damage == "changed manifest":
        return  # that of step 3 says nothing of step 4
    with pytest.raises(ValueError, match="has 2 checkpoints, of which none is whole"):
        checkpointer.load_latest()


def test_interrupted_saves_are_cleaned_up(two_saves: Path, tmp_path: Path) -> None:
    """By the first save, not by readers. A draft that is whole lacked only its name."""
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", two_saves, folder], check=True)
    draft = folder / ".unfinished-step-00000005.0123abcd"
    draft.mkdir()
    (draft / "__0_0.distcp").write_bytes(b"x")
    (folder / ".unfinished-step-00000007").mkdir()  # of 0.2
    (folder / ".deleted-step-00000001").mkdir()
    (folder / "step-00000004").rename(folder / ".unfinished-step-00000004.89abcdef")
    (folder / "notes.txt").write_text("mine")
    (folder / ".unfinished-notes").mkdir()
    before = visible(folder)
    assert loaded_step(folder) == 3
    assert visible(folder) == before
    saved(folder, 6)
    kept = [".unfinished-notes", "notes.txt", "step-00000003", "step-00000004", "step-00000006"]
    assert visible(folder) == kept
    model, optimizer = build(REM16, torch.int8, fresh=True)
    assert Checkpointer(model, optimizer, folder, readonly=True).steps() == [6, 4, 3]


# --- writing fails ------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for two of these checkpoints, of 0.2 MB each, and not for three."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=520k", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk(full_disk: Path) -> None:
    """The error names the bytes needed; what is there stays, and nothing else; with room again, saves go on."""
    model, optimizer = trained(REM16, torch.int8)
    checkpointer = Checkpointer(model, optimizer, full_disk, keep=None, sigterm=False)
    for step in (2, 3):
        checkpointer.save(step)
        checkpointer.wait()
        train(model, optimizer, range(step, step + 1))
    checkpointer.save(4)
    train(model, optimizer, range(4, 5))
    takes = r"the checkpoint takes about \d{6} bytes, of which this rank writes \d{6}; \d+ are free"
    with pytest.raises(RuntimeError, match=f"saving step 4 to .* failed: .*{takes}"):
        checkpointer.wait()
    assert visible(full_disk) == ["step-00000002", "step-00000003"]
    (full_disk / "step-00000002" / "__0_0.distcp").unlink()
    checkpointer.save(5)
    checkpointer.wait()
    checkpointer.close()
    assert loaded_step(full_disk) == 5


class Full(LocalFolder):
    """Fails in the middle of a file."""

    def open(self, name: str, mode: str) -> BinaryIO:
        stream = super().open(name, mode)
        if "w" not in mode:
            return stream

        class Short:
            written = 0

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *error: Any) -> None:
                stream.close()

            def fileno(self) -> int:
                return stream.fileno()

            def write(self, content: memoryview) -> int:
                self.written += len(content)
                if self.written > 20_000:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return stream.write(content)

        return Short()  # type: ignore[return-value]

    def child(self, name: str) -> LocalFolder:
        return Full(self.path / name)


def fail_on_one_rank(folder: str, failing: str) -> list[str]:
    model, optimizer = sharded(0)
    checkpointer = Checkpointer(model, optimizer, folder, sigterm=False)
    step_sharded(model, optimizer, 1)
    checkpointer.save(1)
    checkpointer.wait()
    messages = []
    if dist.get_rank() == 1:
        if failing == "writing":
            checkpointer._directory.folder = Full(Path(folder))
        else:
            model.register_state_dict_pre_hook(raise_here)
    step_sharded(model, optimizer, 2)
    checkpointer.save(2)
    step_sharded(model, optimizer, 3)  # goes on
    with pytest.raises(RuntimeError, match=r"saving step 2 to .* failed") as error:
        checkpointer.wait()
    messages.append(str(error.value))
    checkpointer.wait()  # said once
    if failing != "writing":
        return messages
    checkpointer._directory.folder = LocalFolder(Path(folder))
    checkpointer.save(3)
    checkpointer.close()
    assert checkpointer.steps() == [3, 1]
    return messages


def raise_here(*_: Any) -> None:
    raise ValueError("this state cannot be had")


@pytest.mark.parametrize("failing, reason", [("writing", "no room in"), ("collecting", "this state cannot be had")])
def test_a_failure_on_one_rank_is_everybodys(failing: str, reason: str, tmp_path: Path) -> None:
    results = distributed.run(2, fail_on_one_rank, str(tmp_path), failing)
    assert all(reason in message for messages in results for message in messages)
    assert not [name for name in visible(tmp_path) if name.startswith(".")]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The next call says so, training goes on meanwhile."""
    model, optimizer = trained(REM16, torch.int8)
    (tmp_path / "file").write_text("")
    with Checkpointer(model, optimizer, tmp_path / "file" / "run", sigterm=False) as checkpointer:
        checkpointer.save(2)
        train(model, optimizer, range(2, 3))
        deadline = time.monotonic() + 30
        while not checkpointer._saves[0].done() and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match=r"saving step 2 to .* failed: .*Not a directory"):
            checkpointer.save(3)
        with pytest.raises(RuntimeError, match=r"saving step 3 to .* failed: .*Not a directory"):
            checkpointer.wait()


def test_a_read_only_folder(two_saves: Path, tmp_path: Path) -> None:
    """It can be read."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", two_saves, folder], check=True)
    folder.chmod(0o500)
    try:
        assert loaded_step(folder) == 4
        model, optimizer = trained(REM16, torch.int8)
        checkpointer = Checkpointer(model, optimizer, folder, sigterm=False)
        checkpointer.save(5)
        with pytest.raises(RuntimeError, match="Permission denied"):
            checkpointer.close()
    finally:
        folder.chmod(0o700)


def test_failures_are_said_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where another error is under way, which is not hidden."""
    model, optimizer = trained(REM16, torch.int8)
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    with pytest.raises(RuntimeError, match="saving step 2"), Checkpointer(model, optimizer, folder) as checkpointer:
        checkpointer.save(2)
    with pytest.raises(KeyError, match="mine"), Checkpointer(model, optimizer, folder) as checkpointer:
        checkpointer.save(2)
        raise KeyError("mine")
    assert sum("saving step 2" in record.message for record in caplog.records) >= 2


# --- ranks that die ------------------------------------------------------------------------------------------------


def save_forever(folder: str, form: str) -> tuple[Any, int, list[int]]:
    """Until SIGTERM; the status that the process would end with, the last step, the checkpoints."""
    model, optimizer = sharded(0)
    loss = Loss()
    every = 3 if form == "terminated" else None
    form = "native" if form == "terminated" else form
    options = {"format": form, "keep": 2, "extra": {"loss": loss}, "every": every, "sigterm": True}
    step = 0
    try:
        with Checkpointer(model, optimizer, folder, **options) as checkpointer:
            for step in range(1, 10_000):
                step_sharded(model, optimizer, step)
                loss.value = step
                checkpointer.save(step)
    except SystemExit as end:
        return end.code, step, checkpointer.steps()
    return None, step, []


@pytest.mark.long
@pytest.mark.parametrize("form", ["native", "unscaled"])
def test_kills_of_one_rank(form: str, tmp_path: Path) -> None:
    """At any moment; the other one is ended a little later."""
    chance, folders = random.Random(form), []
    for kill in range(KILLS):
        folders.append(tmp_path / str(kill))
        ready = folders[-1] / "step-00000002" / MANIFEST
        kill_one_rank(save_forever, (str(folders[-1]), form), ready, chance)
        names = visible(folders[-1])
        assert [name for name in names if name.startswith("step-")]
    steps = check_newest(folders)
    for folder, step in zip(folders, steps, strict=True):
        assert max(int(name[-8:]) for name in visible(folder) if name.startswith("step-")) == step
    print(f"{KILLS} kills: newest steps {steps}")


@pytest.mark.long
def test_sigterm_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """One rank gets it: all save the same step and end."""
    workers = Workers(2, "cpu")
    try:
        workers.start(save_forever, (str(tmp_path), "terminated"), 60)
        wait_for(tmp_path / "step-00000006" / MANIFEST)
        os.kill(workers.processes[1].pid, signal.SIGTERM)
        answers = []
        for connection in workers.connections:
            assert connection.poll(60)
            answers.append(connection.recv())
    finally:
        workers.stop()
    assert all(success for success, _ in answers), answers
    (status, step, steps), other = (answer for _, answer in answers)
    assert other == (status, step, steps)
    assert status == 143 and steps[0] == step and len(steps) == 2
    assert check_newest([tmp_path]) == [step]


SCRIPT = """
import os, signal, sys, time, torch
from fused_optim import FusedAdam
from fused_optim.checkpoint import Checkpointer, termination
param = torch.nn.Parameter(torch.ones(8))
model = torch.nn.ParameterList([param])
optimizer = FusedAdam(model.parameters())
with Checkpointer(model, optimizer, sys.argv[1], every=1000, sigterm=True) as checkpointer:
    for step in range(1, 6):
        param.grad = torch.ones(8)
        optimizer.step()
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            if sys.argv[2] != "once":
                termination.PATIENCE = {"twice": 120, "later": 0}.get(sys.argv[2], 120)
                time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)
        if sys.argv[2] != "late":
            checkpointer.save(step)
print("ended", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "when, status, steps", [("once", 143, [3]), ("twice", 143, [3]), ("later", -15, []), ("late", -15, [])]
)
def test_sigterm_ends_the_process(when: str, status: int, steps: list[int], tmp_path: Path) -> None:
    """Once; twice, where launchers forward what schedulers send; again after a while; after the last save."""
    done = fresh.run(SCRIPT, tmp_path / "run", when)
    assert done.returncode == status and "ended" not in done.stdout, done.stderr
    found = sorted((tmp_path / "run").glob("step-*")) if (tmp_path / "run").exists() else []
    assert [json.loads((path / MANIFEST).read_text())["step"] for path in found] == steps
