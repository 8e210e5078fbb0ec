"""The readable reference: updates of decoded states in plain PyTorch. It defines the numerics of the other backends."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fused_optim.backends import GroupWork, ShardWork
from fused_optim.backends.gradients import unscaled, write_
from fused_optim.formats.arithmetic import MASK32
from fused_optim.formats.elements import ROTATING
from fused_optim.formats.masters import Master, join_remainder, split_remainder
from fused_optim.formats.rounding import GOLDEN_RATIO, master_rounding, rounding_bits
from fused_optim.formats.states import FLOAT16, Kind, decode_state, encode_state
from fused_optim.memory.layout import MASTER
from fused_optim.rules import Hyper, Scalars, Update


def read(scalar: float | Tensor, fake: float = 1.0) -> float:
    """A number; ``fake`` where only its shape is known, which lets the step be made."""
    return fake if isinstance(scalar, FakeTensor) else float(scalar)


def derive(hyper: Hyper) -> tuple[Scalars, int | None]:
    """The scalars of the rule's update, and the rounding offset of this step; None: to nearest."""
    step = hyper.step if hyper.steps_done is None else int(read(hyper.steps_done)) + 1
    factor = 1.0 if hyper.grad_factor is None else read(hyper.grad_factor)
    if hyper.grad_scale is not None:
        factor /= read(hyper.grad_scale)
    scalars = hyper.rule.derive(hyper, read(hyper.lr), step, -factor if hyper.maximize else factor)
    return scalars, step * GOLDEN_RATIO & MASK32 if hyper.stochastic_rounding else None


def _separate_master(work: ShardWork) -> Tensor | None:
    """None where the parameter is its own master."""
    if work.layout.master is Master.PARAMETER:
        return None
    assert work.master is not None
    return work.master


def _read_master(work: ShardWork) -> Tensor:
    master = _separate_master(work)
    if master is None:
        return work.param.float()
    if work.layout.master is Master.FLOAT16:
        return decode_state(master, work.layout.scale(MASTER), Kind.MASTER, FLOAT16, work.layout.geometry.block)
    return master if work.layout.master is Master.FLOAT32 else join_remainder(work.param, master)


def _write_master(work: ShardWork, value: Tensor, u: Tensor) -> None:
    master = _separate_master(work)
    if master is not None and work.layout.master is Master.FLOAT32:
        master.copy_(value)
        work.param.copy_(value)
    elif master is not None and work.layout.master is Master.FLOAT16:
        _encode(work, MASTER, master, value, u)
        work.param.copy_(_read_master(work))
    elif master is not None:
        high, low = split_remainder(value, work.layout.master, u.view_as(value))
        work.param.copy_(high)
        master.copy_(low)
    elif work.param.dtype in ROTATING:
        work.param.copy_(ROTATING[work.param.dtype](value.reshape(-1), u).view_as(value))
    else:
        work.param.copy_(value)


def _step_shard(work: ShardWork, update: Update, rounding_offset: int | None) -> None:
    layout, block = work.layout, work.layout.geometry.block
    states = [
        decode_state(state, layout.scale(spec.name), spec.kind, fmt, block)
        for state, spec, fmt in zip(work.states, layout.specs, layout.formats, strict=True)
    ]
    before = _read_master(work)
    param, states = update(work.grad.float(), before, states)
    elements = layout.geometry.global_indices(work.param.device)
    u = rounding_bits(work.key, elements, rounding_offset)
    for spec, target, value in zip(layout.specs, work.states, states, strict=True):
        _encode(work, spec.name, target, value, u)
    if layout.master is Master.FLOAT16:
        u = master_rounding(before, param, u)
    _write_master(work, param, u)


def _encode(work: ShardWork, name: str, target: Tensor, value: Tensor, u: Tensor) -> None:
    layout = work.layout
    bits, scale = encode_state(value, layout.kind(name), layout.format(name), layout.geometry.block, u)
    target.copy_(bits)
    stored = layout.scale(name)
    if stored is not None and scale is not None:
        stored.copy_(scale)


@torch.no_grad()
def run(groups: list[GroupWork]) -> None:
    """Update every shard of one device."""
    for group in groups:
        if group.hyper.found_inf is not None and read(group.hyper.found_inf, 0.0) != 0.0:
            continue
        shards = [work for work in group.shards if work.param.numel()]
        if shards:  # groups of other rules have none here
            scalars, rounding_offset = derive(group.hyper)
            update = group.hyper.rule.update(scalars)
            for work in shards:
                _step_shard(work, update, rounding_offset)
                if group.hyper.grad_scale is not None:
                    write_(work.grad, unscaled(work.grad, group.hyper.grad_scale))
        if group.hyper.steps_done is not None:
            group.hyper.steps_done.add_(1)
