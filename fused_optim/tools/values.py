"""Counts and ranges of values, and how two sets of values differ."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Values:
    """Counts and range of a tensor's elements. ``least``, ``largest``: of the finite ones; None if there are none."""

    elements: int = 0
    nan: int = 0
    infinite: int = 0
    zero: int = 0
    least: float | None = None
    largest: float | None = None

    @staticmethod
    def from_pieces(pieces: Iterable[Tensor]) -> Values:
        """Count elements of ``pieces``, flat floating-point tensors."""
        values = Values()
        for piece in pieces:
            values._add(piece)
        return values

    def _add(self, piece: Tensor) -> None:
        self.elements += piece.numel()
        self.zero += piece.numel() - int(torch.count_nonzero(piece))
        if not piece.numel():
            return
        least, largest = (float(value) for value in piece.aminmax())  # NaN where there is one
        if not (math.isfinite(least) and math.isfinite(largest)):
            self.nan += int(piece.isnan().sum())
            self.infinite += int(piece.isinf().sum())
            piece = piece[piece.isfinite()]
            if not piece.numel():
                return
            least, largest = (float(value) for value in piece.aminmax())
        self.least = least if self.least is None else min(self.least, least)
        self.largest = largest if self.largest is None else max(self.largest, largest)

    def __str__(self) -> str:
        parts = [] if self.least is None else [f"{self.least:.3g} to {self.largest:.3g}"]
        if self.elements and self.zero == self.elements:
            parts = ["zeros"]
        parts += [f"{count:,} {what}" for what, count in (("NaN", self.nan), ("infinite", self.infinite)) if count]
        return ", ".join(parts)


@dataclass
class Difference:
    """The difference of two tensors: elements that differ, the largest difference, and its RMS relative to the first's.

    Elements that are NaN on both sides, or the same infinity, are equal. Differences that are not finite are counted,
    but left out of the other two.
    """

    elements: int = 0
    different: int = 0
    largest: float = 0.0
    relative: float = 0.0

    @staticmethod
    def between(first: Iterable[Tensor], second: Iterable[Tensor]) -> Difference:
        """Compare two tensors in pieces of the same sizes."""
        difference, squares, total = Difference(), 0.0, 0.0
        for one, other in zip(first, second, strict=True):
            difference.elements += one.numel()
            total += _square(one)
            if not torch.equal(one, other):
                apart = difference._add(one, other)
                squares += _square(apart)
        difference.relative = math.sqrt(squares / total) if total else math.inf if squares else 0.0
        return difference

    def _add(self, one: Tensor, other: Tensor) -> Tensor:
        """Count a pair of pieces. Returns the finite differences."""
        same = (one == other) | (one.isnan() & other.isnan())
        self.different += one.numel() - int(same.sum())
        apart = (one.double() - other.double())[~same]
        apart = apart[apart.isfinite()]
        if apart.numel():
            self.largest = max(self.largest, float(apart.abs().max()))
        return apart

    def __str__(self) -> str:
        if not self.different:
            return "the same"
        share = f"{self.different:,} of {self.elements:,} elements differ"
        return f"{share}, by {self.largest:.3g} at most, {self.relative:.3g} of the RMS"


def _square(values: Tensor) -> float:
    """The sum of the squares of the finite values."""
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm**2 if math.isfinite(norm) else float(values[values.isfinite()].double().square().sum())
