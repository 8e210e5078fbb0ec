"""``rms_norm_linear``: RMSNorm and the linear layers that read it, as one operation: queries, keys and values.

Where all its products run in FP8, RMSNorm is cast where it is computed (``rms_norm.py``), once for all layers, and the
backward pass computes its gradient with the sum of those of all layers, and of what else reads ``x``. Compilers see one
operator, ``fused_optim::rms_norm_linear``, and trace what is within it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from fused_optim.quantized.compute import casts, products, rms_norm
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

_MOST = rms_norm.MOST_GRADIENTS  # layers


def rms_norm_linear(x: Tensor, norm: nn.Module, *layers: nn.Module) -> tuple[Tensor, ...]:
    """``x`` and ``layer(norm(x))`` of each layer, in fewer passes over memory where the products run in FP8.

    Args:
        x: Activations of shape ``(..., inputs)``.
        norm: What is before the layers.
        layers: Linear layers of ``inputs`` features.

    Returns:
        ``x``, for what else reads it, as a residual connection does: its gradient from there is then added where the
        norm's is computed; not to be changed in place. And an output of each layer, of shape ``(..., outputs)``.

    In training, one to three layers are fused under the conditions of :func:`swiglu_mlp`, if ``norm`` is a
    :class:`torch.nn.RMSNorm` whose weight is BF16, as ``x`` is, with up to 16384 elements. Everything else calls the
    modules. Fused, the sum of all gradients of ``x`` is rounded to BF16 once. Where delayed scales of
    activations differ, all layers use the largest one.

        x, queries, keys, values = rms_norm_linear(x, self.norm, self.q_proj, self.k_proj, self.v_proj)
        x = x + self.o_proj(attention(queries, keys, values))
    """
    known = fusible(layers)
    normed = None if not known or len(known) > _MOST else norm_of(norm, x)
    if known is None or normed is None or format_of_all(x, *(layer.weight for layer in known)) is None:
        y = norm(x)
        return x, *(layer(y) for layer in layers)
    weights = [layer.weight for layer in known]
    run = torch.ops.fused_optim.rms_norm_linear if torch.compiler.is_compiling() else _rms_norm_linear
    return tuple(run(x, *normed, *weights, *[None] * (_MOST - len(weights)), *histories_of(known)))


def _rms_norm_linear(
    x: Tensor,
    norm: Tensor,
    eps: float,
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    *histories: Tensor | None,
) -> list[Tensor]:
    given = tuple(weight for weight in (first, second, third) if weight is not None)
    pairs = in_pairs(histories, _MOST)[: len(given)]
    format = format_of_all(x, *given)
    if format is None:
        y = nn.functional.rms_norm(x, norm.shape, norm, eps)
        return [x, *(linear(y, weight, None, *pair) for weight, pair in zip(given, pairs, strict=True))]
    x, weights = operands(x, given)
    return list(_NormLinear.apply(x, norm, eps, format, as_histories(pairs), *weights))  # type: ignore[no-untyped-call]


casts.LIBRARY.define(
    "rms_norm_linear(Tensor x, Tensor norm, float eps, Tensor first, Tensor? second, Tensor? third, "
    "Tensor(a!)? first_activations=None, Tensor(b!)? first_gradients=None, Tensor(c!)? second_activations=None, "
    "Tensor(d!)? second_gradients=None, Tensor(e!)? third_activations=None, Tensor(f!)? third_gradients=None) "
    "-> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
casts.LIBRARY.impl("rms_norm_linear", _rms_norm_linear, "CompositeImplicitAutograd")


@implements(torch.ops.fused_optim.rms_norm_linear.default)
def _dispatched(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Without autograd, torch asks the tensor first."""
    return _rms_norm_linear(*args, **kwargs)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        eps: float,
        format: ProductFormat,
        histories: list[Histories | None],
        *weights: QuantizedTensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        rows = casts.matrix_of(x).contiguous()
        codes, kept, rstd = cast_input(rows, Norm(norm, eps), format, histories)
        outputs = [products.output(codes, weight) for weight in weights]
        ctx.save_for_backward(rows, norm, rstd, kept.data, kept.scale, *weights)
        ctx.shape, ctx.histories, ctx.format = x.shape, histories, format
        return x, *(casts.shaped(out, (*x.shape[:-1], out.shape[1])) for out in outputs)

    @staticmethod
    def backward(ctx: Any, addend: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, norm, rstd, data, scale, *weights = ctx.saved_tensors
        format = ctx.format
        kept = Codes(data, scale, format.kept)
        of_outputs: list[Tensor] = []
        of_weights: list[Tensor | None] = []
        for gradient, weight, history in zip(gradients, weights, ctx.histories, strict=True):
            if gradient is None:  # nobody reads the output
                of_weights.append(None)
                continue
            check_backward(gradient)
            matrix = casts.matrix_of(gradient).contiguous()
            of_gradients = None if history is None else history.gradients
            rows, columns = cast_both(matrix, format.gradients, format, True, True, of_gradients)
            assert rows is not None and columns is not None
            of_outputs.append(products.input_gradient(rows, weight, format))
            of_weights.append(products.weight_gradient(columns, kept, weight, format))
        if not of_outputs:
            return addend, None, None, None, None, *of_weights
        beside = None if addend is None else casts.matrix_of(addend).contiguous()
        of_x, of_norm = input_gradients(of_outputs, beside, x, norm, rstd)
        return casts.shaped(of_x, ctx.shape), of_norm, None, None, None, *of_weights
