"""Formats of optimizer states: one row per format, and how a state is encoded and decoded."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fused_optim.formats import codecs
from fused_optim.formats.dtypes import as_dtype
from fused_optim.formats.elements import ROTATING
from fused_optim.formats.rounding import NEAREST

BLOCKS = (128, 64, 32)


class Kind(enum.IntEnum):
    """Kinds of values, which 8-bit and 16-bit formats encode differently."""

    SIGNED = 0  # averages of gradients: of either sign
    SQUARE = 1  # averages of squares: what is positive never becomes 0
    MASTER = 2  # FP16 masters: of either sign, rounded as `master_rounding` says


@dataclass(frozen=True)
class StateFormat:
    """One way to store a state. Dtypes are those of the stored tensors."""

    name: str
    code: int  # the engines' number for it; -1: they do not know it
    signed_dtype: torch.dtype
    square_dtype: torch.dtype
    codec: codecs.Decoder | None  # None: stored element by element, without block scales
    number: int  # of the meaning of its codes, in the native form of state dicts: never used again for another one

    @property
    def scaled(self) -> bool:
        return self.codec is not None

    def dtype(self, kind: Kind) -> torch.dtype:
        return self.square_dtype if kind is Kind.SQUARE else self.signed_dtype


FLOAT32 = StateFormat("float32", 0, torch.float32, torch.float32, None, 0)
STATE_FORMATS: dict[torch.dtype, StateFormat] = {
    torch.float32: FLOAT32,
    torch.bfloat16: StateFormat("bfloat16", 1, torch.bfloat16, torch.bfloat16, None, 1),
    torch.float16: StateFormat("float16", 2, torch.float16, torch.float16, codecs.Float16Codec, 2),
    torch.float8_e4m3fn: StateFormat("float8_e4m3fn", 3, torch.uint8, torch.uint8, codecs.Float8Codec, 3),
    torch.int8: StateFormat("int8", 4, torch.int8, torch.uint8, codecs.Int8Codec, 5),
}
STATE_FORMATS[torch.uint8] = STATE_FORMATS[torch.float8_e4m3fn]  # TransformerEngine's spelling
FLOAT16 = STATE_FORMATS[torch.float16]

# Formats of saved states by their numbers, one of them of version 0.2.
SAVED_FORMATS = {fmt.number: fmt for fmt in STATE_FORMATS.values()}
SAVED_FORMATS[4] = StateFormat("int8", -1, torch.int8, torch.uint8, codecs.FormerInt8Codec, 4)


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


def encode_state(
    x: Tensor, kind: Kind, fmt: StateFormat, block: int, u: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Encode the FP32 values of a state.

    ``u``: flat int64 rounding fractions of its elements; None rounds to nearest. Returns the stored tensor (shaped as
    ``x``) and the FP32 scales of shape ``(blocks,)``, None for a format without scales.
    """
    u = torch.full((x.numel(),), NEAREST, dtype=torch.int64, device=x.device) if u is None else u
    if fmt.codec is None:
        dtype = fmt.dtype(kind)
        return (ROTATING[dtype](x.reshape(-1), u).view_as(x) if dtype in ROTATING else x.to(dtype)), None
    blocks, fractions = _to_blocks(x, block), _to_blocks(u, block)
    codec = cast(codecs.Codec, fmt.codec)
    if kind is Kind.SIGNED:
        scale, inverse = codec.scale_signed(blocks, fractions)
        codes = codec.encode_signed(blocks, inverse[:, None], fractions)
    elif kind is Kind.SQUARE:
        scale, inverse = codec.scale_square(blocks, fractions)
        codes = codec.encode_square(blocks, inverse[:, None], fractions)
    else:
        scale, inverse = codecs.Float16Codec.scale_master(blocks, fractions)
        codes = codecs.Float16Codec.encode_signed(blocks, inverse[:, None], fractions)
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
