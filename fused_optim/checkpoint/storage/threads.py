"""How many threads read and write files."""

from __future__ import annotations

import os

_WRITING = 8  # training goes on meanwhile
_READING = 16


def threads() -> int:
    """As many as help to write, on the cores that this process may use."""
    return min(_WRITING, len(os.sched_getaffinity(0)))


def threads_to_read() -> int:
    """Likewise to read, and to sum up what was read, which nothing else waits for."""
    return min(_READING, len(os.sched_getaffinity(0)))
