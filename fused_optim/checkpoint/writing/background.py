"""Work behind training's back that the end of the process waits for, and whose failures nobody overlooks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, thread, wait  # noqa: F401  the pools register first: the last one is called first

logger = logging.getLogger("fused_optim")

_untold: dict[Future[str | None], None] = {}  # jobs whose outcome nobody has asked for


class Background:
    """Runs jobs one after the other. Each returns what went wrong, if anything did.

    Every job has a thread of its own, which the interpreter waits for at its end: a pool's workers would be stopped
    first. A process whose jobs failed without anybody asking ends with an error and status 1.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: threading.Thread | None = None

    def submit(self, job: Callable[[], str | None]) -> Future[str | None]:
        future: Future[str | None] = Future()
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            try:
                future.set_result(job())
            except BaseException as error:  # raised where the outcome is asked for
                future.set_exception(error)

        _untold[future] = None
        self._last = threading.Thread(target=run, name=self._name)
        self._last.start()
        return future


def outcome(future: Future[str | None]) -> str | None:
    """What went wrong in a job, if anything did. Waits for it."""
    try:
        return future.result()
    finally:
        _untold.pop(future, None)


def _drain() -> None:
    """Before the pools of ``concurrent.futures`` are closed, which clients of object stores use."""
    wait(list(_untold))


def _tell() -> None:
    """At the end of the process, when all threads have ended."""
    failures = []
    for future in list(_untold):
        try:
            failures.append(outcome(future))
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {error}")
    if failures := [text for text in failures if text is not None]:
        for text in failures:
            logger.error("%s", text)
            print(f"fused_optim: {text}", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an error that is raised here would not change the status


atexit.register(_tell)
threading._register_atexit(_drain)  # type: ignore[attr-defined]  # Python has no public way
os.register_at_fork(after_in_child=_untold.clear)
