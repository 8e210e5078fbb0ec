"""``swiglu_mlp``: the feed-forward block of Llama and its like, ``down(silu(gate(x)) * up(x))``, as one operation.

Where all its products run in FP8, it casts ``x`` once for both layers that read it, RMSNorm before them and SwiGLU
where these are computed, forward and backward (``rms_norm.py``, ``swiglu.py``). Codes, scales and results are otherwise
those of the layers. Compilers see one operator, ``fused_optim::swiglu_mlp``, and trace what is within it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from fused_optim.quantized.compute import casts, products, swiglu
from fused_optim.quantized.compute.autograd import check_backward
from fused_optim.quantized.compute.casts import Codes
from fused_optim.quantized.compute.delayed import Histories, cast_both
from fused_optim.quantized.compute.linear import linear
from fused_optim.quantized.compute.shared_input import (
    Norm,
    as_histories,
    cast_input,
    format_of_all,
    fusible,
    histories_of,
    in_pairs,
    input_gradients,
    norm_of,
    operands,
)
from fused_optim.quantized.recipes import ProductFormat
from fused_optim.quantized.tensor import Args, Kwargs, QuantizedTensor, implements


def swiglu_mlp(
    x: Tensor,
    gate: nn.Module,
    up: nn.Module,
    down: nn.Module,
    *,
    norm: nn.Module | None = None,
    residual: bool = False,
) -> Tensor:
    """``down(silu(gate(x)) * up(x))``, in fewer passes over memory where the layers' products run in FP8.

    Args:
        x: Activations of shape ``(..., inputs)``.
        gate, up: Linear layers from ``inputs`` to ``hidden`` features.
        down: A linear layer from ``hidden`` features to any number.
        norm: A module that ``x`` passes before ``gate`` and ``up``.
        residual: Add ``x``, as it is before ``norm``.

    Returns:
        Shape ``(..., outputs)``.

    In training, layers are fused that ``quantize_model_`` has made compute in FP8, by one recipe, if all their products
    run in FP8, with one scale, scales per row or blocks, and if no layer has a bias, a frozen weight, or hooks (so do
    not ``fully_shard`` each layer on its own). Everything else calls the layers. Fused, ``silu(gate) * up`` is rounded
    to BF16 once, as in compiled code; PyTorch's operations round twice in eager mode. Where the delayed scales of
    ``gate`` and ``up`` for ``x`` differ, since the layers had other inputs before, both use the larger one.

    A norm is fused with them if it is a :class:`torch.nn.RMSNorm` whose weight is BF16, as ``x`` is, with up to 16384
    elements; others are called. Then its gradient and the sum of all gradients of ``x`` are rounded once.
    """
    layers = fusible((gate, up, down))
    if layers is None:
        y = x if norm is None else norm(x)
        out: Tensor = down(nn.functional.silu(gate(y)) * up(y))
        return x + out if residual else out
    weights = layers[0].weight, layers[1].weight, layers[2].weight
    known = None if norm is None or _format(x, *weights) is None else norm_of(norm, x)
    run = torch.ops.fused_optim.swiglu_mlp if torch.compiler.is_compiling() else _swiglu_mlp
    if known is None:
        out = run(x if norm is None else norm(x), *weights, None, 0.0, False, *histories_of(layers))
        return x + out if residual else out
    return cast(Tensor, run(x, *weights, *known, residual, *histories_of(layers)))


def _format(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> ProductFormat | None:
    if gate.shape != up.shape or down.shape[-1] != gate.shape[0]:
        return None
    return format_of_all(x, gate, up, down)


def _swiglu_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor | None,
    eps: float,
    residual: bool,
    *histories: Tensor | None,
) -> Tensor:
    pairs = in_pairs(histories, 3)
    format = _format(x, gate, up, down)
    if format is None:
        y = x if norm is None else nn.functional.rms_norm(x, norm.shape, norm, eps)
        of_gate, of_up = (linear(y, weight, None, *pair) for weight, pair in zip((gate, up), pairs, strict=False))
        out = linear(nn.functional.silu(of_gate) * of_up, down, None, *pairs[2])
        return x + out if residual else out
    x, weights = operands(x, (gate, up, down))
    found = _SwiGLUMLP.apply(x, norm, *weights, eps, residual, format, as_histories(pairs))  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


casts.LIBRARY.define(
    "swiglu_mlp(Tensor x, Tensor gate, Tensor up, Tensor down, Tensor? norm, float eps, bool residual, "
    "Tensor(a!)? gate_activations=None, Tensor(b!)? gate_gradients=None, Tensor(c!)? up_activations=None, "
    "Tensor(d!)? up_gradients=None, Tensor(e!)? down_activations=None, Tensor(f!)? down_gradients=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
casts.LIBRARY.impl("swiglu_mlp", _swiglu_mlp, "CompositeImplicitAutograd")


@implements(torch.ops.fused_optim.swiglu_mlp.default)
def _dispatched(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Without autograd, torch asks the tensor first."""
    return _swiglu_mlp(*args, **kwargs)


