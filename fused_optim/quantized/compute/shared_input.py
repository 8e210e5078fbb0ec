"""What operations share of several layers that read the same activations: whether they may run as one, the cast of
these activations, with RMSNorm before it if there is one, and their gradient.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from fused_optim.quantized.compute import computed, products, rms_norm
from fused_optim.quantized.compute.autograd import as_autocast_wants, autocast_dtype, is_transformed
from fused_optim.quantized.compute.casts import Codes
from fused_optim.quantized.compute.delayed import Histories, cast_both
from fused_optim.quantized.compute.kept import KeptWeight, quantized
from fused_optim.quantized.compute.linear import QuantizedLinear, instead_of
from fused_optim.quantized.recipes import ProductFormat
from fused_optim.quantized.tensor import QuantizedTensor


class Norm(NamedTuple):
    """RMSNorm: its weight, BF16 of shape ``(inputs,)``."""

    weight: Tensor
    eps: float


# --- what may be fused --------------------------------------------------------------------------------------------


def fusible(layers: tuple[nn.Module, ...]) -> list[QuantizedLinear] | None:
    """The layers, as far as modules know; None if one of them must be called.

    A layer whose delayed scales have not begun measures them on its own.
    """
    found = [
        layer
        for layer in layers
        if type(layer) is QuantizedLinear and layer.only_multiplies and not (layer.delays and layer.begins)
    ]
    if len(found) < len(layers):
        return None
    for number, layer in enumerate(found):
        if any(layer is other for other in found[:number]):  # compilers would guard id(), and compile for each layer
            return None
    return found if len({layer.delays_now for layer in found}) == 1 else None


def norm_of(module: nn.Module, x: Tensor) -> Norm | None:
    """None if it must be called."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    if type(module) is not nn.RMSNorm or any(hooks) or _has_any_global_hook() or "forward" in module.__dict__:
        return None
    weight = module.weight
    if weight is None or isinstance(weight, DTensor) or not weight.requires_grad or not weight.is_contiguous():
        return None
    if not weight.dtype == x.dtype == torch.bfloat16 or weight.shape != x.shape[-1:] or weight.device != x.device:
        return None
    if x.shape[-1] > rms_norm.MOST_COLUMNS or is_transformed():
        return None
    return Norm(weight, torch.finfo(torch.float32).eps if module.eps is None else module.eps)


def histories_of(layers: list[QuantizedLinear]) -> list[Tensor | None]:
    """Of each: activations, gradients."""
    found: list[Tensor | None] = []
    for layer in layers:
        found += (layer.activation_history, layer.gradient_history) if layer.delays_now else (None, None)
    return found


def in_pairs(histories: tuple[Tensor | None, ...], layers: int) -> list[tuple[Tensor | None, Tensor | None]]:
    """Of each layer, as :func:`histories_of` gave them. torch leaves out what an operator has by default."""
    given = *histories, *[None] * (2 * layers - len(histories))
    return [(given[2 * i], given[2 * i + 1]) for i in range(layers)]


def as_histories(pairs: list[tuple[Tensor | None, Tensor | None]]) -> list[Histories | None]:
    return [None if first is None or second is None else Histories(first, second, False) for first, second in pairs]


def format_of_all(x: Tensor, first: Tensor, *weights: Tensor) -> ProductFormat | None:
    """Of weights whose products all run in FP8 alike, of ``first`` with ``x``; None of others."""
    weights = first, *weights
    if is_transformed() or isinstance(x, DTensor) or x.numel() == 0 or x.shape[-1] != first.shape[-1]:
        return None
    if not torch.is_grad_enabled() or not all(weight.requires_grad for weight in weights):
        return None
    if not all(isinstance(weight, QuantizedTensor | KeptWeight) for weight in weights):
        return None
    format = cast(QuantizedTensor | KeptWeight, first).recipe.products
    if format is None or not computed.is_supported(format):
        return None
    rows, dtype = x.numel() // x.shape[-1], autocast_dtype(x)  # compilers cannot follow casts of weights here
    for weight in cast(tuple[QuantizedTensor | KeptWeight, ...], weights):
        if weight.recipe.products != format or not products.fits(x, weight, dtype):
            return None
        if isinstance(weight, QuantizedTensor) and weight.is_rearranged:
            return None
        if not all(products.products_in_fp8(weight.recipe, weight.device, rows, weight.shape, instead_of(weight))):
            return None
    return format


def operands(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    """As autocast wants them; kept weights quantized."""
    found = []
    for weight in weights:
        x, weight, _ = as_autocast_wants(x, weight, None)
        found.append(quantized(weight) if isinstance(weight, KeptWeight) else weight)
    return x, found


# --- forward and backward -----------------------------------------------------------------------------------------


def cast_input(
    x: Tensor, norm: Norm | None, format: ProductFormat, histories: list[Histories | None]
) -> tuple[Codes, Codes, Tensor | None]:
    """Codes for all layers, those of the transpose, and RMSNorm's ``rstd``.

    Where the layers' delayed scales differ, since they had other inputs before, all use the largest one.
    """
    first, *others = (None if each is None else each.activations for each in histories)
    rstd = None
    for other in others:
        if other is not None and first is not None:
            torch.maximum(first, other, out=first)
    if norm is None:
        tiles = format.activation_tiles
        codes, kept = cast_both(x, torch.float8_e4m3fn, format, True, True, first, False, tiles)
        assert codes is not None and kept is not None
    else:
        codes, kept, rstd = rms_norm.cast_normed(x, norm.weight.detach(), norm.eps, format, first)
    for other in others:
        if other is not None and first is not None:
            other.copy_(first)  # has seen the same
    return codes, kept, rstd


def input_gradients(
    gradients: list[Tensor], addend: Tensor | None, x: Tensor | None, weight: Tensor | None, rstd: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Of the input, and of RMSNorm's weight if there is one. ``addend``: what the input gets besides."""
    if x is None or weight is None or rstd is None:
        for other in gradients[1:] if addend is None else (*gradients[1:], addend):
            gradients[0] = gradients[0] + other
        return gradients[0], None
    most = rms_norm.MOST_GRADIENTS
    incoming = *gradients, *[None] * (most - len(gradients))
    found: tuple[Tensor, Tensor] = rms_norm.differentiate(x, weight, rstd, *incoming, addend)
    return found
