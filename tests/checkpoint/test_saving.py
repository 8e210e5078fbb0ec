"""Saves of one Saver, one after the other: what they share, and that each holds its own state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distributed
from distributed import same_bits
from fused_optim.checkpoint.folders import folder_at
from fused_optim.checkpoint.verify import verify_items, write_file
from fused_optim.checkpoint.write import Planner, Saver, Writer, layout_of
from fused_optim.sharding.dtensor import local_tensor, set_chunks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def base() -> dict[str, Any]:
    return {"model": {"weight": numbers(4, 8), "bias": numbers(8)}, "optimizer": {"step": 5, "lr": 0.1}}


def changed(**entries: Any) -> dict[str, Any]:
    """``base()`` with other entries; None: without one."""
    state = base()
    for key, value in entries.items():
        part = state["model" if isinstance(value, Tensor) or key == "bias" else "optimizer"]
        part.pop(key, None)
        if value is not None:
            part[key] = value
    return state


def save(saver: Saver, state: dict[str, Any], path: Path) -> None:
    """And what is found there by torch, and by the checksums."""
    folder = folder_at(path)
    folder.create()
    sums = saver.save(state, folder, "saving")
    write_file(folder, {range_: crc for each in sums for range_, crc in each.checksums.items()})
    verify_items(folder, None, required=True)
    check(state, path)


def check(state: dict[str, Any], path: Path) -> None:
    found = {
        part: {key: torch.zeros_like(value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for part, values in state.items()
    }
    dcp.load(found, checkpoint_id=path, no_dist=not dist.is_initialized())
    for part, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                assert same_bits(local_tensor(found[part][key]), local_tensor(value)), key
            else:
                assert found[part][key] == value
    if not dist.is_initialized():
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        assert stored.keys() == {f"{part}.{key}" for part, values in state.items() for key in values}


@contextmanager
def counting_plans() -> Iterator[list[int]]:
    """As many items as there are plans that this process made meanwhile."""
    made: list[int] = []
    create = Planner.create_local_plan

    def counted(self: Planner) -> Any:
        made.append(1)
        return create(self)

    with mock.patch.object(Planner, "create_local_plan", counted):
        yield made


SAME: dict[str, Callable[[], dict[str, Any]]] = {
    "the same": base,
    "other values": lambda: changed(weight=numbers(4, 8, seed=1)),
    "a longer number": lambda: changed(step=5 << 70),
}
OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "a shape": lambda: changed(weight=numbers(8, 4)),
    "a dtype": lambda: changed(weight=numbers(4, 8).bfloat16()),
    "one more tensor": lambda: changed(more=numbers(3)),
    "one less": lambda: changed(bias=None),
    "one more number": lambda: changed(seed=3),
    "a tensor for a number": lambda: changed(lr=None) | {"optimizer": {"step": 5, "lr": torch.tensor(0.1)}},
}


@pytest.mark.parametrize("change", SAME)
def test_states_alike_are_planned_once(tmp_path: Path, change: str) -> None:
    assert plans_of([base(), SAME[change](), base()], tmp_path) == 1


@pytest.mark.parametrize("change", OTHERS)
def test_changed_states_are_planned_anew(tmp_path: Path, change: str) -> None:
    assert plans_of([base(), OTHERS[change](), base()], tmp_path) == 3


def plans_of(states: list[dict[str, Any]], path: Path) -> int:
    """That one Saver makes for these, one after the other."""
    saver = Saver(None)
    with counting_plans() as made:
        for i, state in enumerate(states):
            save(saver, state, path / str(i))
    return len(made)


def sharded(mesh: Any, step: int, rows: int = 5) -> dict[str, Any]:
    """Shards of different sizes, replicas, and numbers of all and of one rank, which grow."""
    shard = distribute_tensor(numbers(rows, 8, seed=step), mesh, [Shard(0)])
    replica = distribute_tensor(numbers(6, seed=step), mesh, [Replicate()])
    own = {f"rank{dist.get_rank()}": "x" * step * (dist.get_rank() + 1)}
    return {"model": {"shard": shard, "replica": replica}, "optimizer": {"step": 10**step}, "extra": own}


def save_on_ranks(path: str) -> tuple[int, list[int]]:
    """How often the ranks planned, and which saves failed on this one."""
    saver, mesh, failed = Saver(dist.new_group(backend="gloo")), distributed.mesh(), []
    full = mock.patch.object(Writer, "write", side_effect=OSError("no room"))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with counting_plans() as made:
        for i, (step, rows, fails) in enumerate([(1, 5, 0), (2, 5, 0), (3, 5, 1), (3, 5, 0), (4, 7, 0), (40, 7, 0)]):
            state = sharded(mesh, step, rows)
            Path(path, str(i)).mkdir(exist_ok=True)
            try:
                with full if fails and is_last else nullcontext():
                    saver.save(state, folder_at(f"{path}/{i}"), "saving")
            except (OSError, RuntimeError) as error:
                assert "no room" in str(error)
                failed.append(i)
            else:
                check(state, Path(path, str(i)))
    return len(made), failed


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_plan_together(tmp_path: Path, ranks: int) -> None:
    """At first, after a failure on one of them, and where a shape has changed."""
    assert distributed.run(ranks, save_on_ranks, str(tmp_path)) == [(3, [2])] * ranks


def change_on_one_rank(path: str) -> int:
    """Its own entry alone becomes a tensor, and is there no more in the end."""
    saver = Saver(dist.new_group(backend="gloo"))
    with counting_plans() as made:
        for i in range(4):
            own: dict[str, Any] = {"number": torch.full((3,), float(i))} if dist.get_rank() == 0 else {"other": i}
            if dist.get_rank() == 1 and i == 1:
                own["other"] = torch.tensor(7)
            if dist.get_rank() == 1 and i == 3:
                own = {}
            state = {"extra": own}
            Path(path, str(i)).mkdir(exist_ok=True)
            saver.save(state, folder_at(f"{path}/{i}"), "saving")
            check(state, Path(path, str(i)))
    return len(made)


def test_one_rank_changes(tmp_path: Path) -> None:
    assert distributed.run(2, change_on_one_rank, str(tmp_path)) == [4, 4]


def layouts() -> list[bool]:
    """Whether an equal tensor has the same layout, and whether one that says itself where it lies has any."""
    first, second = (distribute_tensor(numbers(4, 8), distributed.mesh(), [Shard(0)]) for _ in range(2))
    same = layout_of({"weight": first}) == layout_of({"weight": second})
    set_chunks(first, lambda: [], lambda key, value: [])
    return [same, layout_of({"weight": second}) is not None, layout_of({"weight": first}) is not None]


def test_shards_that_say_where_they_lie_are_asked_each_time() -> None:
    assert distributed.run(2, layouts) == [[True, True, False]] * 2
