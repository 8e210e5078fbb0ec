"""Reasons why products with a weight do not run in FP8, from sizes, recipe and device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fused_optim.quantized.fp8 import grouped, products
from fused_optim.quantized.fp8.casts import BLOCK
from fused_optim.quantized.fp8.kept import kept_weight
from fused_optim.quantized.fp8.measured import Baseline
from fused_optim.quantized.fp8.products import PRODUCTS, Product
from fused_optim.quantized.recipes import ProductFormat
from fused_optim.quantized.tensor import QuantizedTensor, local_weight
from fused_optim.sharding.dtensor import local_tensor

MANY = 1 << 62  # rows: more than any measured number


def unsupported_reasons(param: Tensor, rows: int | None = None) -> dict[str, str | None]:
    """Why each product of a layer with this weight does not run in FP8, None if it does. Empty if none should.

    ``param`` may be a shard: FSDP2 gathers it, tensor parallelism does not. Weights of three dims are taken for those
    of experts (``grouped.py``). ``rows``: of activations; None: a number that suits all products.
    """
    if isinstance(local_tensor(param), QuantizedTensor):
        return _of_quantized(param, rows)
    return {} if kept_weight(param) is None else _of_kept(param, rows)


def _of_quantized(param: Tensor, rows: int | None) -> dict[str, str | None]:
    local = local_weight(param)
    format = local.recipe.products
    if format is None:
        return {}
    shape, device = _shape_in_layers(param), _device_in_layers(param)
    always = _unsupported_at_all(local, device) or products.device_unsupported_reason(device, format)
    reasons: dict[str, str | None] = {}
    for product in PRODUCTS:
        if len(shape) == 3:
            why = grouped.unsupported_reason(product, local.recipe, device, shape, rows)
        else:
            why = products.unsupported_reason(product, local.recipe, BLOCK if rows is None else rows, shape)
            why = _unsupported_outside_layers(product, local) or why
            why = why or products.slower_reason(format, device, MANY if rows is None else rows, shape, "decoded")
        reasons[product] = always or why
    return reasons


def _of_kept(param: Tensor, rows: int | None) -> dict[str, str | None]:
    """The reasons for a kept weight; a shard counts as the weight that is gathered of it."""
    kept = kept_weight(param)
    assert kept is not None
    recipe, format = kept.recipe, kept.recipe.products
    assert format is not None
    shape, device = _gathered_shape(param), _device_in_layers(param)
    baseline: Baseline = "decoded" if isinstance(param, DTensor) else "BF16"
    always = _other_dtype(kept.dtype, device, format, len(shape)) or products.device_unsupported_reason(device, format)
    reasons: dict[str, str | None] = {}
    for product in PRODUCTS:
        if len(shape) == 3:
            why = grouped.unsupported_reason(product, recipe, device, shape, rows, baseline)
        else:
            why = products.unsupported_reason(product, recipe, BLOCK if rows is None else rows, shape)
            why = why or products.slower_reason(format, device, MANY if rows is None else rows, shape, baseline)
        reasons[product] = always or why
    return reasons


def _other_dtype(dtype: torch.dtype, device: torch.device, format: ProductFormat, dims: int) -> str | None:
    if device.type != "meta" and torch.is_autocast_enabled(device.type):  # which autocast does not know
        dtype = torch.get_autocast_dtype(device.type)
    if dtype == torch.float16 and dims == 3:
        return "it is float16: torch's grouped products in FP8 have outputs in bfloat16 alone"
    return products.dtype_unsupported_reason(dtype, device, format)


def _unsupported_at_all(local: QuantizedTensor, device: torch.device) -> str | None:
    assert local.recipe.products is not None
    why = _other_dtype(local.dtype, device, local.recipe.products, len(local.shape))
    if why is not None:
        return why
    before = local.shared.position.gathered
    if (local.rows_before if before is None else before) != 0:
        return "tensor parallelism has cut it within a tile"
    return None


def _unsupported_outside_layers(product: Product, local: QuantizedTensor) -> str | None:
    format = local.recipe.products
    if local.shared.in_layer or (product == "output" and format is not None and not format.measured):
        return None
    return "no nn.Linear holds it: gradients are those of decoded weights"


def _shape_in_layers(param: Tensor) -> tuple[int, ...]:
    """The shape that a rank multiplies with: the part that tensor parallelism makes, gathered by FSDP2."""
    if local_weight(param).shared.position.gathered is not None:
        return _gathered_shape(param)
    return _shape_under(param, list(param.placements)) if isinstance(param, DTensor) else tuple(param.shape)


def _gathered_shape(param: Tensor) -> tuple[int, ...]:
    if not isinstance(param, DTensor):
        return tuple(param.shape)
    placements = list(param.placements)
    rows = [i for i, placement in enumerate(placements) if placement.is_shard(0)]
    strided = [i for i in rows if type(placements[i]) is not Shard]  # FSDP2's, where tensor parallelism cuts rows, too
    for i in (strided or rows)[:1]:
        placements[i] = Replicate()
    return _shape_under(param, placements)


def _shape_under(param: DTensor, placements: list[Placement]) -> tuple[int, ...]:
    shape, _ = compute_local_shape_and_global_offset(param.shape, param.device_mesh, placements)
    return tuple(shape)


def _device_in_layers(param: Tensor) -> torch.device:
    """The device of the products: that of the mesh for offloaded weights."""
    if isinstance(param, DTensor) and param.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return param.device
