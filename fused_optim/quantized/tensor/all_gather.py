"""FSDP2's all-gather of quantized weights: the bytes that a shard sends, and the weight that is made of them.

Rows are padded to the same number on every rank. Each component is gathered on its own, so that the weight lies in
the gathered memory without another copy; a group of one rank knows only one tensor, so there all components are
packed into it. A scale of the whole weight is taken from the first rank, which has rows if any rank has: a checkpoint
writes nothing into an empty shard. Histories are not gathered.

If shards are cut within blocks of several rows, each sends the scales of all blocks that it touches, and those of the
whole weight are put together from these.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_optim.quantized.recipes import Component, Components, Recipe

_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class _GatheredComponent:
    """A component to gather: ``sent`` rows of each shard.

    ``taken``: the places of the whole weight's rows among the gathered ones; None: at the beginning, in order.
    """

    component: Component
    sent: int
    shape: tuple[int, ...]  # of the whole weight's
    taken: tuple[slice, ...] | None

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] * self.component.dtype.itemsize


@dataclass(frozen=True)
class Gathered:
    """The facts about gathered outputs that these do not show.

    ``ranks``: the number of shards. ``shape``: of the whole weight with padded rows. ``rows_before``: rows of its first
    block that come before it, as tensor parallelism may have cut it.
    """

    ranks: int
    shape: tuple[int, ...]
    rows_before: int
    parts: tuple[_GatheredComponent, ...]
    puts_together: bool  # some parts, which then do not lie in the memory that is gathered into


@functools.cache
def _gathered(recipe: Recipe, shard_shape: tuple[int, ...], ranks: int, rows_before: int) -> Gathered:
    shape = (shard_shape[0] * ranks, *shard_shape[1:])
    parts = tuple(
        _gathered_component(part, recipe.component_shape(part, shape, rows_before), shard_shape[0], ranks, rows_before)
        for part in recipe.components
        if part.tile is not None or part.name == "tensor_scale"
    )
    return Gathered(ranks, shape, rows_before, parts, any(part.taken is not None for part in parts))


def _gathered_component(
    component: Component, shape: tuple[int, ...], rows: int, ranks: int, rows_before: int
) -> _GatheredComponent:
    if component.tile is None:
        return _GatheredComponent(component, 1, shape, None)
    block_rows, before = component.tile[0], rows_before % component.tile[0]
    starts = [before + rank * rows for rank in range(ranks)]
    sent = max(-(-(start + rows) // block_rows) - start // block_rows for start in starts) if rows else 0
    if ranks == 1 or not any(start % block_rows for start in starts):
        return _GatheredComponent(component, sent, shape, None)
    # Scales of a block that several shards touch are those of the first. The first of a shard's own:
    firsts = [0, *(-(-start // block_rows) for start in starts[1:]), shape[0]]
    taken = [
        slice(rank * sent + firsts[rank] - start // block_rows, rank * sent + firsts[rank + 1] - start // block_rows)
        for rank, start in enumerate(starts)
    ]
    return _GatheredComponent(component, sent, shape, tuple(taken))


class SentShard:
    """The tensors that a shard sends, used again at each gather.

    ``shape``: its own with padded rows. ``rows_before``: as in :class:`Gathered`. Views of the shard's memory are made
    once, since they cost the host more than all else here, and are flat, since FSDP2 makes more views of them.
    """

    def __init__(
        self, recipe: Recipe, components: Components, shape: tuple[int, ...], ranks: int, rows_before: int
    ) -> None:
        self.metadata = _gathered(recipe, shape, ranks, rows_before)
        self._names = [part.component.name for part in self.metadata.parts]
        self._values = [components[name] for name in self._names]
        self._rows = shape[0]
        in_place = all(
            part.component.tile is None or (value.shape[0] == part.sent and value.is_contiguous())
            for part, value in zip(self.metadata.parts, self._values, strict=True)
        )
        self._views = self._bytes() if in_place and ranks > 1 else None

    def sends(self, components: Components, rows: int, ranks: int, rows_before: int) -> bool:
        """True if a shard with these tensors would send the same."""
        known = self.metadata
        same = self._rows == rows and known.ranks == ranks and known.rows_before == rows_before
        return same and all(map(operator.is_, map(components.__getitem__, self._names), self._values))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        if self._views is not None:
            return self._views
        parts = self._bytes()
        return (torch.cat([_aligned(part) for part in parts]),) if self.metadata.ranks == 1 else parts

    def _bytes(self) -> tuple[Tensor, ...]:
        return tuple(
            padded_rows(value if part.component.tile is not None else value[None], part.sent).view(torch.uint8).view(-1)
            for part, value in zip(self.metadata.parts, self._values, strict=True)
        )


def outputs(gathered: tuple[Tensor, ...], metadata: Gathered) -> tuple[Components, tuple[Tensor, ...]]:
    """The components of the whole weight with padded rows, and which of them were put together.

    The others lie in the memory that was gathered into.
    """
    found = {part.component.name: _value(part, each) for part, each in _received(gathered, metadata)}
    made = tuple(found[part.component.name] for part in metadata.parts if part.taken is not None)
    return found, made


def refresh(gathered: tuple[Tensor, ...], metadata: Gathered, components: Components) -> None:
    """Put the parts that are no views together again; ``components`` may have fewer rows."""
    if not metadata.puts_together:
        return
    for part, each in _received(gathered, metadata):
        if part.taken is not None:
            target = components[part.component.name]
            target.copy_(_value(part, each)[: target.shape[0]])


def _received(gathered: tuple[Tensor, ...], metadata: Gathered) -> list[tuple[_GatheredComponent, Tensor]]:
    if metadata.ranks == 1:
        gathered = tuple(_unpacked(metadata.parts, gathered[0]))
    shapes = [(part.sent * metadata.ranks, part.row_bytes) for part in metadata.parts]
    rows = [each.view(shape) for each, shape in zip(gathered, shapes, strict=True)]
    return list(zip(metadata.parts, rows, strict=True))


def _value(part: _GatheredComponent, received: Tensor) -> Tensor:
    if part.component.tile is None:
        received = received[0]
    value = received.view(part.component.dtype)
    # A weight of a single row has one block, though every rank gives one; the first has the row.
    return value[: part.shape[0]] if part.taken is None else torch.cat([value[rows] for rows in part.taken])


def padded_rows(part: Tensor, rows: int) -> Tensor:
    if part.shape[0] == rows:
        return part.contiguous()
    return torch.cat([part, part.new_zeros(rows - part.shape[0], part.shape[1])])


def _aligned(part: Tensor) -> Tensor:
    missing = -part.numel() % _ALIGNMENT
    return torch.nn.functional.pad(part, (0, missing)) if missing else part


def _unpacked(parts: Sequence[_GatheredComponent], packed: Tensor) -> list[Tensor]:
    found, start = [], 0
    for part in parts:
        size = part.sent * part.row_bytes
        found.append(packed[start : start + size])
        start += size + -size % _ALIGNMENT
    return found
