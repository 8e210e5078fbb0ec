"""Where master weights live; masters that are split between a BF16 parameter and its remainder."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from fused_optim.formats.arithmetic import MASK32, bits_float, float_bits
from fused_optim.formats.rounding import NEAREST


class Master(enum.IntEnum):
    """Where the master weights of a parameter live."""

    PARAMETER = 0  # the parameter is its own master
    FLOAT32 = 1  # a separate FP32 tensor
    REMAINDER16 = 2  # BF16 parameter + 16 more bits: lossless FP32
    REMAINDER8 = 3  # BF16 parameter + 8 more bits: a 24-bit master
    FLOAT16 = 4  # a separate FP16 tensor, scaled by blocks; the parameter is its rounded value

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype of ``state[p]["master_param"]``."""
        return (torch.float32, torch.float32, torch.int16, torch.int8, torch.float16)[self]

    @property
    def is_remainder(self) -> bool:
        """Whether a BF16 parameter holds the other bits."""
        return self in (Master.REMAINDER16, Master.REMAINDER8)

    @property
    def is_separate(self) -> bool:
        """Whether it is complete beside the parameter, which is its rounded value."""
        return self is not Master.PARAMETER and not self.is_remainder


def join_remainder(param: Tensor, remainder: Tensor) -> Tensor:
    """BF16 parameter + int16 or int8 remainder -> FP32 master.

    Beside a parameter that was written from outside, a remainder may lead below zero or beyond infinity: to NaN, as the
    bits are ordered. The master is the parameter itself then, so it is finite wherever the parameter is.
    """
    high = param.resolve_neg().view(torch.int16).long() & 0xFFFF
    low = remainder.long() if remainder.dtype == torch.int16 else remainder.long() << 8
    joined = bits_float((((high - (low < 0).long()) << 16) | (low & 0xFFFF)) & MASK32)
    return torch.where(joined.isnan(), param.float(), joined)


def split_remainder(master: Tensor, kind: Master, u: Tensor | int = NEAREST) -> tuple[Tensor, Tensor]:
    """FP32 master -> BF16 parameter and remainder; NaN becomes the quiet NaN, so that the parameter is NaN as well.

    ``u``: 32-bit rounding fractions of a 24-bit master, int64 and shaped as ``master``.
    """
    bits = torch.where(master.isnan(), 0x7FC00000, float_bits(master))
    if kind is Master.REMAINDER8:
        bits = (bits + (u >> 24)) >> 8 << 8
    high = (bits >> 16) + (bits >> 15 & 1) & 0xFFFF
    param = bits_float(high << 16).to(torch.bfloat16)
    low = bits & 0xFFFF
    low = torch.where(low >= 0x8000, low - 0x10000, low)
    return param, low.short() if kind is Master.REMAINDER16 else (low >> 8).to(torch.int8)
