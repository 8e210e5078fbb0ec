"""The three products of a linear layer in FP8, for weights whose recipe has ``compute="fp8"`` or ``"auto"``.

    output = x @ weight.t()         activations E4M3
    input gradient = dy @ weight    gradients E5M2 or E4M3; the weight's own codes, transposed
    weight gradient = dy.t() @ x    both transposed

With ``compute="fp4"`` the first one in FP4. Which of them run so is decided one by one (:func:`unsupported_reason`),
with ``"auto"`` also by what was measured (``measured.py``).
The others decode the weight, or stay in BF16. CPUs compute the same products of the same codes in FP32.

Where this speaks of BF16, layers in FP16 have FP16 (:func:`dtype_unsupported_reason`).
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from fused_optim.quantized.fp8 import casts, measured, microscaling
from fused_optim.quantized.fp8.casts import BLOCK, Codes
from fused_optim.quantized.fp8.kept import KeptWeight
from fused_optim.quantized.fp8.measured import Baseline
from fused_optim.quantized.recipes import ProductFormat, Recipe, Scaling
from fused_optim.quantized.tensor import QuantizedTensor

Product = Literal["output", "input gradient", "weight gradient"]
PRODUCTS: tuple[Product, ...] = get_args(Product)
OUTPUTS = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # of all sizes of FP8 products, but for the rows of the first matrix

_BLOCKS = {"block": ScalingType.BlockWise1x128, "tile": ScalingType.BlockWise128x128}


class Needs(NamedTuple):
    """Requirements of products with a kind of scales.

    ``summed``: a number that the summed size is a multiple of; ``rows``: that of rows of activations. ``lowest``,
    ``below``: the compute capabilities (from, to before); ``name`` and ``capability`` name them in messages.
    """

    name: str = "FP8 products"
    capability: str = "8.9"
    lowest: tuple[int, int] = (8, 9)
    below: tuple[int, int] = (1000, 0)
    summed: int = ALIGNMENT
    rows: int = 1


NEEDS: dict[Scaling, Needs] = {
    "tensor": Needs(),
    "row": Needs(),
    "block": Needs("products of blocks", "9.x", (9, 0), (10, 0), summed=BLOCK, rows=4),
    "mxfp8": Needs("products in MXFP8", "10.x", (10, 0), (11, 0), summed=32),
    "nvfp4": Needs("products in NVFP4", "10.x", (10, 0), (11, 0), summed=32),
}


class Fp8Mask(NamedTuple):
    """The products that run in FP8: True for each."""

    output: bool
    input_gradient: bool
    weight_gradient: bool


NONE = Fp8Mask(False, False, False)


# --- what can run -----------------------------------------------------------------------------------------------


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def device_unsupported_reason(device: torch.device, format: ProductFormat) -> str | None:
    """Why a device has no such products, or None."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"no FP8 products on {device.type}"
    needs, capability = NEEDS[format.scaling], _capability(device)
    if needs.lowest <= capability < needs.below:
        return None
    has = f"this GPU has {capability[0]}.{capability[1]}"
    return f"{needs.name} need compute capability {needs.capability}, {has}"


def dtype_unsupported_reason(dtype: torch.dtype, device: torch.device, format: ProductFormat) -> str | None:
    """Why layers that compute in this dtype have no such products, or None."""
    if dtype == torch.bfloat16:
        return None
    if dtype != torch.float16:
        name = str(dtype).removeprefix("torch.")
        return f"it is {name}: only autocast or FSDP2's mixed precision to bfloat16 or float16 make its products FP8"
    if format.scaling in casts.AS_WEIGHTS:
        return f"it is float16: {NEEDS[format.scaling].name} have outputs in bfloat16 alone"
    if format.scaling == "row" and not _has_half_of_rows(device):
        return "it is float16: torch has such outputs of scales per row for compute capability 9.x and CUDA 12.9 alone"
    return None


