"""The optimizer's adapter (``protocol.py``) for TransformerEngine's quantized tensors.

``Float8Tensor``, ``MXFP8Tensor``, ``Float8BlockwiseQTensor`` and ``NVFP4Tensor`` are all written by their own
``quantize_`` from the FP32 master: it has their scales, amax histories, reductions over ranks and cached transposes in
its care. Nothing of TransformerEngine is imported here; these are methods of the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_optim.dtensor import local_tensor, sharding_dims
from fused_optim.quantized.protocol import Update

ROUNDS_STOCHASTICALLY = False  # quantize_ rounds to nearest: without a master, small updates would be lost


def initial_values(param: Tensor) -> Tensor:
    """Those of ``quantized_model_init(preserve_high_precision_init_val=True)``, which lie in host memory."""
    local = local_tensor(param.detach())
    for holder in _holders(param):
        value = holder.get_high_precision_init_val()
        if value is not None and value.shape == local.shape:
            return value.to(device=local.device, dtype=torch.float32, copy=True)
    return values(local)


def discard_initial(param: Tensor) -> None:
    for holder in _holders(param):
        holder.clear_high_precision_init_val()


def _holders(param: Tensor) -> list[Any]:
    """What remembers the initial values: the local tensor or, before it was sharded, the parameter."""
    candidates = [param] if local_tensor(param) is param else [param, local_tensor(param)]
    return [candidate for candidate in candidates if hasattr(candidate, "get_high_precision_init_val")]


def values(local: Tensor) -> Tensor:
    return local.dequantize(dtype=torch.float32).clone()


def needs_collective(param: Tensor) -> bool:
    """Where one scale is computed for all of a weight, by a reduction within ``quantize_``."""
    return hasattr(local_tensor(param)._quantizer, "with_amax_reduction") and bool(sharding_dims(param))


def _reduce_within_quantize(param: Tensor) -> None:
    """TransformerEngine sets this up when a weight is first gathered; before, shards would get scales of their own."""
    quantizer = local_tensor(param)._quantizer
    if quantizer.with_amax_reduction:
        return
    dims = sharding_dims(param)
    if len(dims) != 1:
        raise NotImplementedError(
            f"a TransformerEngine weight of shape {tuple(param.shape)} with placements {tuple(param.placements)}: its "
            "quantizer reduces scales over one mesh dim only, and several shard it"
        )
    quantizer.amax_reduction_group = param.device_mesh.get_group(dims[0])
    quantizer.with_amax_reduction = True


def target(param: Tensor) -> None:
    return None


def prepare(params: Sequence[Tensor], applies: Tensor | None) -> None:
    pass


@torch.no_grad()
def write(updates: Sequence[Update], applies: Tensor | None = None, advance: bool = True) -> None:
    """One call per weight. Where a step is skipped, masters are as before, hence so are the codes."""
    for update in updates:
        local, reduces = local_tensor(update.param), needs_collective(update.param)
        if reduces:
            _reduce_within_quantize(update.param)
        if update.values is not None:
            local.quantize_(update.values)
        elif reduces:
            local.quantize_(values(local))
