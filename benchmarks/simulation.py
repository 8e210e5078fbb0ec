"""One rank of many without the others: torch's fake process group, in which collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from fused_optim.sharding import dtensor

_MOST_RANKS = 1 << 20


@contextmanager
def simulated(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of ``world_size`` ranks, of which this process is one.

    Raises ValueError for a number of ranks that nobody has, RuntimeError where there is a process group already.
    """
    if not 1 <= world_size <= _MOST_RANKS:
        raise ValueError(f"world_size: expected a number from 1 to {_MOST_RANKS:,}, got {world_size}")
    if dist.is_initialized():
        raise RuntimeError("a process group is there already: end it first")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()  # they are equal to those of another rank


def _forget_meshes() -> None:
    """Also in what torch keeps for operations on DTensors."""
    dtensor._spec.cache_clear()
    dtensor._placed_part_of.cache_clear()
    # torch's own function for this is beside its visualizer, which needs numpy.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def sharded_parameter(
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    device: str = "meta",
) -> nn.Parameter:
    """A parameter of this shape of which only this rank's shard is allocated, with zeros."""
    local, _ = dtensor.placed_part_of(shape, mesh, placements)
    stride = torch.empty(tuple(shape), device="meta").stride()
    values: Tensor = torch.zeros(local, dtype=dtype, device=device)
    return nn.Parameter(
        DTensor.from_local(values, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    )
