"""Formats of optimizer states and masters, and their reference codecs in plain PyTorch.

This file mirrors ``csrc/multi_tensor/formats.h``; both produce the same bits. A codec works on FP32 blocks of shape
``(blocks, block)``, one scale per block. Rounding fractions ``u`` are int64 tensors holding 32-bit values. Every
operation is one IEEE rounding; those that multiply and add at once are written as :func:`fused`, because ``addcmul``
and ``lerp`` promise neither.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

GOLDEN_RATIO = 0x9E3779B9  # 2^32 * 0.6180339887
SQUARE_ROOT_OF_TWO = 0x6A09E667  # 2^32 * 0.4142135623
NEAREST = 0x80000000  # u = 1/2: round to nearest, ties up
MASK32 = 0xFFFFFFFF
BLOCKS = (128, 64, 32)
SMALLEST_NORMAL = 2.0**-126

_SMALLEST_SIGNED = 2.0**-100  # blocks whose absmax lies below encode as zeros
_SMALLEST_SQUARE = 2.0**-120
_TOP_NUDGE = 1 + 2.0**-20  # lets the block's maximum reach the top code under rotating rounding


class Kind(enum.IntEnum):
    """What the values of a state are, which decides how 8-bit and 16-bit formats encode them."""

    SIGNED = 0  # averages of gradients: of either sign, rounded to nearest even
    SQUARE = 1  # averages of squares: what is positive never becomes 0; rounded in the rotating way
    MASTER = 2  # FP16 masters: of either sign, rounded as `master_rounding` says


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


# --- rotating rounding ------------------------------------------------------------------------------------------


Int = TypeVar("Int", int, Tensor)


def finalize(h: Int) -> Int:
    """MurmurHash3's 32-bit finalizer, of a number or of an int64 tensor."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B & MASK32
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35 & MASK32
    return h ^ (h >> 16)


@functools.lru_cache(maxsize=65536)
def rounding_key(seed: int, param_index: int) -> int:
    """The 32-bit key of one parameter's rounding sequence."""
    folded = finalize(seed & MASK32 ^ finalize(seed >> 32 & MASK32))
    return finalize((folded + param_index * GOLDEN_RATIO) & MASK32)


def _octet_hash(key: int, elements: Tensor) -> Tensor:
    octet = elements >> 3
    return finalize(((octet & MASK32) + (octet >> 32) * GOLDEN_RATIO & MASK32) ^ key)


def rounding_bits(key: int, elements: Tensor, offset: int | Tensor | None) -> Tensor:
    """32-bit rounding fractions of ``elements`` (int64 global indices); ``offset`` None means round to nearest."""
    if offset is None:
        return torch.full_like(elements, NEAREST)
    return _octet_hash(key, elements) + (elements & 7) * SQUARE_ROOT_OF_TWO + offset & MASK32


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32).long() & MASK32


def _float(bits: Tensor) -> Tensor:
    return torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)


def fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """``a * b + c`` of FP32 values, rounded once.

    The product is exact in double precision. The sum is rounded to odd there, which makes the second rounding the only
    one (Boldo & Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd",
    2008).
    """
    addend = _double(c)
    product = a.double() * _double(b)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)  # what `total` lacks, exactly (Knuth's two-sum)
    inexact = (error != 0) & error.isfinite() & (total.view(torch.int64) & 1 == 0)
    nudge = torch.where((error > 0) == (total > 0), 1, -1)
    odd = (total.view(torch.int64) + nudge).view(torch.float64)
    return torch.where(inexact, odd, total).float()


def _double(x: Tensor | float) -> Tensor | float:
    return x.double() if isinstance(x, Tensor) else x


