"""Copies of states and parameters to the host that a GPU makes while training goes on.

These tensors change in steps only, so the copies run beside the next forward and backward pass, on a stream of their
own. Whoever in this package is about to write states or parameters calls :func:`wait_for_saves` first: the current
streams wait for the copies, the host does not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_optim.memory.layout import Versions


@dataclass
class Copy:
    """The copies that one save makes on one device. ``done`` has been recorded after the last of them.

    ``watched``: parameters by name. They are found written where someone changed them before any wait.
    """

    device: torch.device
    done: torch.cuda.Event
    watched: Sequence[tuple[str, Tensor]]
    written: str | None = None  # the name of a parameter that was

    def __post_init__(self) -> None:
        self._looking = threading.Lock()
        self._versions: list[Versions] | None = [Versions.read(param) for _, param in self.watched]

    def look(self) -> None:
        """True if someone has written a parameter since. Only the first look counts: later writes come after a wait."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        if self._versions is not None:
            for (name, param), before in zip(self.watched, self._versions, strict=True):
                now = Versions.read(param)
                if now.memory == before.memory and now != before:
                    self.written = self.written or name
            self._versions = None


_lock = threading.Lock()
_under_way: tuple[Copy, ...] = ()


def register_save(copy: Copy) -> None:
    """From now on others wait for it."""
    global _under_way
    with _lock:
        _under_way = (*_under_way, copy)


def finish(copy: Copy) -> None:
    """It is done: nobody need wait any more."""
    global _under_way
    with _lock:
        _under_way = tuple(other for other in _under_way if other is not copy)


def wait_for_saves() -> None:
    """Let the current stream of every device wait for the copies that are under way there, before something is written.

    No host synchronisation. Raises RuntimeError while a CUDA graph is captured, which could not wait again.
    """
    for copy in _under_way:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "CUDA graph capture: a save is still copying states to the host; call "
                "fused_optim.checkpoint.wait_for_copies() and torch.cuda.synchronize() before the capture"
            )
        copy.look()
        torch.cuda.current_stream(copy.device).wait_event(copy.done)
