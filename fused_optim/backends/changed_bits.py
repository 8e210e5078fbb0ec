"""One bit for each element of a tensor, whether it has changed: set by comparing, and turned into indices and values.

Bit ``e % 8`` of byte ``e // 8`` is that of element ``e``; those beyond the last element stay 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
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
    tensors = list(marked)
    by_device: dict[torch.device, list[int]] = {}
    found: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(tensors)
    for i, each in enumerate(tensors):
        by_device.setdefault(each.values.device, []).append(i)
    for device, members in by_device.items():
        own = [tensors[i] for i in members]
        backend = backend_of(own[0].values)
        engine = None if backend == "torch" else load_engine(backend)[0]
        taken = [_by_torch(each) for each in own] if engine is None else _by_engine(engine, own, device)
        for i, pair in zip(members, taken, strict=True):
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


def _by_engine(engine: Engine, tensors: Sequence[MarkedTensor], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    rows = [
        (bits.data_ptr(), values.numel(), values.data_ptr(), first, values.element_size())
        for bits, values, first in tensors
    ]
    units = sum(-(-numel // engine.CHANGES_PER_UNIT) for _, numel, *_ in rows)
    places = torch.empty(units + len(rows), dtype=torch.int64, device=device)
    totals = engine.count_changed(rows=rows, places=places.data_ptr(), **run_on(device))
    # Where all elements are marked they are copied, and one tensor has the indices of all such tensors.
    whole = [0 < total == row[1] for row, total in zip(rows, totals, strict=True)]
    every = torch.arange(max(compress(totals, whole), default=0), device=device)
    listed = [0 if is_whole else total for is_whole, total in zip(whole, totals, strict=True)]
    indices = _split(listed, torch.int64, device)
    values = _side_by_side([each.values for each in tensors], totals)
    targets = [
        (0 if is_whole else of_indices.data_ptr(), of_values.data_ptr()) if total else (0, 0)
        for is_whole, of_indices, of_values, total in zip(whole, indices, values, totals, strict=True)
    ]
    engine.collect_changed(rows=rows, targets=targets, places=places.data_ptr(), **run_on(device))
    return [
        (_shifted(every[:total], each.first) if is_whole else own, taken)
        for each, is_whole, total, own, taken in zip(tensors, whole, totals, indices, values, strict=True)
    ]


def _shifted(indices: Tensor, first: int) -> Tensor:
    return indices + first if first else indices


def _side_by_side(like: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
    """New tensors of these sizes, those of one dtype in one memory."""
    sizes: dict[torch.dtype, list[int]] = {}
    for tensor, numel in zip(like, numels, strict=True):
        sizes.setdefault(tensor.dtype, []).append(numel)
    device = like[0].device
    new = {dtype: iter(_split(own, dtype, device)) for dtype, own in sizes.items()}
    return [next(new[tensor.dtype]) for tensor in like]


def _split(numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    """Parts of one new tensor. It has up to an eighth more room: takes of about as much find the same memory."""
    total = sum(numels)
    step = 1 << max(total.bit_length() - 4, 0)
    room = torch.empty(-(-total // step) * step, dtype=dtype, device=device)
    parts: Sequence[Tensor] = room.narrow(0, 0, total).split(list(numels))
    return parts
