"""Matrix products with quantized weights in FP8, for recipes with ``compute="fp8"``.

The activations are quantized as they are used, per tensor or per row, and multiplied by ``torch._scaled_mm``. Where
that cannot run (CPUs, GPUs before compute capability 8.9, sizes that are no multiples of 16, activations or biases that
are not BF16) and in backward passes, weights are decoded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fused_optim.quantized import elements
from fused_optim.quantized.recipes import ActivationScaling, Float8TensorScaling
from fused_optim.quantized.tensor import Args, Kwargs, QuantizedTensor, decoded, implements

aten = torch.ops.aten


@implements(aten.mm.default)
def _mm(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    x, weight = args
    if _can_scale(x, weight):
        return _scaled_mm(x, weight)
    return func(*decoded(args), **kwargs)


@implements(aten.addmm.default)
def _addmm(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    bias, x, weight = args
    plain = not kwargs and not isinstance(bias, QuantizedTensor) and bias.dim() == 1
    if plain and _can_scale(x, weight) and bias.dtype == x.dtype:
        return _scaled_mm(x, weight, bias)
    return func(*decoded(args), **kwargs)


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _can_scale(x: Tensor, weight: Tensor) -> bool:
    """Whether this is ``activations @ weight.t()`` with a weight whose recipe asks for FP8."""
    if not isinstance(weight, QuantizedTensor) or not isinstance(weight.recipe, Float8TensorScaling):
        return False
    if weight.recipe.compute != "fp8":
        return False
    activations = not isinstance(x, QuantizedTensor) and x.dtype == weight.dtype == torch.bfloat16 and x.numel() > 0
    aligned = weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
    return activations and weight._transposed and aligned and _has_fp8(weight.device)


def quantize_activations(x: Tensor, scaling: ActivationScaling) -> tuple[Tensor, Tensor]:
    """E4M3 codes of a matrix, and the FP32 scales to multiply them by: one per ``"row"``, or ``"tensor"``.

    Scales take what is not finite for the largest, so all that is multiplied by them becomes NaN.
    """
    dims = (1,) if scaling == "row" else (0, 1)
    absmax = torch.linalg.vector_norm(x, float("inf"), dims, keepdim=True, dtype=torch.float32)
    scale = elements.float8_scale(absmax)
    # Neither FP32 values in memory nor a clamp: no quotient rounds to more than the largest code.
    codes = torch.div(x, scale, out=torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device))
    return codes, scale


def _scaled_mm(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    weight.check_not_freed()
    weight.check_fresh()
    recipe = weight.recipe
    assert isinstance(recipe, Float8TensorScaling)
    codes, scale = quantize_activations(x, recipe.activation_scaling)
    weight_scale = weight.components["tensor_scale"]
    if recipe.activation_scaling == "row":
        weight_scale = weight_scale.expand(1, weight.shape[1]).contiguous()
    data = weight.components["data"].view(torch.float8_e4m3fn).t()
    return torch._scaled_mm(codes, data, scale_a=scale, scale_b=weight_scale, bias=bias, out_dtype=x.dtype)
