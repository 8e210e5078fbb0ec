"""CRC-32 of bytes, as ``zlib.crc32``: by the CPU engine, where the processor makes that several times as fast.

Checkpoints are summed up twice as they are written, and once as they are read.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

from fused_optim.backends import load_engine
from fused_optim.backends.engine import CpuEngine

_LEAST = 1 << 10  # bytes for which the call pays


def crc32(content: Any, crc: int = 0) -> int:
    """CRC-32 of contiguous bytes that follow others with CRC-32 ``crc``. Long ones release the interpreter's lock."""
    engine = _engine() if memoryview(content).nbytes >= _LEAST else None
    return zlib.crc32(content, crc) if engine is None else engine.crc32(content, crc)


def crc32_of_file(descriptor: int, start: int, size: int) -> tuple[int, int] | None:
    """The CRC-32 of up to ``size`` bytes of an open file, and their number: fewer at its end.

    None where no engine does it: the file is read by the caller then. Raises OSError.
    """
    engine = _engine()
    return None if engine is None else engine.crc32_of_file(descriptor, start, size)


@functools.cache
def _engine() -> CpuEngine | None:
    engine, _ = load_engine("cpu")
    return engine if engine is not None and engine.can_fold_crc32() else None
