"""Large tensors of the host on their way to GPUs, through page-locked memory.

The driver copies pageable memory several times slower, on one thread that waits for the GPU; to page-lock what is to be
copied, and to release it again, takes longer than copying it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fused_optim.memory.host_memory import HostBuffers
from fused_optim.sharding.dtensor import is_dense

_PIECE = 1 << 24  # bytes of a buffer
_BUFFERS = 2  # one is filled while the other is on its way
_LARGE = 1 << 21  # bytes of a tensor that goes through them


@contextmanager
def uploading() -> Iterator[None]:
    """Meanwhile :func:`copy_into` and :func:`moved` have buffers, which the first large tensor makes."""
    ring = _Ring()
    before = _ring.set(ring)
    try:
        yield
    finally:
        _ring.reset(before)
        ring.wait()


def copy_into(target: Tensor, source: Tensor) -> None:
    """``target.copy_(source)``. ``source`` may be changed or freed at once."""
    ring = _ring.get()
    if ring is None or not _is_worth_it(target, source) or not ring.buffers:
        target.copy_(source)
    else:
        ring.copy(*(each.view(-1).view(torch.uint8) for each in (target, source)))


def moved(source: Tensor, device: torch.device) -> Tensor:
    """``source.to(device)``."""
    if source.device.type == device.type:
        return source.to(device)
    target = torch.empty_like(source, device=device)
    copy_into(target, source)
    return target


def _is_worth_it(target: Tensor, source: Tensor) -> bool:
    from_host = target.is_cuda and source.device.type == "cpu" and source.nbytes >= _LARGE and not source.is_pinned()
    alike = (target.dtype, target.shape) == (source.dtype, source.shape)
    return from_host and alike and is_dense(target) and is_dense(source)


class _Ring:
    """Page-locked buffers that are used in turns: made when the first is needed, none where the system does not let."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] | None = None
        self._next = 0

    @property
    def buffers(self) -> list[_Buffer]:
        if self._buffers is None:
            self._buffers = [_Buffer(memory) for memory in _page_locked()]
        return self._buffers

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes to a GPU, through page-locked buffers in turn; both tensors are flat and equally long."""
        for own, part in zip(target.split(_PIECE), source.split(_PIECE), strict=True):
            self.buffers[self._next].copy(own, part)
            self._next = (self._next + 1) % _BUFFERS

    def wait(self) -> None:
        for buffer in self._buffers or ():
            buffer.wait()


def _page_locked() -> list[Tensor]:
    try:
        return HostBuffers([_PIECE] * _BUFFERS, locked=True, shared=False).tensors
    except (RuntimeError, OSError):
        return []


class _Buffer:
    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._sent: torch.cuda.Event | None = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.wait()
        part = self._memory[: source.nbytes]
        part.copy_(source)
        target.copy_(part, non_blocking=True)
        self._sent = torch.cuda.current_stream(target.device).record_event()

    def wait(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()


_ring: ContextVar[_Ring | None] = ContextVar("ring", default=None)
