"""Rules for the products of layers under autocast, torch.func and double backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def as_autocast_wants(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a product as autocast casts those of ``nn.functional.linear``; a quantized weight as a view."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def is_transformed() -> bool:
    """True within vmap, grad, jvp and the like, which hide what tensors hold from functions."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def decoded_for_transform(weight: Tensor) -> Tensor:
    """The decoded values, by an operation that transforms know: they may hide that the weight is quantized."""
    return weight * 1


def check_backward(gradient: Tensor) -> None:
    """Raise RuntimeError in a backward pass that needs derivatives of codes, which have none.

    At once: an operation that is left out of a graph would pass for a constant.
    """
    hint = 'use a recipe without compute="fp8" or "fp4", dequantize_model_(model), or the transforms of torch.func'
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"gradients of FP8 products cannot be differentiated again, which create_graph=True is for: {hint}"
        )
    if is_transformed() or torch._C._functorch.is_legacy_batchedtensor(gradient):
        raise RuntimeError(
            "gradients of FP8 products cannot be computed for several outputs at once (is_grads_batched=True, "
            f"vectorize=True): {hint}"
        )
