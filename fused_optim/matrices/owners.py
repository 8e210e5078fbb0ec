"""The owner of each matrix, who orthogonalizes it, and the places of its parts: a function of global shapes and meshes.

So every rank knows the same without asking, and no bits depend on it.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fused_optim.sharding.dtensor import placed_parts_of

Range = tuple[int, int]  # first, and after the last


class Matrix(NamedTuple):
    """Some rows of a parameter, which are orthogonalized together; of one with three dims, rows of one expert."""

    param: int
    expert: int
    first_row: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """Proportional to the products' flops: of five steps on Gram matrices, half of each that is symmetric."""
        smaller, larger = sorted((self.rows, self.columns))
        return (3 * larger + 7 * smaller) * smaller**2


class Box(NamedTuple):
    """The part of a parameter that a rank holds: ranges of experts, rows and columns."""

    experts: Range
    rows: Range
    columns: Range

    @property
    def is_empty(self) -> bool:
        return any(first >= end for first, end in self)

    @staticmethod
    def of(shape: Sequence[int], offsets: Sequence[int]) -> Box:
        ranges = [(offset, offset + size) for offset, size in zip(offsets, shape, strict=True)]
        experts, rows, columns = ranges if len(ranges) == 3 else [(0, 1), *ranges]
        return Box(experts, rows, columns)


class Piece(NamedTuple):
    """The part of a matrix that a rank holds: ranges of the matrix's rows and columns.

    In the rank's shard of the parameter its elements are consecutive, and pieces of the next matrix come next.
    """

    rows: Range
    columns: Range

    @property
    def shape(self) -> tuple[int, int]:
        (first_row, end_row), (first_column, end_column) = self
        return end_row - first_row, end_column - first_column

    @property
    def numel(self) -> int:
        rows, columns = self.shape
        return rows * columns

    def of_matrix(self, matrix: Tensor) -> Tensor:
        return matrix[slice(*self.rows), slice(*self.columns)]


def matrices_of(param: int, shape: Sequence[int], splits: Sequence[int] = ()) -> list[Matrix]:
    """The matrices of a parameter with two or three dims, if it has elements; ``splits``: their rows, if several."""
    if 0 in shape:
        return []
    experts, (rows, columns) = (1 if len(shape) == 2 else shape[0]), shape[-2:]
    starts = itertools.accumulate(splits, initial=0) if splits else (0,)
    ranges = list(zip(starts, splits or (rows,), strict=False))
    return [Matrix(param, expert, first, count, columns) for expert in range(experts) for first, count in ranges]


def piece_of(matrix: Matrix, box: Box) -> Piece | None:
    """The piece of a matrix that lies in a box, or None."""
    first, last = box.experts
    if not first <= matrix.expert < last:
        return None
    start = max(box.rows[0] - matrix.first_row, 0)
    end = min(box.rows[1] - matrix.first_row, matrix.rows)
    if start >= end or box.columns[0] >= box.columns[1]:
        return None
    return Piece((start, end), box.columns)


class Boxes:
    """The parts of a parameter that the ranks of a mesh hold, in the order of the mesh."""

    def __init__(self, of_rank: Sequence[Box]) -> None:
        self.of_rank = tuple(of_rank)
        self._by_expert: dict[int, dict[Box, list[int]]] = {}
        for rank, box in enumerate(self.of_rank):
            for expert in range(*box.experts):
                self._by_expert.setdefault(expert, {}).setdefault(box, []).append(rank)
        self._holders: dict[Matrix, dict[Piece, list[int]]] = {}

    def holders(self, matrix: Matrix) -> dict[Piece, list[int]]:
        """The ranks that hold each piece of a matrix, ascending: several where it is replicated.

        Found once for all parameters that are cut alike: a model's layers are, on thousands of ranks.
        """
        anywhere = matrix._replace(param=0)
        if anywhere not in self._holders:
            found: dict[Piece, list[int]] = {}
            for box, ranks in self._by_expert.get(matrix.expert, {}).items():
                if piece := piece_of(matrix, box):
                    found.setdefault(piece, []).extend(ranks)
            self._holders[anywhere] = {piece: sorted(ranks) for piece, ranks in found.items()}
        return self._holders[anywhere]


