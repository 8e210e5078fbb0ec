"""``mm`` and ``addmm`` with quantized weights: FP8 products if the recipe asks for them and they can run.

So every use of a weight gets its forward product; ``QuantizedLinear`` (``linear.py``) has gradients in FP8, too.
Everything else decodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fused_optim.quantized.fp8 import casts, products
from fused_optim.quantized.tensor import Args, Kwargs, QuantizedTensor, decoded, implements

aten = torch.ops.aten


@implements(aten.mm.default)
def _mm(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    x, weight = args
    return _product(x, weight, None) if _can_scale(x, weight) else func(*decoded(args), **kwargs)


@implements(aten.addmm.default)
def _addmm(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    bias, x, weight = args
    plain = not kwargs and not isinstance(bias, QuantizedTensor) and bias.dim() == 1
    if plain and _can_scale(x, weight) and bias.dtype == x.dtype:
        return _product(x, weight, bias)
    return func(*decoded(args), **kwargs)


def _can_scale(x: Tensor, weight: Tensor) -> bool:
    """True for ``activations @ weight.t()`` with a weight whose recipe asks for FP8 outside of layers, too."""
    if not isinstance(weight, QuantizedTensor) or not weight.is_transposed or not products.fits(x, weight):
        return False
    if weight.recipe.products is None or weight.recipe.products.measured:
        return False
    return products.products_in_fp8(weight.recipe, weight.device, x.shape[0], weight.weight_shape).output


def _product(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    format = weight.recipe.products
    assert format is not None
    codes = casts.cast(x.contiguous(), torch.float8_e4m3fn, format.scaling, format.power_of_two)
    return products.output(codes, weight, bias)