class _SwiGLUMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor | None,
        gate: QuantizedTensor,
        up: QuantizedTensor,
        down: QuantizedTensor,
        eps: float,
        residual: bool,
        format: ProductFormat,
        histories: list[Histories | None],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        of_gate, of_up, of_down = histories
        rows = casts.matrix_of(x).contiguous()
        known = None if norm is None else Norm(norm, eps)
        codes, kept_x, rstd = cast_input(rows, known, format, [of_gate, of_up])
        gates, ups = products.output(codes, gate), products.output(codes, up)
        hidden, kept_hidden = swiglu.cast_hidden(gates, ups, format, None if of_down is None else of_down.activations)
        out = products.output(hidden, down)
        codes_kept = kept_x.data, kept_x.scale, kept_hidden.data, kept_hidden.scale
        normed = (None, None, None) if norm is None else (rows, norm, rstd)
        ctx.save_for_backward(gate, up, down, gates, ups, *codes_kept, *normed)
        ctx.shape, ctx.histories, ctx.residual, ctx.format = x.shape, histories, residual, format
        return casts.shaped(rows + out if residual else out, (*x.shape[:-1], out.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        check_backward(gradient)
        gate, up, down, gates, ups, x_data, x_scale, hidden_data, hidden_scale, *normed = ctx.saved_tensors
        format = ctx.format
        kept_x, kept_hidden = Codes(x_data, x_scale, format.kept), Codes(hidden_data, hidden_scale, format.kept)
        of_gate, of_up, of_down = (None if each is None else each.gradients for each in ctx.histories)
        gradient = casts.matrix_of(gradient).contiguous()
        rows, columns = cast_both(gradient, format.gradients, format, True, True, of_down)
        assert rows is not None and columns is not None
        of_hidden = products.input_gradient(rows, down, format)
        down_gradient = products.weight_gradient(columns, kept_hidden, down, format)
        gate_codes, up_codes = swiglu.cast_hidden_gradients(of_hidden, gates, ups, format, of_gate, of_up)
        of_x = of_norm = None
        if ctx.needs_input_grad[0] or normed[0] is not None:
            pairs = (gate_codes[0], gate), (up_codes[0], up)
            of_both = [products.input_gradient(codes, weight, format) for codes, weight in pairs]
            of_x, of_norm = input_gradients(of_both, gradient if ctx.residual else None, *normed)
            of_x = casts.shaped(of_x, ctx.shape)
        gate_gradient = products.weight_gradient(gate_codes[1], kept_x, gate, format)
        up_gradient = products.weight_gradient(up_codes[1], kept_x, up, format)
        return of_x, of_norm, gate_gradient, up_gradient, down_gradient, None, None, None, None
