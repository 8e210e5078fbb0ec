"""What FSDP2 sends of quantized weights: bytes of data and scales, and what it makes of them.

Rows are padded to the same number on every rank. Each component is gathered on its own, so that the weight lies in
what was gathered without another copy; a group of one rank knows only one tensor, so there all components are packed
into it. A scale of the whole weight is taken from the first rank, which has rows if any rank has: a checkpoint writes
nothing into an empty shard. Histories are not gathered.

Where shards are cut within blocks of several rows, each sends the scales of all blocks that it touches, and those of
the whole weight are put together from these.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_optim.quantized.recipes import Component, Components, Recipe

_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Gathered:
    """What the outputs do not say: the padded shard's shape, the number of shards, and how many rows of its first block
    come before the whole weight, which tensor parallelism may have cut.
    """

    shard_shape: tuple[int, ...]
    ranks: int
    rows_before: int

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole weight, with padded rows."""
        return self.shard_shape[0] * self.ranks, *self.shard_shape[1:]


@dataclass(frozen=True)
class _Part:
    """What is gathered of a component: ``sent`` rows of each shard.

    ``taken``: where the rows of the whole weight are among those; None: at the beginning, in order.
    """

    component: Component
    sent: int
    shape: tuple[int, ...]  # of the whole weight's
    taken: tuple[slice, ...] | None


@functools.cache
def _parts(recipe: Recipe, metadata: Gathered) -> list[_Part]:
    parts = [part for part in recipe.components if part.tile is not None or part.name == "tensor_scale"]
    return [_part(part, recipe.component_shape(part, metadata.shape, metadata.rows_before), metadata) for part in parts]


def _part(component: Component, shape: tuple[int, ...], metadata: Gathered) -> _Part:
    if component.tile is None:
        return _Part(component, 1, shape, None)
    tall, rows, before = component.tile[0], metadata.shard_shape[0], metadata.rows_before % component.tile[0]
    starts = [before + rank * rows for rank in range(metadata.ranks)]
    sent = max(-(-(start + rows) // tall) - start // tall for start in starts) if rows else 0
    if metadata.ranks == 1 or not any(start % tall for start in starts):
        return _Part(component, sent, shape, None)
    # Scales of a block that several shards touch are those of the first. The first of a shard's own:
    firsts = [0, *(-(-start // tall) for start in starts[1:]), shape[0]]
    taken = [
        slice(rank * sent + firsts[rank] - start // tall, rank * sent + firsts[rank + 1] - start // tall)
        for rank, start in enumerate(starts)
    ]
    return _Part(component, sent, shape, tuple(taken))


def inputs(
    recipe: Recipe, components: Components, shape: tuple[int, ...], ranks: int, rows_before: int
) -> tuple[tuple[Tensor, ...], Gathered]:
    """What a shard sends. ``shape``: its own with padded rows. ``rows_before``: as in :class:`Gathered`."""
    metadata = Gathered(shape, ranks, rows_before)
    parts = []
    for part in _parts(recipe, metadata):
        value = components[part.component.name]
        parts.append(
            padded_rows(value if part.component.tile is not None else value[None], part.sent).view(torch.uint8)
        )
    return (_packed(parts),) if ranks == 1 else tuple(parts), metadata


def outputs(recipe: Recipe, gathered: tuple[Tensor, ...], metadata: Gathered) -> tuple[Components, tuple[Tensor, ...]]:
    """The components of the whole weight with padded rows, and which of them were put together.

    The others lie in the memory that was gathered into.
    """
    found = {part.component.name: _value(part, each) for part, each in _received(recipe, gathered, metadata)}
    made = tuple(found[part.component.name] for part in _parts(recipe, metadata) if part.taken is not None)
    return found, made


def refresh(recipe: Recipe, gathered: tuple[Tensor, ...], metadata: Gathered, components: Components) -> None:
    """Put those components together again; ``components`` may have fewer rows."""
    for part, each in _received(recipe, gathered, metadata):
        if part.taken is not None:
            target = components[part.component.name]
            target.copy_(_value(part, each)[: target.shape[0]])


def _received(recipe: Recipe, gathered: tuple[Tensor, ...], metadata: Gathered) -> list[tuple[_Part, Tensor]]:
    parts = _parts(recipe, metadata)
    if metadata.ranks == 1:
        gathered = tuple(_unpacked(parts, gathered[0]))
    return list(zip(parts, gathered, strict=True))


def _value(part: _Part, received: Tensor) -> Tensor:
    if part.component.tile is None:
        received = received[0]
    value = received.view(part.component.dtype)
    # A weight of a single row has one block, though every rank gives one; the first has the row.
    return value[: part.shape[0]] if part.taken is None else torch.cat([value[rows] for rows in part.taken])


def padded_rows(part: Tensor, rows: int) -> Tensor:
    if part.shape[0] == rows:
        return part.contiguous()
    return torch.cat([part, part.new_zeros(rows - part.shape[0], part.shape[1])])


def _packed(parts: list[Tensor]) -> Tensor:
    return torch.cat([_aligned(part.view(-1)) for part in parts])


def _aligned(part: Tensor) -> Tensor:
    missing = -part.numel() % _ALIGNMENT
    return torch.nn.functional.pad(part, (0, missing)) if missing else part


def _unpacked(parts: list[_Part], packed: Tensor) -> list[Tensor]:
    found, start = [], 0
    for part in parts:
        rows, columns = (1, *part.shape) if part.component.tile is None else part.shape
        size = rows * columns * part.component.dtype.itemsize
        found.append(packed[start : start + size].view(rows, -1))
        start += size + -size % _ALIGNMENT
    return found
