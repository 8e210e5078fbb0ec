"""What the next step will do to each parameter, and what rounding makes of it: one extra pass that changes nothing.

The pass is the reference's, piece by piece: the update of FP32 values, the moments as they are stored and read again.
It is made on request only; nothing of it is in the way of ``step()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adapters import adapter_of
from fused_optim.backends.torch_reference import derive
from fused_optim.formats.elements import ROTATING
from fused_optim.formats.masters import Master, join_remainder, split_remainder
from fused_optim.formats.rounding import master_rounding, rounding_bits, rounding_key
from fused_optim.formats.states import FLOAT16, Kind, StateFormat, decode_state, encode_state
from fused_optim.memory.layout import MASTER
from fused_optim.options.checks import check_update, describe
from fused_optim.rule import Hyper, Scalars, StateSpec
from fused_optim.rule import Update as ElementUpdate
from fused_optim.sharding.dtensor import dense, finished_local, local_tensor, sharding_dims
from fused_optim.state.param_state import ParamState
from fused_optim.state.remainders import PIECE
from fused_optim.state.store import StateStore
from fused_optim.step.plan import placed_as

# What is summed up of a parameter's elements, by shards, ranks and groups. "low": of a moment, values that are not 0
# and have the smallest code or none.
_SUMS = ("elements", "update", "weight", "gradient", "moved", "lost")
_OF_STATES = ("value", "error", "coded", "top", "low")


def _sums_of(names: Sequence[str]) -> list[str]:
    """``names``: of the rule's states."""
    return [*_SUMS, *(f"{name}_{what}" for name in names for what in _OF_STATES)]


class Diagnostics(dict[str, Any]):
    """Numbers by parameter and by param group, which can be written as JSON.

    ``parameters``: by name; ``groups``: over all parameters of each, with its ``step``. Each has

    * ``update_rms``, ``weight_rms``, ``update_to_weight``, ``gradient_rms``: of the update in FP32, before rounding, of
      the master before it, their ratio, and the gradient as the step reads it (clipped);
    * ``lost_updates``: the share of elements that the update would move and rounding leaves where they are;
    * ``exp_avg_error``, ``exp_avg_sq_error``: RMS of what rounding the new moment changes, relative to its RMS;
    * of moments with scales ``exp_avg_saturated``, the share of elements with their block's largest code (one in each
      block at least), ``exp_avg_lowest``, the share of values other than 0 that get the smallest code or 0, and
      ``exp_avg_scale_min``, ``exp_avg_scale_max`` of scales other than 0; likewise ``exp_avg_sq_...``.

    What does not exist is left out: without a gradient or elements there is nothing.
    """

    def scalars(self, prefix: str = "optimizer", parameters: bool = False) -> dict[str, float]:
        """Flat names and numbers, for TensorBoard's ``add_scalar`` and ``wandb.log``; on request of parameters, too."""
        found = {
            f"{prefix}/group{number}/{key}": value
            for number, group in enumerate(self["groups"])
            for key, value in group.items()
            if key != "step"
        }
        for name, values in self["parameters"].items() if parameters else ():
            found |= {f"{prefix}/{name}/{key}": value for key, value in values.items()}
        return found


@dataclass(frozen=True)
class _Shard:
    """A parameter whose next step is looked at."""

    states: ParamState
    grad: Tensor  # local, dense
    scalars: Scalars
    update: ElementUpdate
    rounding_offset: int | None
    key: int


def diagnose(store: StateStore, hypers: Callable[[torch.device], Sequence[Hyper]]) -> Diagnostics:
    """``hypers``: of the next step, by device, one per param group. A collective over the meshes that cut parameters.

    Raises RuntimeError where no parameter has states, and for gradients that cannot be used.
    """
    rules = store.rules()
    if any(rule.whole_matrices for rule in rules.values()):
        raise RuntimeError("diagnostics() looks at elements one by one, and Muon's update is of whole matrices")
    rows: dict[Tensor, tuple[Tensor, Tensor]] = {}
    numbers = store.rounding_numbers()
    own_names = [spec.name for spec in store.rule.states]
    derived = {device: list(map(derive, hypers(device))) for device in {local_tensor(p).device for p in store.params}}
    for index, number, param, name in _members(store):
        sums, bounds = _empty(own_names, local_tensor(param).device)
        grad = getattr(param, store.grad_attribute, None)
        if grad is not None and param in store:
            check_update(param, grad, index, name)
            placed = dense(finished_local(placed_as(grad, param))).view(-1)
            scalars, offset = derived[local_tensor(param).device][number]
            key = rounding_key(store.settings.seed, numbers[index])
            shard = _Shard(store[param], placed, scalars, rules[param].update(scalars), offset, key)
            _add_shard(shard, sums, bounds)
        rows[param] = sums, bounds
    if not any(param in store for param in rows):
        raise RuntimeError("diagnostics() looks at the next step of existing states: call step() or initialize_state()")
    _reduce(rows)
    return _report(store, {param: (sums.cpu(), bounds.cpu()) for param, (sums, bounds) in rows.items()})


