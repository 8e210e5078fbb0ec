"""``swiglu_mlp``: the feed-forward block of Llama and its like, ``down(silu(gate(x)) * up(x))``, as one operation.

Where all its products run in FP8, it casts ``x`` once for both layers that read it, and SwiGLU where that is computed,
forward and backward (``swiglu.py``). Codes, scales and results are otherwise those of the layers. Compilers see one
operator, ``fused_optim::swiglu_mlp``, and trace what is within it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from fused_optim.quantized.compute import casts, products, swiglu
from fused_optim.quantized.compute.autograd import as_autocast_wants, check_backward, is_transformed
from fused_optim.quantized.compute.casts import Codes
from fused_optim.quantized.compute.delayed import Histories, cast_both
from fused_optim.quantized.compute.kept import KeptWeight, quantized
from fused_optim.quantized.compute.linear import QuantizedLinear, format_of, instead_of, linear, shaped
from fused_optim.quantized.recipes import ProductFormat
from fused_optim.quantized.tensor import Args, Kwargs, QuantizedTensor, implements


def swiglu_mlp(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """``down(silu(gate(x)) * up(x))``, in fewer passes over memory where the layers' products run in FP8.

    Args:
        x: Activations of shape ``(..., inputs)``.
        gate, up: Linear layers from ``inputs`` to ``hidden`` features.
        down: A linear layer from ``hidden`` features to any number.

    Returns:
        Shape ``(..., outputs)``.

    In training, layers are fused that ``quantize_model_`` has made compute in FP8, by one recipe, if all their products
    run in FP8, with one scale, scales per row or blocks, and if no layer has a bias, a frozen weight, or hooks (so do
    not ``fully_shard`` each layer on its own). Everything else calls the layers. Fused, ``silu(gate) * up`` is rounded
    to BF16 once, as in compiled code; PyTorch's operations round twice in eager mode. Where the delayed
    scales of ``gate`` and ``up`` for ``x`` differ, since the layers had other inputs before, both use the larger one.
    """
    layers = [layer for layer in (gate, up, down) if isinstance(layer, QuantizedLinear) and _may_be_fused(layer)]
    if len(layers) < 3 or gate is up or len({layer.delays_now for layer in layers}) > 1:
        out: Tensor = down(nn.functional.silu(gate(x)) * up(x))
        return out
    weights: list[Tensor] = []
    histories: list[Tensor | None] = []
    for layer in layers:
        weights.append(layer.weight)
        histories += (layer.activation_history, layer.gradient_history) if layer.delays_now else (None, None)
    run = torch.ops.fused_optim.swiglu_mlp if torch.compiler.is_compiling() else _swiglu_mlp
    return cast(Tensor, run(x, *weights, *histories))


def _may_be_fused(layer: QuantizedLinear) -> bool:
    """As far as the module knows. A layer whose delayed scales have not begun measures them on its own."""
    return type(layer) is QuantizedLinear and layer.only_multiplies and not (layer.delays and layer.begins)


def _swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *histories: Tensor | None) -> Tensor:
    given = *histories, *[None] * (6 - len(histories))  # torch leaves out what an operator has by default
    pairs = [(given[i], given[i + 1]) for i in (0, 2, 4)]
    format = None if is_transformed() else _format_of_all(x, gate, up, down)
    if format is None:
        of_gate, of_up = (linear(x, weight, None, *pair) for weight, pair in zip((gate, up), pairs, strict=False))
        return linear(nn.functional.silu(of_gate) * of_up, down, None, *pairs[2])
    weights = []
    for weight in (gate, up, down):
        x, weight, _ = as_autocast_wants(x, weight, None)
        weights.append(quantized(weight) if isinstance(weight, KeptWeight) else weight)
    known = [None if first is None or second is None else Histories(first, second, False) for first, second in pairs]
    out: Tensor = _SwiGLUMLP.apply(x, *weights, format, known)  # type: ignore[no-untyped-call]
    return out


casts.LIBRARY.define(
    "swiglu_mlp(Tensor x, Tensor gate, Tensor up, Tensor down, Tensor(a!)? gate_activations=None, "
    "Tensor(b!)? gate_gradients=None, Tensor(c!)? up_activations=None, Tensor(d!)? up_gradients=None, "
    "Tensor(e!)? down_activations=None, Tensor(f!)? down_gradients=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
casts.LIBRARY.impl("swiglu_mlp", _swiglu_mlp, "CompositeImplicitAutograd")


@implements(torch.ops.fused_optim.swiglu_mlp.default)
def _dispatched(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Without autograd, torch asks the tensor first."""
    return _swiglu_mlp(*args, **kwargs)


