"""Loads that other threads verify meanwhile: nothing changes before all bytes are known to be right."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import cases
import distributed
from fused_optim import FusedAdamW
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint import verify as checksums
from fused_optim.checkpoint.folders import _KeptOpen, threads_to_read
from fused_optim.checkpoint.load import Loader
from fused_optim.checkpoint.read import Reader
from fused_optim.checkpoint.verify import FILE
from killed_cases import Loss, sharded, step_sharded
from native_cases import build, stored, train, trained

REM16 = cases.MASTER["bfloat16+rem16"]


def ranges(folder: Path) -> list[tuple[str, int, int]]:
    files = json.loads((folder / FILE).read_text())["files"]
    return [(name, start, length) for name, rows in files.items() for start, length, _ in rows]


def places(folder: Path) -> Iterator[tuple[str, int]]:
    """The first, a middle and the last byte of stored tensors and objects, of every fifth one."""
    for name, start, length in ranges(folder)[::5]:
        for at in {0, length // 2, length - 1}:
            yield name, start + at


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize("form, master", [("native", REM16), ("unscaled", cases.MASTER["float32"])], ids=str)
def test_a_byte_that_differs_changes_nothing(form: str, master: cases.Master, tmp_path: Path) -> None:
    model, optimizer = trained(master, torch.int8)
    loss = Loss()
    loss.value = 2
    with Checkpointer(model, optimizer, tmp_path, extra={"loss": loss}, format=form, sigterm=False) as checkpointer:
        checkpointer.save(2)
    folder = tmp_path / "step-00000002"
    model, optimizer = build(master, torch.int8, fresh=True)
    train(model, optimizer, range(1))
    loss.value = 7
    before, groups = stored(model, optimizer), [{**group, "params": 0} for group in optimizer.param_groups]
    checkpointer = Checkpointer(model, optimizer, tmp_path, extra={"loss": loss}, sigterm=False)
    for name, at in places(folder):
        flip(folder / name, at)
        with pytest.raises(ValueError, match=r"is damaged: .* expected CRC-32 \w{8}, found \w{8}$"):
            checkpointer.load(2)
        flip(folder / name, at)
        distributed.assert_same(stored(model, optimizer), before)
        assert [{**group, "params": 0} for group in optimizer.param_groups] == groups and loss.value == 7
    assert checkpointer.load(2) == 2 and loss.value == 2
    assert not torch.equal(model["long"], before["long: parameter"])


def load_damaged(folder: str) -> tuple[str, bool, int | None]:
    """The error, whether anything was changed by it, and the step that is loaded instead."""
    model, optimizer = sharded(5)
    step_sharded(model, optimizer, 1)
    before = [param._local_tensor.clone() for param in model.parameters()]
    checkpointer = Checkpointer(model, optimizer, folder, sigterm=False)
    with pytest.raises((ValueError, RuntimeError)) as error:
        checkpointer.load(2)
    same = all(torch.equal(a._local_tensor, b) for a, b in zip(model.parameters(), before, strict=True))
    return str(error.value), same, checkpointer.load_latest()


def save_two(folder: str) -> None:
    model, optimizer = sharded(0)
    with Checkpointer(model, optimizer, folder, keep=None, sigterm=False) as checkpointer:
        for step in (1, 2):
            step_sharded(model, optimizer, step)
            checkpointer.save(step)


@pytest.mark.parametrize("saved_by, loaded_by", [(1, 2), (2, 1), (2, 2)])
def test_ranks_refuse_it_together(saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    distributed.run(saved_by, save_two, str(tmp_path))
    folder = tmp_path / "step-00000002"
    name, start, length = max(ranges(folder), key=lambda each: each[2])
    flip(folder / name, start + length - 1)
    for error, same, step in distributed.run(loaded_by, load_damaged, str(tmp_path)):
        assert "is damaged" in error and "expected CRC-32" in error and same and step == 1


def load_newest_without_threads(folder: str) -> tuple[str, int | None]:
    """The error, and the step that is loaded once the first rank's system has threads."""
    model, optimizer = sharded(5)
    checkpointer = Checkpointer(model, optimizer, folder, sigterm=False)
    refused: Any = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with refused if dist.get_rank() == 0 else nullcontext(), pytest.raises(RuntimeError) as error:
        checkpointer.load_latest()
    return str(error.value), checkpointer.load_latest()


