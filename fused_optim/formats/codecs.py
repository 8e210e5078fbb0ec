"""Codecs of the scaled formats, in plain PyTorch: FP32 blocks of shape ``(blocks, block)``, one scale per block.

They mirror ``csrc/multi_tensor/formats.h``; both produce the same bits. Every operation is one IEEE rounding. Rounding
fractions ``u`` are int64 tensors of 32-bit values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fused_optim.formats.arithmetic import SMALLEST_NORMAL, bits_float, clamp_top, divide, float_bits, fused, sqrt
from fused_optim.formats.elements import float16_magnitude, scaled_bits

SMALLEST_SIGNED = 2.0**-100  # blocks whose absmax lies below encode as zeros
SMALLEST_SQUARE = 2.0**-120
TOP_NUDGE = 1 + 2.0**-20  # lets the block's maximum reach the top code under rotating rounding


def absmax_of(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(1) if blocks.numel() else blocks.new_zeros(0)


def block_scale(absmax: Tensor, smallest: float, scale: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """(scale to store, factor to encode by); a block with NaN or infinity gets a NaN scale and decodes to NaN."""
    poisoned = ~absmax.isfinite()
    empty = absmax < smallest
    stored = torch.where(poisoned, torch.nan, torch.where(empty, 0.0, scale))
    return stored, torch.where(poisoned | empty, 0.0, inverse)


def at_least_one(code: Tensor, positive: Tensor) -> Tensor:
    """What is positive does not encode to zero: a zero denominator is what blows 8-bit Adam up."""
    return torch.where((code == 0) & positive, 1, code)


class Codec(Protocol):
    """How a scaled format encodes blocks of FP32 values of each :class:`Kind`, shape (blocks, block).

    ``u``: 32-bit rounding fractions of the elements.

    Scales and what encodes by them, ``inverse``, are one per block; they come as columns to the methods that encode and
    decode. An ``inverse`` of 0 marks a block whose codes are all 0.
    """

    def scale_signed(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """(scale to store, inverse)."""

    def encode_signed(self, m: Tensor, inverse: Tensor) -> Tensor:
        """Codes, rounded to nearest even."""

    def decode_signed(self, bits: Tensor, scale: Tensor) -> Tensor: ...

    def scale_square(self, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """(scale to store, inverse)."""

    def encode_square(self, v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        """Codes, rounded by ``u``; not 0 of what is positive."""

    def decode_square(self, bits: Tensor, scale: Tensor) -> Tensor: ...


class Float16Codec:
    """Values divided by a power of two that puts their block's largest, as it is rounded, into (2^14, 2^15].

    So the exponents below serve the small elements, and what was decoded has the same scale again. From 2^127 on, 2^15
    would decode to infinity: there the largest lies in (2^15, 2^16) and values saturate at 65504.
    """

    @staticmethod
    def _scale(blocks: Tensor, rounded: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
        """``rounded``: bits of the magnitudes. The floor of 2^-102 keeps the smallest code's value a normal number."""
        top = rounded.amax(1) if rounded.numel() else rounded.new_zeros(0)
        exponent = (top + 0x7FFFFF >> 23).clamp(40, 254) - 15
        return block_scale(absmax_of(blocks), smallest, bits_float(exponent << 23), bits_float(254 - exponent << 23))

    @classmethod
    def scale_signed(cls, m: Tensor) -> tuple[Tensor, Tensor]:
        bits = float_bits(m.abs())
        return cls._scale(m, bits + 0xFFF + (bits >> 13 & 1) >> 13 << 13, SMALLEST_SIGNED)

    @staticmethod
    def encode_signed(m: Tensor, inverse: Tensor) -> Tensor:
        return clamp_top(m.abs() * inverse, 65504.0).copysign(m).to(torch.float16).view(torch.int16)

    @classmethod
    def scale_rotating(cls, x: Tensor, u: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
        return cls._scale(x, float_bits(x.abs()) + (u >> 19) >> 13 << 13, smallest)

    @staticmethod
    def encode_rotating(x: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        """Codes of magnitudes."""
        return float16_magnitude(clamp_top(x.abs() * inverse, 65504.0), u)

    @classmethod
    def scale_square(cls, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return cls.scale_rotating(v, u, SMALLEST_SQUARE)

    @classmethod
    def encode_square(cls, v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        return at_least_one(cls.encode_rotating(v, inverse, u), v > 0)

    @staticmethod
    def decode_signed(bits: Tensor, scale: Tensor) -> Tensor:
        return bits.float() * scale

    decode_square = decode_signed

    @classmethod
    def scale_master(cls, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return cls.scale_rotating(x, u, SMALLEST_NORMAL)

    @classmethod
    def encode_master(cls, x: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        code = cls.encode_rotating(x, inverse, u)
        return torch.where(x.signbit(), code - 0x8000, code)


class Float8Codec:
    """float8_e4m3fn (OCP 8-bit floating point specification 1.0), as uint8; what is not negative as its square root."""

    @staticmethod
    def scale_signed(m: Tensor) -> tuple[Tensor, Tensor]:
        absmax = absmax_of(m)
        scale = divide(absmax, 448.0)
        return block_scale(absmax, SMALLEST_SIGNED, scale, 1.0 / scale)

    @staticmethod
    def encode_signed(m: Tensor, inverse: Tensor) -> Tensor:
        x = clamp_top(m.abs() * inverse, 448.0)
        return x.copysign(m).to(torch.float8_e4m3fn).view(torch.uint8)

    @staticmethod
    def decode_signed(bits: Tensor, scale: Tensor) -> Tensor:
        return bits.view(torch.float8_e4m3fn).float() * scale

    @staticmethod
    def scale_square(v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        absmax = absmax_of(v)
        scale = (divide(sqrt(absmax), 448.0)).clamp_min(2.0**-54)
        return block_scale(absmax, SMALLEST_SQUARE, scale, 1.0 / scale * TOP_NUDGE)

    @staticmethod
    def encode_square(v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        x = clamp_top(sqrt(v) * inverse, 448.0)
        return at_least_one((scaled_bits(x, 120) + (u >> 12)) >> 20, v > 0)

    @staticmethod
    def decode_square(bits: Tensor, scale: Tensor) -> Tensor:
        root = bits.view(torch.float8_e4m3fn).float() * scale
        return root * root


class Int8Codec:
    """The signed square root in 127 levels; of what is not negative, the fourth root in 255."""

    @staticmethod
    def scale_signed(m: Tensor) -> tuple[Tensor, Tensor]:
        absmax = absmax_of(m)
        scale = divide(sqrt(absmax), 127.0)
        return block_scale(absmax, SMALLEST_SIGNED, scale, 1.0 / scale)

    @staticmethod
    def encode_signed(m: Tensor, inverse: Tensor) -> Tensor:
        root = sqrt(m.abs() + SMALLEST_NORMAL)  # as the engines, which need a root that is not 0
        return (fused(root.copysign(m), inverse, 1.5 * 2**23) - 1.5 * 2**23).to(torch.int8)

    @staticmethod
    def decode_signed(bits: Tensor, scale: Tensor) -> Tensor:
        root = bits.float() * scale
        return root * root.abs()

    @staticmethod
    def scale_square(v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        absmax = absmax_of(v)
        top = sqrt(sqrt(absmax)).clamp_min(255 * 2.0**-31)
        return block_scale(absmax, SMALLEST_SQUARE, divide(top, 255.0), 1.0 / top * TOP_NUDGE)

    @staticmethod
    def encode_square(v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        x = (sqrt(sqrt(v)) * inverse).nan_to_num(0.0).clamp(0.0, 1.0)
        threshold = 256.0 + (u >> 17).float() * 2.0**-15
        return at_least_one(fused(x, 255.0, threshold).long() - 256, v > 0)

    @staticmethod
    def decode_square(bits: Tensor, scale: Tensor) -> Tensor:
        root = bits.float() * scale
        square = root * root
        return square * square
