"""Streams on which updates run beside the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.sharding.dtensor import local_tensor


class SideStreams:
    """One stream for each GPU; parameters in host memory have none."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, _Lane] = {}

    def beside(self, params: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """For the update of these parameters of one device: after what is enqueued now, beside what comes then."""
        device = local_tensor(params[0]).device
        if device.type != "cuda":
            _await_offloaded(params[0])
            return nullcontext()
        with torch._C.DisableTorchFunctionSubclass():  # of a DTensor, `.grad` is slow where torch looks for it
            grads = [param.grad for param in params]
        return self._lane(device).beside(grads)

    def waiting(self, params: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """For what an update of these parameters has to wait for, and nothing else."""
        device = local_tensor(params[0]).device
        return nullcontext() if device.type != "cuda" else self._lane(device).entered()

    def join(self) -> None:
        """Make the current streams wait for all updates that were enqueued so far."""
        for lane in self._lanes.values():
            lane.join()

    def _lane(self, device: torch.device) -> _Lane:
        return self._lanes.get(device) or self._lanes.setdefault(device, _Lane(device))


class _Lane:
    """The stream of one GPU.

    The gradients of an update are kept until the next one is enqueued. Then others wait for the former, and its memory
    is theirs at once, however far the host is ahead. ``record_stream`` would keep it until the GPU is there: where the
    host is ahead by a backward pass, nothing would be saved. Memory may be taken by the stream that computes, or by one
    of FSDP2's that waits for it before it reduces what comes next, so both wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._computing = torch.cuda.default_stream(device)  # as known from the last step on
        # Recorded again and again: who was told to wait does so for what had been recorded by then.
        self._ready, self._updated = torch.cuda.Event(), torch.cuda.Event()
        self._last: list[Tensor | None] | None = None  # the gradients of the update that was recorded last

    @contextmanager
    def beside(self, grads: list[Tensor | None]) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        with self._after(current):
            yield
        if current == self._stream:  # of buffers that are DistributedDataParallel's, and stay
            return
        if self._last is not None:
            current.wait_event(self._updated)
            if self._computing != current:
                self._computing.wait_event(self._updated)
        self._updated.record(self._stream)
        self._last = grads

    def entered(self) -> AbstractContextManager[Any]:
        return self._after(torch.cuda.current_stream(self._device))

    def _after(self, current: torch.cuda.Stream) -> AbstractContextManager[Any]:
        if current != self._stream:
            self._ready.record(current)
            self._stream.wait_event(self._ready)
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        self._computing = torch.cuda.current_stream(self._device)
        self._computing.wait_stream(self._stream)
        self._last = None


def _await_offloaded(param: Tensor) -> None:
    """FSDP2 of torch before 2.13 calls hooks while gradients are still on their way from a GPU to host memory."""
    if isinstance(param, DTensor) and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