def test_ranks_without_threads_pass_over_nothing(tmp_path: Path) -> None:
    """What is no damage ends the load on all ranks, of whatever kind it is: none goes on to an earlier checkpoint."""
    distributed.run(2, save_two, str(tmp_path))
    found = distributed.run(2, load_newest_without_threads, str(tmp_path), timeout=60)
    assert all("can't start new thread" in error and step == 2 for error, step in found), found


@pytest.mark.parametrize("can_be_read", [True, False])
def test_what_was_read_of_a_damaged_one_is_let_go(can_be_read: bool, tmp_path: Path) -> None:
    """Before the previous one is read: each takes as much host memory as the states."""
    save_damaged(tmp_path, at=0.5 if can_be_read else 0)
    model, optimizer = build(REM16, torch.int8, fresh=True)
    made: list[weakref.ref[Loader]] = []
    alive: list[int] = []
    read = Loader.read

    def note(self: Loader) -> None:
        alive.append(sum(each() is not None for each in made))
        made.append(weakref.ref(self))
        read(self)

    gc.disable()  # which nothing waits for
    try:
        with mock.patch.object(Loader, "read", note):
            assert Checkpointer(model, optimizer, tmp_path, sigterm=False).load_latest() == 2
    finally:
        gc.enable()
    assert alive == [0, 0]


def save_damaged(folder: Path, at: float) -> None:
    """Of two checkpoints the newest, in a tensor; at its beginning is what describes it."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, folder, sigterm=False) as checkpointer:
        for step in (2, 3):
            checkpointer.save(step)
    name, start, length = max(ranges(folder / "step-00000003"), key=lambda each: each[2])
    flip(folder / "step-00000003" / name, start + int(at * length))


def test_damage_is_said_before_what_does_not_fit(tmp_path: Path) -> None:
    """Where the bytes are wrong, what they describe is no reason to give up: an earlier checkpoint is loaded."""
    for step in (1, 2):
        with Checkpointer(*model_of(8), tmp_path, sigterm=False) as checkpointer:
            checkpointer.save(step)
    small, optimizer = model_of(4)
    checkpointer = Checkpointer(small, optimizer, tmp_path, sigterm=False)
    with pytest.raises(ValueError, match="is of another model"):
        checkpointer.load(2)
    folder = tmp_path / "step-00000002"
    name, start, length = max(ranges(folder), key=lambda each: each[2])
    flip(folder / name, start + length - 1)
    with pytest.raises(ValueError, match="is damaged"):
        checkpointer.load(2)
    with pytest.raises(ValueError, match="step-00000001 is of another model"):
        checkpointer.load_latest()


def model_of(width: int) -> tuple[nn.Module, Any]:
    model = nn.Linear(width, width)
    optimizer = FusedAdamW(model.parameters())
    model(torch.ones(width)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_states_are_read_while_bytes_are_verified(tmp_path: Path) -> None:
    """And parameters are not."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(2)
    expected = stored(model, optimizer)
    model, optimizer = build(REM16, torch.int8, fresh=True)
    before, seen, were_read = stored(model, optimizer), [], threading.Event()
    read, crc32 = Loader.read, _KeptOpen.crc32

    def read_states(self: Loader) -> None:
        read(self)
        were_read.set()

    def wait_and_sum_up(self: _KeptOpen, name: str, start: int, length: int) -> int:
        assert were_read.wait(30)
        seen.append(all(torch.equal(value, before[key]) for key, value in stored(model, optimizer).items()))
        return crc32(self, name, start, length)

    with mock.patch.object(Loader, "read", read_states), mock.patch.object(_KeptOpen, "crc32", wait_and_sum_up):
        assert Checkpointer(model, optimizer, tmp_path, sigterm=False).load(2) == 2
    assert len(seen) == len(ranges(tmp_path / "step-00000002")) and all(seen)
    distributed.assert_same(stored(model, optimizer), expected)