def boxes_of(param: Tensor, mesh: DeviceMesh | None) -> Boxes:
    if mesh is None or not isinstance(param, DTensor):
        return Boxes([Box.of(param.shape, [0] * param.dim())])
    return _boxes_of(tuple(param.shape), mesh, tuple(param.placements))


@functools.lru_cache(maxsize=1024)
def _boxes_of(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Boxes:
    return Boxes([Box.of(*part) for part in placed_parts_of(shape, mesh, placements)])


# How many of a bucket's values one rank has at most, times the mean of all ranks.
MOST_TO_MEAN = 2


def assign(matrices: Sequence[Matrix], candidates: Sequence[Sequence[int] | None], busy: Sequence[int]) -> list[int]:
    """The owner of each matrix, of those that may own it: the costliest first, to who has least to do so far.

    Of those that any rank may own, nobody gets more than makes ``MOST_TO_MEAN`` times the mean number of values, but
    for a matrix that is larger than the mean. Else a rank that has less to do elsewhere, since it has fewer experts,
    would get all of a bucket's matrices, which takes memory and lets the others wait.

    ``candidates``: None for all ranks. ``busy``: what each rank has to do already.
    """
    load, owners = list(busy), [0] * len(matrices)
    owned = [0] * len(load)  # values
    for matrix, own in zip(matrices, candidates, strict=True):
        if own is not None and len(own) == 1:
            owned[own[0]] += matrix.numel
    most = MOST_TO_MEAN * sum(matrix.numel for matrix in matrices) / len(load)
    idlest = _Idlest(load, owned, most)
    for i in sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, i)):
        own, numel = candidates[i], matrices[i].numel
        owner = owners[i] = idlest.take(numel) if own is None else min(own, key=lambda rank: (load[rank], rank))
        load[owner] += matrices[i].cost
        owned[owner] += numel if own is None or len(own) > 1 else 0
    return owners


class _Idlest:
    """A queue of ranks, the least busy first. ``load``, ``owned``: cost and values by rank; the caller adds to both."""

    def __init__(self, load: list[int], owned: list[int], most: float) -> None:
        self._load, self._owned, self._most = load, owned, most
        self._heap = [(cost, rank) for rank, cost in enumerate(load)]  # those that have got more since are put back
        heapq.heapify(self._heap)
        # Without room for as many values as were asked for last; kept aside while no fewer are.
        self._full: list[tuple[int, int]] = []
        self._numel = 0

    def take(self, numel: int) -> int:
        """The rank with the fewest values among those with room for ``numel`` more or without any; else among all."""
        heap = self._heap
        if numel < self._numel:
            while self._full:
                heapq.heappush(heap, self._full.pop())
        self._numel = numel
        while heap:
            cost, rank = heap[0]
            if cost != self._load[rank]:
                heapq.heapreplace(heap, (self._load[rank], rank))
            elif self._owned[rank] and self._owned[rank] + numel > self._most:
                self._full.append(heapq.heappop(heap))
            else:
                return rank
        return min(range(len(self._load)), key=lambda rank: (self._owned[rank], rank))


@dataclass(frozen=True)
class Ownership:
    """The matrices of the parameters on one mesh, with their pieces, owners and, for each piece, who sends it there."""

    matrices: list[Matrix]
    pieces: list[dict[Piece, list[int]]]
    owners: list[int]

    @staticmethod
    def of(matrices: list[Matrix], boxes: Mapping[int, Boxes], busy: Sequence[int]) -> Ownership:
        """``boxes``: by parameter. ``busy``: what each rank has to do already.

        Who holds a whole matrix owns it, if any rank does: nothing is moved then.
        """
        pieces = [boxes[matrix.param].holders(matrix) for matrix in matrices]
        candidates = [next(iter(own.values())) if len(own) == 1 else None for own in pieces]
        return Ownership(matrices, pieces, assign(matrices, candidates, busy))

    @functools.cached_property
    def is_local(self) -> bool:
        """True if no piece is moved."""
        return all(
            ranks == [owner] for owner, own in zip(self.owners, self.pieces, strict=True) for ranks in own.values()
        )

    def sender(self, number: int, piece: Piece) -> int:
        """The rank that sends a piece to the owner: this itself if it can, else another one for each owner."""
        ranks, owner = self.pieces[number][piece], self.owners[number]
        return owner if owner in ranks else ranks[owner % len(ranks)]
