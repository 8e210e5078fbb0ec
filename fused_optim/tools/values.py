"""Counts and ranges of values, and how two sets of values differ."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Values:
    """Of a tensor's elements. ``least``, ``largest``: of the finite ones; None where there are none."""

    elements: int = 0
    nan: int = 0
    infinite: int = 0
    zero: int = 0
    least: float | None = None
    largest: float | None = None

    @staticmethod
    def of(pieces: Iterable[Tensor]) -> Values:
        """``pieces``: flat floating-point tensors."""
        found = Values()
        for piece in pieces:
            found._add(piece)
        return found

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
    """Of two tensors' elements: how many differ, the largest difference, and its RMS relative to the first's.

    Elements that are NaN on both sides, or the same infinity, are equal. Differences that are not finite are counted,
    but left out of the other two.
    """

    elements: int = 0
    different: int = 0
    largest: float = 0.0
    relative: float = 0.0

    @staticmethod
    def of(first: Iterable[Tensor], second: Iterable[Tensor]) -> Difference:
        """Pieces of the same sizes."""
        found, squares, total = Difference(), 0.0, 0.0
        for one, other in zip(first, second, strict=True):
            found.elements += one.numel()
            total += _square(one)
            if not torch.equal(one, other):
                apart = found._add(one, other)
                squares += _square(apart)
        found.relative = math.sqrt(squares / total) if total else math.inf if squares else 0.0
        return found

    def _add(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns the differences that are finite."""
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
    """The sum of the squares of what is finite."""
    found = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return found**2 if math.isfinite(found) else float(values[values.isfinite()].double().square().sum())
