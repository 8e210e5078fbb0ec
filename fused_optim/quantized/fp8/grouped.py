"""Linear layers of experts: products of groups of rows, each with the matrix of its expert.

Weights have shape ``(experts, outputs, inputs)``. Rows are sorted by expert, and ``offsets`` (int32, one per expert)
says where each expert's rows end, as for ``torch._grouped_mm``. Two ways to multiply in FP8:

* grouped: weights with one scale on GPUs of compute capability 9.0, in torch's grouped kernels. Activations and
  gradients are E4M3 with a scale per row, in weight gradients per column, for all experts together. Weight gradients
  need numbers of rows that are multiples of 16, in BF16 of 8: rows are copied apart where that is not promised.
* one by one: all others, each expert as a linear layer (``linear.py``). The host waits for ``offsets``.

CPUs compute both in FP32.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_optim.quantized.fp8 import casts, measured, products
from fused_optim.quantized.fp8.autograd import as_autocast_wants, check_backward, is_transformed
from fused_optim.quantized.fp8.casts import Codes
from fused_optim.quantized.fp8.kept import KeptWeight, quantized
from fused_optim.quantized.fp8.linear import format_of, gradients_of, output_of
from fused_optim.quantized.fp8.measured import Baseline
from fused_optim.quantized.fp8.products import NONE, Fp8Mask, Product
from fused_optim.quantized.recipes import Recipe
from fused_optim.quantized.tensor import QuantizedTensor, decoded

_GROUPED_CAPABILITY = (9, 0)
E4M3 = torch.float8_e4m3fn


class GroupedLinear(nn.Module):
    """Experts' linear layers without biases: ``weight`` of shape ``(experts, outputs, inputs)``.

    ``quantize_model_`` takes it where a filter, or a pattern of its name, says so. ``multiple_of``: see
    :func:`grouped_linear`.
    """

    multiple_of = 8  # of pickles of earlier releases

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        multiple_of: int = 8,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        self.multiple_of = multiple_of
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight as ``nn.Linear`` does, expert by expert."""
        bound = 1.0 / math.sqrt(self.weight.shape[2])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, offsets, multiple_of=self.multiple_of)


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, *, multiple_of: int = 8) -> Tensor:
    """``x[rows of expert e] @ weight[e].t()`` for all experts: shape ``(rows, outputs)``.

    Args:
        x: shape ``(rows, inputs)``, sorted by expert.
        weight: plain or quantized, shape ``(experts, outputs, inputs)``.
        offsets: int32, shape ``(experts,)``: where the rows of each expert end.
        multiple_of: what the number of rows of each expert is a multiple of. Nothing checks it. On GPUs weight
            gradients need multiples of 16 in FP8 and of 8 in BF16, as torch's own do: where less is promised, rows are
            copied. With 16, rows of no expert count for the scales of weight gradients: they should be zeros.

    Autocast casts activations and weight, as those of ``nn.Linear``. Raises ValueError for offsets of another shape.
    """
    if offsets.shape != weight.shape[:1]:
        raise ValueError(
            f"offsets: expected shape {tuple(weight.shape[:1])}, the end of the rows of each expert, got "
            f"{tuple(offsets.shape)}"
        )
    x, weight, _ = as_autocast_wants(x, weight, None)
    may = weight.dtype == torch.bfloat16 and not is_transformed()  # torch has no grouped products in FP8 with others
    if may and isinstance(weight, QuantizedTensor | KeptWeight) and products.fits(x, weight):
        baseline: Baseline = "BF16" if isinstance(weight, KeptWeight) else "decoded"
        way, in_fp8 = _way(weight.recipe, weight.device, x.shape[0], tuple(weight.shape), baseline)
        if isinstance(weight, KeptWeight) and (way == "grouped" or (way and _may_wait(x))):
            weight = quantized(weight)
        if way == "grouped":
            format = weight.recipe.products
            if format is not None and format.measured and multiple_of % products.ALIGNMENT:
                in_fp8 = in_fp8._replace(weight_gradient=False)  # copies of rows cost what they save
            out: Tensor = _Grouped.apply(x, weight, offsets, multiple_of, in_fp8)  # type: ignore[no-untyped-call]
            return out
        if way == "one by one" and _may_wait(x):
            out = _OneByOne.apply(x, weight, offsets)  # type: ignore[no-untyped-call]
            return out
    plain = weight.dequantize() if isinstance(weight, QuantizedTensor) and not weight.requires_grad else weight
    return torch._grouped_mm(x, plain.transpose(-2, -1), offs=offsets)