@functools.cache
def _has_half_of_rows(device: torch.device) -> bool:
    """torch leaves the choice of the output to cuBLAS where that has products of scales per row."""
    if device.type != "cuda":
        return True
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return (9, 0) <= _capability(device) < (10, 0) and cuda >= (12, 9)


def unsupported_reason(product: Product, recipe: Recipe, rows: int, weight: tuple[int, ...]) -> str | None:
    """Why a product of so many rows of activations with a weight of this shape does not run in FP8, or None."""
    if recipe.products is None:
        return "the recipe decodes"
    return _unsupported_reason(product, recipe.products, rows, weight)


def _unsupported_reason(product: Product, format: ProductFormat, rows: int, weight: tuple[int, ...]) -> str | None:
    if len(weight) != 2:
        return "the weight is no matrix"
    outputs, inputs = weight
    sizes = {"in_features": inputs, "out_features": outputs}
    if product == "weight gradient":
        if not format.weight_gradients:
            return "the recipe has weight gradients in BF16"
        sizes["rows"] = rows
    if product == "input gradient" and format.no_input_gradients is not None:
        return format.no_input_gradients
    needs = NEEDS[format.scaling]
    summed = {"output": "in_features", "input gradient": "out_features", "weight gradient": "rows"}[product]
    for name, size in sizes.items():
        multiple = needs.summed if name == summed else ALIGNMENT
        if size % multiple:
            return f"{name} = {size} is no multiple of {multiple}"
    if rows % needs.rows:
        return f"rows = {rows} is no multiple of {needs.rows}"
    return None


def products_in_fp8(
    recipe: Recipe, device: torch.device, rows: int, weight: tuple[int, ...], baseline: Baseline = "decoded"
) -> Fp8Mask:
    """The products that run in FP8. ``baseline``: the alternative that ``compute="auto"`` compares times with."""
    if recipe.products is None:
        return NONE
    find = (
        _known_products_in_fp8 if type(rows) is int else _products_in_fp8
    )  # compilers have rows whose number is not known
    return find(recipe.products, device, rows, weight, baseline)


def _products_in_fp8(
    format: ProductFormat, device: torch.device, rows: int, weight: tuple[int, ...], baseline: Baseline
) -> Fp8Mask:
    if device_unsupported_reason(device, format) is not None or len(weight) != 2:
        return NONE
    if slower_reason(format, device, rows, weight, baseline) is not None:
        return NONE
    return Fp8Mask(*(_unsupported_reason(product, format, rows, weight) is None for product in PRODUCTS))


def slower_reason(
    format: ProductFormat, device: torch.device, rows: int, weight: tuple[int, ...], baseline: Baseline
) -> str | None:
    """Why FP8 products with ``compute="auto"`` would not save time, or None."""
    if not format.measured:
        return None
    kind = measured.kind_of(format, baseline == "BF16")
    return measured.slower_reason(kind, device, rows, weight, "sizes", baseline)


_known_products_in_fp8 = functools.lru_cache(maxsize=4096)(_products_in_fp8)


def fits(x: Tensor, weight: QuantizedTensor | KeptWeight) -> bool:
    """True if FP8 products of these tensors are considered at all. torch.jit.trace would not see what engines write."""
    if isinstance(x, QuantizedTensor) or x.numel() == 0 or torch.jit.is_tracing():
        return False
    dtype, format = weight.dtype, weight.recipe.products
    if dtype not in OUTPUTS or x.dtype != dtype:
        return False
    if format is None or (dtype == torch.float16 and dtype_unsupported_reason(dtype, weight.device, format)):
        return False
    # Plain values that were written and not quantized since have no codes, and tiles that begin elsewhere no products.
    return not isinstance(weight, QuantizedTensor) or (not weight.is_pending and weight.rows_before == 0)


# --- products of codes ------------------------------------------------------------------------------------------


