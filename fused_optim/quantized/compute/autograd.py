"""What the products of layers owe to autocast, to torch.func, and to those who differentiate gradients again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]
Backward = Callable[[Any, Tensor], Gradients]


def as_autocast_wants(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a product as autocast casts those of ``nn.functional.linear``; a quantized weight as a view."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def within_transform() -> bool:
    """Whether this runs for torch.func: vmap, grad, jvp and their like, which show no function what tensors hold."""
    return torch._C._are_functorch_transforms_active()


def decoded_for_transform(weight: Tensor) -> Tensor:
    """A plain one with its values, by an operation that transforms know, since they may hide what the weight is."""
    return weight * 1


def differentiable_once(backward: Backward) -> Backward:
    """For a backward pass that computes with codes: its results have no derivatives, and raise where one is asked for.

    torch's own decorator lets results that are no function of the incoming gradient alone pass for constants.
    """

    @functools.wraps(backward)
    def once(ctx: Any, gradient: Tensor) -> Gradients:
        with torch.no_grad():
            found = backward(ctx, gradient)
        if not torch.is_grad_enabled():  # it is with create_graph=True
            return found
        start = torch.ones((), requires_grad=True)
        present: Gradients = _NoDerivative.apply(start, *(x for x in found if x is not None))  # type: ignore[no-untyped-call]
        rest = iter(present)
        return tuple(None if x is None else next(rest) for x in found)

    return once


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, *gradients: Tensor) -> Gradients:
        return tuple(x.view_as(x) for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Gradients:
        raise RuntimeError(
            "gradients of FP8 products cannot be differentiated again (create_graph=True): their codes have no "
            'derivatives. Use a recipe without compute="fp8", or compute="fp4", or dequantize_model_(model)'
        )
