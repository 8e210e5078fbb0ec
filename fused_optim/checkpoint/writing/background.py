"""Work behind training's back that the end of the process waits for, and whose failures nobody overlooks."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
from concurrent.futures import Future, thread, wait  # noqa: F401  the pools register first: the last one is called first

from fused_optim.checkpoint.storage.lock import release_all

logger = logging.getLogger("fused_optim")

_untold: dict[Future[str | None], None] = {}  # jobs whose outcome nobody has asked for


def watched(job: Future[str | None]) -> Future[str | None]:
    """Register a job, which returns None or an error message. The end of the process waits for it.

    A process whose jobs failed without anybody asking for their :func:`outcome` ends with an error and status 1.
    """
    _register()
    _untold[job] = None
    return job


@functools.cache
def _register() -> None:
    """With the first save: other programs' ends are left alone."""
    atexit.register(_tell)
    threading._register_atexit(_drain)  # type: ignore[attr-defined]  # Python has no public way
    os.register_at_fork(after_in_child=_untold.clear)


def outcome(future: Future[str | None]) -> str | None:
    """Wait for a job. Returns its error message, or None."""
    try:
        return future.result()
    finally:
        _untold.pop(future, None)


def _drain() -> None:
    """Wait for all jobs before ``concurrent.futures`` closes its pools, which they use."""
    wait(list(_untold))
    release_all()


def _tell() -> None:
    """Report failures nobody has asked for, at the end of the process, when all threads have ended."""
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
