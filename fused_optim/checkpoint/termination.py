"""SIGTERM, by which clusters announce that they take machines away."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

EXIT_STATUS = 128 + signal.SIGTERM  # of a process that the signal has ended


class Termination:
    """From now on the first SIGTERM is noted; a second one does what it would have done before.

    Only the main thread can receive signals: made in another one, this notes none.
    """

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.restore()
            os.kill(os.getpid(), number)
        self.asked = True

    def restore(self) -> None:
        """SIGTERM does again what it did before."""
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
            self._installed = False
