"""How weights are quantized: one frozen recipe per format, and the codec of each in plain PyTorch.

A recipe says which components a tensor of some shape has, along which boundaries it can be cut, and how FP32 values
become components and back. Weights are seen as matrices: ``shape[0]`` rows, everything after that is the columns. Every
scale is the one to multiply by when decoding. Elements that are not finite become NaN (with their block in NVFP4, whose
elements have no NaN) and do not count for scales.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fused_optim.backends.tables import WeightFormat
from fused_optim.quantized import elements

Components = dict[str, Tensor]
Compute = Literal["dequantize", "fp8"]
Compute4 = Literal["dequantize", "fp4"]
ActivationScaling = Literal["tensor", "row"]
GradientFormat = Literal["e4m3", "e5m2"]
WeightGradients = Literal["fp8", "bf16"]
Scaling = Literal["tensor", "row", "block", "tile", "mxfp8", "nvfp4"]
Float8Format = Literal["e4m3", "hybrid"]
AmaxAlgorithm = Literal["max", "most_recent"]


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
    """How the compiled engines know a recipe.

    ``block``: elements of a row that share a scale (1: any number does), where the update
    of FP32 masters can write the codes in the same pass; else None. ``round_up``: scales of blocks become powers of
    two. The others are about the scale of a whole weight: absmax / ``largest`` * ``factor``, where the absmax may be
    that of a ``history`` of so many updates or its ``most_recent`` entry.
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
    """How products with a weight are computed in FP8, or FP4.

    ``scaling``: of activations and gradients: one scale, one per row, one per 128 elements of a row, or as weights have
    them in MXFP8 and NVFP4. ``gradients``: their float8 dtype; activations are E4M3, or as such weights are.
    ``weight_gradients``: whether these are products in FP8, too. ``power_of_two``: scales of blocks are powers of two,
    rounded up. ``no_input_gradients``: why these are products of decoded weights, where they are.
    """

    scaling: Scaling
    gradients: torch.dtype
    weight_gradients: bool
    power_of_two: bool = False
    no_input_gradients: str | None = None


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
    """What all recipes have.

    ``scales_whole_tensor``: one scale depends on all of a weight, hence on all its shards. ``shares_blocks``: cuts may
    go through blocks of several rows, for which :meth:`largest_in_block` is needed.
    """

    scales_whole_tensor: ClassVar[bool] = False
    shares_blocks: ClassVar[bool] = False

    @property
    def components(self) -> tuple[Component, ...]:
        """What a tensor consists of; a recipe may have it as an attribute of the class."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return type(self).__name__

    @functools.cached_property
    def kernel(self) -> KernelFormat | None:
        """None where only PyTorch knows the recipe."""
        return None

    def same_format(self, other: Recipe) -> bool:
        """Whether components of ``other`` mean the same values here: recipes may differ in how they round alone."""
        return self == other

    @functools.cached_property
    def products(self) -> ProductFormat | None:
        """How products with such weights are computed in FP8; None where weights are decoded for them."""
        return None

    @functools.cached_property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None where the whole weight has one alone."""
        return next((part.tile for part in self.components if part.name == "scale"), None)

    @functools.cached_property
    def of_elements(self) -> tuple[str, ...]:
        """The names of the components that are cut with a weight."""
        return tuple(part.name for part in self.components if part.tile is not None)

    @functools.cached_property
    def block_rows(self) -> int:
        """Over how many rows the tallest blocks go."""
        return max(part.tile[0] for part in self.components if part.tile is not None)

    def component_shape(self, component: Component, shape: tuple[int, ...], rows_before: int = 0) -> tuple[int, ...]:
        """The shape of a component. ``rows_before``: how many rows of the first block come before the weight's."""
        if component.tile is None:
            return component.shape
        (rows, columns), (tall, wide) = as_matrix(shape), component.tile
        return (-(-(rows_before % tall + rows) // tall) if rows else 0), -(-columns // wide)

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight of this shape, or a part of one, cannot be quantized; None if it can."""
        if len(shape) < 2:
            return f"{self.name} needs at least two dims, got shape {tuple(shape)}"
        return None

    def cut_problem(self, start: int, end: int, size: int, dim: int) -> str | None:
        """Why a matrix cannot be cut to ``start`` to ``end`` of ``size`` rows (dim 0) or columns; None if it can."""
        tile = max(component.tile[dim] for component in self.components if component.tile is not None)
        if (start % tile == 0 and (end % tile == 0 or end == size)) or start == end:
            return None
        if dim == 0 and self.shares_blocks:
            return None
        what = ("rows", "columns")[dim]
        return f"{self.name} cannot be cut to {what} {start} to {end} of {size}: its blocks have {tile} {what}"

    def fitting_ranks(self, shape: tuple[int, ...], dim: int, of: int = 64) -> list[int]:
        """On how many ranks, up to ``of``, dim 0 or 1 of a weight can be cut into chunks as torch does."""
        size, found = shape[dim], []
        for ranks in range(1, of + 1):
            chunk = max(-(-size // ranks), 1)
            cuts = [matrix_range(shape, dim, start, min(start + chunk, size)) for start in range(0, size, chunk)]
            if not any(self.cut_problem(start, end, as_matrix(shape)[dim], dim) for start, end in cuts):
                found.append(ranks)
        return found

    def empty(self, shape: tuple[int, ...], device: torch.device, rows_before: int = 0) -> Components:
        """Components that decode to zeros."""
        return {
            part.name: torch.zeros(self.component_shape(part, shape, rows_before), dtype=part.dtype, device=device)
            for part in self.components
        }

    def largest_in_block(self, scale: Tensor) -> Tensor:
        """The FP32 magnitude that as the largest of a block gives it this scale.

        A recipe with ``shares_blocks`` has scales that compare as the largest magnitudes of their blocks do, in FP32,
        and 0 below all others.
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

    def rounded(self, x: Tensor, components: Mapping[str, Tensor]) -> Tensor | None:
        """What FP32 values ``x`` decode to if they are rounded to nearest with the scales of rows in ``components``.

        None where the recipe has no such scales, or rounds them in one way only, which :meth:`encode` knows.
        """
        return None


_FLOAT8_DATA = Component("data", torch.uint8, (1, 1))
_TENSOR_SCALE = Component("tensor_scale", torch.float32, None)


def _set_where(target: Tensor, value: Tensor, applies: Tensor | None) -> None:
    target.copy_(value if applies is None else torch.where(applies, value, target))


def _check_choice(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}: expected {' or '.join(map(repr, get_args(choices)))}, got {value!r}")


@dataclass(frozen=True)
class Float8Recipe(Recipe):
    """E4M3 elements, which products in FP8 can take as they are.

    Args:
        compute: ``"dequantize"``, or ``"fp8"`` for products in FP8 where the GPU can (``products.py``).
        gradient_format: of ``compute="fp8"``: ``"e5m2"`` or ``"e4m3"``. Default: E5M2, whose range is wider, where all
            of a gradient shares one scale; E4M3, whose steps are finer, where each of its rows or blocks has its own.
        weight_gradients: of ``compute="fp8"``: products in ``"fp8"`` or ``"bf16"``. Default: ``"fp8"``, but ``"bf16"``
            with scales per row.

    None of these is part of the format: recipes that differ in them only are equal.
    """

    compute: Compute = field(default="dequantize", compare=False, kw_only=True)
    gradient_format: GradientFormat | None = field(default=None, compare=False, kw_only=True)
    weight_gradients: WeightGradients | None = field(default=None, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_choice("compute", self.compute, Compute)
        if self.gradient_format is not None:
            _check_choice("gradient_format", self.gradient_format, GradientFormat)
        if self.weight_gradients is not None:
            _check_choice("weight_gradients", self.weight_gradients, WeightGradients)

    def _products(
        self, scaling: Scaling, power_of_two: bool = False, no_input_gradients: str | None = None
    ) -> ProductFormat | None:
        if self.compute != "fp8":
            return None
        gradients = self.gradient_format or ("e5m2" if scaling == "tensor" else "e4m3")
        weight_gradients = self.weight_gradients or ("bf16" if scaling == "row" else "fp8")
        dtype = torch.float8_e5m2 if gradients == "e5m2" else torch.float8_e4m3fn
        return ProductFormat(scaling, dtype, weight_gradients == "fp8", power_of_two, no_input_gradients)

    def _check_e4m3_gradients(self) -> None:
        if self.gradient_format == "e5m2":
            raise ValueError("gradient_format: products of blocks take 'e4m3' alone, got 'e5m2'")


@dataclass(frozen=True)
class Float8TensorScaling(Float8Recipe):
    """E4M3 with one FP32 scale per weight.

    Args:
        activation_scaling: of ``compute="fp8"``: one scale per ``"tensor"`` or per ``"row"`` of activations and of
            gradients. No part of the format either.
    """

    scales_whole_tensor: ClassVar[bool] = True
    activation_scaling: ActivationScaling = field(default="tensor", compare=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice("activation_scaling", self.activation_scaling, ActivationScaling)

    @functools.cached_property
    def products(self) -> ProductFormat | None:
        return self._products(self.activation_scaling)

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        inverse = 1.0 / components["tensor_scale"]
        data = components["data"]
        data.copy_(elements.float8_encode(x.reshape(data.shape) * inverse, elements.shaped(fractions, data.shape)))

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return (elements.float8_decode(components["data"]) * components["tensor_scale"]).view(shape)


@dataclass(frozen=True)
class Float8CurrentScaling(Float8TensorScaling):
    """float8_e4m3fn, one FP32 scale per weight: its absmax / 448. A new scale at every update."""

    components: ClassVar[tuple[Component, ...]] = (_FLOAT8_DATA, _TENSOR_SCALE)

    @functools.cached_property
    def kernel(self) -> KernelFormat:
        return KernelFormat(WeightFormat.FLOAT8, largest=elements.FLOAT8_LARGEST)

    def rescale(self, components: Mapping[str, Tensor], absmax: Tensor, applies: Tensor | None, advance: bool) -> None:
        _set_where(components["tensor_scale"], elements.float8_scale(absmax), applies)


@dataclass(frozen=True)
class Float8DelayedScaling(Float8TensorScaling):
    """float8_e4m3fn, one FP32 scale per weight, from the absmax of earlier updates.

    Args:
        fp8_format: ``"e4m3"`` or ``"hybrid"``. Weights are E4M3 in both; the latter is for recipes whose gradients are
            E5M2.
        amax_history_len: how many updates are remembered.
        amax_compute_algo: ``"max"`` of the history or its ``"most_recent"`` entry.
        margin: the scale leaves room for values ``2 ** margin`` times as large.

    The first scale comes from the initial values; that of zeros counts as 1. A weight that grows faster than its
    history saturates at 448 times the scale, for one update.
    """

    fp8_format: Float8Format = "e4m3"
    amax_history_len: int = 16
    amax_compute_algo: AmaxAlgorithm = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice("fp8_format", self.fp8_format, Float8Format)
        _check_choice("amax_compute_algo", self.amax_compute_algo, AmaxAlgorithm)
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len: expected at least 1, got {self.amax_history_len}")

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        history = Component("amax_history", torch.float32, None, (self.amax_history_len,))
        return (_FLOAT8_DATA, _TENSOR_SCALE, history)

    @functools.cached_property
    def kernel(self) -> KernelFormat:
        return KernelFormat(
            WeightFormat.FLOAT8,
            block=1,
            largest=elements.FLOAT8_LARGEST,
            factor=2.0**self.margin,
            history=self.amax_history_len,
            most_recent=self.amax_compute_algo == "most_recent",
        )

    def _scale(self, absmax: Tensor) -> Tensor:
        return elements.float8_scale(absmax) * 2.0**self.margin

    def prepare(self, components: Mapping[str, Tensor], applies: Tensor | None) -> None:
        """The scale of the history; as it is where that is empty, but 1 where it is that of zeros."""
        history, scale = components["amax_history"], components["tensor_scale"]
        seen = history.amax() if self.amax_compute_algo == "max" else history[0]
        kept = torch.where(scale > self._scale(torch.zeros_like(scale)), scale, 1.0)
        _set_where(scale, torch.where(seen > 0, self._scale(seen), kept), applies)

    def rescale(self, components: Mapping[str, Tensor], absmax: Tensor, applies: Tensor | None, advance: bool) -> None:
        """A first scale where there is none, and ``absmax`` into the history (entry 0 is the latest)."""
        history, scale = components["amax_history"], components["tensor_scale"]
        _set_where(scale, torch.where(scale > 0, scale, self._scale(absmax)), applies)
        if advance:
            _set_where(history, torch.cat([absmax.reshape(1), history[:-1]]), applies)


@dataclass(frozen=True)
class Float8BlockScaling(Float8Recipe):
    """float8_e4m3fn with one FP32 scale, absmax / 448, per block of rows x columns.

    Args:
        block: ``(128, 128)`` or ``(1, 128)``.
        power_of_two: scales are powers of two, rounded up; those of activations and gradients, too.

    With ``compute="fp8"`` activations and gradients have a scale per 128 elements of a row, all in E4M3, as in
    DeepSeek-V3 (technical report, section 3.3.2). Weights with blocks of (1, 128) are decoded for input gradients.
    """

    shares_blocks: ClassVar[bool] = True
    block: tuple[int, int] = (128, 128)
    power_of_two: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if tuple(self.block) not in ((128, 128), (1, 128)):
            raise ValueError(f"block: expected (128, 128) or (1, 128), got {self.block}")
        object.__setattr__(self, "block", tuple(self.block))  # configurations have lists, which cannot be hashed
        self._check_e4m3_gradients()

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        rows, columns = self.block
        return (_FLOAT8_DATA, Component("scale", torch.float32, (rows, columns)))

    @functools.cached_property
    def products(self) -> ProductFormat | None:
        why = "blocks of (1, 128) cannot be transposed" if self.block[0] == 1 else None
        return self._products("block", self.power_of_two, why)

    @functools.cached_property
    def kernel(self) -> KernelFormat | None:
        if self.block[0] == 1:
            return KernelFormat(WeightFormat.FLOAT8_BLOCKS, block=128, round_up=self.power_of_two)
        return KernelFormat(WeightFormat.FLOAT8_TILES, round_up=self.power_of_two)

    def same_format(self, other: Recipe) -> bool:
        return isinstance(other, Float8BlockScaling) and tuple(other.block) == tuple(self.block)

    def problem(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) != 2 and self.block[0] > 1:
            return f"{self.name} with blocks of {self.block} needs two dims, got shape {tuple(shape)}"
        return super().problem(shape)

    def _scales(self, absmax: Tensor) -> Tensor:
        scales = elements.float8_scale(absmax)
        return elements.next_power_of_two(scales) if self.power_of_two else scales

    def largest_in_block(self, scale: Tensor) -> Tensor:
        return (scale * elements.FLOAT8_LARGEST).clamp_max(torch.finfo(torch.float32).max)

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        data, scale = components["data"], components["scale"]
        x = x.reshape(data.shape)
        scale.copy_(self._scales(elements.tile_absmax(x, self.block)))
        data.copy_(self._codes(x, scale, elements.shaped(fractions, data.shape)))

    def _codes(self, x: Tensor, scale: Tensor, fractions: Tensor | None) -> Tensor:
        return elements.float8_encode(x * elements.spread(1.0 / scale, self.block, tuple(x.shape)), fractions)

    def rounded(self, x: Tensor, components: Mapping[str, Tensor]) -> Tensor | None:
        if self.block[0] > 1:  # whose rows may lie anywhere in a tile
            return None
        codes = self._codes(x.reshape(components["data"].shape), components["scale"], None)
        return self.decode({**components, "data": codes}, tuple(x.shape))

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        data = components["data"]
        scale = elements.spread(components["scale"], self.block, data.shape)
        return (elements.float8_decode(data) * scale).view(shape)


@dataclass(frozen=True)
class MXFP8BlockScaling(Float8Recipe):
    """float8_e4m3fn with one E8M0 scale per 32 elements of a row (OCP Microscaling Formats specification 1.0).

    Args:
        round_up: True for the smallest power of two with which no element saturates, as TransformerEngine and NVIDIA's
            recipes have it; False for the specification's scale, ``2 ** (floor(log2(absmax)) - 8)``, with which the
            largest elements of a block may. Weights that were saved with either keep their bytes when they are loaded.

    With ``compute="fp8"`` activations and gradients are MXFP8, too, rounded up; scaled along what each product sums
    over. For input gradients the weight's codes get scales along its other dim, which are powers of two as well: that
    changes none but elements below 2 ** -13 of the largest of their new block, by at most 2 ** -17 of it.
    """

    round_up: bool = True
    components: ClassVar[tuple[Component, ...]] = (_FLOAT8_DATA, Component("scale", torch.uint8, (1, 32)))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_e4m3_gradients()

    @functools.cached_property
    def products(self) -> ProductFormat | None:
        return self._products("mxfp8")

    @functools.cached_property
    def kernel(self) -> KernelFormat:
        return KernelFormat(WeightFormat.MXFLOAT8, block=32, round_up=self.round_up)

    def same_format(self, other: Recipe) -> bool:
        return isinstance(other, MXFP8BlockScaling)

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        data, scale = components["data"], components["scale"]
        x = x.reshape(data.shape)
        exponent = elements.e8m0_exponent(elements.tile_absmax(x, (1, 32)), self.round_up)
        scale.copy_(exponent)
        data.copy_(self._codes(x, exponent, elements.shaped(fractions, data.shape)))

    def _codes(self, x: Tensor, exponent: Tensor, fractions: Tensor | None) -> Tensor:
        inverse = elements.spread(elements.power_of_two(254 - exponent), (1, 32), tuple(x.shape))
        return elements.float8_encode(x * inverse, fractions)

    def rounded(self, x: Tensor, components: Mapping[str, Tensor]) -> Tensor:
        codes = self._codes(x.reshape(components["data"].shape), components["scale"].int(), None)
        return self.decode({**components, "data": codes}, tuple(x.shape))

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        data = components["data"]
        scale = elements.power_of_two(components["scale"].int())
        return (elements.float8_decode(data) * elements.spread(scale, (1, 32), data.shape)).view(shape)


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """E2M1 with one E4M3 scale per 16 elements of a row, and one FP32 scale per weight: its absmax / (6 * 448).

    Two elements share a byte, the first in its low half, as in ``torch.float4_e2m1fn_x2``. Rows need an even number of
    elements.

    Args:
        compute: ``"dequantize"``, or ``"fp4"`` for outputs from activations in NVFP4, too, where the GPU can; gradients
            are those of decoded weights and of activations in BF16. No part of the format.
    """

    compute: Compute4 = field(default="dequantize", compare=False, kw_only=True)

    components: ClassVar[tuple[Component, ...]] = (
        Component("data", torch.uint8, (1, 2)),
        Component("scale", torch.uint8, (1, 16)),
        _TENSOR_SCALE,
    )
    scales_whole_tensor: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_choice("compute", self.compute, Compute4)

    @functools.cached_property
    def products(self) -> ProductFormat | None:
        if self.compute != "fp4":
            return None
        return ProductFormat("nvfp4", torch.bfloat16, False, no_input_gradients="FP4 rounds gradients too coarsely")

    @functools.cached_property
    def kernel(self) -> KernelFormat:
        return KernelFormat(WeightFormat.NVFLOAT4, largest=6.0 * 448.0)

    def problem(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) >= 2 and as_matrix(shape)[1] % 2:
            return f"{self.name} needs an even number of elements per row, got shape {tuple(shape)}"
        return super().problem(shape)

    def rescale(self, components: Mapping[str, Tensor], absmax: Tensor, applies: Tensor | None, advance: bool) -> None:
        _set_where(components["tensor_scale"], elements.scale_for(absmax, 6.0 * 448.0), applies)

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        data, scale, whole = components["data"], components["scale"], components["tensor_scale"]
        x = x.reshape(data.shape[0], 2 * data.shape[1])
        absmax = elements.tile_absmax(x, (1, 16))
        code = elements.float8_encode(elements.divide(absmax, 6.0) / whole, None)
        poisoned = elements.tile_absmax(torch.where(x.isfinite(), 0.0, 1.0), (1, 16)) > 0
        scale.copy_(torch.where(poisoned, elements.FLOAT8_NAN, code))
        step = elements.float8_decode(code) * whole
        inverse = torch.where(step > 0, 1.0 / step, 0.0)
        codes = elements.float4_encode(
            x * elements.spread(inverse, (1, 16), x.shape), elements.shaped(fractions, x.shape)
        )
        data.copy_(codes[:, 0::2] | codes[:, 1::2] << 4)

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        data = components["data"]
        step = elements.float8_decode(components["scale"]) * components["tensor_scale"]
        codes = torch.stack([data & 0xF, data >> 4], dim=2).view(data.shape[0], 2 * data.shape[1])
        return (elements.float4_decode(codes) * elements.spread(step, (1, 16), codes.shape)).view(shape)


RECIPES: dict[str, type[Recipe]] = {
    recipe.__name__: recipe
    for recipe in (Float8CurrentScaling, Float8DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
}
