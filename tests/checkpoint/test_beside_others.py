"""Readers beside a run whose folder they read, and Checkpointers that follow each other in one process."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import distributed
from fused_optim import FusedAdamW, load_optimizer_checkpoint
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint.load import Loader
from fused_optim.checkpoint.open import DcpFolder
from fused_optim.checkpoint.plan import ModelLoader
from fused_optim.checkpoint.saves import BackgroundSaves


def built() -> tuple[nn.Module, FusedAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 6))
    if torch.distributed.is_initialized():
        fully_shard(model, mesh=distributed.mesh())
    return model, FusedAdamW(model.named_parameters(), lr=0.1)


def train(model: nn.Module, optimizer: FusedAdamW) -> None:
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def local_values(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [getattr(each, "_local_tensor", each).detach().clone() for each in tensors]


def opened(folder: str, **options: Any) -> tuple[nn.Module, FusedAdamW, Checkpointer]:
    model, optimizer = built()
    return model, optimizer, Checkpointer(model, optimizer, folder, **options)


# --- a run goes on while its newest checkpoint is read ----------------------------------------------------------------


def read_while(when: str, keep: int, rotations: int, folder: str) -> tuple[int | None, bool]:
    """The step that an evaluation loads, and whether the values are those of that step."""
    model, optimizer, writer = opened(folder, keep=keep, sigterm=False)
    for step in range(1, keep + 1):
        train(model, optimizer)
        writer.save(step)
    writer.wait()
    read, _, reader = opened(folder, readonly=True)
    there: Callable[..., Any] = getattr(reader, when)
    rotated = []

    def goes_on(*args: Any) -> Any:
        found = there(*args)
        if len(rotated) < rotations:
            rotated.append(1)
            for _ in range(keep):  # so that nothing stays of what was listed
                train(model, optimizer)
                writer.save(keep + sum(rotated) * keep)
                writer.wait()
        return found

    setattr(reader, when, goes_on)
    step = reader.load_latest()
    return step, all(map(torch.equal, local_values(read.parameters()), local_values(model.parameters())))


@pytest.mark.parametrize("when", ["_list", "_compare"])
@pytest.mark.parametrize(("ranks", "keep", "rotations"), [(1, 1, 1), (2, 1, 1), (1, 1, 3), (3, 1, 2)])
def test_the_newest_is_loaded_although_what_was_listed_is_gone(
    ranks: int, keep: int, rotations: int, when: str, tmp_path: Path
) -> None:
    for step, is_right in distributed.run(ranks, read_while, when, keep, rotations, str(tmp_path)):
        assert (step, is_right) == (1 + rotations, True)


MOMENTS: dict[str, tuple[type, str]] = {
    "before it is opened": (DcpFolder, "__init__"),
    "before states are read": (Loader, "read"),
    "before the model is read": (ModelLoader, "load"),
}


def read_while_published_again(way: str, moment: str, folder: str) -> bool:
    """Whether all that was loaded is of the second checkpoint of the step."""
    model, optimizer, writer = opened(folder, sigterm=False)
    train(model, optimizer)
    writer.save(1)
    writer.wait()
    read, read_optimizer, reader = opened(folder, readonly=True)
    owner, name = MOMENTS[moment]
    do: Callable[..., Any] = getattr(owner, name)

    def late(*args: Any) -> Any:
        setattr(owner, name, do)
        train(model, optimizer)
        writer.save(1)
        writer.wait()
        return do(*args)

    with mock.patch.object(owner, name, late):
        if way == "load_optimizer_checkpoint":
            with pytest.raises((OSError, ValueError, RuntimeError), match=r"was replaced|is missing"):
                load_optimizer_checkpoint(read, read_optimizer, reader.path(1))
            reader.load(1)
        else:
            assert getattr(reader, way)(*([1] if way == "load" else [])) == 1
    moments = [
        local_values(each.state[p]["exp_avg"] for p in each.param_groups[0]["params"])
        for each in (optimizer, read_optimizer)
    ]
    return all(map(torch.equal, local_values(read.parameters()), local_values(model.parameters()))) and all(
        map(torch.equal, *moments)
    )


@pytest.mark.parametrize("where", ["disk", "object store"])
@pytest.mark.parametrize(
    "way, moment",
    [
        *((way, moment) for way in ("load", "load_latest") for moment in MOMENTS),
        ("load_optimizer_checkpoint", "before states are read"),
    ],
)
def test_one_checkpoint_is_read_although_its_step_is_saved_again(
    way: str, moment: str, where: str, tmp_path: Path
) -> None:
    folder = str(tmp_path) if where == "disk" else f"memory://{tmp_path}"
    assert read_while_published_again(way, moment, folder)
    if where == "disk":
        again = str(tmp_path / "ranks")
        assert distributed.run(2, read_while_published_again, way, moment, again) == [True, True]


def test_what_is_damaged_is_not_read_for_ever(tmp_path: Path) -> None:
    model, optimizer, writer = opened(str(tmp_path), sigterm=False)
    train(model, optimizer)
    writer.save(1)
    writer.close()
    next(tmp_path.glob("step-*/*.distcp")).write_bytes(b"")
    with pytest.raises(ValueError, match="of which none is whole"):
        opened(str(tmp_path), readonly=True)[2].load_latest()


# --- one after the other, without close() ---------------------------------------------------------------------------


def follow(folder: str, count: int) -> list[int]:
    """As cells of a notebook that are run again."""
    model, optimizer = built()
    checkpointer = None
    for step in range(1, count + 1):
        checkpointer = Checkpointer(model, optimizer, folder, keep=None, sigterm=False)
        gc.collect()  # of the one before, whose save is under way
        train(model, optimizer)
        checkpointer.save(step)
    assert checkpointer is not None
    checkpointer.wait()
    steps = checkpointer.steps()
    checkpointer.close()
    return steps


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_an_earlier_one_has_under_way_is_saved(ranks: int, tmp_path: Path) -> None:
    for steps in distributed.run(ranks, follow, str(tmp_path), 5):
        assert steps == [5, 4, 3, 2, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08}" for step in range(1, 6)]


def test_on_object_stores_too() -> None:
    assert follow("memory://followed", 4) == [4, 3, 2, 1]


def saves_late(folder: str, count: int) -> tuple[list[int], int | None]:
    """The threads of earlier Checkpointers begin last, as those of a busy machine may."""
    model, optimizer = built()
    submit, begun = BackgroundSaves.submit, threading.Event()

    def late(self: BackgroundSaves, pool: Executor, step: int, staged: Any) -> Any:
        def wait_and(save: Callable[[], Any]) -> Any:
            if step == count:
                begun.set()
            assert begun.wait(20)
            time.sleep(0.1 * (count - step))
            return save()

        return submit(self, mock.Mock(submit=lambda save: pool.submit(wait_and, save)), step, staged)

    with mock.patch.object(BackgroundSaves, "submit", late):
        checkpointer = None
        for step in range(1, count + 1):
            checkpointer = Checkpointer(model, optimizer, folder, keep=None, sigterm=False)
            gc.collect()
            train(model, optimizer)
            checkpointer.save(step)
        assert checkpointer is not None
        checkpointer.wait()
    return checkpointer.steps(), checkpointer.load_latest()


@pytest.mark.parametrize("ranks", [1, 2])
def test_saves_are_made_in_the_order_in_which_they_were_asked_for(ranks: int, tmp_path: Path) -> None:
    for found in distributed.run(ranks, saves_late, str(tmp_path), 3, timeout=30):
        assert found == ([3, 2, 1], 3)


def test_on_object_stores_in_that_order() -> None:
    assert saves_late("memory://in_order", 3) == ([3, 2, 1], 3)


def test_a_save_that_cannot_begin_leaves_no_other_waiting(tmp_path: Path) -> None:
    model, optimizer = built()
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        no_thread = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
        with no_thread, pytest.raises(RuntimeError, match="new thread"):
            checkpointer.save(1)
        checkpointer.save(1, force=True)
        checkpointer.wait()
        assert checkpointer.steps() == [1]


# --- ranks that do not do the same ------------------------------------------------------------------------------------


class Extra:
    """Its state is refused by some ranks."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise RuntimeError("not this one")


