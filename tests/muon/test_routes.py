"""Where pieces of matrices lie in messages, and what comes of sending these: by hand, of all ranks in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fused_optim.matrices.owners import Box, Boxes, Matrix, Ownership, Piece, matrices_of, piece_of
from fused_optim.matrices.routes import Message, Route, copy_regions


def cuts(size: int, ranks: int) -> list[tuple[int, int]]:
    """As torch.chunk cuts."""
    step = -(-size // ranks)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(ranks)]


def shard(full: Tensor, box: Box) -> Tensor:
    return full.view(-1, *full.shape[-2:])[tuple(slice(*part) for part in box)].reshape(-1)


class World:
    """Parameters on all ranks of a mesh, whose places in the process group may be others."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], boxes: list[list[Box]], splits: Sequence[Sequence[int]]):
        self.fulls = [
            1000.0 * i + torch.arange(torch.Size(shape).numel()).view(shape) for i, shape in enumerate(shapes)
        ]
        self.boxes, self.ranks = boxes, len(boxes[0])
        matrices = [m for i, shape in enumerate(shapes) for m in matrices_of(i, shape, splits[i])]
        self.owned = Ownership.of(matrices, {i: Boxes(own) for i, own in enumerate(boxes)}, [0] * self.ranks)

    def held(self, rank: int) -> dict[int, Piece]:
        found = ((n, piece_of(m, self.boxes[m.param][rank])) for n, m in enumerate(self.owned.matrices))
        return {n: piece for n, piece in found if piece is not None}

    def routes(self, places: Sequence[int]) -> list[Route]:
        mine = [[n for n, owner in enumerate(self.owned.owners) if owner == rank] for rank in range(self.ranks)]
        params = range(len(self.fulls))
        return [Route(self.owned, r, places, params, self.held(r), mine[r]) for r in range(self.ranks)]

    def matrix(self, number: int) -> Tensor:
        m: Matrix = self.owned.matrices[number]
        full = self.fulls[m.param].view(-1, *self.fulls[m.param].shape[-2:])
        return full[m.expert, m.first_row : m.first_row + m.rows]


def exchanged(sent: list[tuple[Tensor, Message]], received: list[Message], places: Sequence[int]) -> list[Tensor]:
    """All to all."""
    runs: dict[tuple[int, int], Tensor] = {}  # by places
    for rank, (memory, message) in enumerate(sent):
        for to, run in enumerate(memory[: message.numel].split(message.sizes)):
            runs[places[rank], to] = run
    found = []
    for rank, message in enumerate(received):
        parts = [runs[place, places[rank]] for place in range(len(places))]
        assert [len(part) for part in parts] == message.sizes
        found.append(torch.cat(parts))
    return found


SHAPES = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    st.just((16, 8)),
)


@given(st.lists(SHAPES, min_size=1, max_size=4), st.data())
def test_matrices_come_together_and_go_back(shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    outer, inner, replicas = (data.draw(st.integers(1, 3)) for _ in range(3))
    boxes, splits = [], []
    for shape in shapes:
        dims = data.draw(st.permutations(range(len(shape))))[:2]
        ranges = [cuts(n, outer if d == dims[0] else inner if d == dims[1] else 1) for d, n in enumerate(shape)]
        own = [Box(*(each if len(each) == 3 else ((0, 1), *each))) for each in itertools.product(*ranges)]
        boxes.append(own * replicas)
        rows = shape[-2]
        splits.append(data.draw(st.sampled_from([(), (1, rows - 1)])) if rows > 1 else ())
    world = World(shapes, boxes, splits)
    places = data.draw(st.permutations(range(world.ranks)))
    routes = world.routes(places)
    sent = []
    for rank, route in enumerate(routes):
        memory = torch.full((route.updates.numel,), torch.nan)
        for i, own in route.updates.of_params(memory).items():
            own.copy_(shard(world.fulls[i], boxes[i][rank]))
        copy_regions(memory, memory, route.updates.apart)
        sent.append((memory, route.sent))
    come = exchanged(sent, [route.coming for route in routes], places)
    back = []
    for (memory, _), got, route in zip(sent, come, routes, strict=True):
        whole = memory if world.owned.is_local else torch.full((route.numel,), torch.nan)
        copy_regions(whole, got, route.gathered)
        for n, region in route.matrices.items():
            assert torch.equal(region.of(whole), world.matrix(n))
        returned = torch.full((route.returning.numel,), torch.nan)
        for to, n, piece in route.returned:
            to.of(returned).copy_(-piece.of_matrix(world.matrix(n)))
        back.append((returned, route.returning))
    if world.owned.is_local:
        return
    for rank, (route, got) in enumerate(zip(routes, exchanged(back, [r.back for r in routes], places), strict=True)):
        memory = torch.full((route.made.numel,), torch.nan)
        memory[: len(got)] = got
        copy_regions(memory, memory, [(own, there) for there, own in route.made.apart])
        for i, made in route.made.of_params(memory).items():
            assert torch.equal(made, -shard(world.fulls[i], boxes[i][rank]))
