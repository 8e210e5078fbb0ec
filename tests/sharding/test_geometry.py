"""Where a local shard lies in the global tensor, and how it is cut into blocks: against enumeration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fused_optim.sharding.dtensor import Geometry, shard_geometry

BLOCKS = (128, 64, 32)


def strided(dim: int, factor: int) -> Placement:
    """How FSDP2 places a parameter on the first mesh dim that tensor parallelism has cut along the same dim."""
    return _StridedShard(dim, split_factor=factor)


def shards(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[DTensor, Geometry]]:
    """Every rank's part of ``arange``, with its geometry; one process plays the ranks in turn."""
    found = []
    world_size = math.prod(mesh_shape)
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            mesh = init_device_mesh("cpu", tuple(mesh_shape))
            full = torch.arange(math.prod(shape)).view(tuple(shape))
            param = distribute_tensor(full, mesh, placements, src_data_rank=None)
            found.append((param, shard_geometry(param)))
        finally:
            dist.destroy_process_group()
    return found


SHAPES = [
    (8, 6), (5, 4), (7, 3), (1, 5), (3, 4), (16,), (10,), (3,), (5, 3, 4), (6, 4, 10), (2, 5, 3), (0, 4), (4, 3, 2, 5)
]  # fmt: skip
PLACEMENTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((1,), (Shard(0),)),
    ((2,), (Shard(0),)),
    ((3,), (Shard(0),)),
    ((4,), (Shard(0),)),
    ((8,), (Shard(0),)),
    ((3,), (Replicate(),)),
    ((2,), (Shard(1),)),
    ((3,), (Shard(1),)),
    ((4,), (Shard(2),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 3), (Shard(0), Replicate())),
    ((2, 2), (Shard(0), Shard(0))),
    ((3, 2), (Shard(0), Shard(1))),
    ((2, 2), (Shard(1), Shard(0))),
    ((2, 2), (Shard(0), Shard(2))),
    ((2, 2), (Shard(1), Shard(1))),
    ((2, 2), (strided(0, 2), Shard(0))),
    ((4, 2), (strided(0, 2), Shard(0))),
    ((2, 3), (strided(0, 3), Shard(0))),
    ((2, 2), (strided(1, 2), Shard(1))),
    ((2, 2, 2), (Replicate(), strided(0, 2), Shard(0))),
    ((2, 2, 2), (Shard(0), strided(1, 2), Shard(1))),
]


def applies(shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    return all(getattr(placement, "dim", 0) < len(shape) for placement in placements)


@pytest.mark.parametrize("mesh_shape, placements", PLACEMENTS, ids=str)
def test_indices_are_those_of_the_elements(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    for shape in SHAPES:
        if not applies(shape, placements):
            continue
        for rank, (param, geometry) in enumerate(shards(shape, mesh_shape, placements)):
            elements = param._local_tensor.flatten()
            assert geometry.numel == elements.numel()
            assert geometry.global_indices(torch.device("cpu")).tolist() == elements.tolist(), (shape, rank)


@pytest.mark.parametrize("shape", [(8, 4), (7, 64)])
def test_empty_shards_have_no_blocks_and_no_indices(shape: tuple[int, ...]) -> None:
    geometry = shards(shape, (9,), (Shard(0),))[-1][1]
    assert (geometry.numel, geometry.blocks) == (0, 0)
    assert geometry.global_indices(torch.device("cpu")).tolist() == []


@pytest.mark.parametrize(
    "mesh_shape, placements",
    [((2,), (strided(0, 2),)), ((2, 2), (strided(0, 2), Replicate())), ((2, 2), (Shard(1), Shard(2)))],
    ids=str,
)
def test_interleaved_shards_number_elements_from_their_first(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    for param, geometry in shards((8, 4, 6), mesh_shape, placements):
        first = int(param._local_tensor.flatten()[0])
        expected = list(range(first, first + geometry.numel))
        assert geometry.global_indices(torch.device("cpu")).tolist() == expected


def plain_geometry(*shape: int) -> Geometry:
    return shard_geometry(torch.zeros(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_tensors_are_numbered_from_zero(shape: tuple[int, ...]) -> None:
    indices = plain_geometry(*shape).global_indices(torch.device("cpu"))
    assert indices.tolist() == list(range(math.prod(shape)))


# --- blocks -----------------------------------------------------------------------------------------------------


def largest_block(rows: set[int]) -> int:
    return next((block for block in BLOCKS if all(row % block == 0 for row in rows)), 0)


@pytest.mark.parametrize(
    "shape, block",
    [
        ((4, 128), 128),
        ((4, 384), 128),
        ((4, 192), 64),
        ((4, 96), 32),
        ((4, 100), 0),
        ((4, 16), 0),
        ((128, 1), 0),
        ((5, 4, 32), 128),
        ((5, 3, 32), 32),
        ((2, 3, 3, 3), 0),
        ((8, 32, 3, 3), 32),
        ((128,), 0),
        ((4095,), 0),
        ((4096,), 128),
        ((5001,), 128),
        ((), 0),
    ],
    ids=str,
)
def test_block_divides_the_row(shape: tuple[int, ...], block: int) -> None:
    assert plain_geometry(*shape).block == block


WIDE_SHAPES = [
    (7, 128), (1, 512), (5, 384), (4, 96), (3, 100), (2, 192), (6, 320), (9, 40),
    (5, 6, 32), (2, 5, 32), (4, 3, 128), (3, 32, 4),
]  # fmt: skip


@pytest.mark.parametrize("mesh_shape, placements", PLACEMENTS, ids=str)
def test_block_divides_the_rows_of_all_ranks(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    for shape in WIDE_SHAPES:
        if not applies(shape, placements):
            continue
        found = shards(shape, mesh_shape, placements)
        rows = {math.prod(param._local_tensor.shape[1:]) for param, _ in found}
        for param, geometry in found:
            assert geometry.block == largest_block(rows), (shape, rows)
            if geometry.block:
                assert geometry.blocks * geometry.block == param._local_tensor.numel()


@pytest.mark.parametrize("size, block", [(4095, 0), (4096, 128), (4100, 128)])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_blocks_of_vectors_depend_on_the_global_size(world_size: int, size: int, block: int) -> None:
    for param, geometry in shards((size,), (world_size,), (Shard(0),)):
        assert geometry.block == block
        assert geometry.blocks == (math.ceil(param._local_tensor.numel() / block) if block else 0)


def test_more_ranks_choose_smaller_blocks_where_columns_are_cut() -> None:
    blocks = [shards((4, 384), (n,), (Shard(1),))[0][1].block for n in (1, 2, 3, 4, 5)]
    assert blocks == [128, 64, 128, 32, 0]
