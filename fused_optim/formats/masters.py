"""Kinds of master weights, and a codec for each: FP32 values from the stored tensors, and back."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from fused_optim.formats.arithmetic import MASK32, bits_float, float_bits
from fused_optim.formats.elements import ROTATING
from fused_optim.formats.rounding import NEAREST, master_rounding
from fused_optim.formats.states import FLOAT16, Kind, decode_state, encode_state


class Master(enum.IntEnum):
    """Kinds of master weights, as the engines number them."""

    PARAMETER = 0  # the parameter is its own master
    FLOAT32 = 1  # a separate FP32 tensor
    REMAINDER16 = 2  # BF16 parameter + 16 more bits: lossless FP32
    REMAINDER8 = 3  # BF16 parameter + 8 more bits: a 24-bit master
    FLOAT16 = 4  # a separate FP16 tensor, scaled by blocks; the parameter is its rounded value

    @property
    def codec(self) -> MasterCodec:
        return _CODECS[self]

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype of ``state[p]["master_param"]``."""
        return self.codec.dtype

    @property
    def is_remainder(self) -> bool:
        """True if a BF16 parameter holds the upper bits."""
        return self in (Master.REMAINDER16, Master.REMAINDER8)

    @property
    def is_separate(self) -> bool:
        """True if the master is complete without the parameter, which is its rounded value."""
        return self is not Master.PARAMETER and not self.is_remainder


class MasterTensors(NamedTuple):
    """Plain tensors of one master; None for those that its kind lacks or that are left alone.

    ``param``: FP32, BF16 or FP16. ``stored``: the tensor beside it, shaped alike. ``scale``: FP32, one per ``block``
    elements.
    """

    param: Tensor | None
    stored: Tensor | None
    scale: Tensor | None
    block: int


class MasterCodec(ABC):
    """Codec of one kind of master. ``name``: in texts; ``dtype``: of the stored tensor.

    ``value``: FP32 values. ``u``: their 32-bit rounding fractions, flat int64; None rounds to nearest.
    """

    name: str
    dtype: torch.dtype

    @abstractmethod
    def read(self, master: MasterTensors) -> Tensor:
        """FP32 values: a new tensor, unless an FP32 one holds them. Only remainders and PARAMETER need ``param``."""

    @abstractmethod
    def encode(self, value: Tensor, dtype: torch.dtype, block: int, u: Tensor | None = None) -> MasterTensors:
        """New tensors, for a parameter of ``dtype``. Beside a separate master its values may still be in FP32."""

    def write(self, master: MasterTensors, value: Tensor, u: Tensor | None = None) -> None:
        """Set the parameter, the stored tensor and the scales."""
        dtype = value.dtype if master.param is None else master.param.dtype
        for target, source in zip(master[:3], self.encode(value, dtype, master.block, u)[:3], strict=True):
            if target is not None and source is not None:
                target.copy_(source)

    def seed(self, master: MasterTensors, value: Tensor) -> None:
        """Set the stored tensor and the scales from the parameter's ``value``; the parameter stays as it is."""
        self.write(master._replace(param=None), value)

    def fractions(self, before: Tensor, after: Tensor, u: Tensor) -> Tensor:
        """The rounding fractions of an update from ``before`` to ``after``, given the elements' own, ``u``."""
        return u


class _Parameter(MasterCodec):
    name, dtype = "none", torch.float32

    def read(self, master: MasterTensors) -> Tensor:
        assert master.param is not None
        return master.param.float()

    def encode(self, value: Tensor, dtype: torch.dtype, block: int, u: Tensor | None = None) -> MasterTensors:
        if u is None or dtype not in ROTATING:
            return MasterTensors(value.to(dtype), None, None, block)
        return MasterTensors(ROTATING[dtype](value.reshape(-1), u).view_as(value), None, None, block)


class _Float32(MasterCodec):
    name, dtype = "float32", torch.float32

    def read(self, master: MasterTensors) -> Tensor:
        assert master.stored is not None
        return master.stored

    def encode(self, value: Tensor, dtype: torch.dtype, block: int, u: Tensor | None = None) -> MasterTensors:
        return MasterTensors(value, value, None, block)


class _Float16(MasterCodec):
    """An element that is 2^-32 or less of its block's largest may lose bits."""

    name, dtype = "float16", torch.float16

    def read(self, master: MasterTensors) -> Tensor:
        assert master.stored is not None
        return decode_state(master.stored, master.scale, Kind.MASTER, FLOAT16, master.block)

    def encode(self, value: Tensor, dtype: torch.dtype, block: int, u: Tensor | None = None) -> MasterTensors:
        stored, scale = encode_state(value, Kind.MASTER, FLOAT16, block, u)
        return MasterTensors(decode_state(stored, scale, Kind.MASTER, FLOAT16, block), stored, scale, block)

    def fractions(self, before: Tensor, after: Tensor, u: Tensor) -> Tensor:
        return master_rounding(before, after, u)


class _Remainder(MasterCodec):
    def __init__(self, kind: Master, dtype: torch.dtype) -> None:
        self.kind, self.name, self.dtype = kind, f"{8 * dtype.itemsize}-bit remainder", dtype

    def read(self, master: MasterTensors) -> Tensor:
        assert master.param is not None and master.stored is not None
        return join_remainder(master.param, master.stored)

    def encode(self, value: Tensor, dtype: torch.dtype, block: int, u: Tensor | None = None) -> MasterTensors:
        high, low = split_remainder(value, self.kind, NEAREST if u is None else u.view_as(value))
        return MasterTensors(high, low, None, block)

    def seed(self, master: MasterTensors, value: Tensor) -> None:
        assert master.stored is not None
        master.stored.zero_()  # split NaN would not belong to the parameter's own NaN


_CODECS = {
    Master.PARAMETER: _Parameter(),
    Master.FLOAT32: _Float32(),
    Master.REMAINDER16: _Remainder(Master.REMAINDER16, torch.int16),
    Master.REMAINDER8: _Remainder(Master.REMAINDER8, torch.int8),
    Master.FLOAT16: _Float16(),
}


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
