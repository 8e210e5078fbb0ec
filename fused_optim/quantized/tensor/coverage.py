"""The parts of a weight that were loaded, as checkpoints load them piece by piece."""

from __future__ import annotations

from typing import NamedTuple


class Region(NamedTuple):
    """Rows and columns of a matrix, each from one to before another."""

    rows: tuple[int, int]
    columns: tuple[int, int]


def joined(parts: tuple[Region, ...], new: Region) -> tuple[Region, ...]:
    """The parts with one more; what lies side by side is one part. Those of a grid become one once it is complete."""
    for part in parts:
        union = _union(part, new)
        if union is not None:
            return joined(tuple(other for other in parts if other is not part), union)
    return (*parts, new)


def _union(a: Region, b: Region) -> Region | None:
    """The union of two regions if it is a rectangle, else None."""
    if a.columns == b.columns and _touch(a.rows, b.rows):
        return Region(_span(a.rows, b.rows), a.columns)
    if a.rows == b.rows and _touch(a.columns, b.columns):
        return Region(a.rows, _span(a.columns, b.columns))
    return None


def _touch(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return max(a[0], b[0]) <= min(a[1], b[1])


def _span(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return min(a[0], b[0]), max(a[1], b[1])
