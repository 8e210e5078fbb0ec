"""Matrix products with quantized weights in FP8, for recipes with ``compute="fp8"``.

The activations are quantized as they are used, per tensor or per row, and multiplied by ``torch._scaled_mm``. Where
that cannot run (CPUs, GPUs before compute capability 8.9, sizes that are no multiples of 16, activations that are not
BF16) and in backward passes, weights are decoded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fused_optim.quantized import elements
from fused_optim.quantized.tensor import QuantizedTensor, decoded, implements

aten = torch.ops.aten


@implements(aten.mm.default)
def _mm(func: Any, args: Any, kwargs: Any) -> Any:
    if _can_scale(*args[:2]):
        return _scaled_mm(args[0], args[1])
    return func(*decoded(args), **kwargs)


@implements(aten.addmm.default)
def _addmm(func: Any, args: Any, kwargs: Any) -> Any:
    if _can_scale(*args[1:3]) and not kwargs and not isinstance(args[0], QuantizedTensor):
        return _scaled_mm(args[1], args[2]) + args[0]
    return func(*decoded(args), **kwargs)


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _can_scale(x: Any, weight: Any) -> bool:
    """Whether this is ``activations @ weight.t()`` with a weight whose recipe asks for FP8."""
    if not isinstance(weight, QuantizedTensor) or isinstance(x, QuantizedTensor) or not weight._transposed:
        return False
    wanted = getattr(weight.recipe, "compute", None) == "fp8" and x.dtype == torch.bfloat16
    return wanted and _has_fp8(weight.device) and weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0


def _scaled_mm(x: Tensor, weight: QuantizedTensor) -> Tensor:
    weight.check_fresh()
    per_row = weight.recipe.activation_scaling == "row"
    values = x.float()
    absmax = elements.finite_absmax(values)[:, None] if per_row else weight.recipe.absmax(values)
    scale = elements.float8_scale(absmax)
    codes = elements.float8_encode(values / scale, None).view(torch.float8_e4m3fn)
    weight_scale = weight.components["tensor_scale"].reshape(())
    if per_row:
        weight_scale = weight_scale.expand(1, weight.shape[1]).contiguous()
    data = weight.components["data"].view(torch.float8_e4m3fn).t()
    return torch._scaled_mm(codes, data, scale_a=scale, scale_b=weight_scale, out_dtype=x.dtype)
