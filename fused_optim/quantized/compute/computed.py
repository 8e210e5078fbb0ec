"""Casts of values where they are computed, which are then not written: what all of these share.

Their engines' kernels make codes of rows and of the transpose at once. Without one, values are computed and cast.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fused_optim.backends.compiled import address
from fused_optim.backends.tables import CastScaling
from fused_optim.quantized.compute import casts
from fused_optim.quantized.compute.casts import Codes
from fused_optim.quantized.recipes import ProductFormat, Scaling

Parts = tuple[Tensor, Tensor, Tensor, Tensor | None]  # codes and scale, and both of the transpose

_SCALINGS: dict[Scaling, CastScaling] = {
    "tensor": CastScaling.TENSOR,
    "row": CastScaling.ROW,
    "block": CastScaling.BLOCK,
}


def is_supported(format: ProductFormat) -> bool:
    """Whether there are casts of this kind here."""
    return format.scaling in _SCALINGS


def scaling_of(format: ProductFormat, history: Tensor | None) -> CastScaling:
    return _SCALINGS[format.scaling] if history is None else CastScaling.DELAYED


def codes_of(parts: Any, scaling: Scaling, tiles: bool) -> tuple[Codes, Codes]:
    data, scale, transposed, transposed_scale = parts
    if scaling == "tensor":
        return Codes(data, scale, scaling), Codes(transposed, scale, scaling)
    if scaling == "row":
        return Codes(data, scale, scaling), Codes(transposed, transposed_scale, scaling)
    columns = Codes(transposed, transposed_scale, "tile") if tiles else Codes(transposed, transposed_scale.t(), scaling)
    return Codes(data, scale.t(), scaling), columns


def cast_values(
    x: Tensor, history: Tensor | None, dtype: torch.dtype, scaling: int, power_of_two: bool, tiles: bool
) -> Parts:
    """Of values that are there."""
    if scaling == CastScaling.ROW:
        return cast(Parts, casts.cast_rows(x, dtype, True, True))
    if scaling == CastScaling.BLOCK:
        return cast(Parts, casts.cast_blocks(x, dtype, power_of_two, tiles, True, True))
    if history is None:
        data, transposed, scale = casts.cast_tensor(x, None, dtype, True, True)
    else:
        data, transposed, scale = casts.cast_delayed(x, history, dtype, True, True)
    assert data is not None and transposed is not None
    return data, scale, transposed, None


# --- for kernels --------------------------------------------------------------------------------------------------


def has_kernel(x: Tensor, *others: Tensor | None) -> bool:
    """``others``: what kernels read beside the matrix ``x``."""
    if x.device.type != "cuda" or casts.engine_for(x, torch.bfloat16) is None:
        return False
    return all(each is None or casts.is_aligned(each) for each in others)


def room(x: Tensor, dtype: torch.dtype, scaling: int, tiles: bool) -> Parts:
    """``x``: a matrix of the same shape."""
    if scaling == CastScaling.ROW:
        return cast(Parts, casts.room_of_rows(x, dtype, True, True))
    if scaling == CastScaling.BLOCK:
        return cast(Parts, casts.room_of_blocks(x, dtype, False, tiles, True, True))
    data, transposed, scale = casts.room_of_tensor(x, None, dtype, True, True)
    assert data is not None and transposed is not None
    return data, scale, transposed, None


def room_of_absmax(x: Tensor, scaling: int, results: int = 1) -> Tensor | None:
    """Where kernels measure."""
    words = sum(x.shape) if scaling == CastScaling.ROW else 2
    return None if scaling == CastScaling.BLOCK else casts.room(x, (words * results,), torch.float32)


def row_of(parts: Parts, history: Tensor | None) -> tuple[int, int, int, int, int]:
    """A result, as engines are told of it."""
    data, scale, transposed, transposed_scale = parts
    pointers = data, transposed, scale, transposed_scale, history
    return tuple(map(address, pointers))  # type: ignore[return-value]
