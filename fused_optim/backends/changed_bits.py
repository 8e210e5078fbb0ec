"""One bit for each element of a tensor, whether it has changed: set by comparing, and turned into indices and values.

Bit ``e % 8`` of byte ``e // 8`` is that of element ``e``; those beyond the last element stay 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, compress
from typing import NamedTuple

import torch
from torch import Tensor

from fused_optim.adapters import COMPARED
from fused_optim.backends import backend_of, load_engine
from fused_optim.backends.compiled import mark_differences, run_on
from fused_optim.backends.engine import Engine
from fused_optim.sharding.dtensor import dense

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXTRACTED = 2**24  # bytes of bits that are turned into indices at a time
_BITS_OF_BYTES = 0x0102040810204080  # times eight bytes of 0 or 1: these as the bits of the highest byte


def bit_bytes(numel: int) -> int:
    """What the bits of so many elements take, in whole sectors of a GPU's memory."""
    return -(-numel // 256) * 32


def set_all(bits: Tensor, numel: int) -> None:
    """Mark every element."""
    bits[: numel // 8].fill_(0xFF)
    if numel % 8:
        bits[numel // 8].fill_((1 << numel % 8) - 1)


# --- comparing ----------------------------------------------------------------------------------------------------


def raw_bits(values: Tensor) -> Tensor:
    """Flat, as integers: NaN and negative zeros are compared by their bits."""
    return dense(values.detach()).view(-1).view(_INTEGERS[values.element_size()])


def compare(parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Mark elements whose bits differ: bits, before and after, both flat as of :func:`raw_bits`."""
    on_gpus: dict[torch.device, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for bits, before, after in parts:
        if backend_of(after) == "cuda":
            on_gpus.setdefault(after.device, []).append((bits, before, after))
        else:
            _mark_differences(bits, before, after)
    for device, rows in on_gpus.items():
        mark_differences(rows, device)


def _mark_differences(bits: Tensor, before: Tensor, after: Tensor) -> None:
    """Piece by piece, which bounds the memory."""
    for first in range(0, after.numel(), COMPARED):
        differs = before[first : first + COMPARED] != after[first : first + COMPARED]
        padded = torch.nn.functional.pad(differs, (0, -differs.numel() % 8))
        packed = padded.view(torch.int64).mul(_BITS_OF_BYTES).bitwise_right_shift_(56).to(torch.uint8)
        bits[first // 8 : first // 8 + packed.numel()] |= packed


# --- collecting ---------------------------------------------------------------------------------------------------


class MarkedTensor(NamedTuple):
    """A tensor's bits and its values, dense. ``first``: what the index of its first element is."""

    bits: Tensor
    values: Tensor
    first: int = 0


def collect(marked: Iterable[MarkedTensor]) -> list[tuple[Tensor, Tensor]]:
    """Of each the indices of marked elements, ascending (int64), and their values. Waits for each device once.

    What is given back may lie in one memory, and where all elements of tensors are marked their indices may be the same
    tensor's.
    """
    return Collector(list(marked)).collect()


class Collector:
    """:func:`collect` of tensors that stay where they are, again and again: what does not change is found out once.

    ``can_be_kept``: without keeping these, or their bits, which is the caller's; it must not be asked once they moved.
    """

    def __init__(self, tensors: Sequence[MarkedTensor]) -> None:
        by_device: dict[torch.device, list[int]] = {}
        for i, each in enumerate(tensors):
            by_device.setdefault(each.values.device, []).append(i)
        self._count = len(tensors)
        self._by_torch: list[tuple[int, MarkedTensor]] = []
        self._by_engine: list[tuple[list[int], _EngineCollector]] = []
        for device, members in by_device.items():
            own = [tensors[i] for i in members]
            backend = backend_of(own[0].values)
            engine = None if backend == "torch" else load_engine(backend)[0]
            if engine is None:
                self._by_torch += zip(members, own, strict=True)
            else:
                self._by_engine.append((members, _EngineCollector(engine, own, device)))
        self.can_be_kept = not self._by_torch

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        found: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * self._count
        for i, each in self._by_torch:
            found[i] = _by_torch(each)
        for members, own in self._by_engine:
            for i, pair in zip(members, own.collect(), strict=True):
                found[i] = pair
        return found


def _by_torch(tensor: MarkedTensor) -> tuple[Tensor, Tensor]:
    bits = tensor.bits[: -(-tensor.values.numel() // 8)]
    pieces = [_indices(piece) + 8 * _EXTRACTED * i for i, piece in enumerate(bits.split(_EXTRACTED))]
    indices = torch.cat(pieces)
    return indices + tensor.first, tensor.values.detach().view(-1)[indices]


def _indices(bits: Tensor) -> Tensor:
    """Bytes that are not 0 first: after most steps these are few."""
    at = bits.nonzero().view(-1)
    each = torch.arange(8, dtype=torch.uint8, device=bits.device)
    found = (bits[at].unsqueeze(1) >> each & 1).view(-1).nonzero().view(-1)
    return at[found >> 3].mul_(8).add_(found & 7)


class _EngineCollector:
    """Those of one device that has an engine."""

    def __init__(self, engine: Engine, tensors: Sequence[MarkedTensor], device: torch.device) -> None:
        self._engine, self._device = engine, device
        rows = [
            (bits.data_ptr(), values.numel(), values.data_ptr(), first, values.element_size())
            for bits, values, first in tensors
        ]
        self._rows = engine.MarkedRows(rows)
        self._numels = [each.values.numel() for each in tensors]
        self._firsts = [each.first for each in tensors]
        self._dtypes = [each.values.dtype for each in tensors]
        units = sum(-(-numel // engine.CHANGES_PER_UNIT) for numel in self._numels)
        self._places = torch.empty(units + len(rows), dtype=torch.int64, device=device)

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        engine, device, places = self._engine, self._device, self._places.data_ptr()
        totals = engine.count_changed(rows=self._rows, places=places, **run_on(device))
        # Where all elements are marked they are copied, and one tensor has the indices of all such tensors.
        whole = [0 < total == numel for total, numel in zip(totals, self._numels, strict=True)]
        every = torch.arange(max(compress(totals, whole), default=0), device=device)
        listed = [0 if is_whole else total for is_whole, total in zip(whole, totals, strict=True)]
        indices, index_addresses = _split(listed, torch.int64, device)
        values, value_addresses = self._side_by_side(totals)
        targets = list(zip(index_addresses, value_addresses, strict=True))
        engine.collect_changed(rows=self._rows, targets=targets, places=places, **run_on(device))
        return [
            (_shifted(every[:total], first) if is_whole else own, taken)
            for first, is_whole, total, own, taken in zip(self._firsts, whole, totals, indices, values, strict=True)
        ]

    def _side_by_side(self, numels: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        """New tensors of these sizes, those of one dtype in one memory, and their addresses."""
        sizes: dict[torch.dtype, list[int]] = {}
        for dtype, numel in zip(self._dtypes, numels, strict=True):
            sizes.setdefault(dtype, []).append(numel)
        new = {dtype: zip(*_split(own, dtype, self._device), strict=True) for dtype, own in sizes.items()}
        pairs = [next(new[dtype]) for dtype in self._dtypes]
        return [tensor for tensor, _ in pairs], [where for _, where in pairs]


def _shifted(indices: Tensor, first: int) -> Tensor:
    return indices + first if first else indices


def _split(numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Sequence[Tensor], list[int]]:
    """Parts of one new tensor, and their addresses; 0 of empty ones.

    It has up to an eighth more room: takes of about as much find the same memory.
    """
    ends = list(accumulate(numels, initial=0))
    total = ends[-1]
    step = 1 << max(total.bit_length() - 4, 0)
    room = torch.empty(-(-total // step) * step, dtype=dtype, device=device)
    parts: Sequence[Tensor] = torch.split_with_sizes(room.narrow(0, 0, total), numels)
    start = room.data_ptr()
    return parts, [start + begin * dtype.itemsize if numel else 0 for begin, numel in zip(ends, numels, strict=False)]
