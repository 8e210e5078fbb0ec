"""Values of saved states: the stored tensors, and how to read them.

A state dict may hold the values, or a :class:`LazyTensor` that makes them when it is written to disk, from copies of
the stored tensors. So a save moves no more bytes than are stored, and GPUs convert nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from fused_optim.backends import decoding
from fused_optim.formats.masters import join_remainder
from fused_optim.formats.states import Kind, StateFormat, decode_state, encode_state
from fused_optim.memory.uploads import copy_into, moved
from fused_optim.sharding.dtensor import dense
from fused_optim.state.remainders import PIECE, row_checks

STAGER = "stager"  # the device of a state dict that is copied by one before anything changes

aten = torch.ops.aten


class Values(Protocol):
    """A frozen dataclass: plain local tensors, which may be replaced by copies elsewhere, and how to read them."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, device: str | None = None) -> Tensor:
        """A new tensor on ``device``; None: where the parts are."""

    def read_into(self, out: Tensor) -> None:
        """The values into a contiguous tensor of as many elements, on any device."""


@dataclass(frozen=True)
class Stored:
    """A state, or a separate master: local bits, one FP32 scale per block of the flat tensor, and their format.

    All reading and writing of states in any format goes through it.
    """

    bits: Tensor
    scale: Tensor | None
    kind: Kind
    format: StateFormat
    block: int

    dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.bits.shape

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def read(self, device: str | None = None) -> Tensor:
        """New FP32 values on ``device``; None: where the bits are."""
        return _read_new(self, self.bits.device if device is None else device)

    def read_into(self, out: Tensor) -> None:
        if not decoding.decode_state(self.bits, self.scale, self.kind, self.format, self.block, out):
            _read_pieces(self.piece, out)

    def piece(self, piece: slice) -> Tensor:
        """The FP32 values of some elements of the flat tensor, from the first of a block on."""
        block, scale = self.block, self.scale
        scales = None if scale is None else scale[piece.start // block : -(-piece.stop // block)]
        return decode_state(self.bits.reshape(-1)[piece], scales, self.kind, self.format, block)

    def write(self, value: Tensor, device: torch.device) -> None:
        """Encode values of the same shape, on ``device``, rounding to nearest."""
        source, target = dense(value).view(-1), self.bits.view(-1)
        for piece in pieces(target.numel()):
            part = moved(source[piece], device).float()
            bits, scale = encode_state(part, self.kind, self.format, self.block)
            target[piece] = bits
            if scale is not None and self.scale is not None:
                self.scale[piece.start // self.block : -(-piece.stop // self.block)] = scale

    def copy_(self, other: Stored, device: torch.device) -> None:
        """Bit for bit where both have one format and scales, else encoded from the values."""
        alike = (self.format, self.block) == (other.format, other.block)
        if self.scale is None or other.scale is None or not alike:
            self.write(other.read(), device)
            return
        copy_into(self.bits, other.bits)
        copy_into(self.scale, other.scale)


@dataclass(frozen=True)
class Joined:
    """FP32 masters whose high bits are a BF16 parameter; ``low`` may be in host memory where that is on a GPU."""

    low: Tensor
    high: Tensor

    dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.high.shape

    def read(self, device: str | None = None) -> Tensor:
        return _read_new(self, self.low.device if device is None else device)

    def read_into(self, out: Tensor) -> None:
        if not decoding.join_remainder(self.high, self.low, out):
            _read_pieces(self.piece, out)

    def piece(self, piece: slice) -> Tensor:
        """The FP32 values of some elements of the flat tensor."""
        high = self.high.reshape(-1)[piece]
        return join_remainder(high, self.low.reshape(-1)[piece].to(high.device))


@dataclass(frozen=True)
class RowChecks:
    """Sums by which a BF16 parameter is recognized as the high half of remainders; see ``remainders.row_checks``."""

    param: Tensor

    dtype = torch.int32

    @property
    def shape(self) -> torch.Size:
        return self.param.shape[:1]

    def read(self, device: str | None = None) -> Tensor:
        return row_checks(self.param).to(device or self.param.device)

    def read_into(self, out: Tensor) -> None:
        out.copy_(row_checks(self.param))


def parts(values: Values) -> dict[str, Tensor]:
    """The tensors that values are made of, by the names of their fields."""
    return {name: value for name in _names(type(values)) if isinstance(value := getattr(values, name), Tensor)}


@functools.cache  # saves ask for each tensor, while training waits
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def with_parts(values: Values, replaced: dict[str, Tensor]) -> Values:
    """A copy with other tensors, by the names of :func:`parts`."""
    made: Values = replace(values, **replaced)  # type: ignore[type-var]
    return made


def pieces(numel: int) -> Iterator[slice]:
    return (slice(start, min(start + PIECE, numel)) for start in range(0, numel, PIECE))


def _read_new(values: Values, device: str | torch.device) -> Tensor:
    out = torch.empty(values.shape, dtype=values.dtype, device=device)
    values.read_into(out)
    return out


def _read_pieces(decode: Callable[[slice], Tensor], out: Tensor) -> None:
    """There is one piece's worth of temporaries."""
    flat = out.view(-1)
    for piece in pieces(out.numel()):
        flat[piece] = decode(piece)


# --- values that are read later ---------------------------------------------------------------------------------


class LazyTensor(torch.Tensor):
    """Values that are made when something reads them. Not to be written.

    In a state dict it refers to tensors that the next step changes. ``PinnedStager`` puts one in its place that refers
    to copies, which writers of torch.distributed.checkpoint read, also in other processes. torch's stagers refuse it.
    """

    source: Values

    # As torch's own subclasses have it; only its stubs know another signature.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Values) -> LazyTensor:
        device = next(iter(parts(values).values())).device
        self = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=device)
        self.source = values
        return self

    def data_ptr(self) -> int:
        return 0

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0, device=self.device)

    def is_pinned(self, device: str | torch.device | int | None = None) -> bool:
        return False

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # of one without types
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, proto: Any) -> tuple[Any, ...]:
        return LazyTensor, (self.source,)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # which torch's stubs take for a static method
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.alias.default or (func is aten.view.default and tuple(args[1]) == tuple(args[0].shape)):
            return LazyTensor(args[0].source)  # planning asks for these, and does not read
        if func in _NEW:
            raise TypeError(
                "a state dict that was made with checkpoint_device='stager' refers to the running states: give it to "
                "fused_optim.checkpoint.PinnedStager, or set optimizer.checkpoint_device = None before it is made"
            )
        if func._schema.is_mutable and isinstance(args[0], LazyTensor):
            raise TypeError(f"{func} cannot write values that are made when they are read")
        return func(*_read(args), **_read(kwargs or {}))


_NEW = (aten.new_empty.default, aten.new_zeros.default, aten.empty_like.default, aten.zeros_like.default)


def _read(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.source.read()
    if type(value) in (list, tuple):
        return type(value)(map(_read, value))
    if type(value) is dict:
        return {key: _read(item) for key, item in value.items()}
    return value


def materialize(values: Values, device: str | None) -> Tensor:
    """Values as a state dict holds them; ``device``: see ``state_dict.Options``."""
    return LazyTensor(values) if device == STAGER else values.read(device)
