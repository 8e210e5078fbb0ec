"""What a step would do to a shard, as sums over its elements, by the reference: in PyTorch, piece by piece.

It says what the engines' passes compute (``diagnose.h``), and serves where there is no engine, and states in host
memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_optim.adapters import adapter_of
from fused_optim.formats.elements import ROTATING
from fused_optim.formats.masters import Master, join_remainder, split_remainder
from fused_optim.formats.rounding import master_rounding, rounding_bits
from fused_optim.formats.states import FLOAT16, Kind, StateFormat, decode_state, encode_state
from fused_optim.memory.layout import MASTER
from fused_optim.rule import Scalars, StateSpec, Update
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.state.param_state import ParamState
from fused_optim.state.remainders import PIECE

# What is summed up of a parameter's elements, by shards, ranks and groups. "low": of a state, values that are not 0
# and have the smallest code or none.
_SUMS = ("elements", "update", "weight", "gradient", "moved", "lost")
_OF_STATES = ("value", "error", "coded", "top", "low")
OF_ALL, OF_STATE = len(_SUMS), len(_OF_STATES)


@functools.cache
def sums_of(names: tuple[str, ...]) -> list[str]:
    """``names``: of the rule's states."""
    return [*_SUMS, *(f"{name}_{what}" for name in names for what in _OF_STATES)]


@dataclass(frozen=True)
class LookedAt:
    """A parameter whose next step is looked at."""

    states: ParamState
    grad: Tensor  # local, dense, flat
    scalars: Scalars
    update: Update
    rounding_offset: int | None
    key: int


def add_shard(shard: LookedAt, row: Tensor) -> None:
    """Add to the sums in a row, and widen the bounds that follow them."""
    states = len(shard.states.layout.specs)
    sums, bounds = row[: -2 * states], row[-2 * states :].view(states, 2)
    master = _master_reader(shard.states)
    for first in range(0, shard.grad.numel(), PIECE):
        piece = slice(first, min(first + PIECE, shard.grad.numel()))
        _add_piece(shard, master(piece), piece, sums, bounds)


def _add_piece(shard: LookedAt, before: Tensor, piece: slice, sums: Tensor, bounds: Tensor) -> None:
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
    index = {name: i for i, name in enumerate(sums_of(tuple(names)))}
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
        return join_remainder(*split_remainder(after, kind, u))
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
