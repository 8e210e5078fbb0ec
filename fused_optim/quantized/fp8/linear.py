"""Linear layers whose three products run in FP8 (``products.py``), forward and backward, with and without a compiler.

``quantize_model_`` makes an ``nn.Linear`` a :class:`QuantizedLinear`, which decodes the weight where products do not
run in FP8. Compilers see one operator, ``fused_optim::linear``, and trace what is within it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MethodType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fused_optim.quantized.fp8 import casts, products
from fused_optim.quantized.fp8.autograd import (
    as_autocast_wants,
    check_backward,
    decoded_for_transform,
    is_transformed,
)
from fused_optim.quantized.fp8.casts import Codes
from fused_optim.quantized.fp8.delayed import HISTORY, Histories, cast_both
from fused_optim.quantized.fp8.kept import KeptWeight, kept_weight, quantized
from fused_optim.quantized.fp8.measured import Baseline
from fused_optim.quantized.fp8.products import Fp8Mask
from fused_optim.quantized.recipes import ProductFormat
from fused_optim.quantized.tensor import Args, Kwargs, QuantizedTensor, decoded, implements
from fused_optim.sharding.dtensor import local_tensor


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` for a quantized weight. With any other weight it does what ``nn.Linear`` does.

    With delayed scales it has histories (``delayed.py``), which are no part of state dicts: after a load, or a move, it
    measures as at the start.
    """

    activation_history: Tensor
    gradient_history: Tensor
    delays = False  # whether it has them
    is_first_pass = True  # until a backward pass has filled them; compiled, until a forward pass has been traced

    def forward(self, input: Tensor) -> Tensor:
        compiles = torch.compiler.is_compiling()
        histories: tuple[Any, ...] = ()
        if self.delays and self.training and torch.is_grad_enabled():
            histories = self.activation_history, self.gradient_history, self.is_first_pass
            if compiles:
                self.is_first_pass = False
            elif self.is_first_pass:
                histories = *histories, self
        if compiles:
            out: Tensor = torch.ops.fused_optim.linear(input, self.weight, self.bias, *histories)
            return out
        return linear(input, self.weight, self.bias, *histories)

    def keep_histories(self, device: torch.device) -> None:
        for name in ("activation_history", "gradient_history"):
            self.register_buffer(name, torch.zeros(1 + HISTORY, dtype=torch.float32, device=device), persistent=False)
        self.delays = True

    def _begin(self) -> None:
        self.is_first_pass = True
        if self.delays:
            self.activation_history.zero_()
            self.gradient_history.zero_()

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._begin()  # to_empty() leaves anything in them
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._begin()


def convert(module: nn.Module) -> None:
    """Make a linear layer that has a quantized weight compute with it."""
    if type(module) is not nn.Linear:  # which may do anything in forward(); its products are those of mm.py
        return
    kept = kept_weight(module.weight)
    local = local_tensor(module.weight) if kept is None else kept
    if not isinstance(local, QuantizedTensor | KeptWeight):
        return
    module.__class__ = QuantizedLinear
    if "_old_forward" in vars(module):  # what a hook of Accelerate calls, and bound before
        vars(module)["_old_forward"] = MethodType(QuantizedLinear.forward, module)
    if local.recipe.products is not None and local.recipe.products.delayed:
        assert isinstance(module, QuantizedLinear)
        module.keep_histories(local.device)
    if isinstance(local, QuantizedTensor):
        local.shared.in_layer = True


def revert(module: nn.Module) -> None:
    """Undo :func:`convert`, for a layer whose weight is plain again."""
    if type(module) is not QuantizedLinear:  # FSDP2's classes are derived from it
        return
    if module.delays:
        del module.activation_history, module.gradient_history
    for name in ("delays", "is_first_pass"):
        vars(module).pop(name, None)
    module.__class__ = nn.Linear  # type: ignore[assignment]
    if "_old_forward" in vars(module):
        vars(module)["_old_forward"] = MethodType(nn.Linear.forward, module)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activations: Tensor | None = None,
    gradients: Tensor | None = None,
    is_first_pass: bool = False,
    layer: QuantizedLinear | None = None,
) -> Tensor:
    """``torch.nn.functional.linear``, with the products in FP8 that the weight's recipe wants and that can run.

    ``activations``, ``gradients``, ``is_first_pass``: :class:`Histories` of delayed scales. ``layer``: their owner, if
    a backward pass should clear its ``is_first_pass``. Within torch.func the weight is decoded.
    """
    if is_transformed():
        return nn.functional.linear(x, decoded_for_transform(weight), bias)
    histories = (
        None if activations is None or gradients is None else Histories(activations, gradients, is_first_pass, layer)
    )
    if isinstance(weight, DTensor):
        return _linear_of_shards(x, weight, bias, histories)
    if not isinstance(weight, QuantizedTensor | KeptWeight) or isinstance(x, DTensor):
        return nn.functional.linear(x, weight, bias)
    x, weight, bias = as_autocast_wants(x, weight, bias)
    assert isinstance(weight, QuantizedTensor | KeptWeight)
    in_fp8 = _products_in_fp8(x, weight, bias)
    if in_fp8 is None:
        return decoded_linear(x, weight, bias)
    if isinstance(weight, KeptWeight):
        weight = quantized(weight)
    if torch.is_grad_enabled():
        out: Tensor = _Linear.apply(x, weight, bias, in_fp8, histories)  # type: ignore[no-untyped-call]
        return out
    out, _ = output_of(x, weight, bias, in_fp8, histories, False)
    return casts.shaped(out, (*x.shape[:-1], weight.shape[0]))


