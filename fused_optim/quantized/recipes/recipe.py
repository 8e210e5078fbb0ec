"""Recipes, which say how weights are quantized: one frozen class per format, with its codec in plain PyTorch.

A recipe says which components a tensor of some shape has, along which boundaries it can be cut, and how FP32 values
become components and back. Weights are seen as matrices: ``shape[0]`` rows, everything after that is the columns. Every
scale is the one to multiply by when decoding. Elements that are not finite become NaN (with their block in NVFP4, whose
elements have no NaN) and do not count for scales.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from fused_optim.backends.tables import WeightFormat
from fused_optim.quantized.recipes import elements

Components = dict[str, Tensor]
Scaling = Literal["tensor", "row", "block", "tile", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class Component:
    """One plain tensor of a quantized tensor.

    ``tile``: rows and columns of the weight that one entry (one byte of packed data) covers; None where the tensor
    belongs to the whole weight, however it is cut, and has ``shape``.
    """

    name: str
    dtype: torch.dtype
    tile: tuple[int, int] | None
    shape: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class KernelFormat:
    """The compiled engines' description of a recipe.

    ``block``: elements of a row that share a scale (1: any number does) if the update of FP32 masters can write the
    codes in the same pass; else None. ``round_up``: scales of blocks become powers of two. The others describe the
    scale of a whole weight, absmax / ``largest`` * ``factor``: the absmax may be that of a ``history`` of so many
    updates, or its ``most_recent`` entry.
    """

    format: WeightFormat
    block: int | None = None
    round_up: bool = False
    largest: float = 0.0
    factor: float = 1.0
    history: int = 0
    most_recent: bool = False


@dataclass(frozen=True)
class ProductFormat:
    """The format of products with a weight in FP8 or FP4.

    ``scaling``: of activations and gradients: one scale, one per row, one per 128 elements of a row, or as weights have
    them in MXFP8 and NVFP4. ``gradients``: their float8 dtype; activations are E4M3, or as such weights are.
    ``weight_gradients``: True if these are products in FP8, too. ``power_of_two``: scales of blocks are powers of two,
    rounded up. ``no_input_gradients``: why these are products of decoded weights, if they are. ``delayed``: the one
    scale is that of earlier passes. ``activation_tiles``: in weight gradients of blocks, activations have a scale per
    128 x 128. ``fast_gradients``: products of gradients are accumulated with 14 bits, as outputs are. ``measured``:
    only layers have them, of sizes at which they were measured to save time.
    """

    scaling: Scaling
    gradients: torch.dtype
    weight_gradients: bool
    power_of_two: bool = False
    no_input_gradients: str | None = None
    delayed: bool = False
    activation_tiles: bool = False
    fast_gradients: bool = False
    measured: bool = False

    @property
    def transpose_scaling(self) -> Scaling:
        """The scaling of the activations' transpose."""
        return "tile" if self.activation_tiles else self.scaling


