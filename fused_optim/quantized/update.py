"""The optimizer's adapter (``adapters.py``) for :class:`QuantizedTensor`.

Quantizes many weights at once: every weight's absmax, one reduction over the ranks that share weights, the codes.

Scales that depend on a whole weight are the same on all of its shards, over every mesh dim that shards it and none that
replicates it: otherwise a checkpoint could not be resharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_optim.adapters import Target, Update
from fused_optim.quantized import engine
from fused_optim.quantized.engine import Encoding
from fused_optim.quantized.tensor import INITIAL, local_weight
from fused_optim.sharding.dtensor import sharding_dims


def needs_master(param: Tensor) -> None:
    return None


def initial_values(param: Tensor) -> Tensor:
    local = local_weight(param)
    local.check_fresh()
    return local.initial_values().clone()


def discard_initial(param: Tensor) -> None:
    local_weight(param).discard_high_precision_init()


def values(local: Tensor) -> Tensor:
    return local_weight(local).values()


def rounded(param: Tensor, master: Tensor) -> Tensor:
    local = local_weight(param)
    local.check_fresh()
    local.check_components([part.name for part in local.recipe.components])
    copies = {name: part.clone() for name, part in local.components.items() if name != INITIAL}
    engine.encode([Encoding(local.recipe, copies, master)])
    return engine.decode(local.recipe, copies, tuple(master.shape), torch.float32)


def needs_collective(param: Tensor) -> bool:
    """Whether new values of this parameter need a reduction over ranks."""
    return local_weight(param).recipe.scales_whole_tensor and bool(sharding_dims(param))


def target(param: Tensor) -> Target | None:
    local = local_weight(param)
    kernel, parts = local.recipe.kernel, local.components
    if kernel is None:
        return None
    measures = local.recipe.scales_whole_tensor
    names = ("data", "scale" if "scale" in parts else "tensor_scale")
    local.check_components(names)
    data, scale = (parts[name] for name in names)
    fits = kernel.block is not None and data.shape[1] % kernel.block == 0
    if not (fits and engine.is_plain(data) and engine.is_plain(scale)):
        return Target(kernel.format, kernel.round_up, None, None, measures, (), parts)
    return Target(kernel.format, kernel.round_up, data, scale, measures, names, parts)


def prepare(updates: Sequence[Update], applies: Tensor | None) -> None:
    locals_ = [local_weight(update.param) for update in updates]
    locals_ = [local for local in locals_ if local.recipe.scales_whole_tensor]
    engine.prepare([(local.recipe, local.components) for local in locals_], applies)


@torch.no_grad()
def write(updates: Sequence[Update], applies: Tensor | None = None, advance: bool = True) -> None:
    pairs = [(local_weight(update.param), update) for update in updates]
    reduced = [update for local, update in pairs if local.recipe.scales_whole_tensor]
    absmax = _absmax(reduced)
    if not advance:
        _complete_empty_shards(update.param for update in reduced)
    changed = [(local, update, update.values) for local, update in pairs if update.values is not None]
    rescaled = [(local, absmax[update.param]) for local, update, _ in changed if update.param in absmax]
    engine.rescale(
        [(x.recipe, x.components) for x, _ in rescaled], [largest for _, largest in rescaled], applies, advance
    )
    engine.encode([Encoding(x.recipe, x.components, new, u.fractions) for x, u, new in changed if not u.written])
    engine.written(x.components[name] for x, u, _ in changed if u.written for name in x.recipe.of_elements)
    for local, _, _ in changed:
        local.mark_fresh()


def _absmax(updates: Sequence[Update]) -> dict[Tensor, Tensor]:
    """The largest finite magnitude of each parameter's values over all shards."""
    by_device: dict[torch.device, list[Update]] = {}
    own: dict[Tensor, Tensor] = {}
    for update in updates:
        if update.absmax is None:
            by_device.setdefault(local_weight(update.param).device, []).append(update)
        else:
            own[update.param] = update.absmax
    for device, there in by_device.items():
        recipes = [local_weight(update.param).recipe for update in there]
        absmax = engine.absmax(recipes, [update.values for update in there], device)
        own.update(zip((update.param for update in there), absmax.split(1), strict=True))
    in_order = {update.param: own[update.param] for update in updates}  # that in which all ranks reduce
    return {param: absmax[0] for param, absmax in reduce_over_shards(in_order).items()}


def reduce_over_shards(numbers: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """The largest of the ranks' numbers of each parameter, element by element; all ranks pass the same parameters."""
    by_sharding: dict[tuple[DeviceMesh, tuple[int, ...], torch.device], list[Tensor]] = {}
    for param, own in numbers.items():
        dims = sharding_dims(param)
        if isinstance(param, DTensor) and dims:
            by_sharding.setdefault((param.device_mesh, dims, own.device), []).append(param)
    found = dict(numbers)
    for (mesh, dims, _), alike in by_sharding.items():
        reduced = torch.cat([numbers[param] for param in alike])
        for dim in dims:
            dist.all_reduce(reduced, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        found.update(zip(alike, reduced.split([len(numbers[param]) for param in alike]), strict=True))
    return found


def _complete_empty_shards(params: Iterable[Tensor]) -> None:
    """Ranks that hold no rows take over scales and histories, of which a checkpoint neither saves nor loads theirs."""
    locals_ = {param: local_weight(param) for param in params}
    own = {param: torch.cat(local.of_whole_weight()) for param, local in locals_.items()}
    own = {param: value if locals_[param].numel() else torch.zeros_like(value) for param, value in own.items()}
    for param, numbers in reduce_over_shards(own).items():
        if not locals_[param].numel():
            parts = locals_[param].of_whole_weight()
            for part, value in zip(parts, numbers.split([len(part) for part in parts]), strict=True):
                part.copy_(value)
