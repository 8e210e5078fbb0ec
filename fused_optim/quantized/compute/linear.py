"""Linear layers whose three products run in FP8 (``products.py``), forward and backward, with and without a compiler.

``quantize_model_`` makes an ``nn.Linear`` a :class:`QuantizedLinear` where the recipe has ``compute="fp8"``. Compilers
see one operator, ``fused_optim::linear``, and trace what is within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fused_optim.quantized.compute import casts, products
from fused_optim.quantized.compute.casts import Codes
from fused_optim.quantized.compute.products import InFP8
from fused_optim.quantized.compute.shared_casts import cast_activations
from fused_optim.quantized.recipes import ProductFormat
from fused_optim.quantized.tensor import Args, Kwargs, QuantizedTensor, implements
from fused_optim.sharding.dtensor import local_tensor


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` for a quantized weight. With any other weight it does what ``nn.Linear`` does."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.fused_optim.linear(input, self.weight, self.bias)
            return out
        return linear(input, self.weight, self.bias)


def convert(module: nn.Module) -> None:
    """Make a module that has a quantized weight compute with it, where that is more than decoding it."""
    if type(module) is not nn.Linear:  # which may do anything in forward(); its products are those of mm.py
        return
    local = local_tensor(module.weight)
    if isinstance(local, QuantizedTensor) and local.recipe.products is not None:
        module.__class__ = QuantizedLinear
        local.shared.in_layer = True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``, with the products in FP8 that the weight's recipe wants and that can run."""
    if isinstance(weight, DTensor):
        return _linear_of_shards(x, weight, bias)
    if not isinstance(weight, QuantizedTensor) or isinstance(x, DTensor):
        return nn.functional.linear(x, weight, bias)
    x, weight, bias = _as_autocast_wants(x, weight, bias)
    in_fp8 = _products_in_fp8(x, weight, bias)
    if in_fp8 is None:
        return nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled():
        out: Tensor = _Linear.apply(x, weight, bias, in_fp8)  # type: ignore[no-untyped-call]
        return out
    out, _ = _forward(x, weight, bias, in_fp8, False)
    return _shaped(out, (*x.shape[:-1], weight.shape[0]))


casts.LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
casts.LIBRARY.impl("linear", linear, "CompositeImplicitAutograd")