def _may_wait(x: Tensor) -> bool:
    """True if the host can read results of the GPU now: not while tracing or capturing."""
    return not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


# --- which way ----------------------------------------------------------------------------------------------------


def _way(
    recipe: Recipe, device: torch.device, rows: int, weight: tuple[int, ...], baseline: Baseline
) -> tuple[str | None, Fp8Mask]:
    """("grouped", "one by one" or None, the products in FP8) of experts that all have about as many rows."""
    rows -= rows % (weight[0] * casts.BLOCK)  # numbers that suit no product are those of single experts
    reasons = [unsupported_reason(product, recipe, device, weight, rows, baseline) for product in products.PRODUCTS]
    in_fp8 = Fp8Mask(*(reason is None for reason in reasons))
    if not in_fp8.output:
        return None, NONE
    return "grouped" if _is_grouped(recipe, device) else "one by one", in_fp8


def unsupported_reason(
    product: Product,
    recipe: Recipe,
    device: torch.device,
    weight: tuple[int, ...],
    rows: int | None = None,
    baseline: Baseline = "decoded",
) -> str | None:
    """Why a product with experts' weights of this shape does not run in FP8, or None.

    ``rows``: of all experts together, each of which is taken to have as many; None: a number that suits all products.
    """
    format = recipe.products
    if format is None:
        return "the recipe decodes"
    _, columns = recipe.for_shape(weight[1:]).block_shape
    if weight[2] % columns:  # blocks go on in the next row
        return f"in_features = {weight[2]} is no multiple of {columns}"
    rows_each = _MANY if rows is None else rows // weight[0]
    suits_all = rows is None or _is_grouped(recipe, device)
    why = products.unsupported_reason(product, recipe, casts.BLOCK if suits_all else rows_each, weight[1:])
    why = why or products.device_unsupported_reason(device, format)
    if why is not None or not format.measured:
        return why
    return _slower_reason(product, recipe, device, rows_each, weight[1:], baseline)


_MANY = 1 << 62  # rows: more than any measured number


def _slower_reason(
    product: Product, recipe: Recipe, device: torch.device, rows: int, weight: tuple[int, ...], baseline: Baseline
) -> str | None:
    """Why products would not save time, or None. Grouped weight gradients gain at larger sizes than the others."""
    kind = _kind(recipe, baseline == "BF16")
    why = measured.slower_reason(kind, device, rows, weight, "experts", baseline)
    if why is None and product == "weight gradient" and _is_grouped(recipe, device):
        return measured.slower_reason("tensor", device, rows, weight, "experts", _BF16_WEIGHT_GRADIENTS)
    return why


_BF16_WEIGHT_GRADIENTS = f"row{measured.BF16_WEIGHT_GRADIENTS}"  # of grouped products, whose rows have scales


def _kind(recipe: Recipe, keeps_weights: bool) -> str:
    """The table's name for products of experts, preferring kinds with few products in FP8."""
    assert recipe.products is not None
    if recipe.products.scaling not in ("tensor", "row"):
        return measured.kind_of(recipe.products, keeps_weights)
    return f"tensor{measured.WEIGHTS_KEPT}" if keeps_weights else _BF16_WEIGHT_GRADIENTS


def gaining_sizes(recipe: Recipe, table: Path) -> tuple[measured.Size, ...]:
    """Sizes at which experts were measured to take less time than in BF16; none where they were not measured.

    Rows are those of each expert.
    """
    try:
        return measured.gaining_sizes(_kind(recipe, recipe.keeps_weights), "BF16", "experts", table)
    except KeyError:
        return ()


def _is_grouped(recipe: Recipe, device: torch.device) -> bool:
    """True if torch has a grouped product of such codes."""
    if recipe.products is None or recipe.products.scaling not in ("tensor", "row"):
        return False
    return device.type == "cpu" or (
        device.type == "cuda" and torch.cuda.get_device_capability(device) == _GROUPED_CAPABILITY
    )


# --- grouped ------------------------------------------------------------------------------------------------------


class _Groups(NamedTuple):
    """Groups of rows padded to multiples of a number: the ends of the groups, and where each row goes.

    ``to``: None if rows stay where they are. ``rows``: the number of padded rows; rows of no expert go after them.
    """

    ends: Tensor
    to: Tensor | None = None
    rows: int = 0

    def spread(self, x: Tensor) -> Tensor:
        """The rows at their new places, with zeros in between."""
        if self.to is None:
            return x
        return x.new_zeros(self.rows + 1, x.shape[1]).index_copy_(0, self.to, x)[: self.rows]