def refuses_extra(folder: str) -> str:
    model, optimizer = built()
    extra = {"mine": Extra(torch.distributed.get_rank() == 0)}
    with Checkpointer(model, optimizer, folder, extra=extra, sigterm=False) as checkpointer:
        train(model, optimizer)
        checkpointer.save(1)
        with pytest.raises(RuntimeError) as raised:
            checkpointer.load_latest()
    return str(raised.value)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_one_rank_cannot_load_raises_on_all(ranks: int, tmp_path: Path) -> None:
    for text in distributed.run(ranks, refuses_extra, str(tmp_path), timeout=20):
        assert "not this one" in text


def saves_other_step(folder: str, is_later: bool) -> list[int]:
    model, optimizer, checkpointer = opened(folder, every=1 if is_later else None)
    train(model, optimizer)
    if is_later:
        checkpointer.save(4)
    with pytest.raises(ValueError, match=r"save\(\d\): ranks were given steps from 5 to \d; all save the same one"):
        checkpointer.save(5 + torch.distributed.get_rank())
    checkpointer.save(9)
    checkpointer.close()
    return checkpointer.steps()


@pytest.mark.parametrize("is_later", [True, False])
@pytest.mark.parametrize("ranks", [3])
def test_ranks_save_the_same_step(ranks: int, is_later: bool, tmp_path: Path) -> None:
    expected = [9, 4] if is_later else [9]
    assert distributed.run(ranks, saves_other_step, str(tmp_path), is_later, timeout=20) == [expected] * ranks


def opens_differently(folder: str, options: dict[str, list[Any]]) -> str:
    model, optimizer = built()
    own = {name: values[torch.distributed.get_rank()] for name, values in options.items()}
    with pytest.raises(ValueError, match="ranks were given different options: ") as raised:
        Checkpointer(model, optimizer, folder, **own)
    return str(raised.value)


@pytest.mark.parametrize(
    "options",
    [{"every": [1, 2]}, {"keep": [3, None]}, {"sigterm": [True, False]}, {"readonly": [True, False]}],
    ids=lambda options: next(iter(options)),
)
def test_ranks_are_given_the_same_options(options: dict[str, list[Any]], tmp_path: Path) -> None:
    (name, values), *_ = options.items()
    for text in distributed.run(2, opens_differently, str(tmp_path), options, timeout=20):
        assert f": {name}: " in text and all(f"on rank {rank}" in text for rank in range(2))
        assert name == "keep" or f"{values[0]!r} on rank 0, {values[1]!r} on rank 1" in text
