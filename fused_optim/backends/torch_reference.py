"""The readable reference: Adam(W) on decoded states in plain PyTorch. It defines the numerics of the other backends."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fused_optim.backends import GroupWork, Hyper, ShardWork
from fused_optim.backends.gradients import unscaled, write_
from fused_optim.formats import (
    FLOAT16,
    GOLDEN_RATIO,
    MASK32,
    ROTATING,
    Master,
    decode_state,
    encode_state,
    fused,
    join_remainder,
    master_rounding,
    normal,
    rounding_bits,
    split_remainder,
    sqrt,
)
from fused_optim.slots import MASTER


def _float32(x: float) -> float:
    return ctypes.c_float(x).value


def _read(scalar: float | Tensor, fake: float = 1.0) -> float:
    """A number; ``fake`` where only its shape is known, which lets the step be made."""
    return fake if isinstance(scalar, FakeTensor) else float(scalar)


def integer_power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring: the same bits as the engines', which library pow does not promise."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@dataclass(frozen=True)
class Scalars:
    """What the update of an element reads; every float is rounded to FP32."""

    grad_factor: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inverse_sqrt_correction2: float
    eps: float
    step_size: float
    decay: float
    l2_penalty: float
    rounding_offset: int | None


def derive(hyper: Hyper) -> Scalars:
    """Bias corrections and step size in double precision, then rounded to FP32."""
    lr = _read(hyper.lr)
    step = hyper.step if hyper.steps_done is None else int(_read(hyper.steps_done)) + 1
    factor = 1.0 if hyper.grad_factor is None else _read(hyper.grad_factor)
    if hyper.grad_scale is not None:
        factor /= _read(hyper.grad_scale)
    correction1 = 1.0 - integer_power(hyper.beta1, step) if hyper.bias_correction else 1.0
    correction2 = 1.0 - integer_power(hyper.beta2, step) if hyper.bias_correction else 1.0
    return Scalars(
        grad_factor=_float32(-factor if hyper.maximize else factor),
        beta1=_float32(hyper.beta1),
        one_minus_beta1=_float32(1.0 - hyper.beta1),
        beta2=_float32(hyper.beta2),
        one_minus_beta2=_float32(1.0 - hyper.beta2),
        inverse_sqrt_correction2=_float32(1.0 / math.sqrt(correction2)),
        eps=_float32(hyper.eps),
        step_size=_float32(lr / correction1),
        decay=_float32(1.0 - lr * hyper.weight_decay) if hyper.adam_w else 1.0,
        l2_penalty=0.0 if hyper.adam_w else _float32(hyper.weight_decay),
        rounding_offset=step * GOLDEN_RATIO & MASK32 if hyper.stochastic_rounding else None,
    )


def update(grad: Tensor, param: Tensor, m: Tensor, v: Tensor, s: Scalars) -> tuple[Tensor, Tensor, Tensor]:
    """New (param, exp_avg, exp_avg_sq) of FP32 inputs; the update uses the moments before they are rounded."""
    grad = grad * s.grad_factor
    if s.l2_penalty != 0.0:
        grad = fused(param, s.l2_penalty, grad)
    m = fused(m, s.beta1, s.one_minus_beta1 * grad)
    v = normal(fused(s.one_minus_beta2 * grad, grad, normal(s.beta2 * v)))
    denominator = fused(sqrt(v), s.inverse_sqrt_correction2, s.eps)
    return fused(m / denominator, -s.step_size, param * s.decay), m, v


def _separate_master(work: ShardWork) -> Tensor | None:
    """None where the parameter is its own master."""
    if work.slots.master is Master.PARAMETER:
        return None
    assert work.master is not None
    return work.master


def _read_master(work: ShardWork) -> Tensor:
    master = _separate_master(work)
    if master is None:
        return work.param.float()
    if work.slots.master is Master.FLOAT16:
        return decode_state(master, work.slots.scale(MASTER), MASTER, FLOAT16, work.slots.geometry.block)
    return master if work.slots.master is Master.FLOAT32 else join_remainder(work.param, master)


def _write_master(work: ShardWork, value: Tensor, u: Tensor) -> None:
    master = _separate_master(work)
    if master is not None and work.slots.master is Master.FLOAT32:
        master.copy_(value)
        work.param.copy_(value)
    elif master is not None and work.slots.master is Master.FLOAT16:
        _encode(work, MASTER, master, value, u)
        work.param.copy_(_read_master(work))
    elif master is not None:
        high, low = split_remainder(value, work.slots.master)
        work.param.copy_(high)
        master.copy_(low)
    elif work.param.dtype in ROTATING:
        work.param.copy_(ROTATING[work.param.dtype](value.reshape(-1), u).view_as(value))
    else:
        work.param.copy_(value)


def _step_shard(work: ShardWork, s: Scalars) -> None:
    slots, block = work.slots, work.slots.geometry.block
    m = decode_state(work.exp_avg, slots.scale("exp_avg"), "exp_avg", slots.exp_avg, block)
    v = decode_state(work.exp_avg_sq, slots.scale("exp_avg_sq"), "exp_avg_sq", slots.exp_avg_sq, block)
    before = _read_master(work)
    param, m, v = update(work.grad.float(), before, m, v, s)
    elements = slots.geometry.global_indices(work.param.device)
    u = rounding_bits(work.key, elements, s.rounding_offset)
    _encode(work, "exp_avg", work.exp_avg, m, u)
    _encode(work, "exp_avg_sq", work.exp_avg_sq, v, u)
    if slots.master is Master.FLOAT16:
        u = master_rounding(before, param, u)
    _write_master(work, param, u)


def _encode(work: ShardWork, name: str, target: Tensor, value: Tensor, u: Tensor) -> None:
    slots = work.slots
    bits, scale = encode_state(value, name, slots.format(name), slots.geometry.block, u)
    target.copy_(bits)
    stored = slots.scale(name)
    if stored is not None and scale is not None:
        stored.copy_(scale)


@torch.no_grad()
def run(groups: list[GroupWork]) -> None:
    """Update every shard of one device."""
    for group in groups:
        if group.hyper.found_inf is not None and _read(group.hyper.found_inf, 0.0) != 0.0:
            continue
        scalars = derive(group.hyper)
        for work in group.shards:
            if work.param.numel():
                _step_shard(work, scalars)
                if group.hyper.grad_scale is not None:
                    write_(work.grad, unscaled(work.grad, group.hyper.grad_scale))
        if group.hyper.steps_done is not None:
            group.hyper.steps_done.add_(1)