def _groups(offsets: Tensor, rows: int, multiple: int) -> _Groups:
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    sizes = (offsets - starts + multiple - 1) // multiple * multiple
    ends = sizes.cumsum(0, dtype=torch.int32)
    total = (rows + len(offsets) * (multiple - 1)) // multiple * multiple
    at = torch.arange(rows, device=offsets.device)
    expert = torch.searchsorted(offsets, at, right=True)
    moved = torch.cat([ends - sizes - starts, offsets.new_zeros(1)])  # by how many rows those of each expert move
    to = torch.where(expert < len(offsets), at + moved[expert], total)
    return _Groups(ends, to, total)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: QuantizedTensor, offsets: Tensor, multiple_of: int, in_fp8: Fp8Mask
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        need_weight = ctx.needs_input_grad[1]
        ctx.in_fp8, ctx.groups, ctx.fast = in_fp8, None, format_of(weight).fast_gradients
        saved: tuple[Tensor, ...] = ()
        if need_weight:
            needed = products.ALIGNMENT if in_fp8.weight_gradient else 8
            fits = multiple_of % needed == 0 and x.shape[0] % needed == 0
            ctx.groups = _Groups(offsets) if fits else _groups(offsets, x.shape[0], needed)
        rows, columns = _cast_both(x, ctx.groups if in_fp8.weight_gradient else None, True)
        assert rows is not None
        if need_weight:
            saved = (x,) if columns is None else (columns.data, columns.scale)
        ctx.save_for_backward(weight, offsets, *saved)
        return _product(rows, *_matrices(weight), offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        check_backward(gradient)
        weight, offsets, *saved = ctx.saved_tensors
        need_x, need_weight, *_ = ctx.needs_input_grad
        gradient, groups = gradient.contiguous(), ctx.groups
        fp8_x = need_x and ctx.in_fp8.input_gradient and isinstance(weight, QuantizedTensor)  # as it was saved
        fp8_weight = need_weight and ctx.in_fp8.weight_gradient
        rows, columns = _cast_both(gradient, groups if fp8_weight else None, fp8_x)
        of_x = of_weight = None
        if rows is not None:
            of_x = _product(rows, *_transposed(weight, gradient), offsets)
        elif need_x:
            of_x = torch._grouped_mm(gradient, decoded(weight), offs=offsets)
        if columns is not None:
            data, scale = saved
            of_weight = _weight_gradient(columns, Codes(data, scale, "row"), groups.ends, ctx.fast)
        elif need_weight:
            of_weight = torch._grouped_mm(groups.spread(gradient).t(), groups.spread(saved[0]), offs=groups.ends)
        return of_x, of_weight, None, None, None


def _cast_both(x: Tensor, groups: _Groups | None, rows: bool) -> tuple[Codes | None, Codes | None]:
    """``x`` with a scale per row, and the transpose of its groups with one per column. ``groups``: None: not wanted."""
    if groups is None or groups.to is None:
        return casts.cast_both(x, E4M3, "row", False, rows, groups is not None)
    codes, _ = casts.cast_both(x, E4M3, "row", False, rows, False)
    _, transposed = casts.cast_both(groups.spread(x), E4M3, "row", False, False, True)
    return codes, transposed


def _matrices(weight: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """The codes in the shape of the weight, and its scale."""
    codes = products.weight_codes(weight)
    return codes.data.view(weight.shape), codes.scale


def _transposed(weight: QuantizedTensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`_matrices` of the transposed matrices: views of the transpose of all rows."""
    codes = products.weight_codes(weight)
    experts, outputs, inputs = weight.shape
    rows = Codes(codes.data.view(experts * outputs, inputs), codes.scale, codes.scaling)
    transposed = casts.transposed(rows, after=after)
    return transposed.data.view(inputs, experts, outputs).transpose(0, 1), transposed.scale


def _product(rows: Codes, matrices: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
    """``rows @ matrices[e].t()`` for the rows of each expert e; BF16."""
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


def _weight_gradient(gradient: Codes, activations: Codes, ends: Tensor, fast: bool) -> Tensor:
    """``gradient[:, of e] @ activations[:, of e].t()`` for each expert, of the transposes of both."""
    if gradient.data.device.type == "cpu":
        return _emulated_weight_gradient(gradient, activations, ends)
    experts = len(ends)
    return torch._scaled_grouped_mm(
        gradient.data,
        activations.data.t(),
        gradient.scale.view(-1).repeat(experts),
        activations.scale.view(-1).repeat(experts),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _expert_of_row(offsets: Tensor, rows: int) -> Tensor:
    return torch.searchsorted(offsets, torch.arange(rows, dtype=offsets.dtype), right=True)


def _emulated(rows: Codes, matrices: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
    """Every row with every expert, and its own is taken: nothing depends on the values of the offsets."""
    expert = _expert_of_row(offsets, rows.data.shape[0])[:, None]
    values = rows.values()
    out = torch.zeros(rows.data.shape[0], matrices.shape[1], dtype=torch.float32)
    with torch.autocast("cpu", enabled=False):
        for index, matrix in enumerate(matrices.unbind()):
            out = torch.where(expert == index, values @ (matrix.float() * scale).t(), out)
    return out.to(torch.bfloat16)


def _emulated_weight_gradient(gradient: Codes, activations: Codes, ends: Tensor) -> Tensor:
    expert = _expert_of_row(ends, gradient.data.shape[1])
    of_rows, values = gradient.values(), activations.values().t()
    with torch.autocast("cpu", enabled=False):
        found = [torch.where(expert == index, of_rows, 0.0) @ values for index in range(len(ends))]
    return torch.stack(found).to(torch.bfloat16)


# --- one by one ---------------------------------------------------------------------------------------------------


def _experts(weight: QuantizedTensor) -> list[QuantizedTensor]:
    """The matrix of each expert, in the memory of all."""
    count, outputs, inputs = weight.shape
    recipe = weight.recipe.for_shape((outputs, inputs))
    whole = {part.name: weight.components[part.name] for part in recipe.components if part.tile is None}
    cut = {part.name: part for part in recipe.components if part.tile is not None}
    shapes = {name: recipe.component_shape(part, (outputs, inputs)) for name, part in cut.items()}
    return [
        QuantizedTensor(
            {**whole, **{name: weight.components[name][i].view(shape) for name, shape in shapes.items()}},
            recipe,
            (outputs, inputs),
            weight.dtype,
        )
        for i in range(count)
    ]


class _OneByOne(torch.autograd.Function):
    """The layers of experts, each with the products that its number of rows allows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, offsets: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        need_weight = ctx.needs_input_grad[1]
        ends = offsets.tolist()
        ctx.parts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        ctx.in_fp8, ctx.transpose_scalings, saved, outputs = [], [], [], []
        for expert, part in zip(_experts(weight), ctx.parts, strict=True):
            in_fp8 = _products_of(expert, part)
            out, saved_transpose = output_of(x[part], expert, None, in_fp8, None, need_weight)
            outputs.append(out)
            ctx.in_fp8.append(in_fp8)
            ctx.transpose_scalings.append(None if saved_transpose is None else saved_transpose.scaling)
            saved += [] if saved_transpose is None else [saved_transpose.data, saved_transpose.scale]
        outputs.append(x.new_zeros(x.shape[0] - ends[-1], weight.shape[1]))  # rows of no expert
        ctx.format = format_of(weight)
        wants_x = need_weight and None in ctx.transpose_scalings
        ctx.save_for_backward(weight, x if wants_x else None, *saved)
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        check_backward(gradient)
        weight, x, *saved = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        rest = iter(saved)
        all_of_x: list[Tensor] = []
        all_of_weight: list[Tensor] = []
        experts = _experts(weight) if isinstance(weight, QuantizedTensor) else weight.unbind()
        for expert, part, in_fp8, scaling in zip(experts, ctx.parts, ctx.in_fp8, ctx.transpose_scalings, strict=True):
            saved_transpose = None if scaling is None else Codes(next(rest), next(rest), scaling)
            rows = x[part] if saved_transpose is None and need_weight else None
            of_expert = gradients_of(
                gradient[part].contiguous(), expert, saved_transpose, rows, need_x, in_fp8, None, ctx.format
            )
            for gradient_part, of_all in zip(of_expert, (all_of_x, all_of_weight), strict=True):
                of_all += [] if gradient_part is None else [gradient_part]
        if need_x:
            all_of_x.append(gradient.new_zeros(gradient.shape[0] - ctx.parts[-1].stop, weight.shape[2]))
        return torch.cat(all_of_x) if need_x else None, torch.stack(all_of_weight) if need_weight else None, None


def _products_of(expert: QuantizedTensor, part: slice) -> Fp8Mask:
    rows = part.stop - part.start
    return products.products_in_fp8(expert.recipe, expert.device, rows, expert.weight_shape) if rows else NONE
