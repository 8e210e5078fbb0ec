"""How many threads read and write files."""

from __future__ import annotations

import os

MOST = 8


def threads() -> int:
    """As many as help, on the cores that this process may use."""
    return min(MOST, len(os.sched_getaffinity(0)))