def _members(store: StateStore) -> Iterator[tuple[int, int, Tensor, str | None]]:
    """(position, number of the group, parameter, name)."""
    names = store.names
    index = 0
    for number, group in enumerate(store.groups):
        for param in group["params"]:
            yield index, number, param, names[index]
            index += 1


def _empty(names: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums, and bounds: rows of least and largest scale, the least with its sign changed, so that both are maxima."""
    sums = torch.zeros(len(_sums_of(names)), dtype=torch.float64, device=device)
    return sums, torch.full((len(names), 2), -math.inf, dtype=torch.float64, device=device)


# --- one shard ----------------------------------------------------------------------------------------------------


def _add_shard(shard: _Shard, sums: Tensor, bounds: Tensor) -> None:
    master = _master_reader(shard.states)
    for first in range(0, shard.grad.numel(), PIECE):
        piece = slice(first, min(first + PIECE, shard.grad.numel()))
        _add_piece(shard, master(piece), piece, sums, bounds)


def _add_piece(shard: _Shard, before: Tensor, piece: slice, sums: Tensor, bounds: Tensor) -> None:
    states, layout, scalars = shard.states, shard.states.layout, shard.scalars
    grad = shard.grad[piece].float()
    names = [spec.name for spec in layout.specs]
    after, values = shard.update(grad, before, [_stored(states, name, piece) for name in names])
    elements = layout.geometry.global_indices(grad.device, piece.start, piece.stop)
    u = rounding_bits(shard.key, elements, shard.rounding_offset)
    found = {"elements": torch.ones_like(before), "update": (after.double() - before.double()).square()}
    found |= {"weight": before.double().square(), "gradient": (grad * scalars.grad_factor).double().square()}
    rounded = _rounded_master(states, before, after, u)
    if rounded is not None:
        decays = (before != 0) if scalars.decay != 1.0 else torch.zeros_like(before, dtype=torch.bool)
        found["moved"] = ((values[0] != 0) | decays) & (scalars.step_size != 0.0)
        found["lost"] = found["moved"] & (rounded == before)
    for i, (spec, fmt, value) in enumerate(zip(layout.specs, layout.formats, values, strict=True)):
        found |= _rounding_of(spec, value, fmt, layout.geometry.block, u, bounds[i])
    index = {name: i for i, name in enumerate(_sums_of(names))}
    for name, counted in found.items():
        sums[index[name]] += counted.sum(dtype=torch.float64)


def _stored(states: ParamState, name: str, piece: slice) -> Tensor:
    """A part of a state, or of an FP16 master, in FP32."""
    return states.stored(name).piece(piece).to(local_tensor(states.param).device)


def _master_reader(states: ParamState) -> Callable[[slice], Tensor]:
    """Reads parts of the master in FP32."""
    kind, local = states.layout.master, local_tensor(states.param.detach())
    if kind is Master.FLOAT16:
        return lambda piece: _stored(states, MASTER, piece)
    if kind is Master.FLOAT32:
        whole = local_tensor(states.tensors[MASTER]).reshape(-1)
        return lambda piece: whole[piece].to(local.device)
    adapter = adapter_of(states.param)
    param = (local if adapter is None else adapter.values(local)).reshape(-1)
    if kind is Master.PARAMETER:
        return lambda piece: param[piece].float()
    low = local_tensor(states.tensors[MASTER]).reshape(-1)
    return lambda piece: join_remainder(param[piece], low[piece].to(local.device))


def _rounded_master(states: ParamState, before: Tensor, after: Tensor, u: Tensor) -> Tensor | None:
    """What the step makes of the new master. None for quantized parameters without one: their library knows."""
    kind, block = states.layout.master, states.layout.geometry.block
    if kind in (Master.FLOAT32, Master.REMAINDER16):
        return after
    if kind is Master.REMAINDER8:
        return join_remainder(*split_remainder(after, kind))
    if kind is Master.FLOAT16:
        bits, scale = encode_state(after, Kind.MASTER, FLOAT16, block, master_rounding(before, after, u))
        return decode_state(bits, scale, Kind.MASTER, FLOAT16, block)
    if adapter_of(states.param) is not None:
        return None
    dtype = states.param.dtype
    return ROTATING[dtype](after, u).float() if dtype in ROTATING else after


def _rounding_of(
    spec: StateSpec, value: Tensor, fmt: StateFormat, block: int, u: Tensor, bounds: Tensor
) -> dict[str, Tensor]:
    """What storing a new state makes of it. ``bounds``: of the scales, which are widened."""
    name, kind = spec.name, spec.kind
    bits, scale = encode_state(value, kind, fmt, block, u)
    kept = decode_state(bits, scale, kind, fmt, block)
    exact = value.double()
    found = {f"{name}_value": exact.square(), f"{name}_error": (kept.double() - exact).square()}
    if scale is None:
        return found
    smallest = decode_state(_first_code(bits), scale, kind, fmt, block)
    blocks = torch.nn.functional.pad(kept.abs(), (0, -kept.numel() % block)).view(-1, block)
    largest = blocks.amax(1).repeat_interleave(block)[: kept.numel()]
    found |= {f"{name}_coded": value != 0, f"{name}_top": (kept != 0) & (kept.abs() == largest)}
    found[f"{name}_low"] = (value != 0) & (kept.abs() <= smallest.abs())
    used = scale[(scale > 0) & scale.isfinite()].double()
    if used.numel():
        bounds.copy_(torch.maximum(bounds, torch.stack([-used.amin(), used.amax()])))
    return found


def _first_code(bits: Tensor) -> Tensor:
    """The smallest code above that of 0, in place of all."""
    integers = {1: torch.uint8, 2: torch.int16}[bits.element_size()]
    return torch.ones(bits.shape, dtype=integers, device=bits.device).view(bits.dtype)


# --- all shards ---------------------------------------------------------------------------------------------------


def _reduce(rows: dict[Tensor, tuple[Tensor, Tensor]]) -> None:
    """Replace each parameter's sums and bounds by those over the ranks that hold its shards."""
    alike: dict[Any, list[Tensor]] = {}
    for param in rows:
        if isinstance(param, DTensor) and sharding_dims(param):
            alike.setdefault((param.device_mesh, sharding_dims(param)), []).append(param)
    for (mesh, dims), members in alike.items():
        both = [torch.stack([rows[param][i].to(mesh.device_type) for param in members]) for i in (0, 1)]
        for dim in dims:
            for values, how in zip(both, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
                dist.all_reduce(values, how, group=mesh.get_group(dim))
        rows.update(zip(members, zip(*(values.unbind() for values in both), strict=True), strict=True))


def _report(store: StateStore, rows: Mapping[Tensor, tuple[Tensor, Tensor]]) -> Diagnostics:
    parameters, names = {}, [spec.name for spec in store.rule.states]
    for index, _, param, name in _members(store):
        if values := _values([rows[param]], names):
            parameters[name or describe(param, index)] = values
    groups = [
        {"step": int(group["step"]) + 1, **_values([rows[param] for param in group["params"]], names)}
        for group in store.groups
    ]
    return Diagnostics(parameters=parameters, groups=groups)


def _values(rows: Iterable[tuple[Tensor, Tensor]], names: Sequence[str]) -> dict[str, float]:
    """The numbers of some parameters together."""
    listed = list(rows)
    if not listed:
        return {}
    sums = dict(zip(_sums_of(names), torch.stack([own for own, _ in listed]).sum(0).tolist(), strict=True))
    bounds = torch.stack([own for _, own in listed]).amax(0).tolist()
    count = sums["elements"]
    if not count:
        return {}
    found = {f"{key}_rms": math.sqrt(sums[key] / count) for key in ("update", "weight", "gradient")}
    found |= _ratio("update_to_weight", found["update_rms"], found["weight_rms"])
    found |= _ratio("lost_updates", sums["lost"], sums["moved"])
    for name, (least, largest) in zip(names, bounds, strict=True):
        found |= _ratio(f"{name}_error", math.sqrt(sums[f"{name}_error"]), math.sqrt(sums[f"{name}_value"]))
        found |= _ratio(f"{name}_saturated", sums[f"{name}_top"], sums[f"{name}_coded"])
        found |= _ratio(f"{name}_lowest", sums[f"{name}_low"], sums[f"{name}_coded"])
        if largest > 0.0:
            found |= {f"{name}_scale_min": -least, f"{name}_scale_max": largest}
    return found


def _ratio(name: str, part: float, whole: float) -> dict[str, float]:
    return {name: part / whole} if whole else {}
