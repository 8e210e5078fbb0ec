"""Codecs of the scaled formats, in plain PyTorch: FP32 blocks of shape ``(blocks, block)``, one scale per block.

They mirror ``csrc/multi_tensor/formats.h``; both produce the same bits. Every operation is one IEEE rounding. Rounding
fractions ``u`` are int64 tensors of 32-bit values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fused_optim.formats.arithmetic import (
    MASK32,
    SMALLEST_NORMAL,
    bits_float,
    clamp_top,
    divide,
    float_bits,
    fma,
    sqrt,
)
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
    """The codes, with 1 in place of 0 for positive values: 8-bit Adam diverges where a second moment decodes to 0."""
    return torch.where((code == 0) & positive, 1, code)


class Decoder(Protocol):
    """How a scaled format decodes blocks of codes, shape (blocks, block), with a column of their scales."""

    def decode_signed(self, bits: Tensor, scale: Tensor) -> Tensor: ...

    def decode_square(self, bits: Tensor, scale: Tensor) -> Tensor: ...


class Codec(Decoder, Protocol):
    """How a scaled format encodes blocks of FP32 values of each :class:`Kind`, shape (blocks, block).

    ``u``: 32-bit rounding fractions of the elements.

    Scales and the factors that encode by them, ``inverse``, are one per block; they come as columns to the methods that
    encode. An ``inverse`` of 0 marks a block whose codes are all 0.
    """

    def scale_signed(self, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """For each block, the scale to store and the ``inverse`` to encode with."""

    def encode_signed(self, m: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        """Codes, whose magnitudes are rounded by ``u``."""

    def scale_square(self, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """For each block, the scale to store and the ``inverse`` to encode with."""

    def encode_square(self, v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        """Codes, rounded by ``u``; positive values get at least code 1."""


class Float16Codec:
    """Values divided by a power of two that puts their block's largest, as it is rounded, into (2^14, 2^15].

    So the exponents below serve the small elements, and what was decoded has the same scale again. From 2^127 on, 2^15
    would decode to infinity: there the largest lies in (2^15, 2^16) and values saturate at 65504.
    """

    @staticmethod
    def _scale(x: Tensor, u: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
        """The floor of 2^-102 keeps the smallest code's value a normal number."""
        rounded = float_bits(x.abs()) + (u >> 19) >> 13 << 13
        top = rounded.amax(1) if rounded.numel() else rounded.new_zeros(0)
        exponent = (top + 0x7FFFFF >> 23).clamp(40, 254) - 15
        return block_scale(absmax_of(x), smallest, bits_float(exponent << 23), bits_float(254 - exponent << 23))

    @staticmethod
    def _encode(x: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        """FP16 bits of the magnitudes, rounded by ``u``; the sign is not encoded."""
        return float16_magnitude(clamp_top(x.abs() * inverse, 65504.0), u)

    @classmethod
    def scale_signed(cls, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return cls._scale(m, u, SMALLEST_SIGNED)

    @classmethod
    def encode_signed(cls, m: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        code = cls._encode(m, inverse, u)
        return torch.where(m.signbit(), code - 0x8000, code)

    @classmethod
    def scale_square(cls, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return cls._scale(v, u, SMALLEST_SQUARE)

    @classmethod
    def encode_square(cls, v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        return at_least_one(cls._encode(v, inverse, u), v > 0)

    @staticmethod
    def decode_signed(bits: Tensor, scale: Tensor) -> Tensor:
        return bits.float() * scale

    decode_square = decode_signed

    @classmethod
    def scale_master(cls, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return cls._scale(x, u, SMALLEST_NORMAL)


class Float8Codec:
    """float8_e4m3fn (OCP 8-bit floating point specification 1.0), as uint8; what is not negative as its square root."""

    @staticmethod
    def _encode(x: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        """Codes of values that are not negative; ``inverse`` maps the block's largest to 1."""
        return (scaled_bits((x * inverse).clamp_max(1.0), 120, 448.0) + (u >> 12)) >> 20

    @staticmethod
    def scale_signed(m: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        absmax = absmax_of(m)
        scale = divide(absmax, 448.0)
        return block_scale(absmax, SMALLEST_SIGNED, scale, 1.0 / scale * (TOP_NUDGE / 448.0))

    @classmethod
    def encode_signed(cls, m: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        code = cls._encode(m.abs(), inverse, u)
        return torch.where(m.signbit(), code + 0x80, code)

    @staticmethod
    def decode_signed(bits: Tensor, scale: Tensor) -> Tensor:
        return bits.view(torch.float8_e4m3fn).float() * scale

    @staticmethod
    def scale_square(v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        absmax = absmax_of(v)
        scale = (divide(sqrt(absmax), 448.0)).clamp_min(2.0**-54)
        return block_scale(absmax, SMALLEST_SQUARE, scale, 1.0 / scale * (TOP_NUDGE / 448.0))

    @classmethod
    def encode_square(cls, v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        return at_least_one(cls._encode(sqrt(v), inverse, u), v > 0)

    @staticmethod
    def decode_square(bits: Tensor, scale: Tensor) -> Tensor:
        root = bits.view(torch.float8_e4m3fn).float() * scale
        return root * root


class Int8Codec:
    """Levels whose precision tapers off, in units of the scale; of averages of squares, of their roots.

    The four highest powers of two have 16 levels each (roots of squares 32), the four below them 8, and so on: a float
    of which a quarter of the bits is kept. It is a fourth root with straight lines in the place of its curves. Both
    moments have as many levels for each power of ten of the gradients.
    """

    # Quarters of levels are codes in units of it; the level of the top code.
    SIGNED_UNIT, SIGNED_TOP = 2.0**-101, 31.0
    SQUARE_UNIT, SQUARE_TOP = 2.0**-102, 31.5

    @staticmethod
    def _quarter(x: Tensor) -> Tensor:
        return bits_float(float_bits(x) >> 2)

    @staticmethod
    def _level(quarter: Tensor) -> Tensor:
        bits = float_bits(quarter)
        return bits_float((bits << 2 | bits & 0x80000000) & MASK32)

    @staticmethod
    def _scale(absmax: Tensor, smallest: float, scale: Tensor) -> tuple[Tensor, Tensor]:
        """An odd scale is found again from its top level."""
        odd = bits_float(float_bits(scale) | 1)
        return block_scale(absmax, smallest, odd, 1.0 / odd * TOP_NUDGE)

    @staticmethod
    def _round(x: Tensor, unit: float, u: Tensor) -> Tensor:
        return fma(x, 1.0 / unit, 256.0 + (u >> 17).float() * 2.0**-15).long() - 256

    @classmethod
    def scale_signed(cls, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The floor of 2^-103 keeps the smallest code's value a normal number."""
        absmax = absmax_of(m)
        return cls._scale(absmax, SMALLEST_SIGNED, divide(absmax, cls.SIGNED_TOP).clamp_min(2.0**-103))

    @classmethod
    def encode_signed(cls, m: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        """Below code 1 it is the value that rotates, not its quarter.

        A value that has all but faded would else be drawn up to code 1 so often that it never fades.
        """
        level = clamp_top(m.abs() * inverse, cls.SIGNED_TOP)
        quarter = torch.minimum(cls._quarter(level), level * (2.0**23 * cls.SIGNED_UNIT))
        code = cls._round(quarter, cls.SIGNED_UNIT, u)
        return torch.where(m < 0, -code, code)

    @classmethod
    def decode_signed(cls, bits: Tensor, scale: Tensor) -> Tensor:
        return cls._level(bits.float() * cls.SIGNED_UNIT) * scale

    @classmethod
    def scale_square(cls, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        absmax = absmax_of(v)
        return cls._scale(absmax, SMALLEST_SQUARE, divide(sqrt(absmax), cls.SQUARE_TOP))

    @classmethod
    def encode_square(cls, v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        level = clamp_top(sqrt(v) * inverse, cls.SQUARE_TOP)
        return at_least_one(cls._round(cls._quarter(level), cls.SQUARE_UNIT, u), v > 0)

    @classmethod
    def decode_square(cls, bits: Tensor, scale: Tensor) -> Tensor:
        root = cls._level(bits.float() * cls.SQUARE_UNIT) * scale
        return root * root


class FormerInt8Codec:
    """int8 as version 0.2 stored it: the signed square root, and the fourth root of squares. For reading alone."""

    @staticmethod
    def decode_signed(bits: Tensor, scale: Tensor) -> Tensor:
        root = bits.float() * scale
        return root * root.abs()

    @staticmethod
    def decode_square(bits: Tensor, scale: Tensor) -> Tensor:
        square = (bits.float() * scale).square()
        return square * square
