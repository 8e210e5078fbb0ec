"""The readable reference: updates of decoded states in plain PyTorch. It defines the numerics of the other backends."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fused_optim.backends import GroupWork, ShardWork
from fused_optim.backends.gradients import unscaled, write_
from fused_optim.formats.arithmetic import MASK32
from fused_optim.formats.masters import MasterTensors
from fused_optim.formats.rounding import GOLDEN_RATIO, rounding_bits
from fused_optim.formats.states import decode_state, encode_state
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


def _step_shard(work: ShardWork, update: Update, rounding_offset: int | None) -> None:
    layout, block, codec = work.layout, work.layout.geometry.block, work.layout.master.codec
    states = [
        decode_state(state, layout.scale(spec.name), spec.kind, fmt, block)
        for state, spec, fmt in zip(work.states, layout.specs, layout.formats, strict=True)
    ]
    master = MasterTensors(work.param, work.master, layout.scale(MASTER), block)
    before = codec.read(master)
    after, states = update(work.grad.float(), before, states)
    u = rounding_bits(work.key, layout.geometry.global_indices(work.param.device), rounding_offset)
    for spec, fmt, stored, value in zip(layout.specs, layout.formats, work.states, states, strict=True):
        bits, new_scale = encode_state(value, spec.kind, fmt, block, u)
        stored.copy_(bits)
        if (scale := layout.scale(spec.name)) is not None and new_scale is not None:
            scale.copy_(new_scale)
    codec.write(master, after, codec.fractions(before, after, u))


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
