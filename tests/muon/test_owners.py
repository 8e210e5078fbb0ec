"""Who owns which matrix, and where its pieces lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fused_optim.matrices import shards
from fused_optim.matrices.owners import Box, Boxes, Matrix, Ownership, assign, matrices_of
from simulation import sharded_parameter, simulated


def cuts(size: int, ranks: int) -> list[tuple[int, int]]:
    """As torch.chunk cuts."""
    step = -(-size // ranks)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(ranks)]


def boxes(shape: Sequence[int], by_dim: Sequence[int], replicas: int) -> list[Box]:
    """Of a mesh whose dims cut the tensor's, and which has replicas of all that."""
    ranges = [cuts(size, ranks) for size, ranks in zip(shape, by_dim, strict=True)]
    own = [Box(*(each if len(each) == 3 else ((0, 1), *each))) for each in itertools.product(*ranges)]
    return own * replicas


SHAPES = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 9)), st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
)


@given(SHAPES, st.data())
def test_pieces_cover_every_matrix_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    by_dim = [data.draw(st.integers(1, 4)) for _ in shape]
    replicas = data.draw(st.integers(1, 2))
    splits = data.draw(st.sampled_from([(), (1, shape[-2] - 1)])) if shape[-2] > 1 else ()
    where = boxes(shape, by_dim, replicas)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    shards = [
        full.view(-1, *shape[-2:])[slice(*b.experts), slice(*b.rows), slice(*b.columns)].reshape(
            [end - start for start, end in (b if len(shape) == 3 else b[1:])]
        )
        for b in where
    ]
    seen = torch.zeros_like(full)
    read = [0] * len(shards)  # pieces lie one behind the other
    for matrix in matrices_of(0, shape, splits):
        rows = slice(matrix.first_row, matrix.first_row + matrix.rows)
        whole = full.view(-1, *shape[-2:])[matrix.expert, rows]
        for piece, ranks in Boxes(where).holders(matrix).items():
            assert len(ranks) == replicas
            for rank in ranks:
                own = shards[rank].reshape(-1)[read[rank] : read[rank] + piece.numel].view(piece.shape)
                assert torch.equal(own, piece.of_matrix(whole))
                read[rank] += piece.numel
            piece.of_matrix(seen.view(-1, *shape[-2:])[matrix.expert, rows]).add_(1)
    assert (seen == 1).all() and read == [shard.numel() for shard in shards]


def test_what_lies_whole_stays_there() -> None:
    """Experts that are cut by the expert, replicated matrices, rows that fit into one shard: nothing is moved."""
    experts = matrices_of(0, (4, 6, 5))
    owned = Ownership.of(experts, {0: Boxes(boxes((4, 6, 5), (2, 1, 1), 1))}, [0] * 2)
    assert owned.owners == [0, 0, 1, 1] and owned.is_local
    owned = Ownership.of(matrices_of(0, (1, 8)), {0: Boxes(boxes((1, 8), (4, 1), 1))}, [0] * 4)
    assert owned.owners == [0] and owned.is_local
    owned = Ownership.of(matrices_of(0, (8, 8)), {0: Boxes(boxes((8, 8), (2, 1), 1))}, [0] * 2)
    assert not owned.is_local


def test_replicas_share_the_work() -> None:
    matrices = [matrix for i in range(4) for matrix in matrices_of(i, (8, 8))]
    owned = Ownership.of(matrices, dict.fromkeys(range(4), Boxes(boxes((8, 8), (1, 1), 2))), [0] * 2)
    assert sorted(owned.owners) == [0, 0, 1, 1] and not owned.is_local


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=40), st.integers(1, 9))
def test_work_is_even(shapes: list[tuple[int, int]], ranks: int) -> None:
    """The costliest first: nobody has more than 4/3 of what the best assignment gives (Graham, 1969)."""
    matrices = [Matrix(i, 0, 0, *shape) for i, shape in enumerate(shapes)]
    owners = assign(matrices, [None] * len(matrices), [0] * ranks)
    load = [0] * ranks
    for matrix, owner in zip(matrices, owners, strict=True):
        load[owner] += matrix.cost
    costs = sorted((matrix.cost for matrix in matrices), reverse=True)
    best = max([sum(costs) / ranks, costs[0], *([costs[ranks - 1] + costs[ranks]] if len(costs) > ranks else [])])
    assert max(load) <= 4 / 3 * best + 1e-9


def owned_values(matrices: Sequence[Matrix], owners: Sequence[int], ranks: int) -> list[int]:
    """Of each rank; an owner of -1 is none."""
    found = [0] * ranks
    for matrix, owner in zip(matrices, owners, strict=True):
        if owner >= 0:
            found[owner] += matrix.rows * matrix.columns
    return found


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=40),
    st.lists(st.integers(0, 10**7), min_size=1, max_size=9),
)
def test_nobody_owns_much_more_than_others(shapes: list[tuple[int, int]], busy: list[int]) -> None:
    """Whatever ranks have to do already."""
    matrices = [Matrix(i, 0, 0, *shape) for i, shape in enumerate(shapes)]
    values = owned_values(matrices, assign(matrices, [None] * len(matrices), busy), len(busy))
    mean, largest = sum(values) / len(busy), max(rows * columns for rows, columns in shapes)
    assert max(values) <= max(2 * mean, mean + largest)


@pytest.mark.parametrize("experts", [1, 2, 6, 8, 64])
def test_buckets_are_small_where_few_ranks_hold_all(experts: int) -> None:
    """On 8 ranks: no rank holds more than twice what is meant for the mean."""
    with simulated(8), mock.patch.object(shards, "BUCKET_BYTES", 1 << 20):
        mesh = init_device_mesh("cpu", (8,))
        params = {i: sharded_parameter((experts, 64, 64), torch.bfloat16, mesh, [Shard(0)]) for i in range(100)}
        buckets = [bucket for _, bucket in shards.cut(dict(params))]
        assert sorted(i for bucket in buckets for i in bucket) == list(range(100))
    matrix = 64 * 64 * 4
    by_mean, by_most = (1 << 19) * 8 // (matrix * experts), (1 << 20) // (matrix * -(-experts // 8))
    assert max(map(len, buckets)) == min(by_mean, by_most, 100)


def test_pieces_come_from_the_owner_or_from_all_replicas_alike() -> None:
    owned = Ownership.of(
        matrices_of(0, (8, 8)) + matrices_of(1, (8, 8)),
        dict.fromkeys(range(2), Boxes(boxes((8, 8), (2, 1), 2))),
        [0] * 4,
    )
    for number, owner in enumerate(owned.owners):
        for piece, ranks in owned.pieces[number].items():
            sender = owned.sender(number, piece)
            assert sender in ranks and (sender == owner or owner not in ranks)
