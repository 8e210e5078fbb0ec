"""SIGTERM, by which clusters announce that they take machines away."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

PATIENCE = 120.0  # seconds after the first signal in which others are repeats: schedulers and launchers both send it


class _Handler:
    """The process's handler of SIGTERM, installed as long as somebody listens."""

    def __init__(self) -> None:
        self.listeners: list[Termination] = []
        self.asked: float | None = None  # when
        self.is_over = False  # the last saves are made, and the process ends
        self._previous: Any = None

    def add(self, listener: Termination) -> None:
        """Listen to SIGTERM; does nothing outside of the main thread, which alone receives signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        _register()
        if not self.listeners:
            self.asked, self.is_over = None, False
            self._previous = signal.signal(signal.SIGTERM, self._note)
        self.listeners.append(listener)

    def remove(self, listener: Termination) -> bool:
        """True if it was the last listener, so that SIGTERM is handled as before again."""
        if listener not in self.listeners:
            return False
        self.listeners.remove(listener)
        if self.listeners:
            return False
        self._restore()
        return True

    def _restore(self) -> None:
        is_ours = signal.getsignal(signal.SIGTERM) == self._note
        if is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.listeners or (self.asked is not None and time.monotonic() - self.asked > PATIENCE):
            self._restore()
            os.kill(os.getpid(), number)
        elif self.asked is None:
            self.asked = time.monotonic()

    # --- children that are forked: they save nothing, and SIGTERM is to end them, from the first moment on ----------

    def hold_back(self) -> None:
        if self.listeners:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def let_through(self) -> None:
        if self.listeners:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def forget(self) -> None:
        if self.listeners:
            self._restore()
            self.let_through()
            self.listeners.clear()
        self.asked = None


_handler = _Handler()


@functools.cache
def _register() -> None:
    os.register_at_fork(before=_handler.hold_back, after_in_parent=_handler.let_through, after_in_child=_handler.forget)


class Termination:
    """Notes the first SIGTERM from now on; repeats are ignored for :data:`PATIENCE` seconds.

    All of a process's share one handler: ``asked`` is true of all of them.
    """

    def __init__(self) -> None:
        self.is_used = False  # whether its owner saves at all
        self.has_ended = False  # its owner has made the last save
        _handler.add(self)

    @property
    def asked(self) -> bool:
        return _handler.asked is not None and self in _handler.listeners

    def note(self) -> None:
        """Note that another rank was asked to end."""
        if _handler.asked is None:
            _handler.asked = time.monotonic()

    def end(self) -> bool:
        """Note that the owner's last save is made. Returns True if all other owners that save have made theirs, too."""
        self.has_ended = True
        _handler.is_over = all(each.has_ended for each in _handler.listeners if each.is_used)
        return _handler.is_over

    def close(self) -> None:
        """Stop listening. A signal that came and was not answered is sent again if nobody else listens."""
        was_asked = self.asked
        if _handler.remove(self) and was_asked and not _handler.is_over:
            os.kill(os.getpid(), signal.SIGTERM)
