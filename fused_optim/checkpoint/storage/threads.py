"""Threads that read and write files: their number, and how they share jobs."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_WRITING = 8  # training goes on meanwhile
_READING = 16

T = TypeVar("T")
Result = TypeVar("Result")


def threads() -> int:
    """The number of threads that write, by the cores that this process may use."""
    return min(_WRITING, len(os.sched_getaffinity(0)))


def threads_to_read() -> int:
    """The number of threads that read and compute checksums; more than write, since nothing else runs meanwhile."""
    return min(_READING, len(os.sched_getaffinity(0)))


def done_by(pool: ThreadPoolExecutor, do: Callable[[T], Result], jobs: Iterable[T]) -> list[Result]:
    """``pool.map``, without a future for each of thousands of jobs. After what raises, no other job begins."""
    waiting = deque(enumerate(jobs))
    results: dict[int, Result] = {}

    def work() -> None:
        while waiting:
            try:
                number, job = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[number] = do(job)
            except BaseException:
                waiting.clear()
                raise

    try:
        for worker in [pool.submit(work) for _ in range(min(threads_to_read(), len(waiting)))]:
            worker.result()
    finally:  # Ctrl+C comes here
        waiting.clear()
    return [results[number] for number in range(len(results))]
