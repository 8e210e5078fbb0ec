"""What FSDP2 sends of quantized weights: bytes of data and scales, and what it makes of them.

Rows are padded to the same number on every rank. Each component is gathered on its own, so that the weight lies in
what was gathered without another copy; a group of one rank knows only one tensor, so there all components are packed
into it. A scale of the whole weight is taken from the first rank, which has rows if any rank has: a checkpoint writes
nothing into an empty shard. Histories are not gathered.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_optim.quantized.recipes import Component, Components, Recipe

_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Gathered:
    """What the outputs do not say: the padded shard's shape and the number of shards."""

    shard_shape: tuple[int, ...]
    ranks: int


@functools.cache
def _gathered_components(recipe: Recipe, shape: tuple[int, ...]) -> list[tuple[Component, tuple[int, ...]]]:
    """What is gathered, and its shape where the weight, or the shard, has this one."""
    parts = [part for part in recipe.components if part.tile is not None or part.name == "tensor_scale"]
    return [(part, recipe.component_shape(part, shape)) for part in parts]


def inputs(
    recipe: Recipe, components: Components, shape: tuple[int, ...], ranks: int
) -> tuple[tuple[Tensor, ...], Gathered]:
    """What a shard sends. ``shape``: its own with padded rows."""
    parts = []
    for part, (rows, *_) in _gathered_components(recipe, shape):
        value = components[part.name]
        parts.append(_padded(value if part.tile is not None else value[None], rows).view(torch.uint8))
    return (_packed(parts),) if ranks == 1 else tuple(parts), Gathered(shape, ranks)


def outputs(recipe: Recipe, gathered: tuple[Tensor, ...], metadata: Gathered) -> tuple[Components, tuple[int, ...]]:
    """The components of the whole weight, in the memory that was gathered into, and its shape with padded rows."""
    ranks = metadata.ranks
    shape = (metadata.shard_shape[0] * ranks, *metadata.shard_shape[1:])
    parts = _unpacked(recipe, gathered[0], shape) if ranks == 1 else list(gathered)
    components = {}
    for (part, size), value in zip(_gathered_components(recipe, shape), parts, strict=True):
        rows_first = value[0] if part.tile is None else value
        # A weight of a single row has one block, though every rank gives one; the first has the row.
        components[part.name] = rows_first.view(part.dtype)[: size[0]]
    return components, shape


def _padded(part: Tensor, rows: int) -> Tensor:
    if part.shape[0] == rows:
        return part.contiguous()
    return torch.cat([part, part.new_zeros(rows - part.shape[0], part.shape[1])])


def _packed(parts: list[Tensor]) -> Tensor:
    return torch.cat([_aligned(part.view(-1)) for part in parts])


def _aligned(part: Tensor) -> Tensor:
    missing = -part.numel() % _ALIGNMENT
    return torch.nn.functional.pad(part, (0, missing)) if missing else part


def _unpacked(recipe: Recipe, packed: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    parts, start = [], 0
    for part, (rows, *rest) in _gathered_components(recipe, shape):
        size = rows * math.prod(rest) * part.dtype.itemsize
        parts.append(packed[start : start + size].view(rows, -1))
        start += size + -size % _ALIGNMENT
    return parts
