"""The optimizer's adapter (``protocol.py``) for :class:`QuantizedTensor`.

Quantizes many weights at once: every weight's absmax, one reduction over the ranks that share weights, the codes.

Scales that depend on a whole weight are the same on all of its shards, over every mesh dim that shards it and none that
replicates it: otherwise a checkpoint could not be resharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor

from fused_optim.dtensor import local_tensor
from fused_optim.quantized.protocol import Update
from fused_optim.quantized.tensor import QuantizedTensor

ROUNDS_STOCHASTICALLY = True


def initial_values(param: Tensor) -> Tensor:
    local = local_tensor(param)
    local.check_fresh()
    return local.initial_values().clone()


def discard_initial(param: Tensor) -> None:
    local_tensor(param).discard_high_precision_init()


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
    found = {}
    for param, numbers in reduce_over_shards({u.param: _of_whole_weight(u) for u in updates}).items():
        found[param] = numbers[0]
        _take_over(local_tensor(param), numbers[1:])
    return found


def reduce_over_shards(numbers: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """The largest of the ranks' numbers of each parameter, element by element; all ranks pass the same parameters."""
    by_sharding: dict[tuple[DeviceMesh | None, tuple[int, ...], torch.device], list[Tensor]] = {}
    for param, own in numbers.items():
        dims = sharding_dims(param)
        mesh = param.device_mesh if dims else None
        by_sharding.setdefault((mesh, dims, own.device), []).append(param)
    found = {}
    for (mesh, dims, _), alike in by_sharding.items():
        reduced = torch.cat([numbers[param] for param in alike])
        for dim in dims:
            dist.all_reduce(reduced, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        found.update(zip(alike, reduced.split([len(numbers[param]) for param in alike]), strict=True))
    return found


def _of_whole_weight(update: Update) -> Tensor:
    """The absmax of this rank's values, then what the weight has beside them: zeros where this rank holds no rows."""
    local = local_tensor(update.param)
    whole = local.of_whole_weight()
    absmax = whole[0].new_zeros(1) if update.values is None else local.recipe.absmax(update.values).reshape(1)
    own = torch.cat([absmax, *whole])
    return own if local.numel() else torch.zeros_like(own)


def _take_over(local: QuantizedTensor, numbers: Tensor) -> None:
    """Ranks that hold no rows have no scales and histories of their own; a checkpoint writes none there, either."""
    if not local.numel():
        parts = local.of_whole_weight()
        for part, value in zip(parts, numbers.split([len(part) for part in parts]), strict=True):
            part.copy_(value)
