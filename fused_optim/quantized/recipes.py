"""How weights are quantized: one frozen recipe per format, and the codec of each in plain PyTorch.

A recipe says which components a tensor of some shape has, along which boundaries it can be cut, and how FP32 values
become components and back. Weights are seen as matrices: ``shape[0]`` rows, everything after that is the columns. Every
scale is the one to multiply by when decoding. Elements that are not finite become NaN (with their block in NVFP4, whose
elements have no NaN) and do not count for scales.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fused_optim.quantized import elements

Components = dict[str, Tensor]
Compute = Literal["dequantize", "fp8"]
ActivationScaling = Literal["tensor", "row"]
Float8Format = Literal["e4m3", "hybrid"]
AmaxAlgorithm = Literal["max", "most_recent"]


@dataclass(frozen=True)
class Component:
    """One plain tensor of a quantized tensor.

    ``tile``: rows and columns of the weight that one entry (one byte of packed data) stands for; None where the tensor
    belongs to the whole weight, however it is cut, and has ``shape``.
    """

    name: str
    dtype: torch.dtype
    tile: tuple[int, int] | None
    shape: tuple[int, ...] = (1,)


class WeightFormat(enum.IntEnum):
    """Formats of weights, as the engines number them; their elements and scales stand in ``table.h``."""

    FLOAT8 = 0
    FLOAT8_BLOCKS = 1
    FLOAT8_TILES = 2
    MXFLOAT8 = 3
    NVFLOAT4 = 4


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


def as_matrix(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


@dataclass(frozen=True)
class Recipe:
    """What all recipes have. ``scales_whole_tensor``: one scale depends on all of a weight, hence on all its shards."""

    scales_whole_tensor: ClassVar[bool] = False

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

    @functools.cached_property
    def of_elements(self) -> tuple[str, ...]:
        """The names of the components that are cut with a weight."""
        return tuple(part.name for part in self.components if part.tile is not None)

    def component_shape(self, component: Component, shape: tuple[int, ...]) -> tuple[int, ...]:
        if component.tile is None:
            return component.shape
        return tuple(-(-size // tile) for size, tile in zip(as_matrix(shape), component.tile, strict=True))

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
        what = ("rows", "columns")[dim]
        return f"{self.name} cannot be cut to {what} {start} to {end} of {size}: its blocks have {tile} {what}"

    def empty(self, shape: tuple[int, ...], device: torch.device) -> Components:
        """Components that decode to zeros."""
        return {
            part.name: torch.zeros(self.component_shape(part, shape), dtype=part.dtype, device=device)
            for part in self.components
        }

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


_FLOAT8_DATA = Component("data", torch.uint8, (1, 1))
_TENSOR_SCALE = Component("tensor_scale", torch.float32, None)


def _set_where(target: Tensor, value: Tensor, applies: Tensor | None) -> None:
    target.copy_(value if applies is None else torch.where(applies, value, target))


@dataclass(frozen=True)
class Float8TensorScaling(Recipe):
    """E4M3 with one FP32 scale per weight.

    Args:
        compute: ``"dequantize"``, or ``"fp8"`` for products in FP8 where the GPU can (``compute.py``).
        activation_scaling: of ``compute="fp8"``: one scale per ``"tensor"`` or per ``"row"`` of activations.

    These two are no part of the format: recipes that differ in them only are equal.
    """

    scales_whole_tensor: ClassVar[bool] = True
    compute: Compute = field(default="dequantize", compare=False, kw_only=True)
    activation_scaling: ActivationScaling = field(default="tensor", compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.compute not in get_args(Compute):
            raise ValueError(f"compute: expected 'dequantize' or 'fp8', got {self.compute!r}")
        if self.activation_scaling not in get_args(ActivationScaling):
            raise ValueError(f"activation_scaling: expected 'tensor' or 'row', got {self.activation_scaling!r}")

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
        if self.fp8_format not in get_args(Float8Format):
            raise ValueError(f"fp8_format: expected 'e4m3' or 'hybrid', got {self.fp8_format!r}")
        if self.amax_compute_algo not in get_args(AmaxAlgorithm):
            raise ValueError(f"amax_compute_algo: expected 'max' or 'most_recent', got {self.amax_compute_algo!r}")
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
class Float8BlockScaling(Recipe):
    """float8_e4m3fn with one FP32 scale, absmax / 448, per block of rows x columns.

    Args:
        block: ``(128, 128)`` or ``(1, 128)``.
        power_of_two: scales are powers of two, rounded up.
    """

    block: tuple[int, int] = (128, 128)
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if tuple(self.block) not in ((128, 128), (1, 128)):
            raise ValueError(f"block: expected (128, 128) or (1, 128), got {self.block}")

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        rows, columns = self.block
        return (_FLOAT8_DATA, Component("scale", torch.float32, (rows, columns)))

    @functools.cached_property
    def kernel(self) -> KernelFormat | None:
        if self.block[0] == 1:
            return KernelFormat(WeightFormat.FLOAT8_BLOCKS, block=128, round_up=self.power_of_two)
        return KernelFormat(WeightFormat.FLOAT8_TILES, round_up=self.power_of_two)

    def problem(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) != 2 and self.block[0] > 1:
            return f"{self.name} with blocks of {self.block} needs two dims, got shape {tuple(shape)}"
        return super().problem(shape)

    def _scales(self, absmax: Tensor) -> Tensor:
        scales = elements.float8_scale(absmax)
        return elements.next_power_of_two(scales) if self.power_of_two else scales

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        data, scale = components["data"], components["scale"]
        x = x.reshape(data.shape)
        scale.copy_(self._scales(elements.tile_absmax(x, self.block)))
        inverse = elements.spread(1.0 / scale, self.block, data.shape)
        data.copy_(elements.float8_encode(x * inverse, elements.shaped(fractions, data.shape)))

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        data = components["data"]
        scale = elements.spread(components["scale"], self.block, data.shape)
        return (elements.float8_decode(data) * scale).view(shape)


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """float8_e4m3fn with one E8M0 scale per 32 elements of a row (OCP Microscaling Formats specification 1.0).

    Args:
        round_up: False for the specification's scale, ``2 ** (floor(log2(absmax)) - 8)``, with which the largest
            elements of a block may saturate; True for the smallest power of two with which none does.
    """

    round_up: bool = False
    components: ClassVar[tuple[Component, ...]] = (_FLOAT8_DATA, Component("scale", torch.uint8, (1, 32)))

    @functools.cached_property
    def kernel(self) -> KernelFormat:
        return KernelFormat(WeightFormat.MXFLOAT8, block=32, round_up=self.round_up)

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        data, scale = components["data"], components["scale"]
        x = x.reshape(data.shape)
        exponent = elements.e8m0_exponent(elements.tile_absmax(x, (1, 32)), self.round_up)
        scale.copy_(exponent)
        inverse = elements.spread(elements.power_of_two(254 - exponent), (1, 32), data.shape)
        data.copy_(elements.float8_encode(x * inverse, elements.shaped(fractions, data.shape)))

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        data = components["data"]
        scale = elements.power_of_two(components["scale"].int())
        return (elements.float8_decode(data) * elements.spread(scale, (1, 32), data.shape)).view(shape)


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """E2M1 with one E4M3 scale per 16 elements of a row, and one FP32 scale per weight: its absmax / (6 * 448).

    Two elements share a byte, the first in its low half, as in ``torch.float4_e2m1fn_x2``. Rows need an even number of
    elements.
    """

    components: ClassVar[tuple[Component, ...]] = (
        Component("data", torch.uint8, (1, 2)),
        Component("scale", torch.uint8, (1, 16)),
        _TENSOR_SCALE,
    )
    scales_whole_tensor: ClassVar[bool] = True

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
