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
from torch.distributed.tensor import DeviceMesh

from fused_optim.dtensor import local_tensor, sharding_dims
from fused_optim.quantized import engine
from fused_optim.quantized.engine import Encoding
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


def needs_collective(param: Tensor) -> bool:
    """Whether new values of this parameter need a reduction over ranks."""
    return local_tensor(param).recipe.scales_whole_tensor and bool(sharding_dims(param))


@torch.no_grad()
def write(updates: Sequence[Update], applies: Tensor | None = None, advance: bool = True) -> None:
    reduced = [update for update in updates if local_tensor(update.param).recipe.scales_whole_tensor]
    absmax = _absmax(reduced)
    if not advance:
        _complete_empty_shards(update.param for update in reduced)
    targets, weights, absmaxes = [], [], []
    for update in updates:
        if update.values is not None:
            target = local_tensor(update.param)
            targets.append(target)
            weights.append(Encoding(target.recipe, target.components, update.values, update.fractions))
            absmaxes.append(absmax.get(update.param))
    engine.rescale(weights, absmaxes, applies, advance)
    engine.encode(weights)
    for target in targets:
        target.mark_fresh()


def _absmax(updates: Iterable[Update]) -> dict[Tensor, Tensor]:
    """The largest finite magnitude of each parameter's values over all shards."""
    by_device: dict[torch.device, list[Update]] = {}
    for update in updates:
        by_device.setdefault(local_tensor(update.param).device, []).append(update)
    own = {}
    for device, there in by_device.items():
        recipes = [local_tensor(update.param).recipe for update in there]
        absmax = engine.absmax(recipes, [update.values for update in there], device)
        own.update(zip((update.param for update in there), absmax.split(1), strict=True))
    return {param: absmax[0] for param, absmax in reduce_over_shards(own).items()}


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


def _complete_empty_shards(params: Iterable[Tensor]) -> None:
    """Ranks that hold no rows take over scales and histories, of which a checkpoint neither saves nor loads theirs."""
    locals_ = {param: local_tensor(param) for param in params}
    own = {param: torch.cat(local.of_whole_weight()) for param, local in locals_.items()}
    own = {param: value if locals_[param].numel() else torch.zeros_like(value) for param, value in own.items()}
    for param, numbers in reduce_over_shards(own).items():
        if not locals_[param].numel():
            parts = locals_[param].of_whole_weight()
            for part, value in zip(parts, numbers.split([len(part) for part in parts]), strict=True):
                part.copy_(value)
