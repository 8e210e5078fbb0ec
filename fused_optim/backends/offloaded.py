"""States in host memory: chunk by chunk they come to the device, are updated there, and go back.

While one chunk is updated the next one is on its way in and the one before on its way out, so both directions of the
link are busy. A chunk consists of whole shards, or of parts of a large one. Its update is any backend's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from fused_optim.backends import Backend, ShardWork, uncounted
from fused_optim.backends.engine import CachedShard
from fused_optim.backends.shards import shards_on
from fused_optim.memory.host_memory import can_be_streamed
from fused_optim.rules import Hyper, Rule
from fused_optim.sharding.dtensor import Geometry, local_tensor

CHUNK_BYTES = 32 << 20  # of states, in a buffer on the device
_BUFFERS = 3  # on their way in, being updated, on their way out
_ALIGNMENT = 256


class HostTransfer:
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
    """The elements of a shard from ``start`` to ``end``, and their states in host memory.

    ``values``: the rule's states, and the master if there is one. ``scales``: of each of them that has some.
    ``nbytes``: what both take in a buffer.
    """

    start: int
    end: int
    geometry: Geometry
    values: list[Tensor]
    scales: list[Tensor]
    nbytes: int

    @staticmethod
    def of(work: ShardWork, start: int, end: int) -> _Part:
        layout, whole = work.layout, work.layout.geometry
        states = [*work.states, *([] if work.master is None else [work.master])]
        scales = [scale for scale in map(layout.scale, layout.names) if scale is not None]
        if (start, end) == (0, whole.numel):
            scales = [layout.scales] if scales else []
        else:
            scales = [scale[start // whole.block : -(-end // whole.block)] for scale in scales]
        values = [state.view(-1)[start:end] for state in states]
        size = sum(_rounded(value.nbytes) for value in values) + _rounded(sum(scale.nbytes for scale in scales))
        return _Part(start, end, whole.part(start, end), values, scales, size)

    def moved_to(self, buffer: Tensor, work: ShardWork) -> tuple[ShardWork, list[tuple[Tensor, Tensor]]]:
        """The work with copies of the states in ``buffer``, and what is to be copied: (host, device)."""
        pairs, used = [], 0
        for value in self.values:
            pairs.append((value, buffer[used : used + value.nbytes].view(value.dtype)))
            used += _rounded(value.nbytes)
        first = used
        for scale in self.scales:  # one after the other, as in layouts
            pairs.append((scale, buffer[used : used + scale.nbytes].view(scale.dtype)))
            used += scale.nbytes
        layout, count = work.layout, len(work.states)
        moved_states = tuple(staged for _, staged in pairs[:count])
        moved = ShardWork(
            grad=work.grad.view(-1)[self.start : self.end],
            param=work.param.view(-1)[self.start : self.end],
            master=None if work.master is None else pairs[count][1],
            states=moved_states,
            layout=replace(layout, geometry=self.geometry, scales=buffer[first:used].view(torch.float32), offloaded=()),
            key=work.key,
        )
        return moved, pairs


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _cut(work: ShardWork, most: int) -> list[_Part]:
    """Cuts of a shard into parts whose states take at most ``most`` bytes."""
    layout = work.layout
    per_element = sum(dtype.itemsize for dtype in layout.dtypes().values()) or 1  # there may be nothing to move
    if scaled := sum(layout.format(name).scaled for name in layout.names):
        per_element += -(-4 * scaled // layout.geometry.block)
    cuts = layout.geometry.cuts(max(most // per_element, 1))
    return [_Part.of(work, start, end) for start, end in pairwise(cuts) if end > start]


@dataclass(frozen=True)
class StreamedShards:
    """Shards of one device and rule whose states are in host memory. ``groups``: the param group of each.

    ``parts``: of each shard that was updated before, the addresses of its states and its parts then.
    """

    device: torch.device
    backend: Backend
    groups: list[int]
    group_count: int
    rule: Rule
    link: HostTransfer
    parts: dict[int, tuple[tuple[int, ...], list[_Part]]] = field(default_factory=dict)


def is_locked(cached: CachedShard, device: torch.device) -> bool:
    """True if a shard's states are page-locked still. Asked in every step: no other guard sees that."""
    states = *cached.state_tensors, cached.master
    return all(state is None or can_be_streamed(local_tensor(state), device) for state in states)


def update_streamed(
    shards: StreamedShards, works: Iterable[tuple[int, ShardWork]], hypers: list[Hyper], workspace: Tensor | None
) -> None:
    """Update shards chunk by chunk. ``works``: by number, ascending; asked for one by one, while chunks are under way.

    The last chunk, which may be empty, advances the step counters of ``hypers``.
    """
    chunk: list[tuple[int, ShardWork, _Part]] = []
    size = 0
    for index, work in works:
        states = (*work.states, work.master, work.layout.scales)
        places = CHUNK_BYTES, *(0 if state is None else state.data_ptr() for state in states)
        if index not in shards.parts or shards.parts[index][0] != places:
            shards.parts[index] = places, _cut(work, CHUNK_BYTES)
        for part in shards.parts[index][1]:
            if chunk and size + part.nbytes > CHUNK_BYTES:
                _update_chunk(shards, chunk, uncounted(hypers), workspace)
                chunk, size = [], 0
            chunk.append((index, work, part))
            size += part.nbytes
    _update_chunk(shards, chunk, hypers, workspace)


def _update_chunk(
    shards: StreamedShards, chunk: list[tuple[int, ShardWork, _Part]], hypers: list[Hyper], workspace: Tensor | None
) -> None:
    buffer = shards.link.buffer(sum(part.nbytes for _, _, part in chunk))
    groups = [shards.groups[i] for i, _, _ in chunk]
    staged = shards_on(shards.device, shards.backend, groups, shards.group_count, shards.rule)
    pairs, used = [], 0
    for number, (_, work, part) in enumerate(chunk):
        moved, copied = part.moved_to(buffer[used:], work)
        staged.set(number, moved, None)
        pairs += copied
        used += part.nbytes
    with shards.link.moved(pairs):
        staged.run(hypers, workspace)
