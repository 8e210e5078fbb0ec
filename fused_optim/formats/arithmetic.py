"""FP32 arithmetic, one rounding per operation, as in ``csrc/multi_tensor/arithmetic.h``."""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
SMALLEST_NORMAL = 2.0**-126


def float_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32).long() & MASK32


def bits_float(bits: Tensor) -> Tensor:
    return torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """``a * b + c`` of FP32 values, rounded once, which ``addcmul`` and ``lerp`` do not promise.

    The product is exact in double precision. The sum is rounded to odd there, which makes the second rounding the only
    one (Boldo & Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd",
    2008).
    """
    addend = _double(c)
    product = a.double() * _double(b)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)).add_(addend - rest)  # what `total` lacks, exactly (Knuth's two-sum)
    # To odd: towards zero, and the last bit is set if that is inexact. The sign of `error * total`, which cannot
    # underflow, says whether `total` is beyond the sum; it is NaN where `total` is not finite, which stays.
    error.mul_(total)
    bits = total.view(torch.int64).sub_((error < 0).long()).bitwise_or_(error.abs_() > 0)
    return bits.view(torch.float64).float()


def _double(x: Tensor | float) -> Tensor | float:
    return x.double() if isinstance(x, Tensor) else x


def flush_denormals(x: Tensor) -> Tensor:
    """Values that are not negative, with those below 2^-126 replaced by 0."""
    return torch.where(x < SMALLEST_NORMAL, 0.0, x)


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of FP32 values; ``Tensor.sqrt`` on CPUs may be one unit off."""
    return x.double().sqrt().float()


def divide(x: Tensor, divisor: float) -> Tensor:
    """The IEEE quotient; on GPUs ``Tensor / float`` multiplies by the reciprocal instead."""
    return x / torch.full_like(x, divisor)


def clamp_top(x: Tensor, top: float) -> Tensor:
    return torch.where(x < top, x, top)
