"""MXFP8 and NVFP4 matrices as ``torch.nn.functional.scaled_mm`` takes them on GPUs of compute capability 10.

That has not run on such a GPU: tests compare the arguments with an emulation that undoes the layout of scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from fused_optim.quantized.fp8.casts import Codes
from fused_optim.quantized.recipes import Scaling


class _Format(NamedTuple):
    """Dtypes of elements and of the scales of blocks; what ``scaled_mm`` calls the scales, and how they lie."""

    elements: torch.dtype
    scales: torch.dtype
    types: list[ScalingType]
    swizzles: list[SwizzleType]


_FORMATS: dict[Scaling, _Format] = {
    "mxfp8": _Format(
        torch.float8_e4m3fn, torch.float8_e8m0fnu, [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    ),
    "nvfp4": _Format(
        torch.float4_e2m1fn_x2,
        torch.float8_e4m3fn,
        [ScalingType.BlockWise1x16, ScalingType.TensorWise],
        [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
    ),
}


def product(a: Codes, b: Codes) -> Tensor:
    """``a @ b.t()`` in BF16."""
    format = _FORMATS[a.scaling]
    return scaled_mm(
        a.data.view(format.elements),
        b.data.view(format.elements).t(),
        _scales(a, format),
        format.types,
        _scales(b, format),
        format.types,
        format.swizzles,
        format.swizzles,
        output_dtype=torch.bfloat16,
    )


def _scales(codes: Codes, format: _Format) -> list[Tensor]:
    of_blocks = swizzled(codes.scale).view(format.scales)
    return [of_blocks] if codes.whole is None else [of_blocks, codes.whole]


def swizzled(scale: Tensor) -> Tensor:
    """Scales of blocks (uint8) in the order in which tensor cores read them, one-dimensional.

    Padded with zeros to tiles of 128 rows and four columns, which follow each other by rows of tiles. In a tile the
    element of row ``r`` and column ``c`` has the place ``16 * (r % 32) + 4 * (r // 32) + c`` (cuBLAS documentation,
    "1D Block Scaling Factors Layout").
    """
    rows, columns = scale.shape
    padded = torch.nn.functional.pad(scale, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(
        -1, 4, 32, padded.shape[1] // 4, 4
    )  # row // 128, row // 32 % 4, row % 32, column // 4, column % 4
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
