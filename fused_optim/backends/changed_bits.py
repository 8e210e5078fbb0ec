"""One bit for each element of a tensor, whether it has changed: set by comparing, and turned into indices and values.

Bit ``e % 8`` of byte ``e // 8`` is that of element ``e``; those beyond the last element stay 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress
from typing import NamedTuple

import torch
from torch import Tensor

from fused_optim.backends import backend_of, load_engine
from fused_optim.backends.compiled import run_on
from fused_optim.backends.engine import Engine
from fused_optim.sharding.dtensor import dense

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED = 2**24  # elements that are compared at a time, where that takes memory
_MOST_BYTES = 4  # of elements, that engines take; frozen parameters may have more
_EXTRACTED = 2**24  # bytes of bits that are turned into indices at a time
_BITS_OF_BYTES = 0x0102040810204080  # times eight bytes of 0 or 1: these as the bits of the highest byte


def bit_bytes(numel: int) -> int:
    """Bytes for the bits of so many elements, in whole sectors of a GPU's memory."""
    return -(-numel // 256) * 32


def set_all(bits: Tensor, numel: int) -> None:
    """Mark every element."""
    bits[: numel // 8].fill_(0xFF)
    if numel % 8:
        bits[numel // 8].fill_((1 << numel % 8) - 1)


# --- comparing ----------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """Flat values as :func:`raw_bits` has them, their former copy, and their bits, on the values' device."""

    bits: Tensor
    copy: Tensor
    values: Tensor


def raw_bits(values: Tensor) -> Tensor:
    """Flat, as integers: NaN and negative zeros are compared by their bits."""
    return dense(values.detach()).view(-1).view(_INTEGERS[values.element_size()])


def compare(rows: Sequence[Compared]) -> None:
    """Mark elements that differ from their copy, which takes them. Copies may be in page-locked host memory."""
    on_gpus: dict[torch.device, list[Compared]] = {}
    for row in rows:
        if backend_of(row.values) != "cuda" or row.values.element_size() > _MOST_BYTES:
            _compare_by_torch(row)
        elif row.copy.is_cuda:
            on_gpus.setdefault(row.values.device, []).append(row)
        else:
            _compare_with_host(row)
    for device, there in on_gpus.items():
        _mark_differences(device, there)


def _pieces(row: Compared) -> list[Compared]:
    """The row in pieces of ``_COMPARED`` elements, which bound the memory that a comparison needs."""
    bits = row.bits.split(_COMPARED // 8)
    return [Compared(*piece) for piece in zip(bits, row.copy.split(_COMPARED), row.values.split(_COMPARED))]


def _compare_by_torch(row: Compared) -> None:
    for bits, copy, values in _pieces(row):
        differs = copy.to(values.device) != values
        padded = torch.nn.functional.pad(differs, (0, -differs.numel() % 8))
        packed = padded.view(torch.int64).mul(_BITS_OF_BYTES).bitwise_right_shift_(56).to(torch.uint8)
        bits[: packed.numel()] |= packed
        copy.copy_(values)


def _compare_with_host(row: Compared) -> None:
    """In the order of a stream, which whoever collects the bits waits for."""
    moved = torch.empty_like(row.values[:_COMPARED])
    for bits, copy, values in _pieces(row):
        there = moved[: values.numel()].copy_(copy, non_blocking=True)
        _mark_differences(values.device, [Compared(bits, there, values)])
        copy.copy_(there, non_blocking=True)


def _mark_differences(device: torch.device, rows: Sequence[Compared]) -> None:
    engine, _ = load_engine("cuda")
    assert engine is not None
    table = [(c.data_ptr(), v.data_ptr(), bits.data_ptr(), v.numel(), v.element_size()) for bits, c, v in rows]
    engine.mark_differences(table, **run_on(device))


# --- collecting ---------------------------------------------------------------------------------------------------


class MarkedTensor(NamedTuple):
    """A tensor's bits and its values, dense. ``first``: what the index of its first element is."""

    bits: Tensor
    values: Tensor
    first: int = 0


def collect(marked: Sequence[MarkedTensor]) -> list[tuple[Tensor, Tensor]]:
    """Indices of each tensor's marked elements, ascending (int64), and their values. Waits for each device once.

    What is given back may lie in one memory, and where all elements of tensors are marked their indices may be the same
    tensor's.
    """
    alike: dict[tuple[torch.device, bool], list[int]] = {}
    for i, each in enumerate(marked):
        alike.setdefault((each.values.device, each.values.element_size() <= _MOST_BYTES), []).append(i)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for (device, fits), members in alike.items():
        own = [marked[i] for i in members]
        backend = backend_of(own[0].values)
        engine = None if backend == "torch" or not fits else load_engine(backend)[0]
        pairs = list(map(_by_torch, own)) if engine is None else _by_engine(engine, own, device)
        found.update(zip(members, pairs, strict=True))
    return [found[i] for i in range(len(marked))]


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


def _by_engine(engine: Engine, tensors: Sequence[MarkedTensor], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The same on one device: the engine counts marks, and then writes into memory of that size."""
    numels = [each.values.numel() for each in tensors]
    rows = engine.MarkedRows(
        [
            (bits.data_ptr(), values.numel(), values.data_ptr(), first, values.element_size())
            for bits, values, first in tensors
        ]
    )
    units = sum(-(-numel // engine.CHANGES_PER_UNIT) for numel in numels)
    places = torch.empty(units + len(tensors), dtype=torch.int64, device=device)
    totals = engine.count_changed(rows=rows, places=places.data_ptr(), **run_on(device))
    # Where all elements are marked they are copied, and one tensor has the indices of all such tensors.
    whole = [0 < total == numel for total, numel in zip(totals, numels, strict=True)]
    every = torch.arange(max(compress(totals, whole), default=0), device=device)
    listed = [0 if is_whole else total for is_whole, total in zip(whole, totals, strict=True)]
    indices, index_addresses = _split(listed, torch.int64, device)
    values, value_addresses = _side_by_side([each.values.dtype for each in tensors], totals, device)
    targets = list(zip(index_addresses, value_addresses, strict=True))
    engine.collect_changed(rows=rows, targets=targets, places=places.data_ptr(), **run_on(device))
    return [
        (_shifted(every[:total], each.first) if is_whole else own, taken)
        for each, is_whole, total, own, taken in zip(tensors, whole, totals, indices, values, strict=True)
    ]


def _side_by_side(
    dtypes: Sequence[torch.dtype], numels: Sequence[int], device: torch.device
) -> tuple[list[Tensor], list[int]]:
    """New tensors of these sizes, those of one dtype in one memory, and their addresses."""
    sizes: dict[torch.dtype, list[int]] = {}
    for dtype, numel in zip(dtypes, numels, strict=True):
        sizes.setdefault(dtype, []).append(numel)
    new = {dtype: zip(*_split(own, dtype, device), strict=True) for dtype, own in sizes.items()}
    pairs = [next(new[dtype]) for dtype in dtypes]
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
