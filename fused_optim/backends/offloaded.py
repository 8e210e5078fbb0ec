"""States in host memory: chunk by chunk they come to the device, are updated there, and go back.

While one chunk is updated the next one is on its way in and the one before on its way out, so both directions of the
link are busy. A chunk consists of whole shards, or of parts of a large one. Its update is any backend's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from fused_optim.backends import Backend, Hyper, ShardWork, uncounted
from fused_optim.backends.shards import ReferenceShards, shards_on
from fused_optim.slots import STATES

CHUNK_BYTES = 32 << 20  # of states, in a buffer on the device
_BUFFERS = 3  # on their way in, being updated, on their way out
_ALIGNMENT = 256


class Link:
    """Buffers on one device, and the copies between them and host memory. All plans of an optimizer share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor | None] = [None] * _BUFFERS
        self._turn = 0
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._free = [torch.cuda.Event() for _ in range(_BUFFERS)]

    def buffer(self, size: int) -> Tensor:
        """At least ``size`` bytes on the device, for the next :meth:`moved`."""
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.nbytes < size:
            with torch.inference_mode(False):  # a step made in it would leave memory for no other
                buffer = self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, device=self._device)
            if self._on_gpu:
                self._in.wait_stream(torch.cuda.current_stream(self._device))  # which may still use this memory
                buffer.record_stream(self._in)
                buffer.record_stream(self._out)
        if self._on_gpu:
            buffer.record_stream(torch.cuda.current_stream(self._device))
        return buffer

    @contextmanager
    def moved(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Within it, what the current stream does to parts of the last buffer is done to tensors in host memory.

        ``pairs``: (in host memory, on the device). On a GPU the copies back are only under way at the end; see
        :meth:`synchronize`.
        """
        turn, self._turn = self._turn, (self._turn + 1) % _BUFFERS
        if not self._on_gpu:
            for host, staged in pairs:
                staged.copy_(host)
            yield
            for host, staged in pairs:
                host.copy_(staged)
            return
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._in):
            self._in.wait_event(self._free[turn])
            for host, staged in pairs:
                staged.copy_(host, non_blocking=True)
        current.wait_stream(self._in)
        yield
        self._out.wait_stream(current)
        with torch.cuda.stream(self._out):
            for host, staged in pairs:
                host.copy_(staged, non_blocking=True)
            self._free[turn].record(self._out)

    def synchronize(self) -> None:
        """Wait until everything is in host memory."""
        if self._on_gpu:
            self._out.synchronize()


@dataclass(frozen=True)
class _Part:
    """The elements of a shard from ``start`` to ``end``, with their states in host memory."""

    index: int  # of the shard
    work: ShardWork
    start: int
    end: int

    @property
    def values(self) -> list[Tensor]:
        """Moments, and the master if there is one."""
        states = (self.work.exp_avg, self.work.exp_avg_sq, self.work.master)
        return [state.view(-1)[self.start : self.end] for state in states if state is not None]

    @property
    def scales(self) -> list[Tensor]:
        slots, block = self.work.slots, self.work.slots.geometry.block
        if (self.start, self.end) == (0, slots.geometry.numel):
            return [slots.scales] if slots.scales.numel() else []
        found = [scale for scale in map(slots.scale, STATES) if scale is not None]
        return [scale[self.start // block : -(-self.end // block)] for scale in found]

    @property
    def nbytes(self) -> int:
        """What a buffer needs for it."""
        return sum(map(_aligned, self.values)) + _rounded(sum(scale.nbytes for scale in self.scales))

    def moved_to(self, buffer: Tensor) -> tuple[ShardWork, list[tuple[Tensor, Tensor]]]:
        """The work with the states in ``buffer``, and what is to be copied there and back: (host, device)."""
        pairs, used = [], 0
        for value in self.values:
            pairs.append((value, buffer[used : used + value.nbytes].view(value.dtype)))
            used += _aligned(value)
        staged, first = [each for _, each in pairs], used
        for scale in self.scales:  # one after the other, as in slots
            pairs.append((scale, buffer[used : used + scale.nbytes].view(scale.dtype)))
            used += scale.nbytes
        work = self.work
        geometry = work.slots.geometry.part(self.start, self.end)
        moved = replace(
            work,
            grad=work.grad.view(-1)[self.start : self.end],
            param=work.param.view(-1)[self.start : self.end],
            exp_avg=staged[0],
            exp_avg_sq=staged[1],
            master=staged[2] if work.master is not None else None,
            slots=replace(work.slots, geometry=geometry, scales=buffer[first:used].view(torch.float32)),
        )
        return moved, pairs


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _aligned(tensor: Tensor) -> int:
    return _rounded(tensor.nbytes)


def _parts(index: int, work: ShardWork, most: int) -> Iterator[_Part]:
    slots = work.slots
    per_element = sum(dtype.itemsize for dtype in slots.dtypes().values())
    scales = sum(slots.format(name).scaled for name in STATES)
    if scales:
        per_element += -(-4 * scales // slots.geometry.block)
    cuts = slots.geometry.cuts(max(most // per_element, 1))
    return (_Part(index, work, start, end) for start, end in pairwise(cuts) if end > start)


def _chunks(works: dict[int, ShardWork], most: int) -> Iterator[list[_Part]]:
    """All elements, in the order of the shards."""
    chunk: list[_Part] = []
    size = 0
    for part in chain.from_iterable(_parts(index, work, most) for index, work in sorted(works.items())):
        if chunk and size + part.nbytes > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(part)
        size += part.nbytes
    yield chunk  # also where there is none: the step is counted


class OffloadedShards(ReferenceShards):
    """Shards whose states are in host memory, described anew at every step."""

    def __init__(self, device: torch.device, backend: Backend, groups: list[int], group_count: int, link: Link) -> None:
        super().__init__(groups)
        self._device, self._backend, self._group_count, self._link = device, backend, group_count, link

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        works, self._work = self._work, {}
        chunks = list(_chunks(works, CHUNK_BYTES))
        for chunk in chunks:
            counting = hypers if chunk is chunks[-1] else uncounted(hypers)
            buffer = self._link.buffer(sum(part.nbytes for part in chunk))
            moved, used = [], 0
            for part in chunk:
                moved.append(part.moved_to(buffer[used:]))
                used += part.nbytes
            shards = shards_on(
                self._device, self._backend, [self._groups[part.index] for part in chunk], self._group_count
            )
            for number, (work, _) in enumerate(moved):
                shards.set(number, work, None)
            with self._link.moved([pair for _, pairs in moved for pair in pairs]):
                shards.run(counting, workspace)
