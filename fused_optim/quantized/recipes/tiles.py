"""Blocks of several rows, which shards may cut: every rank has the scales of all blocks that it touches.

Ranks encode their own rows first. One reduction then finds the largest scale of each block, and what lies in shared
blocks is encoded again under that: elements and scales do not depend on the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_optim.adapters import Fractions
from fused_optim.quantized.recipes import codec
from fused_optim.quantized.recipes.codec import Encoding
from fused_optim.quantized.recipes.recipe import Components, Recipe, as_matrix, cut_component


@dataclass(frozen=True)
class Position:
    """Position of a part of a weight relative to blocks of several rows.

    ``rows_before``: rows of its first block that come before it. ``shares_blocks``: ranks share blocks of the weight,
    though perhaps not this one. ``gathered``: ``rows_before`` of the weight that FSDP2 has cut this from; None if it
    has not. ``rows``: its rows, if padding follows them. ``known``: False if memory was made for a part that touches as
    many blocks as one of this size can, before its place is known.
    """

    rows_before: int = 0
    shares_blocks: bool = False
    gathered: int | None = None
    rows: int | None = None
    known: bool = True


WHOLE = Position()


def shares_blocks(recipe: Recipe, rows_before: int, starts: Sequence[int]) -> bool:
    """True if a cut at one of these rows of a weight, or of a part of one, goes through a block."""
    return any((rows_before + start) % recipe.block_rows for start in starts if start)


def rows_of(components: Components, recipe: Recipe, rows: slice, rows_before: int) -> Components:
    """Views of what these rows need of the components of a part."""
    return {
        part.name: cut_component(components[part.name], part, 0, rows.start, rows.stop, rows_before)
        for part in recipe.components
    }


def row_slices(recipe: Recipe, shape: tuple[int, ...], rows_before: int, numel: int) -> list[slice]:
    """The rows of a part, about ``numel`` elements at a time; each begins, but for the first, with a block."""
    (rows, columns), block_rows = as_matrix(shape), recipe.block_rows
    size = max(numel // max(columns, 1) // block_rows, 1) * block_rows
    starts = [0, *range(min(-rows_before % block_rows, rows) or size, rows, size)]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], rows], strict=True)]


def decode(
    recipe: Recipe, components: Components, shape: tuple[int, ...], dtype: torch.dtype, rows_before: int
) -> Tensor:
    """:func:`codec.decode` of a part that may begin within a block."""
    if not rows_before:
        return codec.decode(recipe, components, shape, dtype)
    head = min(recipe.block_rows - rows_before, shape[0])
    parts = [
        codec.decode(
            recipe, rows_of(components, recipe, rows, rows_before), (rows.stop - rows.start, *shape[1:]), dtype
        )
        for rows in (slice(0, head), slice(head, shape[0]))
    ]
    return torch.cat(parts)


def pieces(weight: Encoding, rows_before: int) -> list[Encoding]:
    """Encodings that an engine can take of a part that may begin within a block: that block's rest, and the others."""
    if not rows_before:
        return [weight]
    rows = weight.values.shape[0]
    head = min(weight.recipe.block_rows - rows_before, rows)
    return [_piece(weight, slice(0, head), rows_before), _piece(weight, slice(head, rows), rows_before)]


def edges(weight: Encoding, rows_before: int, ends: bool) -> list[Encoding]:
    """The rows of a part that lie in blocks of which it has only some rows.

    ``ends``: it is the last part of its weight.
    """
    rows, block_rows = weight.values.shape[0], weight.recipe.block_rows
    head = min(-rows_before % block_rows, rows)
    tail = max((rows_before + rows) // block_rows * block_rows - rows_before, head)
    parts = [slice(0, head)] if head else []
    if tail < rows and not ends:
        parts.append(slice(tail, rows))
    return [_piece(weight, part, rows_before) for part in parts]


def _piece(weight: Encoding, rows: slice, rows_before: int) -> Encoding:
    components = rows_of(weight.components, weight.recipe, rows, rows_before)
    columns = as_matrix(weight.values.shape)[1]
    fractions = _fractions_of(weight.fractions, rows.start * columns, (rows.stop - rows.start) * columns)
    return Encoding(weight.recipe, components, weight.values[rows], fractions)


def _fractions_of(fractions: Fractions | None, start: int, numel: int) -> Fractions | None:
    return None if fractions is None else replace(fractions, geometry=fractions.geometry.of_rows(start, numel))


def encode_under_scales(parts: Sequence[Encoding]) -> None:
    """Encode rows of single blocks under the scales that their components have: with a row that gives these scales."""
    groups: dict[tuple[Recipe, torch.device], list[Encoding]] = {}
    for part in parts:
        groups.setdefault((part.recipe, part.values.device), []).append(part)
    for (recipe, _), alike in groups.items():
        _encode_under_scales(recipe, alike)


def _encode_under_scales(recipe: Recipe, parts: Sequence[Encoding]) -> None:
    """:func:`encode_under_scales` for one recipe and device, in as many launches as for one part."""
    _, block_columns = recipe.block_shape
    scales = [part.components["scale"].reshape(-1) for part in parts]
    largest = recipe.largest_in_block(torch.cat(scales)).repeat_interleave(block_columns)
    copies = [_with_another_row(part) for part in parts]
    rows = [row for copy in copies for row in (copy.values[:-1], copy.values[-1])]
    values = [
        row
        for part, of_blocks in zip(parts, largest.split([block_columns * len(scale) for scale in scales]), strict=True)
        for row in (part.values.view(part.values.shape[0], -1), of_blocks[: as_matrix(part.values.shape)[1]])
    ]
    torch._foreach_copy_(rows, values)
    codec.encode(copies)
    targets = [part.components[name] for part in parts for name in recipe.of_elements]
    sources = [copy.components[name] for copy in copies for name in recipe.of_elements]
    torch._foreach_copy_(targets, [source[: len(target)] for source, target in zip(sources, targets, strict=True)])


def _with_another_row(weight: Encoding) -> Encoding:
    """Memory for the weight's values and components, and for those of a row more, in the same block."""
    rows, columns = as_matrix(weight.values.shape)
    assert rows < weight.recipe.block_rows
    values = weight.values.new_empty(rows + 1, columns)
    components = {
        part.name: values.new_empty(weight.recipe.component_shape(part, (rows + 1, columns)), dtype=part.dtype)
        for part in weight.recipe.components
    }
    return Encoding(weight.recipe, components, values, _fractions_of(weight.fractions, 0, values.numel()))
