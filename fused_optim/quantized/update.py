"""The optimizer's adapter (``protocol.py``) for :class:`QuantizedTensor`.

Quantizes many weights at once: every weight's absmax, one reduction over the ranks that share weights, the codes.

Scales that depend on a whole weight are the same on all of its shards, over every mesh dim that shards it and none that
replicates it: otherwise a checkpoint could not be resharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor

from fused_optim.dtensor import local_tensor
from fused_optim.quantized.protocol import Update
from fused_optim.quantized.tensor import QuantizedTensor


def initial_values(local: QuantizedTensor) -> Tensor:
    local.check_fresh()
    return local.initial_values().clone()


def discard_initial(local: QuantizedTensor) -> None:
    local.discard_high_precision_init()


def values(local: QuantizedTensor) -> Tensor:
    return local.values()


def sharding_dims(param: Tensor) -> tuple[int, ...]:
    """The mesh dims that cut a parameter."""
    if not isinstance(param, DTensor):
        return ()
    sizes = param.device_mesh.shape
    return tuple(i for i, p in enumerate(param.placements) if not p.is_replicate() and sizes[i] > 1)


def needs_collective(param: Tensor) -> bool:
    """Whether new values of this parameter need a reduction over ranks."""
    return local_tensor(param).recipe.scales_whole_tensor and bool(sharding_dims(param))


@torch.no_grad()
def write(updates: Sequence[Update], applies: Tensor | None = None, advance: bool = True) -> None:
    absmax = _absmax([update for update in updates if local_tensor(update.param).recipe.scales_whole_tensor])
    for update in updates:
        if update.values is None:
            continue
        target = local_tensor(update.param)
        target.recipe.rescale(target.components, absmax.get(update.param), applies, advance)
        target.recipe.encode(update.values, target.components, update.fractions)
        target.mark_fresh()


def _absmax(updates: Iterable[Update]) -> dict[Tensor, Tensor]:
    """The largest finite magnitude of each parameter's values over all shards."""
    by_sharding: dict[tuple[DeviceMesh | None, tuple[int, ...], torch.device], list[Update]] = {}
    for update in updates:
        dims = sharding_dims(update.param)
        mesh = update.param.device_mesh if dims else None
        by_sharding.setdefault((mesh, dims, local_tensor(update.param).device), []).append(update)
    found = {}
    for (mesh, dims, device), alike in by_sharding.items():
        numbers = [_of_whole_weight(update, device) for update in alike]
        reduced = torch.cat(numbers)
        for dim in dims:
            dist.all_reduce(reduced, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        for update, piece in zip(alike, reduced.split([len(own) for own in numbers]), strict=True):
            found[update.param] = piece[0]
            _take_over(local_tensor(update.param), piece[1:])
    return found


def _of_whole_weight(update: Update, device: torch.device) -> Tensor:
    """The absmax of this rank's values, then what the weight has beside them: zeros where this rank holds no rows."""
    local = local_tensor(update.param)
    absmax = torch.zeros((), device=device) if update.values is None else local.recipe.absmax(update.values)
    own = torch.cat([absmax.reshape(1), *local.of_whole_weight()])
    return own if local.numel() else torch.zeros_like(own)


def _take_over(local: QuantizedTensor, numbers: Tensor) -> None:
    """Ranks that hold no rows have no scales and histories of their own; a checkpoint writes none there, either."""
    if not local.numel():
        parts = local.of_whole_weight()
        for part, value in zip(parts, numbers.split([len(part) for part in parts]), strict=True):
            part.copy_(value)
