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
from fused_optim.quantized import engine
from fused_optim.quantized.engine import Encoding
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
    by_sharding: dict[tuple[DeviceMesh | None, tuple[int, ...], torch.device], list[Update]] = {}
    for update in updates:
        dims = sharding_dims(update.param)
        mesh = update.param.device_mesh if dims else None
        by_sharding.setdefault((mesh, dims, local_tensor(update.param).device), []).append(update)
    found = {}
    for (mesh, dims, device), alike in by_sharding.items():
        recipes = [local_tensor(update.param).recipe for update in alike]
        absmax = engine.absmax(recipes, [update.values for update in alike], device)
        for dim in dims:
            dist.all_reduce(absmax, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        found.update(zip((update.param for update in alike), absmax.unbind(), strict=True))
    return found
