"""Element types of gradients and parameters, and how FP32 values are rounded to them."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch import Tensor

from fused_optim.formats.arithmetic import bits_float, float_bits


class Element(enum.IntEnum):
    """Element types of gradients and parameters, as the engines number them."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


ELEMENT_TYPES: dict[torch.dtype, Element] = {
    torch.float32: Element.FLOAT32,
    torch.bfloat16: Element.BFLOAT16,
    torch.float16: Element.FLOAT16,
}


def bfloat16_rotating(x: Tensor, u: Tensor) -> Tensor:
    """FP32 -> BF16: adds ``u`` parts of the last kept place to the magnitude and truncates; finite stays finite."""
    bits = float_bits(x)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + (u >> 16)) >> 16
    rounded = torch.where((rounded > 0x7F7F) & (magnitude < 0x7F800000), 0x7F7F, rounded)
    rounded = torch.where(magnitude > 0x7F800000, 0x7FC0, rounded | (bits >> 16 & 0x8000))
    return bits_float(rounded << 16).to(torch.bfloat16)


def scaled_bits(x: Tensor, exponent: int, factor: float = 1.0) -> Tensor:
    """The bits of ``x * factor * 2**-exponent``, rounded once to nearest even; of 0 to ``2**exponent`` exclusive."""
    exact = x.double() * factor
    subnormal = (exact * 2.0 ** (149 - exponent)).round().clamp_max(2.0**23).long()
    value = exact.float()
    return torch.where(value < 2.0 ** (exponent - 126), subnormal, float_bits(value) - (exponent << 23))


def float16_magnitude(x: Tensor, u: Tensor) -> Tensor:
    return (scaled_bits(x, 112) + (u >> 19)) >> 13


def float16_rotating(x: Tensor, u: Tensor) -> Tensor:
    """FP32 -> FP16 as :func:`bfloat16_rotating`; 65536 and above become infinite."""
    magnitude = x.abs()
    code = float16_magnitude(torch.where(magnitude < 65536.0, magnitude, 0.0), u)
    code = torch.where(magnitude >= 65536.0, 0x7C00, code)
    code = torch.where(magnitude.isnan(), 0x7E00, code)
    code = torch.where(x.signbit(), code - 0x8000, code)
    return code.short().view(torch.float16)


ROTATING: dict[torch.dtype, Callable[[Tensor, Tensor], Tensor]] = {
    torch.bfloat16: bfloat16_rotating,
    torch.float16: float16_rotating,
}
