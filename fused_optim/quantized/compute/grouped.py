"""Linear layers of experts: products of groups of rows, each with the matrix of its expert.

Weights have shape ``(experts, outputs, inputs)``. Rows are sorted by expert, and ``offsets`` (int32, one per expert)
says where each expert's rows end, as for ``torch._grouped_mm``. With ``compute="fp8"`` and one scale per weight the
output and the input gradient are FP8 products with scales per row of activations and gradients; weight gradients are in
BF16.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fused_optim.quantized.compute import casts, products
from fused_optim.quantized.compute.autograd import as_autocast_wants, check_backward, is_transformed
from fused_optim.quantized.compute.casts import Codes
from fused_optim.quantized.compute.products import Product
from fused_optim.quantized.recipes import Recipe
from fused_optim.quantized.tensor import QuantizedTensor


class GroupedLinear(nn.Module):
    """Experts' linear layers without biases: ``weight`` of shape ``(experts, outputs, inputs)``.

    ``quantize_model_`` takes it where ``filter_fn`` says so.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear`` begins, expert by expert."""
        bound = 1.0 / math.sqrt(self.weight.shape[2])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, offsets)


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``x[rows of expert e] @ weight[e].t()`` for all experts: shape ``(rows, outputs)``.

    Args:
        x: shape ``(rows, inputs)``, sorted by expert.
        weight: plain or quantized, shape ``(experts, outputs, inputs)``.
        offsets: int32, shape ``(experts,)``: where the rows of each expert end.

    Autocast casts activations and weight, as those of ``nn.Linear``.
    """
    x, weight, _ = as_autocast_wants(x, weight, None)
    if isinstance(weight, QuantizedTensor) and not is_transformed() and _runs(x, weight):
        out: Tensor = _Grouped.apply(x, weight, offsets)  # type: ignore[no-untyped-call]
        return out
    plain = weight.dequantize() if isinstance(weight, QuantizedTensor) and not weight.requires_grad else weight
    return torch._grouped_mm(x, plain.transpose(-2, -1), offs=offsets)


def _runs(x: Tensor, weight: QuantizedTensor) -> bool:
    shape = tuple(weight.shape)
    return products.fits(x, weight) and unsupported_reason("output", weight.recipe, weight.device, shape) is None


def unsupported_reason(product: Product, recipe: Recipe, device: torch.device, weight: tuple[int, ...]) -> str | None:
    """Why a product with experts' weights of this shape does not run in FP8, or None."""
    if recipe.products is None or recipe.products.scaling not in ("tensor", "row"):
        return "experts' products in FP8 need a recipe with one scale per weight"
    if product == "weight gradient":
        return "experts have weight gradients in BF16"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        return "experts' products in FP8 need compute capability 9.0"
    for name, size in zip(("out_features", "in_features"), weight[1:], strict=True):
        if size % products.ALIGNMENT:
            return f"{name} = {size} is no multiple of {products.ALIGNMENT}"
    return products.device_unsupported_reason(device, recipe.products)


def _matrices(weight: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """The codes in the shape of the weight, and its scale."""
    codes = products.weight_codes(weight)
    return codes.data.view(weight.shape), codes.scale


def _transposed(weight: QuantizedTensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """As above, of the transposed matrices: views of the transpose of all rows."""
    codes = products.weight_codes(weight)
    experts, outputs, inputs = weight.shape
    rows = Codes(codes.data.view(experts * outputs, inputs), codes.scale, codes.scaling)
    transposed = casts.transposed(rows, after=after)
    return transposed.data.view(inputs, experts, outputs).transpose(0, 1), transposed.scale


def _product(rows: Codes, matrices: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
    """``rows[of e] @ matrices[e].t()``."""
    if rows.data.device.type == "cpu":
        return _emulated(rows, matrices, scale, offsets)
    experts, columns, _ = matrices.shape
    return torch._scaled_grouped_mm(
        rows.data,
        matrices.transpose(-2, -1),
        rows.scale.view(-1),
        scale.expand(experts, columns).contiguous(),
        offs=offsets,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _emulated(rows: Codes, matrices: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
    """Every row with every expert, and its own is taken: nothing depends on the values of the offsets."""
    expert = torch.searchsorted(offsets, torch.arange(rows.data.shape[0], dtype=offsets.dtype), right=True)[:, None]
    values = rows.values()
    out = torch.zeros(rows.data.shape[0], matrices.shape[1], dtype=torch.float32)
    with torch.autocast("cpu", enabled=False):
        for index, matrix in enumerate(matrices.unbind()):
            out = torch.where(expert == index, values @ (matrix.float() * scale).t(), out)
    return out.to(torch.bfloat16)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        rows = casts.cast(x, torch.float8_e4m3fn, "row", False)
        return _product(rows, *_matrices(weight), offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(gradient)
        x, weight, offsets = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            rows = casts.cast(gradient, torch.float8_e4m3fn, "row", False)
            of_x = _product(rows, *_transposed(weight, gradient), offsets)
        if ctx.needs_input_grad[1]:
            of_weight = torch._grouped_mm(gradient.t(), x, offs=offsets)
        return of_x, of_weight, None
