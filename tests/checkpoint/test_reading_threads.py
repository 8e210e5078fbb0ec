"""What threads do of many jobs."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fused_optim.checkpoint.folders import done_by


@pytest.mark.parametrize("count", [0, 1, 3, 5000])
def test_results_are_in_order(count: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert done_by(pool, lambda job: job * job, range(count)) == [job * job for job in range(count)]


def test_nothing_begins_after_an_error() -> None:
    begun: list[int] = []

    def do(job: int) -> int:
        begun.append(job)
        if job == 3:
            raise KeyError(job)
        return job

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError, match="3"):
        done_by(pool, do, range(100))
    assert begun == [0, 1, 2, 3]


def test_nothing_begins_after_an_interrupt() -> None:
    """Of the thread that waits: the pool is closed at once, not when all is done."""
    begun: list[int] = []

    def do(job: int) -> None:
        begun.append(job)
        if job == 3:
            time.sleep(0.5)  # until the pool knows of this thread, and is waited for
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            time.sleep(0.5)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
            done_by(pool, do, range(100))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert begun == [0, 1, 2, 3]


def test_threads_share_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_optim.checkpoint.folders.threads_to_read", lambda: 3)
    barrier = threading.Barrier(3, timeout=30)  # which nobody passes alone
    with ThreadPoolExecutor(3) as pool:
        done_by(pool, lambda _: barrier.wait(), range(6))
