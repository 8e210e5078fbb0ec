"""The memory that states are read into, in host memory and placed as their parameters are."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.checkpoint.reading.source import TensorInfo
from fused_optim.memory.host_memory import empty_host
from fused_optim.sharding.dtensor import has_own_chunks, keep_chunks, local_tensor, placed_part_of, rewrap_shaped


def buffer_for(param: Tensor, info: TensorInfo) -> Tensor:
    """Placed as ``param`` is."""
    if not isinstance(param, DTensor):
        return empty_host(info.shape, info.dtype)
    if has_own_chunks(param):
        local = empty_host(local_tensor(param).shape, info.dtype)
        return keep_chunks(rewrap_shaped(local, param, info.shape), param)
    shape, _ = placed_part_of(info.shape, param.device_mesh, param.placements)
    return rewrap_shaped(empty_host(shape, info.dtype), param, info.shape)


def buffer_beside(param: Tensor, info: TensorInfo | None) -> Tensor | None:
    """For what is kept beside the states: placed as ``param`` where it has its shape. None for what is no tensor."""
    if info is None or info.shape == param.shape:
        return None if info is None else buffer_for(param, info)
    return empty_host(info.shape, info.dtype)


def native_buffer_for(param: Tensor, info: TensorInfo) -> Tensor:
    """For a part of a state in the native form, which can be cut by rows only: otherwise every rank reads all of it."""
    if isinstance(param, DTensor) and all(p.is_replicate() or p.is_shard(0) for p in param.placements):
        return buffer_for(param, info)
    return empty_host(info.shape, info.dtype)