def as_matrix(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def matrix_range(shape: tuple[int, ...], dim: int, start: int, end: int) -> tuple[int, int]:
    """Rows (dim 0) or columns (dim 1) of the matrix that ``start`` to ``end`` of a weight's dim 0 or 1 are."""
    inner = math.prod(shape[2:]) if dim else 1
    return start * inner, end * inner


def cut_component(value: Tensor, component: Component, dim: int, start: int, end: int, before: int = 0) -> Tensor:
    """A view of what rows (dim 0) or columns ``start`` to ``end`` need of a component: all blocks that they touch.

    ``before``: how many rows, or columns, of the first block come before those of ``value``.
    """
    if component.tile is None:
        return value
    tile = component.tile[dim]
    first, last = (before + start) // tile - before // tile, -(-(before + end) // tile) - before // tile
    return value.narrow(dim, first, last - first if end > start else 0)


@dataclass(frozen=True)
class Recipe:
    """Base class of all recipes.

    ``scales_whole_tensor``: one scale depends on all of a weight, hence on all its shards. ``shares_blocks``: cuts may
    go through blocks of several rows, for which :meth:`largest_in_block` is needed.
    """

    scales_whole_tensor: ClassVar[bool] = False
    shares_blocks: ClassVar[bool] = False

    @property
    def components(self) -> tuple[Component, ...]:
        """The components of a quantized tensor. Recipes may define them as a class attribute."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return type(self).__name__

    @functools.cached_property
    def kernel(self) -> KernelFormat | None:
        """The engines' description of the format; None if only PyTorch knows the recipe."""
        return None

    def same_format(self, other: Recipe) -> bool:
        """True if components of ``other`` mean the same values here. Recipes may differ in how they round."""
        return self == other

    @functools.cached_property
    def products(self) -> ProductFormat | None:
        """The format of FP8 products with such weights; None if weights are decoded for them."""
        return None

    @property
    def keeps_weights(self) -> bool:
        """True if weights stay plain and are quantized only when they are gathered or multiplied."""
        return False

    def for_shape(self, shape: tuple[int, ...]) -> Recipe:
        """The recipe of weights of this shape: itself, but for blocks that weights of three dims have their own way."""
        return self

    def matrices(self, components: Components) -> Components:
        """Views of components, with all that has blocks as one matrix of them: what codecs see."""
        return components

    @functools.cached_property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None where the whole weight has one alone."""
        return next((part.tile for part in self.components if part.name == "scale"), None)

    @functools.cached_property
    def of_elements(self) -> tuple[str, ...]:
        """The names of the components that are cut with a weight."""
        return tuple(part.name for part in self.components if part.tile is not None)

    @functools.cached_property
    def block_shape(self) -> tuple[int, int]:
        """Rows and columns between which a weight can be cut, whatever its components."""
        tiles = [part.tile for part in self.components if part.tile is not None]
        return max(rows for rows, _ in tiles), max(columns for _, columns in tiles)

    @property
    def block_rows(self) -> int:
        return self.block_shape[0]

    def component_shape(self, component: Component, shape: tuple[int, ...], rows_before: int = 0) -> tuple[int, ...]:
        """The shape of a component. ``rows_before``: how many rows of the first block come before the weight's."""
        if component.tile is None:
            return component.shape
        (rows, columns), (block_rows, block_columns) = as_matrix(shape), component.tile
        return (-(-(rows_before % block_rows + rows) // block_rows) if rows else 0), -(-columns // block_columns)

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight of this shape, or a part of one, cannot be quantized; None if it can."""
        if len(shape) < 2:
            return f"{self.name} needs at least two dims, got shape {tuple(shape)}"
        return None

    def cut_problem(self, start: int, end: int, size: int, dim: int) -> str | None:
        """Why a matrix cannot be cut to ``start`` to ``end`` of ``size`` rows (dim 0) or columns; None if it can."""
        tile = self.block_shape[dim]
        if (start % tile == 0 and (end % tile == 0 or end == size)) or start == end:
            return None
        if dim == 0 and self.shares_blocks:
            return None
        lines = ("rows", "columns")[dim]
        return f"{self.name} cannot be cut to {lines} {start} to {end} of {size}: its blocks have {tile} {lines}"

    def fitting_ranks(self, shape: tuple[int, ...], dim: int, of: int = 64) -> list[int]:
        """The numbers of ranks, up to ``of``, on which dim 0 or 1 of a weight can be cut into chunks as torch does."""
        size, fitting = shape[dim], []
        for ranks in range(1, of + 1):
            chunk = max(-(-size // ranks), 1)
            cuts = [matrix_range(shape, dim, start, min(start + chunk, size)) for start in range(0, size, chunk)]
            if not any(self.cut_problem(start, end, as_matrix(shape)[dim], dim) for start, end in cuts):
                fitting.append(ranks)
        return fitting

    def empty(self, shape: tuple[int, ...], device: torch.device, rows_before: int = 0) -> Components:
        """Components that decode to zeros."""
        return {
            part.name: torch.zeros(self.component_shape(part, shape, rows_before), dtype=part.dtype, device=device)
            for part in self.components
        }

    def largest_in_block(self, scale: Tensor) -> Tensor:
        """The FP32 magnitude that gives a block this scale if it is the block's largest.

        In a recipe with ``shares_blocks``, scales compare as the largest magnitudes of their blocks do, in FP32, and 0
        is below all others.
        """
        raise NotImplementedError

    def absmax(self, x: Tensor) -> Tensor:
        """The largest finite magnitude of FP32 values, a scalar; 0 of none."""
        return elements.finite_absmax(x.reshape(1, -1))[0]

    def prepare(self, components: Mapping[str, Tensor], applies: Tensor | None) -> None:
        """Set the tensor-wide scale for new values whose absmax is not known yet, where it comes from earlier ones."""

    def rescale(self, components: Mapping[str, Tensor], absmax: Tensor, applies: Tensor | None, advance: bool) -> None:
        """Set the tensor-wide scale for new values with this ``absmax`` over all shards, unless :meth:`prepare` has.

        ``applies``: a boolean scalar; where it is False nothing is changed. None means True.
        ``advance``: False if the values are those of the last update again: no history moves on.
        """

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        """Write the FP32 values ``x`` into ``components`` with the tensor-wide scale that these have.

        ``fractions``: 32-bit rounding fractions (int64, shaped as ``x``), None to round to nearest even.
        """
        raise NotImplementedError

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """FP32 values of this shape."""
        raise NotImplementedError

    def rounded(self, x: Tensor, components: Mapping[str, Tensor]) -> Tensor:
        """The decoded values of the matrix ``x`` rounded to nearest under the scales in ``components``; FP32.

        Values too large for these scales saturate. By default block scales are those of ``x``; see :meth:`fits`.
        """
        return self.decode(self._encoded(x, components), tuple(x.shape))

    def fits(self, x: Tensor, components: Mapping[str, Tensor], same: Tensor) -> Tensor:
        """Mask of the matrix ``x``: False for elements that become the decoded values only because they saturate.

        ``same``: mask of the elements that are rounded to the decoded values of ``components``.
        """
        made, mask = self._encoded(x, components), torch.ones_like(same)
        for part in self.components:
            if part.tile is not None and part.name != "data":
                mask &= elements.expand_scales(made[part.name] == components[part.name], part.tile, tuple(x.shape))
        if self.scales_whole_tensor and x.numel():
            largest = self.rounded(torch.full_like(x, 4.0 * float(self.absmax(x))), components)
            mask &= (x.abs() <= largest * (1 + 2.0**-8)) | ~x.isfinite()
        return mask

    def _encoded(self, x: Tensor, components: Mapping[str, Tensor]) -> Components:
        made = {name: part.clone() for name, part in components.items()}
        self.encode(x, made)
        return made


@dataclass(frozen=True)
class ScaledRecipe(Recipe):
    """A recipe whose codes are rounded one by one, under scales that are known.

    ``half_step_above``: the largest code's value and half a step.
    """

    half_step_above: ClassVar[float]

    def scales(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """The FP32 scales of a matrix of this shape: one for each element, or one for all."""
        raise NotImplementedError

    def nearest(self, x: Tensor) -> Tensor:
        """The values of the codes that FP32 values are rounded to."""
        raise NotImplementedError

    def rounded(self, x: Tensor, components: Mapping[str, Tensor]) -> Tensor:
        scales = self.scales(components, tuple(x.shape))
        return self.nearest(x * torch.where(scales > 0, 1.0 / scales, 0.0)) * scales

    def fits(self, x: Tensor, components: Mapping[str, Tensor], same: Tensor) -> Tensor:
        return ~((x.abs() > self._most(components, same)) & x.isfinite())  # scales may be NaN

    def _most(self, components: Mapping[str, Tensor], same: Tensor) -> Tensor:
        """The magnitudes up to which elements may have become the largest code."""
        return self.scales(components, tuple(same.shape)) * self.half_step_above


FLOAT8_DATA = Component("data", torch.uint8, (1, 1))
TENSOR_SCALE = Component("tensor_scale", torch.float32, None)


def set_where(target: Tensor, value: Tensor, applies: Tensor | None) -> None:
    """``value`` into ``target``, unless ``applies`` (a boolean scalar on any device) is False."""
    target.copy_(value if applies is None else torch.where(applies.to(target.device), value, target))


def check_choice(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}: expected {' or '.join(map(repr, get_args(choices)))}, got {value!r}")


def check_compute(recipe: Any, choices: object) -> None:
    """:func:`check_choice` for ``compute``; files of earlier releases call ``"decode"`` ``"dequantize"``."""
    if recipe.compute == "dequantize":
        object.__setattr__(recipe, "compute", "decode")
    check_choice("compute", recipe.compute, choices)