def product(
    a: Codes, b: Codes, *, bias: Tensor | None = None, fast: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """``a @ b.t() + bias`` in ``dtype``, one of ``OUTPUTS``; MXFP8 and NVFP4 in BF16 alone.

    ``fast``: the GPU adds up with 14 bits, which costs accuracy in long sums and saves time.
    """
    if a.data.device.type == "cpu":
        return _emulated(a, b, bias, dtype)
    if a.scaling not in ("tensor", "row"):
        out = microscaling.product(a, b) if a.scaling in casts.AS_WEIGHTS else _product_of_blocks(a, b, dtype)
        return out if bias is None else out.add_(bias)
    scale_a, scale_b = _alike(a, b)
    return torch._scaled_mm(a.data, b.data.t(), scale_a, scale_b.t(), bias=bias, out_dtype=dtype, use_fast_accum=fast)


def _emulated(a: Codes, b: Codes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        out = a.values() @ b.values().t()
        return (out if bias is None else out + bias.float()).to(dtype)


def _alike(a: Codes, b: Codes) -> tuple[Tensor, Tensor]:
    """Their scales: where one has them by rows, for the other as well."""
    if a.scaling == b.scaling:
        return a.scale, b.scale
    by_rows = (c.scale if c.scaling == "row" else c.scale.expand(c.data.shape[0])[:, None].contiguous() for c in (a, b))
    return tuple(by_rows)  # type: ignore[return-value]


def _product_of_blocks(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    return scaled_mm(
        a.data,
        b.data.t(),
        _scale_operand(a),
        _BLOCKS[a.scaling],
        _scale_operand(b),
        _BLOCKS[b.scaling],
        output_dtype=dtype,
    )


def _scale_operand(codes: Codes) -> Tensor:
    """The scales as cuBLAS reads them: column by column for blocks; transposed, padded to multiples of four, for tiles.

    The scales of blocks are copied if they lie otherwise, as they may after a hook of saved tensors has copied them.
    """
    if codes.scaling == "block":
        return codes.scale if codes.scale.stride(0) == 1 else codes.scale.t().contiguous().t()
    missing = -codes.scale.shape[1] % 4
    scale = torch.nn.functional.pad(codes.scale, (0, missing)) if missing else codes.scale
    return scale.t()


# --- products with a weight -------------------------------------------------------------------------------------

# What scales a weight has, by how many of its rows and columns share one.
_KINDS: dict[tuple[int, int] | None, Scaling] = {
    None: "tensor",
    (BLOCK, BLOCK): "tile",
    (1, BLOCK): "block",
    **{recipe.tile: scaling for scaling, recipe in casts.AS_WEIGHTS.items()},
}


def weight_codes(weight: QuantizedTensor) -> Codes:
    """The codes of a weight, whether or not it is a transposed view: rows are outputs. No copy."""
    weight.check_not_freed()
    parts, kind = weight.components, _KINDS[weight.recipe.tile]
    if kind in casts.AS_WEIGHTS:
        return Codes(parts["data"], parts["scale"], kind, parts.get("tensor_scale"))
    data = parts["data"].view(torch.float8_e4m3fn)
    if kind == "tensor":
        return Codes(data, parts["tensor_scale"], kind)
    return Codes(data, parts["scale"] if kind == "tile" else parts["scale"].t().contiguous().t(), kind)


def output(codes: Codes, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    fast = codes.scaling in ("tensor", "row")
    return product(codes, weight_codes(weight), bias=bias, fast=fast, dtype=weight.dtype)


def input_gradient(gradient: Codes, weight: Tensor, format: ProductFormat) -> Tensor:
    """``gradient @ weight`` in the weight's dtype; hooks of saved tensors may have made the weight plain."""
    if not isinstance(weight, QuantizedTensor):
        return gradient.values().to(weight.dtype) @ weight
    transposed = casts.transposed(weight_codes(weight), after=gradient.data)
    return product(gradient, transposed, fast=format.fast_gradients, dtype=weight.dtype)


def weight_gradient(gradient: Codes, activations: Codes, weight: Tensor, format: ProductFormat) -> Tensor:
    """``gradient @ activations.t()`` in the weight's dtype, of the transposes of gradient and activations."""
    return product(gradient, activations, fast=format.fast_gradients, dtype=weight.dtype)
