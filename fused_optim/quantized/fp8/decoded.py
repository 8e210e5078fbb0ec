"""The products of a linear layer that decodes its weight, forward and again backward.

torch's own operations would do the same, with the weight as a tensor that is decoded for them (``tensor/dispatch.py``):
each of these calls costs the host more than a kernel with few rows costs the GPU. So this decodes first.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fused_optim.quantized.fp8 import casts
from fused_optim.quantized.tensor import QuantizedTensor, decoded


def decoded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``torch.nn.functional.linear`` for any weight; a quantized one is decoded first."""
    if not isinstance(weight, QuantizedTensor) or not _are_known(x, weight):
        return nn.functional.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return nn.functional.linear(x, weight.dequantize(), bias)
    return cast(Tensor, _DecodedLinear.apply(x, weight, bias))  # type: ignore[no-untyped-call]


def _are_known(x: Tensor, weight: QuantizedTensor) -> bool:
    """True for plain activations and a matrix, outside of tracing: compilers need torch's own operations."""
    is_plain = type(x) in (Tensor, nn.Parameter) and x.numel() > 0
    is_watched = casts.is_traced() or torch.jit.is_tracing()
    return is_plain and weight.dim() == 2 and not weight.is_rearranged and not is_watched


class _DecodedLinear(torch.autograd.Function):
    """Keeps the weight for the gradient of ``x``, and ``x`` for that of the weight, where these are wanted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.shape = x.shape
        out = nn.functional.linear(x, weight.dequantize(), bias)
        return casts.shaped(out, out.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None
        need_x, need_weight, need_bias = ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        rows = casts.matrix_of(gradient)
        of_x = of_weight = None
        if need_x:  # of a gradient that is differentiated again, the weight is a variable
            of_x = rows @ (weight if torch.is_grad_enabled() else decoded(weight))
            of_x = casts.shaped(of_x, ctx.shape)
        if need_weight:
            of_weight = rows.t() @ casts.matrix_of(x)
        return of_x, of_weight, rows.sum(0) if need_bias else None