def normal(x: Tensor) -> Tensor:
    """Values that are not negative, with those below 2^-126 replaced by 0."""
    return torch.where(x < SMALLEST_NORMAL, 0.0, x)


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of FP32 values; ``Tensor.sqrt`` on CPUs may be one unit off."""
    return x.double().sqrt().float()


def _divide(x: Tensor, divisor: float) -> Tensor:
    """The IEEE quotient; on GPUs ``Tensor / float`` multiplies by the reciprocal instead."""
    return x / torch.full_like(x, divisor)


def _clamp_top(x: Tensor, top: float) -> Tensor:
    return torch.where(x < top, x, top)


# --- elements ---------------------------------------------------------------------------------------------------


def bfloat16_rotating(x: Tensor, u: Tensor) -> Tensor:
    """FP32 -> BF16: adds ``u`` parts of the last kept place to the magnitude and truncates; finite stays finite."""
    bits = _bits(x)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + (u >> 16)) >> 16
    rounded = torch.where((rounded > 0x7F7F) & (magnitude < 0x7F800000), 0x7F7F, rounded)
    rounded = torch.where(magnitude > 0x7F800000, 0x7FC0, rounded | (bits >> 16 & 0x8000))
    return _float(rounded << 16).to(torch.bfloat16)


def scaled_bits(x: Tensor, exponent: int) -> Tensor:
    """The bits of ``x * 2**-exponent`` for ``0 <= x < 2**exponent``, denormals rounded to nearest even."""
    subnormal = (x * 2.0 ** (149 - exponent)).round().clamp_max(2.0**23).long()
    return torch.where(x < 2.0 ** (exponent - 126), subnormal, _bits(x) - (exponent << 23))


def _float16_magnitude_rotating(x: Tensor, u: Tensor) -> Tensor:
    return (scaled_bits(x, 112) + (u >> 19)) >> 13


def float16_rotating(x: Tensor, u: Tensor) -> Tensor:
    """FP32 -> FP16 as :func:`bfloat16_rotating`; 65536 and above become infinite."""
    magnitude = x.abs()
    code = _float16_magnitude_rotating(torch.where(magnitude < 65536.0, magnitude, 0.0), u)
    code = torch.where(magnitude >= 65536.0, 0x7C00, code)
    code = torch.where(magnitude.isnan(), 0x7E00, code)
    code = torch.where(x.signbit(), code - 0x8000, code)
    return code.short().view(torch.float16)


ROTATING: dict[torch.dtype, Callable[[Tensor, Tensor], Tensor]] = {
    torch.bfloat16: bfloat16_rotating,
    torch.float16: float16_rotating,
}


# --- split masters ----------------------------------------------------------------------------------------------


def join_remainder(param: Tensor, remainder: Tensor) -> Tensor:
    """BF16 parameter + int16 or int8 remainder -> FP32 master.

    Beside a parameter that was written from outside, a remainder may lead below zero or beyond infinity: to NaN, as the
    bits are ordered. The master is the parameter itself then, so it is finite wherever the parameter is.
    """
    high = param.resolve_neg().view(torch.int16).long() & 0xFFFF
    low = remainder.long() if remainder.dtype == torch.int16 else remainder.long() << 8
    joined = _float((((high - (low < 0).long()) << 16) | (low & 0xFFFF)) & MASK32)
    return torch.where(joined.isnan(), param.float(), joined)


def split_remainder(master: Tensor, kind: Master) -> tuple[Tensor, Tensor]:
    """FP32 master -> BF16 parameter and remainder; NaN becomes the quiet NaN, so that the parameter is NaN as well."""
    bits = torch.where(master.isnan(), 0x7FC00000, _bits(master))
    if kind is Master.REMAINDER8:
        bits = (bits + 0x80) >> 8 << 8
    high = (bits >> 16) + (bits >> 15 & 1) & 0xFFFF
    param = _float(high << 16).to(torch.bfloat16)
    low = bits & 0xFFFF
    low = torch.where(low >= 0x8000, low - 0x10000, low)
    return param, low.short() if kind is Master.REMAINDER16 else (low >> 8).to(torch.int8)


# --- block-scaled states ----------------------------------------------------------------------------------------


def _absmax(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(1) if blocks.numel() else blocks.new_zeros(0)


def _block_scale(absmax: Tensor, smallest: float, scale: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """(scale to store, factor to encode by); a block with NaN or infinity gets a NaN scale and decodes to NaN."""
    poisoned = ~absmax.isfinite()
    empty = absmax < smallest
    stored = torch.where(poisoned, torch.nan, torch.where(empty, 0.0, scale))
    return stored, torch.where(poisoned | empty, 0.0, inverse)


def _at_least_one(code: Tensor, positive: Tensor) -> Tensor:
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


class _Float16Codec:
    """Values divided by a power of two that puts their block's largest, as it is rounded, into (2^14, 2^15].

    So the exponents below serve the small elements, and what was decoded has the same scale again. From 2^127 on, 2^15
    would decode to infinity: there the largest lies in (2^15, 2^16) and values saturate at 65504.
    """

    @staticmethod
    def _scale(blocks: Tensor, rounded: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
        """``rounded``: bits of the magnitudes. The floor of 2^-102 keeps the smallest code's value a normal number."""
        top = rounded.amax(1) if rounded.numel() else rounded.new_zeros(0)
        exponent = (top + 0x7FFFFF >> 23).clamp(40, 254) - 15
        return _block_scale(_absmax(blocks), smallest, _float(exponent << 23), _float(254 - exponent << 23))

    @classmethod
    def scale_signed(cls, m: Tensor) -> tuple[Tensor, Tensor]:
        bits = _bits(m.abs())
        return cls._scale(m, bits + 0xFFF + (bits >> 13 & 1) >> 13 << 13, _SMALLEST_SIGNED)

    @staticmethod
    def encode_signed(m: Tensor, inverse: Tensor) -> Tensor:
        return _clamp_top(m.abs() * inverse, 65504.0).copysign(m).to(torch.float16).view(torch.int16)

    @classmethod
    def scale_rotating(cls, x: Tensor, u: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
        return cls._scale(x, _bits(x.abs()) + (u >> 19) >> 13 << 13, smallest)

    @staticmethod
    def encode_rotating(x: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        """Codes of magnitudes."""
        return _float16_magnitude_rotating(_clamp_top(x.abs() * inverse, 65504.0), u)

    @classmethod
    def scale_square(cls, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return cls.scale_rotating(v, u, _SMALLEST_SQUARE)

    @classmethod
    def encode_square(cls, v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        return _at_least_one(cls.encode_rotating(v, inverse, u), v > 0)

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


class _Float8Codec:
    """float8_e4m3fn (OCP 8-bit floating point specification 1.0), as uint8; what is not negative as its square root."""

    @staticmethod
    def scale_signed(m: Tensor) -> tuple[Tensor, Tensor]:
        absmax = _absmax(m)
        scale = _divide(absmax, 448.0)
        return _block_scale(absmax, _SMALLEST_SIGNED, scale, 1.0 / scale)

    @staticmethod
    def encode_signed(m: Tensor, inverse: Tensor) -> Tensor:
        x = _clamp_top(m.abs() * inverse, 448.0)
        return x.copysign(m).to(torch.float8_e4m3fn).view(torch.uint8)

    @staticmethod
    def decode_signed(bits: Tensor, scale: Tensor) -> Tensor:
        return bits.view(torch.float8_e4m3fn).float() * scale

    @staticmethod
    def scale_square(v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        absmax = _absmax(v)
        scale = (_divide(sqrt(absmax), 448.0)).clamp_min(2.0**-54)
        return _block_scale(absmax, _SMALLEST_SQUARE, scale, 1.0 / scale * _TOP_NUDGE)

    @staticmethod
    def encode_square(v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        x = _clamp_top(sqrt(v) * inverse, 448.0)
        return _at_least_one((scaled_bits(x, 120) + (u >> 12)) >> 20, v > 0)

    @staticmethod
    def decode_square(bits: Tensor, scale: Tensor) -> Tensor:
        root = bits.view(torch.float8_e4m3fn).float() * scale
        return root * root


class _Int8Codec:
    """The signed square root in 127 levels; of what is not negative, the fourth root in 255."""

    @staticmethod
    def scale_signed(m: Tensor) -> tuple[Tensor, Tensor]:
        absmax = _absmax(m)
        scale = _divide(sqrt(absmax), 127.0)
        return _block_scale(absmax, _SMALLEST_SIGNED, scale, 1.0 / scale)

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
        absmax = _absmax(v)
        top = sqrt(sqrt(absmax)).clamp_min(255 * 2.0**-31)
        return _block_scale(absmax, _SMALLEST_SQUARE, _divide(top, 255.0), 1.0 / top * _TOP_NUDGE)

    @staticmethod
    def encode_square(v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        x = (sqrt(sqrt(v)) * inverse).nan_to_num(0.0).clamp(0.0, 1.0)
        threshold = 256.0 + (u >> 17).float() * 2.0**-15
        return _at_least_one(fused(x, 255.0, threshold).long() - 256, v > 0)

    @staticmethod
    def decode_square(bits: Tensor, scale: Tensor) -> Tensor:
        root = bits.float() * scale
        square = root * root
        return square * square


@dataclass(frozen=True)
class StateFormat:
    """One way to store a state. ``code`` is the engines' number for it; dtypes are those of the stored tensors."""

    name: str
    code: int
    signed_dtype: torch.dtype
    square_dtype: torch.dtype
    codec: Codec | None  # None: stored element by element, without block scales

    @property
    def scaled(self) -> bool:
        return self.codec is not None

    def dtype(self, kind: Kind) -> torch.dtype:
        return self.square_dtype if kind is Kind.SQUARE else self.signed_dtype


FLOAT32 = StateFormat("float32", 0, torch.float32, torch.float32, None)
STATE_FORMATS: dict[torch.dtype, StateFormat] = {
    torch.float32: FLOAT32,
    torch.bfloat16: StateFormat("bfloat16", 1, torch.bfloat16, torch.bfloat16, None),
    torch.float16: StateFormat("float16", 2, torch.float16, torch.float16, _Float16Codec),
    torch.float8_e4m3fn: StateFormat("float8_e4m3fn", 3, torch.uint8, torch.uint8, _Float8Codec),
    torch.int8: StateFormat("int8", 4, torch.int8, torch.uint8, _Int8Codec),
}
FLOAT16 = STATE_FORMATS[torch.float16]
STATE_FORMATS[torch.uint8] = STATE_FORMATS[torch.float8_e4m3fn]  # TransformerEngine's spelling


# What people call them, beside torch's own names.
SHORT_NAMES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "8bit": torch.int8,
}


def as_dtype(given: object) -> torch.dtype | None:
    """A dtype, also one that is given by a name: "int8", "torch.int8", "8bit". None for what is none."""
    found = given
    if isinstance(given, str):
        found = SHORT_NAMES.get(given) or getattr(torch, given.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def state_format(given: torch.dtype | str) -> StateFormat:
    """The format of the states that are asked for by a dtype or its name. Raises KeyError for those that have none."""
    dtype = as_dtype(given)
    if dtype not in STATE_FORMATS:
        raise KeyError(given)
    return STATE_FORMATS[dtype]


def _to_blocks(x: Tensor, block: int) -> Tensor:
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)


def _stored(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(torch.int16).view(dtype) if dtype == torch.float16 else codes.to(dtype)


def master_rounding(before: Tensor, after: Tensor, u: Tensor) -> Tensor:
    """How an FP16 master rounds: ``u``, flat int64 fractions, where the update is small; elsewhere to nearest.

    The threshold rotates for the sake of updates below the last place, which would be lost otherwise. From two units
    of the last place on none is lost, and rounding to nearest errs half as much.
    """
    return torch.where((after - before).abs() >= after.abs() * 2.0**-9, NEAREST, u.view_as(after)).view(-1)


def encode_state(x: Tensor, kind: Kind, fmt: StateFormat, block: int, u: Tensor) -> tuple[Tensor, Tensor | None]:
    """Encode the FP32 values of a state.

    ``u``: flat int64 rounding fractions, ignored by signed ones, which round to nearest even. Returns the stored
    tensor (shaped as ``x``) and the FP32 scales of shape ``(blocks,)``, None for a format without scales.
    """
    if fmt.codec is None:
        dtype = fmt.dtype(kind)
        rotates = kind is Kind.SQUARE and dtype in ROTATING
        return (ROTATING[dtype](x.reshape(-1), u).view_as(x) if rotates else x.to(dtype)), None
    blocks, fractions = _to_blocks(x, block), _to_blocks(u, block)
    if kind is Kind.SIGNED:
        scale, inverse = fmt.codec.scale_signed(blocks)
        codes = fmt.codec.encode_signed(blocks, inverse[:, None])
    elif kind is Kind.SQUARE:
        scale, inverse = fmt.codec.scale_square(blocks, fractions)
        codes = fmt.codec.encode_square(blocks, inverse[:, None], fractions)
    else:
        scale, inverse = _Float16Codec.scale_master(blocks, fractions)
        codes = _Float16Codec.encode_master(blocks, inverse[:, None], fractions)
    codes = torch.where(inverse[:, None] > 0, codes, 0)
    return _stored(codes, fmt.dtype(kind)).view(-1)[: x.numel()].view_as(x), scale


def decode_state(bits: Tensor, scale: Tensor | None, kind: Kind, fmt: StateFormat, block: int) -> Tensor:
    """The FP32 values of a stored state; a new tensor, except for FP32 states, which are returned as they are."""
    if fmt.codec is None:
        return bits.float()
    assert scale is not None  # a format with a codec has scales
    decode = fmt.codec.decode_square if kind is Kind.SQUARE else fmt.codec.decode_signed
    blocks = decode(_to_blocks(bits, block), scale[:, None])
    return blocks.view(-1)[: bits.numel()].view_as(bits)
