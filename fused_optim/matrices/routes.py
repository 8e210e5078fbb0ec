"""Where everything lies that is exchanged of matrices: found once, for as long as the same parameters take part.

Messages have one run of values for each rank, in the order of the matrices. Shards lie in messages where they can, so
that passes over elements write and read these; else behind them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fused_optim.matrices.owners import Ownership, Piece

_ALIGNMENT = 8  # elements: 16 bytes at least, which kernels load and store at once


class Region(NamedTuple):
    """Rows of ``columns`` values in flat memory, ``pitch`` apart."""

    start: int
    rows: int
    columns: int
    pitch: int

    def of(self, memory: Tensor) -> Tensor:
        return memory.as_strided((self.rows, self.columns), (self.pitch, 1), self.start)

    def part(self, piece: Piece) -> Region:
        """The region of a rectangle of the matrix that lies here."""
        (first_row, end_row), (first_column, end_column) = piece
        start = self.start + first_row * self.pitch + first_column
        return Region(start, end_row - first_row, end_column - first_column, self.pitch)

    @staticmethod
    def run(start: int, rows: int, columns: int) -> Region:
        """One row directly behind the other."""
        return Region(start, rows, columns, columns)


def copy_regions(target: Tensor, source: Tensor, pairs: Iterable[tuple[Region, Region]]) -> None:
    """``pairs``: in ``target``, in ``source``; both are flat."""
    copy_all([(to.of(target), of.of(source)) for to, of in pairs])


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class Message(NamedTuple):
    """``sizes``: for each rank, or from it, in values; ``starts``: of what it consists of, in the given order."""

    sizes: list[int]
    starts: list[int]

    @staticmethod
    def of(parcels: Sequence[tuple[int, int]], ranks: int) -> Message:
        """``parcels``: (rank, how many values), in the order of the matrices."""
        sizes = [0] * ranks
        for rank, numel in parcels:
            sizes[rank] += numel
        ends, starts = list(itertools.accumulate(sizes, initial=0)), []
        for rank, numel in parcels:
            starts.append(ends[rank])
            ends[rank] += numel
        return Message(sizes, starts)

    @property
    def numel(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class ShardMemory:
    """Flat memory that begins with a message, and has shards in it.

    ``shards``: (start, how many values), by parameter. ``starts``: of each piece in its shard, by matrix. ``apart``:
    (where a piece is in the message, where in its shard), of shards that lie behind the message.
    """

    numel: int
    shards: dict[int, tuple[int, int]]
    starts: dict[int, int]
    apart: list[tuple[Region, Region]]

    @staticmethod
    def of(message: int, pieces: Mapping[int, Sequence[tuple[int, int, int | None]]]) -> ShardMemory:
        """``message``: its size. ``pieces``: by parameter, all of its shard: (matrix, size, start in the message)."""
        end = _aligned(message)
        found = ShardMemory(0, {}, {}, [])
        for param, own in pieces.items():
            offsets = list(itertools.accumulate((size for _, size, _ in own), initial=0))
            first = own[0][2] if own else None
            is_there = first is not None and _lies_at(first, own, offsets)
            start = first if first is not None and is_there else end
            found.shards[param] = start, offsets[-1]
            for (number, size, place), offset in zip(own, offsets, strict=False):
                found.starts[number] = start + offset
                if place is not None and not is_there:
                    found.apart.append((Region.run(place, 1, size), Region.run(start + offset, 1, size)))
            end = end if is_there else _aligned(end + offsets[-1])
        return ShardMemory(end, found.shards, found.starts, found.apart)

    def of_params(self, memory: Tensor) -> dict[int, Tensor]:
        """The parameters' shards, flat, as views of ``memory``."""
        return {param: memory.narrow(0, start, numel) for param, (start, numel) in self.shards.items()}


def _lies_at(first: int, pieces: Sequence[tuple[int, int, int | None]], offsets: Sequence[int]) -> bool:
    """True if the pieces lie one behind the other from there on, and kernels can be fast."""
    places = [first + offset for offset in offsets]
    return first % _ALIGNMENT == 0 and all(place == at for (_, _, place), at in zip(pieces, places, strict=False))


class Route:
    """The ways of the pieces of some matrices: to their owners, and back.

    ``rank``: this one. ``places``: of ranks of the mesh, in the process group. ``params``: of which this rank has
    shards, empty ones too, that are updated. ``held``: by matrix, what this rank has of it. ``mine``: what it owns.

    ``sent``, ``coming``, ``returning``, ``back``: the messages, two each way; empty where nothing is moved.
    ``updates``: shards in what is sent. ``gathered``: (in whole matrices, in what comes). ``matrices``: where whole
    ones lie: among these, or among updates where nothing is moved. ``returned``: (in what is sent back, matrix, its
    piece). ``made``: shards in what comes back. ``held_of``: matrices, by parameter.
    """

    def __init__(
        self,
        owned: Ownership,
        rank: int,
        places: Sequence[int],
        params: Iterable[int],
        held: Mapping[int, Piece],
        mine: Sequence[int],
    ) -> None:
        self._owned, self._places, self._held = owned, places, held
        self.mine = list(mine)
        self.held_of: dict[int, list[int]] = {param: [] for param in params}  # matrices
        for n in held:
            self.held_of[owned.matrices[n].param].append(n)
        sent = [] if owned.is_local else [n for n, piece in held.items() if owned.sender(n, piece) == rank]
        self.sent = self._message((owned.owners[n], held[n]) for n in sent)
        self.updates = self._shards(self.sent, sent)
        self._plan_matrices()
        self._plan_return()

    def _plan_matrices(self) -> None:
        owned = self._owned
        coming = [] if owned.is_local else [(n, piece) for n in self.mine for piece in owned.pieces[n]]
        self.coming = self._message((owned.sender(n, piece), piece) for n, piece in coming)
        self.matrices: dict[int, Region] = {}
        self.numel = 0  # of whole matrices
        for n in self.mine:
            matrix = owned.matrices[n]
            start = self.updates.starts[n] if owned.is_local else self.numel
            self.matrices[n] = Region.run(start, matrix.rows, matrix.columns)
            self.numel += _aligned(matrix.rows * matrix.columns)
        self.gathered = [
            (whole, Region.run(start, whole.rows, whole.columns))
            for (n, piece), start in zip(coming, self.coming.starts, strict=True)
            for whole in (self.matrices[n].part(piece),)
        ]

    def _plan_return(self) -> None:
        owned = self._owned
        returned = [
            (n, piece, rank)
            for n in ([] if owned.is_local else self.mine)
            for piece, ranks in owned.pieces[n].items()
            for rank in ranks
        ]
        self.returning = self._message((rank, piece) for _, piece, rank in returned)
        self.returned = [
            (Region.run(start, *piece.shape), n, piece)
            for (n, piece, _), start in zip(returned, self.returning.starts, strict=True)
        ]
        back = [] if owned.is_local else list(self._held)
        self.back = self._message((owned.owners[n], self._held[n]) for n in back)
        self.made = self._shards(self.back, back)

    def _message(self, parcels: Iterable[tuple[int, Piece]]) -> Message:
        return Message.of([(self._places[rank], piece.numel) for rank, piece in parcels], len(self._places))

    def _shards(self, message: Message, numbers: Sequence[int]) -> ShardMemory:
        """``numbers``: of the matrices whose pieces the message consists of."""
        starts = dict(zip(numbers, message.starts, strict=True))
        pieces = {param: [(n, self._held[n].numel, starts.get(n)) for n in own] for param, own in self.held_of.items()}
        return ShardMemory.of(message.numel, pieces)


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT
