"""Delayed scales: of the largest magnitudes of a layer's earlier training passes, so that none are measured.

A cast then reads its values once, and notes their largest magnitude on the way. A history (FP32) is the scale for the
next pass, then the largest magnitudes of the last 16, the latest first. The first pass measures, as do passes that do
not train, which leave histories alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fused_optim.quantized.fp8 import casts
from fused_optim.quantized.fp8.casts import Codes
from fused_optim.quantized.recipes import ProductFormat

HISTORY = 16  # passes


class Histories(NamedTuple):
    """The amax histories of a layer, FP32 of shape ``(17,)`` each: the next scale, then 16 magnitudes.

    Each pass changes them. ``is_first_pass``: their contents mean nothing yet. ``layer``: the layer whose
    ``is_first_pass`` a backward pass clears.
    """

    activations: Tensor
    gradients: Tensor
    is_first_pass: bool
    layer: nn.Module | None = None


def cast_both(
    x: Tensor,
    dtype: torch.dtype,
    format: ProductFormat,
    rows: bool,
    columns: bool,
    history: Tensor | None = None,
    is_first_pass: bool = False,
    tiles: bool = False,
) -> tuple[Codes | None, Codes | None]:
    """:func:`~fused_optim.quantized.fp8.casts.cast_both` as a format wants it, with a delayed scale if any."""
    x = x.contiguous()
    if history is None:
        return casts.cast_both(x, dtype, format.scaling, format.power_of_two, rows, columns, tiles)
    if not rows and not columns:
        return None, None
    if is_first_pass:
        absmax = casts.absmax_of(x)
        known = torch.where(absmax.isfinite(), absmax, 0.0)
        history.copy_(torch.cat([casts.delayed_scale(known, dtype), known, history.new_zeros(HISTORY - 1)]))
        data, transposed, scale = casts.cast_tensor(x, absmax, dtype, rows, columns)
    else:
        data, transposed, scale = casts.cast_delayed(x, history, dtype, rows, columns)
    return (
        None if not rows else Codes(data, scale, format.scaling),
        None if not columns else Codes(transposed, scale, format.scaling),
    )