def test_states_that_cannot_be_read_leave_the_model_alone(tmp_path: Path) -> None:
    """Also without verification: they are read before parameters are written."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(2)
    model, optimizer = build(REM16, torch.int8, fresh=True)
    before = stored(model, optimizer)
    checkpointer = Checkpointer(model, optimizer, tmp_path, sigterm=False)
    with mock.patch.object(Loader, "_read", side_effect=OSError("gone")), pytest.raises(OSError, match="gone"):
        checkpointer.load(2, verify=False)
    distributed.assert_same(stored(model, optimizer), before)


def test_a_dry_run_reads_no_states(tmp_path: Path) -> None:
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(2)
    with mock.patch.object(Loader, "read", side_effect=AssertionError):
        assert checkpointer.load(2, dry_run=True) == 2


def test_verification_alone_names_all_that_differs(tmp_path: Path) -> None:
    """It runs from when it is started, and says nothing before it is asked."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(2)
    folder = tmp_path / "step-00000002"
    with checksums.verifying(checksums.folder_at(folder), None, required=True):
        pass
    for name, start, length in ranges(folder)[:3]:
        flip(folder / name, start + length // 2)
    ran = []
    with pytest.raises(ValueError, match="and 2 more"), checksums.verifying(checksums.folder_at(folder), None, True):
        ran.append("damaged")
    (folder / FILE).unlink()
    with checksums.verifying(checksums.folder_at(folder), None, required=False):
        ran.append("without")
    lacking = pytest.raises(FileNotFoundError, match="has no checksums")
    with lacking, checksums.verifying(checksums.folder_at(folder), None, required=True):
        ran.append("missing")
    assert ran == ["damaged", "without", "missing"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_verification(error: type[BaseException], tmp_path: Path) -> None:
    """Else the process would end after all bytes are read."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(2)
    before, crc32, summed = set(threading.enumerate()), _KeptOpen.crc32, []
    begun, interrupted = threading.Event(), threading.Event()

    def wait_and_sum_up(self: _KeptOpen, name: str, start: int, length: int) -> int:
        summed.append(name)
        begun.set()
        assert interrupted.wait(30)
        return crc32(self, name, start, length)

    def interrupt(_: Loader) -> None:
        assert begun.wait(30)
        raise error

    with mock.patch.object(_KeptOpen, "crc32", wait_and_sum_up):
        with mock.patch.object(Loader, "read", interrupt), pytest.raises(error):
            checkpointer.load(2)
        interrupted.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(30)
    assert len(summed) <= threads_to_read() < len(ranges(tmp_path / "step-00000002"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_damage(error: type[BaseException], tmp_path: Path) -> None:
    """Nothing is read again to find out which state it was."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(2)
    tries = []

    def interrupt(*_: Any) -> None:
        tries.append(1)
        raise error("mine")

    with mock.patch.object(Reader, "_prepare", interrupt), pytest.raises(error, match="mine"):
        checkpointer.load(2)
    assert len(tries) <= threads_to_read()


def test_empty_tensors_are_verified(tmp_path: Path) -> None:
    """What has no bytes has a description, which has some."""
    model: Any = nn.ParameterDict({"none": torch.zeros(0, 8), "some": torch.ones(3, 8)})
    optimizer = FusedAdamW(model.parameters(), state_dtype="int8")
    optimizer.initialize_state()
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        checkpointer.save(1)
    saved: Tensor = model["some"].detach().clone()
    with torch.no_grad():
        model["some"].zero_()
    assert Checkpointer(model, optimizer, tmp_path, sigterm=False).load(1) == 1
    assert torch.equal(model["some"], saved)
