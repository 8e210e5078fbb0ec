"""What torch.distributed.checkpoint says where one process calls it, and where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

SINGLE_PROCESS = "torch.distributed is disabled"  # its warning


@contextmanager
def in_one_process() -> Iterator[None]:
    """Without the warning that there are no other ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SINGLE_PROCESS)
        yield


def cause(error: BaseException) -> BaseException:
    """What went wrong, without torch's wrapping."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)
