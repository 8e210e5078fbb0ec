"""How many threads read and write files, and threads that write while the interpreter ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_WRITING = 8  # training goes on meanwhile
_READING = 16


def threads() -> int:
    """As many as help to write, on the cores that this process may use."""
    return min(_WRITING, len(os.sched_getaffinity(0)))


def threads_to_read() -> int:
    """Likewise to read, and to sum up what was read, which nothing else waits for."""
    return min(_READING, len(os.sched_getaffinity(0)))


def in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``function`` of every item, each on a thread of its own; the first error is raised once all of them have ended.

    Pools of ``concurrent.futures`` take no work any more once the main thread has ended; saves go on then.
    """
    results: list[R | BaseException] = [RuntimeError("not run")] * len(items)

    def run(i: int) -> None:
        try:
            results[i] = function(items[i])
        except BaseException as error:  # raised below
            results[i] = error

    started = [threading.Thread(target=run, args=(i,), name=f"fused_optim {i}") for i in range(1, len(items))]
    for thread in started:
        thread.start()
    if items:
        run(0)
    for thread in started:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # none of them is an error