casts.LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? activations=None, Tensor(b!)? gradients=None, "
    "bool is_first_pass=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
casts.LIBRARY.impl("linear", linear, "CompositeImplicitAutograd")


@implements(torch.ops.fused_optim.linear.default)
def _dispatched(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """The operator without autograd, where torch asks the tensor first."""
    return linear(*args, **kwargs)


def _products_in_fp8(x: Tensor, weight: QuantizedTensor | KeptWeight, bias: Tensor | None) -> Fp8Mask | None:
    """The products to run in FP8; None if torch does all of them."""
    if (isinstance(weight, QuantizedTensor) and weight.is_rearranged) or not products.fits(x, weight):
        return None
    if x.shape[-1] != weight.shape[-1] or (bias is not None and bias.dtype != x.dtype):
        return None
    rows, shape = x.numel() // x.shape[-1], weight.shape
    in_fp8 = products.products_in_fp8(weight.recipe, weight.device, rows, shape, baseline_of(weight))
    return in_fp8 if any(in_fp8) else None


def output_of(
    x: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None,
    in_fp8: Fp8Mask,
    histories: Histories | None,
    keep: bool,
) -> tuple[Tensor, Codes | None]:
    """The output, a matrix, and the codes of ``x`` transposed, for weight gradients in FP8.

    Both are cast at once: a transpose of the codes, later on, would read them and write as much.
    """
    format = format_of(weight)
    keep = keep and in_fp8.weight_gradient
    history, is_first_pass = (None, False) if histories is None else (histories.activations, histories.is_first_pass)
    rows, tiles = casts.matrix_of(x), format.activation_tiles
    codes, saved_transpose = cast_both(
        rows, torch.float8_e4m3fn, format, in_fp8.output, keep, history, is_first_pass, tiles
    )
    if codes is None:
        return nn.functional.linear(rows, weight.dequantize(), bias), saved_transpose
    return products.output(codes, weight, bias), saved_transpose


def gradients_of(
    gradient: Tensor,
    weight: Tensor,
    saved_transpose: Codes | None,
    x: Tensor | None,
    need_x: bool,
    in_fp8: Fp8Mask,
    histories: Histories | None,
    format: ProductFormat,
) -> tuple[Tensor | None, Tensor | None]:
    """(gradient of activations, gradient of the weight), each None if not wanted.

    The latter is from ``saved_transpose`` of :func:`output_of`, or else from ``x``.
    """
    fp8_x, fp8_weight = need_x and in_fp8.input_gradient, saved_transpose is not None
    rows, columns = None, None
    if fp8_x or fp8_weight:
        _, history, is_first_pass, layer = histories or (None, None, False, None)
        rows, columns = cast_both(gradient, format.gradients, format, fp8_x, fp8_weight, history, is_first_pass)
        if isinstance(layer, QuantizedLinear):
            layer.is_first_pass = False
    of_x = of_weight = None
    if need_x:
        of_x = gradient @ decoded(weight) if rows is None else products.input_gradient(rows, weight, format)
    if saved_transpose is not None and columns is not None:
        of_weight = products.weight_gradient(columns, saved_transpose, weight, format)
    elif x is not None:
        of_weight = gradient.t() @ x
    return of_x, of_weight


def format_of(weight: QuantizedTensor) -> ProductFormat:
    format = weight.recipe.products
    assert format is not None
    return format


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: QuantizedTensor,
        bias: Tensor | None,
        in_fp8: Fp8Mask,
        histories: Histories | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        need_x, need_weight, *_ = ctx.needs_input_grad
        out, saved_transpose = output_of(x, weight, bias, in_fp8, histories, need_weight)
        ctx.in_fp8, ctx.shape, ctx.saves_transpose, ctx.histories = (
            in_fp8,
            x.shape,
            saved_transpose is not None,
            histories,
        )
        ctx.format = format_of(weight)
        activations = (
            ()
            if not need_weight
            else (casts.matrix_of(x),)
            if saved_transpose is None
            else (saved_transpose.data, saved_transpose.scale)
        )
        ctx.save_for_backward(weight if need_x or need_weight else None, *activations)
        return casts.shaped(out, (*x.shape[:-1], out.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        check_backward(gradient)
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        weight, *activations = ctx.saved_tensors
        gradient = casts.matrix_of(gradient).contiguous()
        saved_transpose, x = None, None
        if need_weight and ctx.saves_transpose:
            data, scale = activations
            saved_transpose = Codes(data, scale, ctx.format.transpose_scaling)
        elif need_weight:
            (x,) = activations
        of_x = of_weight = None
        if need_x or need_weight:  # else the bias alone is trained, of a first layer
            of_x, of_weight = gradients_of(
                gradient, weight, saved_transpose, x, need_x, ctx.in_fp8, ctx.histories, ctx.format
            )
        of_x = None if of_x is None else casts.shaped(of_x, ctx.shape)
        return of_x, of_weight, gradient.sum(0) if need_bias else None, None, None


# --- tensor parallelism -----------------------------------------------------------------------------------------


def _linear_of_shards(x: Tensor, weight: DTensor, bias: Tensor | None, histories: Histories | None) -> Tensor:
    """:func:`linear` of the local shards if placements are those of tensor parallelism; else torch's."""
    local = weight._local_tensor
    known = isinstance(local, QuantizedTensor | KeptWeight)
    matches = isinstance(x, DTensor) and known and x.device_mesh == weight.device_mesh
    if not matches or (bias is not None and not isinstance(bias, DTensor)):
        return nn.functional.linear(x, weight, bias)
    assert isinstance(x, DTensor)
    if not _may_run(local, x, weight):
        return nn.functional.linear(x, weight, bias)
    layouts = [_layout(*pair, x.dim() - 1) for pair in zip(x.placements, weight.placements, strict=True)]
    if None in layouts:
        return nn.functional.linear(x, weight, bias)
    of_out, of_x, of_weight = zip(*(layout for layout in layouts if layout is not None), strict=True)
    local_bias = None if bias is None else _local_bias(bias, of_out, x.dim() - 1)
    local_x, local_weight = x.to_local(grad_placements=of_x), weight.to_local(grad_placements=of_weight)
    out = linear(local_x, local_weight, local_bias, *(histories or ()))
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    return DTensor.from_local(
        out, x.device_mesh, of_out, run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
    )


def _may_run(local: Tensor, x: DTensor, weight: DTensor) -> bool:
    """True if products of the largest shards gain in FP8 by the measured times; the same on all ranks."""
    assert isinstance(local, QuantizedTensor | KeptWeight)
    format, baseline = local.recipe.products, baseline_of(local)
    if format is None or not format.measured:
        return format is not None
    *rows, inputs = _largest_shard(x)
    shape = _largest_shard(weight)
    return products.slower_reason(format, local.device, math.prod(rows), (shape[0], inputs), baseline) is None


def baseline_of(weight: QuantizedTensor | KeptWeight) -> Baseline:
    return "BF16" if isinstance(weight, KeptWeight) else "decoded"


def _largest_shard(tensor: DTensor) -> tuple[int, ...]:
    shape = list(tensor.shape)
    for dim, place in enumerate(tensor.placements):
        if isinstance(place, Shard):
            shape[place.dim] = -(-shape[place.dim] // tensor.device_mesh.size(dim))
    return tuple(shape)


def _local_bias(bias: DTensor, of_out: Sequence[Placement], last: int) -> Tensor:
    """The local bias.

    If outputs are summed over ranks, only the first rank adds it; its gradient is the same on all.
    """
    gradients = [
        Replicate() if not isinstance(place, Shard) else Shard(0) if place.dim == last else Partial()
        for place in of_out
    ]
    local = bias.to_local(grad_placements=gradients)
    coordinate = bias.device_mesh.get_coordinate()
    assert coordinate is not None
    first = all(at == 0 for at, place in zip(coordinate, of_out, strict=True) if isinstance(place, Partial))
    return local if first else local - local.detach()


def _layout(x: Placement, weight: Placement, last: int) -> tuple[Placement, Placement, Placement] | None:
    """(output, gradient of x, gradient of weight): placements along a mesh dim; None for other cases."""
    if type(weight) is Shard and weight.dim == 0 and x.is_replicate():
        return Shard(last), Partial(), Shard(0)
    if type(weight) is Shard and weight.dim == 1 and type(x) is Shard and x.dim == last:
        return Partial(), Shard(last), Shard(1)
    if weight.is_replicate() and x.is_replicate():
        return Replicate(), Replicate(), Replicate()
    if weight.is_replicate() and type(x) is Shard and x.dim < last:
        return x, x, Partial()
    return None


# --- products with decoded weights ------------------------------------------------------------------------------------


def decoded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``torch.nn.functional.linear`` for any weight; a quantized one is decoded first, again in the backward pass.

    torch's own operations would do the same, with the weight as a tensor that is decoded for them
    (``tensor/dispatch.py``): each of these calls costs the host more than a kernel with few rows costs the GPU.
    """
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
