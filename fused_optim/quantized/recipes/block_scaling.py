"""Recipes with a scale per block of elements: FP8 with FP32 scales, MXFP8 and NVFP4."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fused_optim.backends.tables import WeightFormat
from fused_optim.quantized.recipes import elements
from fused_optim.quantized.recipes.recipe import (
    FLOAT8_DATA,
    TENSOR_SCALE,
    Component,
    Components,
    KernelFormat,
    ProductFormat,
    Recipe,
    ScaledRecipe,
    as_matrix,
    check_compute,
    set_where,
)
from fused_optim.quantized.recipes.tensor_scaling import Float8Recipe

Compute4 = Literal["decode", "fp4"]

_MXFP8_TILE = (1, 32)
_NVFP4_TILE = (1, 16)
_NVFP4_LARGEST = elements.FLOAT4_LEVELS[-1] * elements.FLOAT8_LARGEST


@dataclass(frozen=True)
class Float8BlockScaling(Float8Recipe):
    """float8_e4m3fn with one FP32 scale, absmax / 448, per block of rows x columns.

    Args:
        block: ``(128, 128)`` or ``(1, 128)``.
        power_of_two: scales are powers of two, rounded up; those of activations and gradients, too.
        activation_tiles: of products in FP8: in weight gradients activations have a scale per 128 x 128, which GPUs
            multiply faster. No part of the format.
        expert_columns: of weights of three dims, whose last dim it is; :meth:`for_shape` sets it. Blocks of
            (128, 128) lie within the matrices of experts, whose sizes must be multiples of 128.

    In products in FP8 activations and gradients have a scale per 128 elements of a row, all in E4M3, as in
    DeepSeek-V3 (technical report, section 3.3.2). Weights with blocks of (1, 128) are decoded for input gradients.
    """

    shares_blocks: ClassVar[bool] = True
    block: tuple[int, int] = (128, 128)
    power_of_two: bool = False
    activation_tiles: bool = field(default=False, compare=False, kw_only=True)
    expert_columns: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if tuple(self.block) not in ((128, 128), (1, 128)):
            raise ValueError(f"block: expected (128, 128) or (1, 128), got {self.block}")
        object.__setattr__(self, "block", tuple(self.block))  # configurations have lists, which cannot be hashed
        self._check_e4m3_gradients()

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        """An expert's matrix is a row of the weight, in which a block takes as many columns as it has elements."""
        rows, columns = self.block if self.expert_columns is None else (1, self.block[0] * self.block[1])
        return (FLOAT8_DATA, Component("scale", torch.float32, (rows, columns)))

    def for_shape(self, shape: tuple[int, ...]) -> Recipe:
        columns = shape[2] if len(shape) == 3 and self.block[0] > 1 else None
        return self if columns == self.expert_columns else replace(self, expert_columns=columns)

    def matrices(self, components: Components) -> Components:
        if not self.expert_columns or not all(part.is_contiguous() for part in components.values()):
            return components
        widths = {"data": self.expert_columns, "scale": self.expert_columns // self.block[1]}
        return {**components, **{name: components[name].view(-1, width) for name, width in widths.items()}}

    @functools.cached_property
    def products(self) -> ProductFormat | None:
        why = "blocks of (1, 128) cannot be transposed" if self.block[0] == 1 else None
        options = {"power_of_two": self.power_of_two, "activation_tiles": self.activation_tiles}
        return self._products("block", no_input_gradients=why, **options)

    @functools.cached_property
    def kernel(self) -> KernelFormat | None:
        if self.block[0] == 1:
            return KernelFormat(WeightFormat.FLOAT8_BLOCKS, block=128, round_up=self.power_of_two)
        return KernelFormat(WeightFormat.FLOAT8_TILES, round_up=self.power_of_two)

    def same_format(self, other: Recipe) -> bool:
        return isinstance(other, Float8BlockScaling) and tuple(other.block) == tuple(self.block)

    def problem(self, shape: tuple[int, ...]) -> str | None:
        if self.block[0] == 1 or len(shape) == 2:
            return super().problem(shape)
        if len(shape) != 3:
            return f"{self.name} with blocks of {self.block} needs two dims, or three, got shape {tuple(shape)}"
        if any(size % tile for size, tile in zip(shape[1:], self.block, strict=True)):
            return f"{self.name}: experts' matrices need sizes that are multiples of 128, got shape {tuple(shape)}"
        return None

    def cut_problem(self, start: int, end: int, size: int, dim: int) -> str | None:
        if dim == 0 or self.expert_columns is None:
            return super().cut_problem(start, end, size, dim)
        rows = [row // self.expert_columns for row in (start, end)]
        if not any(row % self.block[0] for row in rows):
            return None
        return f"{self.name} cannot be cut to rows {rows[0]} to {rows[1]} of experts' matrices: blocks have 128 rows"

    def _scales(self, absmax: Tensor) -> Tensor:
        scales = elements.float8_scale(absmax)
        return elements.next_power_of_two(scales) if self.power_of_two else scales

    def largest_in_block(self, scale: Tensor) -> Tensor:
        return (scale * elements.FLOAT8_LARGEST).clamp_max(torch.finfo(torch.float32).max)

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        data, scale = components["data"], components["scale"]
        x = x.reshape(self._matrix(data.shape))
        new = self._scales(elements.tile_absmax(x, self.block))
        inverse = elements.expand_scales(1.0 / new, self.block, tuple(x.shape))
        scale.copy_(new.view(scale.shape))
        data.copy_(elements.float8_encode(x * inverse, elements.shaped(fractions, x.shape)).view(data.shape))

    def scales(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        scale = components["scale"]
        if self.expert_columns:
            scale = scale.reshape(-1, self.expert_columns // self.block[1])
        return elements.expand_scales(scale, self.block, self._matrix(shape)).view(shape)

    def _matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """The shape of the matrix that blocks lie in: one expert's below the other's."""
        if not self.expert_columns:
            return shape[0], shape[1]
        return math.prod(shape) // self.expert_columns, self.expert_columns


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
    components: ClassVar[tuple[Component, ...]] = (FLOAT8_DATA, Component("scale", torch.uint8, _MXFP8_TILE))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_e4m3_gradients()

    @functools.cached_property
    def products(self) -> ProductFormat | None:
        return self._products("mxfp8")

    @functools.cached_property
    def kernel(self) -> KernelFormat:
        return KernelFormat(WeightFormat.MXFLOAT8, block=_MXFP8_TILE[1], round_up=self.round_up)

    def same_format(self, other: Recipe) -> bool:
        return isinstance(other, MXFP8BlockScaling)

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        data, scale = components["data"], components["scale"]
        x = x.reshape(data.shape)
        exponent = elements.e8m0_exponent(elements.tile_absmax(x, _MXFP8_TILE), self.round_up)
        scale.copy_(exponent)
        inverse = elements.expand_scales(elements.power_of_two(254 - exponent), _MXFP8_TILE, tuple(x.shape))
        data.copy_(elements.float8_encode(x * inverse, elements.shaped(fractions, data.shape)))

    def scales(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return elements.expand_scales(elements.power_of_two(components["scale"].int()), _MXFP8_TILE, shape)

    def _most(self, components: Mapping[str, Tensor], same: Tensor) -> Tensor:
        """The specification's scales saturate up to 512. A block may have one where all of it is its master."""
        shape = tuple(same.shape)
        others = elements.tile_absmax((~same).float(), _MXFP8_TILE)
        most = torch.where(others == 0, 512.0, self.half_step_above)
        return self.scales(components, shape) * elements.expand_scales(most, _MXFP8_TILE, shape)


@dataclass(frozen=True)
class NVFP4BlockScaling(ScaledRecipe):
    """E2M1 with one E4M3 scale per 16 elements of a row, and one FP32 scale per weight: its absmax / (6 * 448).

    Two elements share a byte, the first in its low half, as in ``torch.float4_e2m1fn_x2``. Rows need an even number of
    elements.

    Args:
        compute: ``"decode"``, or ``"fp4"`` for outputs from activations in NVFP4, too, where the GPU can; gradients
            are those of decoded weights and of activations in BF16. No part of the format.
    """

    compute: Compute4 = field(default="decode", compare=False, kw_only=True)

    components: ClassVar[tuple[Component, ...]] = (
        Component("data", torch.uint8, (1, 2)),
        Component("scale", torch.uint8, _NVFP4_TILE),
        TENSOR_SCALE,
    )
    scales_whole_tensor: ClassVar[bool] = True
    half_step_above: ClassVar[float] = 7.0

    def __post_init__(self) -> None:
        check_compute(self, Compute4)

    @functools.cached_property
    def products(self) -> ProductFormat | None:
        if self.compute != "fp4":
            return None
        return ProductFormat("nvfp4", torch.bfloat16, False, no_input_gradients="FP4 rounds gradients too coarsely")

    @functools.cached_property
    def kernel(self) -> KernelFormat:
        return KernelFormat(WeightFormat.NVFLOAT4, largest=_NVFP4_LARGEST)

    def problem(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) >= 2 and as_matrix(shape)[1] % 2:
            return f"{self.name} needs an even number of elements per row, got shape {tuple(shape)}"
        return super().problem(shape)

    def rescale(self, components: Mapping[str, Tensor], absmax: Tensor, applies: Tensor | None, advance: bool) -> None:
        set_where(components["tensor_scale"], elements.scale_for(absmax, _NVFP4_LARGEST), applies)

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        data, scale, whole = components["data"], components["scale"], components["tensor_scale"]
        x = x.reshape(data.shape[0], 2 * data.shape[1])
        absmax = elements.tile_absmax(x, _NVFP4_TILE)
        code = elements.float8_encode(elements.divide(absmax, elements.FLOAT4_LEVELS[-1]) / whole, None)
        poisoned = elements.tile_absmax(torch.where(x.isfinite(), 0.0, 1.0), _NVFP4_TILE) > 0
        scale.copy_(torch.where(poisoned, elements.FLOAT8_NAN, code))
        step = elements.float8_decode(code) * whole
        inverse = torch.where(step > 0, 1.0 / step, 0.0)
        codes = elements.float4_encode(
            x * elements.expand_scales(inverse, _NVFP4_TILE, x.shape), elements.shaped(fractions, x.shape)
        )
        data.copy_(codes[:, 0::2] | codes[:, 1::2] << 4)

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        data = components["data"]
        codes = torch.stack([data & 0xF, data >> 4], dim=2).view(data.shape[0], 2 * data.shape[1])
        return (elements.float4_decode(codes) * self.scales(components, codes.shape)).view(shape)

    def scales(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        step = elements.float8_decode(components["scale"]) * components["tensor_scale"]
        return elements.expand_scales(step, _NVFP4_TILE, shape)

    def nearest(self, x: Tensor) -> Tensor:
        return elements.float4_decode(elements.float4_encode(x, None))

    def _most(self, components: Mapping[str, Tensor], same: Tensor) -> Tensor:
        """Scales are rounded themselves, the smallest ones down to zero."""
        scale = components["scale"]
        above = elements.float8_decode(scale) + elements.float8_decode((scale + 1).clamp_max(0x7E))
        most = elements.FLOAT4_LEVELS[-1] * components["tensor_scale"] * (above / 2)
        most = elements.expand_scales(most, _NVFP4_TILE, tuple(same.shape))
        return torch.maximum(super()._most(components, same), most)
