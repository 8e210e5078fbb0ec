"""Python's garbage collection, while checkpoints are described."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Many objects are made that stay. Looking through them again and again takes as long as making them, and training
    waits for it in whatever thread it is done."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