@implements(torch.ops.fused_optim.linear.default)
def _dispatched(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Without autograd, torch asks the tensor first."""
    return linear(*args, **kwargs)


def _as_autocast_wants(
    x: Tensor, weight: QuantizedTensor, bias: Tensor | None
) -> tuple[Tensor, QuantizedTensor, Tensor | None]:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    cast_weight = weight.to(dtype)  # within autocast, a view
    assert isinstance(cast_weight, QuantizedTensor)
    return x.to(dtype), cast_weight, None if bias is None else bias.to(dtype)


def _products_in_fp8(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> InFP8 | None:
    """None where torch does it all."""
    if weight.is_transposed or weight.is_flat or not products.fits(x, weight):
        return None
    if x.shape[-1] != weight.shape[-1] or (bias is not None and bias.dtype != x.dtype):
        return None
    in_fp8 = products.products_in_fp8(weight.recipe, weight.device, x.numel() // x.shape[-1], weight.weight_shape)
    return in_fp8 if any(in_fp8) else None


def _forward(
    x: Tensor, weight: QuantizedTensor, bias: Tensor | None, in_fp8: InFP8, keep: bool
) -> tuple[Tensor, Codes | None]:
    """The output, a matrix, and what weight gradients in FP8 will take of ``x``: the codes of its transpose.

    Both are cast at once: a transpose of the codes, later on, would read them and write as much.
    """
    format = _format(weight)
    keep = keep and in_fp8.weight_gradient
    codes, kept = cast_activations(x, format, rows=in_fp8.output, columns=keep)
    if codes is None:
        return nn.functional.linear(casts.matrix_of(x), weight.dequantize(), bias), kept
    return products.output(codes, weight, bias), kept


def _format(weight: QuantizedTensor) -> ProductFormat:
    format = weight.recipe.products
    assert format is not None
    return format


def _shaped(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """No view as autograd knows them, as in torch's own linear layers: it may be changed in place."""
    return matrix if len(shape) == 2 else torch.ops.aten._unsafe_view.default(matrix, shape)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None, in_fp8: InFP8) -> Tensor:
        need_x, need_weight, _, _ = ctx.needs_input_grad
        out, kept = _forward(x, weight, bias, in_fp8, need_weight)
        ctx.in_fp8, ctx.shape, ctx.kept = in_fp8, x.shape, kept is not None
        activations = () if not need_weight else (casts.matrix_of(x),) if kept is None else (kept.data, kept.scale)
        ctx.save_for_backward(weight if need_x or need_weight else None, *activations)
        return _shaped(out, (*x.shape[:-1], out.shape[1]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        weight, *activations = ctx.saved_tensors
        gradient = casts.matrix_of(gradient).contiguous()
        format = _format(weight)
        rows, columns = None, None
        fp8_x, fp8_weight = need_x and ctx.in_fp8.input_gradient, need_weight and ctx.kept
        if fp8_x or fp8_weight:
            rows, columns = casts.cast_both(
                gradient, format.gradients, format.scaling, format.power_of_two, rows=fp8_x, columns=fp8_weight
            )
        of_x = of_weight = None
        if need_x:
            of_x = gradient @ weight.dequantize() if rows is None else products.input_gradient(rows, weight)
            of_x = _shaped(of_x, ctx.shape)
        if need_weight:
            if columns is None:
                of_weight = gradient.t() @ activations[0]
            else:
                data, scale = activations
                of_weight = products.weight_gradient(columns, Codes(data, scale, format.scaling))
        return of_x, of_weight, gradient.sum(0) if need_bias else None, None


# --- tensor parallelism -----------------------------------------------------------------------------------------


def _linear_of_shards(x: Tensor, weight: DTensor, bias: Tensor | None) -> Tensor:
    """Each rank multiplies what it holds, where the placements are those of tensor parallelism; else torch does it."""
    local = weight._local_tensor
    matches = isinstance(x, DTensor) and isinstance(local, QuantizedTensor) and x.device_mesh == weight.device_mesh
    if not matches or (bias is not None and not isinstance(bias, DTensor)):
        return nn.functional.linear(x, weight, bias)
    assert isinstance(x, DTensor)
    layouts = [_layout(*pair, x.dim() - 1) for pair in zip(x.placements, weight.placements, strict=True)]
    if None in layouts:
        return nn.functional.linear(x, weight, bias)
    of_out, of_x, of_weight = zip(*(layout for layout in layouts if layout is not None), strict=True)
    local_bias = None if bias is None else _local_bias(bias, of_out, x.dim() - 1)
    out = linear(x.to_local(grad_placements=of_x), weight.to_local(grad_placements=of_weight), local_bias)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    return DTensor.from_local(
        out, x.device_mesh, of_out, run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
    )


def _local_bias(bias: DTensor, of_out: Sequence[Placement], last: int) -> Tensor:
    """Of outputs that are summed over ranks, only the first one adds it; its gradient is the same on all."""
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
    """Placements of the output and of both gradients along a mesh dim; None where that is another case."""
    if type(weight) is Shard and weight.dim == 0 and x.is_replicate():
        return Shard(last), Partial(), Shard(0)
    if type(weight) is Shard and weight.dim == 1 and type(x) is Shard and x.dim == last:
        return Partial(), Shard(last), Shard(1)
    if weight.is_replicate() and x.is_replicate():
        return Replicate(), Replicate(), Replicate()
    if weight.is_replicate() and type(x) is Shard and x.dim < last:
        return x, x, Partial()
    return None
