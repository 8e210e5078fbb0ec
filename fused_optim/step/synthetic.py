"""Recognises synthetic first steps, by which other libraries make an optimizer create its states.

``torch.distributed.checkpoint.state_dict`` and Megatron-FSDP fill gradients with zeros and call ``step()``. Such a step
must leave the optimizer as ``initialize_state()`` would: a decoupled weight decay or a counted step would be damage.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor

from fused_optim.sharding.dtensor import local_tensor


def all_gradients_zero(params: Iterable[Tensor], grads: Iterable[Tensor]) -> bool:
    """Whether every element of every gradient is zero on every rank of the parameters' meshes.

    A collective over those meshes, made once in an optimizer's life: before its first step. Raises RuntimeError if
    another rank called :func:`announce_failure` instead.
    """
    nonzero = any(bool(torch.count_nonzero(local_tensor(grad))) for grad in grads)
    nonzero, failed = any_rank(params, nonzero, False)
    if failed:
        raise RuntimeError("another rank refused its gradients before the first step; its error says why")
    return not nonzero


def announce_failure(params: Iterable[Tensor]) -> None:
    """Take part in the other ranks' :func:`all_gradients_zero`, so that they raise instead of waiting."""
    any_rank(params, False, True)


def any_rank(params: Iterable[Tensor], nonzero: bool, failed: bool) -> tuple[bool, bool]:
    """Whether each is true on any rank of the parameters' meshes: a collective over these."""
    meshes: dict[DeviceMesh, None] = {p.device_mesh: None for p in params if isinstance(p, DTensor)}
    for mesh in meshes:
        flags = torch.tensor([nonzero, failed], dtype=torch.int32, device=mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        nonzero, failed = (bool(flag) for flag in flags.tolist())
    return nonzero, failed