def _format_of_all(x: Tensor, *weights: Tensor) -> ProductFormat | None:
    """Of weights whose products all run in FP8 alike; None of others."""
    if isinstance(x, DTensor) or not torch.is_grad_enabled() or not all(weight.requires_grad for weight in weights):
        return None
    if not all(isinstance(weight, QuantizedTensor | KeptWeight) for weight in weights):
        return None
    gate, up, down = cast(tuple[QuantizedTensor | KeptWeight, ...], weights)
    format = gate.recipe.products
    if format is None or not swiglu.is_supported(format) or x.shape[-1] != gate.shape[-1]:
        return None
    if gate.shape != up.shape or down.shape[-1] != gate.shape[0] or x.numel() == 0:
        return None
    rows = x.numel() // x.shape[-1]
    for weight in (gate, up, down):
        value, fitting, _ = as_autocast_wants(x, weight, None)
        if weight.recipe.products != format or not products.fits(value, fitting):
            return None
        if isinstance(weight, QuantizedTensor) and weight.is_rearranged:
            return None
        if not all(products.products_in_fp8(weight.recipe, weight.device, rows, weight.shape, instead_of(weight))):
            return None
    return format


class _SwiGLUMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: QuantizedTensor,
        up: QuantizedTensor,
        down: QuantizedTensor,
        format: ProductFormat,
        histories: list[Histories | None],
    ) -> Tensor:
        of_gate, of_up, of_down = (None if each is None else each.activations for each in histories)
        rows, tiles = casts.matrix_of(x), format.activation_tiles
        if of_gate is not None and of_up is not None:
            of_gate.copy_(torch.maximum(of_gate, of_up))  # the same, unless the layers have had lives of their own
        codes, kept_x = cast_both(rows, torch.float8_e4m3fn, format, True, True, of_gate, False, tiles)
        assert codes is not None and kept_x is not None
        if of_gate is not None and of_up is not None:
            of_up.copy_(of_gate)  # has seen the same
        gates, ups = products.output(codes, gate), products.output(codes, up)
        hidden, kept_hidden = swiglu.cast_hidden(gates, ups, format, of_down)
        out = products.output(hidden, down)
        ctx.save_for_backward(
            gate, up, down, gates, ups, kept_x.data, kept_x.scale, kept_hidden.data, kept_hidden.scale
        )
        ctx.shape, ctx.histories = x.shape, histories
        return shaped(out, (*x.shape[:-1], out.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(gradient)
        gate, up, down, gates, ups, x_data, x_scale, hidden_data, hidden_scale = ctx.saved_tensors
        format = format_of(gate)
        kept_x, kept_hidden = Codes(x_data, x_scale, format.kept), Codes(hidden_data, hidden_scale, format.kept)
        of_gate, of_up, of_down = (None if each is None else each.gradients for each in ctx.histories)
        gradient = casts.matrix_of(gradient).contiguous()
        rows, columns = cast_both(gradient, format.gradients, format, True, True, of_down)
        assert rows is not None and columns is not None
        of_hidden = products.input_gradient(rows, down)
        down_gradient = products.weight_gradient(columns, kept_hidden, format)
        gate_codes, up_codes = swiglu.cast_hidden_gradients(of_hidden, gates, ups, format, of_gate, of_up)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = products.input_gradient(gate_codes[0], gate) + products.input_gradient(up_codes[0], up)
            of_x = shaped(of_x, ctx.shape)
        gate_gradient = products.weight_gradient(gate_codes[1], kept_x, format)
        up_gradient = products.weight_gradient(up_codes[1], kept_x, format)
        return of_x, gate_gradient, up_gradient, down_gradient, None, None
