"""States in host memory: chunk by chunk they come to the device, are updated there, and go back.

While one chunk is updated the next one is on its way in and the one before on its way out, so both directions of the
link are busy. A chunk consists of whole shards, or of parts of a large one. Its update is any backend's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from fused_optim.backends import Backend, ShardWork, uncounted
from fused_optim.backends.engine import CachedShard
from fused_optim.backends.shards import shards_on
from fused_optim.memory.host_memory import can_be_streamed
from fused_optim.memory.layout import StateLayout
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


class OffloadedShards:
    """Shards whose states are in host memory. What has changed since the step before is noticed as of resident ones.

    A step plans each chunk while those before are under way. Before the first one it does only what may raise.
    """

    def __init__(
        self,
        device: torch.device,
        backend: Backend,
        groups: list[int],
        group_count: int,
        rule: Rule,
        link: HostTransfer,
    ) -> None:
        self._device, self._backend, self._rule, self._link = device, backend, rule, link
        self._groups, self._group_count = groups, group_count
        self._whole = shards_on(device, backend, groups, group_count, rule, torch.device("cpu"))
        self.works = self._whole.works
        self._cached: list[CachedShard] = []
        self._attribute = ""
        self._lasting: dict[int, tuple[StateLayout, int]] = {}  # by shard: its layout and key
        self._known: dict[int, tuple[tuple[int, ...], list[_Part]]] = {}  # by shard: where its states were; its parts

    def refresh(self, cached: list[CachedShard], attribute: str) -> Sequence[int]:
        self._cached, self._attribute = cached, attribute
        stale = self._whole.refresh(cached, attribute)
        return sorted({*stale, *(i for i in self._whole.with_gradients() if not self._is_locked(cached[i]))})

    def _is_locked(self, cached: CachedShard) -> bool:
        """Asked in every step: no other guard sees that the memory of a tensor is not page-locked any more."""
        states = *cached.state_tensors, cached.master
        return all(state is None or can_be_streamed(local_tensor(state), self._device) for state in states)

    def set(self, shard: int, work: ShardWork, cached: CachedShard | None) -> bool:
        self._lasting[shard] = work.layout, work.key
        return self._whole.set(shard, work, cached)

    def drop_param(self, shard: int) -> None:
        self._whole.drop_param(shard)
        self._lasting.pop(shard, None)
        self._known.pop(shard, None)

    def written(self) -> Sequence[int]:
        return self._whole.written()

    def find_written(self, cached: list[CachedShard]) -> Sequence[int]:
        return self._whole.find_written(cached)

    def sharing(self) -> Sequence[int]:
        return self._whole.sharing()

    def takes_target(self, layout: StateLayout) -> bool:
        return False

    def with_gradients(self) -> Sequence[int]:
        return self._whole.with_gradients()

    def updated(self, cached: list[CachedShard]) -> list[Tensor]:
        return self._whole.updated(cached)

    def mark(self, cached: list[CachedShard]) -> None:
        self._whole.mark(cached)
        self.works.clear()

    def groups_with_gradients(self) -> Sequence[int]:
        return self._whole.groups_with_gradients()

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        for chunk, is_last in self._chunks():
            buffer = self._link.buffer(sum(part.nbytes for _, _, part in chunk))
            groups = [self._groups[i] for i, _, _ in chunk]
            shards = shards_on(self._device, self._backend, groups, self._group_count, self._rule)
            pairs, used = [], 0
            for number, (_, work, part) in enumerate(chunk):
                moved, copied = part.moved_to(buffer[used:], work)
                shards.set(number, moved, None)
                pairs += copied
                used += part.nbytes
            with self._link.moved(pairs):
                shards.run(hypers if is_last else uncounted(hypers), workspace)

    def _chunks(self) -> Iterator[tuple[list[tuple[int, ShardWork, _Part]], bool]]:
        """Chunks of parts with their shards, in order, each with a flag: the last chunk, which exists in any case.

        Planned as they are asked for.
        """
        chunk: list[tuple[int, ShardWork, _Part]] = []
        size = 0
        for index in self._whole.with_gradients():
            work = self._work(index)
            for part in self._parts(index, work):
                if chunk and size + part.nbytes > CHUNK_BYTES:
                    yield chunk, False
                    chunk, size = [], 0
                chunk.append((index, work, part))
                size += part.nbytes
        yield chunk, True

    def _work(self, index: int) -> ShardWork:
        """The work that was set for this step, or else the unchanged tensors of the last one."""
        if index in self.works:
            return self.works[index]
        cached = self._cached[index]
        param = cached.param_ref()
        assert param is not None
        layout, key = self._lasting[index]
        return ShardWork(
            grad=local_tensor(getattr(param, self._attribute)),
            param=local_tensor(param),
            master=None if cached.master is None else local_tensor(cached.master),
            states=tuple(local_tensor(state) for state in cached.state_tensors if state is not None),
            layout=layout,
            key=key,
        )

    def _parts(self, index: int, work: ShardWork) -> list[_Part]:
        """The parts of the last step, unless the states have moved."""
        states = (*work.states, work.master, work.layout.scales)
        places = CHUNK_BYTES, *(0 if state is None else state.data_ptr() for state in states)
        if index not in self._known or self._known[index][0] != places:
            self._known[index] = places, _cut(work, CHUNK_BYTES)
        return self._known[index][1]
