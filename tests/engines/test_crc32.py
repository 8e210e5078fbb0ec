"""CRC-32 by the CPU engine: zlib's, whatever is summed up, in one piece or in several."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fused_optim.backends import checksum, load_engine
from fused_optim.memory.host_memory import memory_of

ENGINE, _ = load_engine("cpu")
pytestmark = pytest.mark.skipif(ENGINE is None or not ENGINE.can_fold_crc32(), reason="a processor without pclmul")
BYTES = random.Random(0).randbytes(1 << 20)


@pytest.mark.parametrize("start", [0, 1, 7, 16])
def test_every_length(start: int) -> None:
    assert ENGINE is not None
    for size in [*range(400), 1000, 4095, 4096, 4097, 65535, (1 << 20) - start]:
        content = memoryview(BYTES)[start : start + size]
        for crc in (0, 1, 0xFFFFFFFF, 0x12345678):
            assert ENGINE.crc32(content, crc) == zlib.crc32(content, crc), (size, crc)


def test_pieces() -> None:
    cuts = sorted(random.Random(1).sample(range(len(BYTES)), 50))
    crc = 0
    for begin, end in zip([0, *cuts], [*cuts, len(BYTES)], strict=True):
        crc = checksum.crc32(BYTES[begin:end], crc)
    assert crc == zlib.crc32(BYTES)


def test_whatever_has_bytes() -> None:
    array = np.frombuffer(BYTES, dtype=np.float32)
    tensor = torch.from_numpy(array.copy())  # kept: its memory is looked at
    for content in (BYTES, bytearray(BYTES), memoryview(BYTES), array, memory_of(tensor)):
        assert checksum.crc32(content) == zlib.crc32(BYTES)
    assert checksum.crc32(b"") == 0 and checksum.crc32(b"", 5) == 5
    assert ENGINE is not None
    with pytest.raises((BufferError, ValueError)):
        ENGINE.crc32(array[::2], 0)
    with pytest.raises(TypeError):
        ENGINE.crc32(3, 0)


def test_files(tmp_path: Path) -> None:
    """In pieces of the engine's own size; a file that ends says how much it had."""
    content = BYTES + BYTES[:1001]
    (tmp_path / "file").write_bytes(content)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        for start, size in [(0, len(content)), (3, 100), (7, 1 << 19), (1, (1 << 19) + 1), (5, 0), (1 << 20, 1001)]:
            expected = zlib.crc32(content[start : start + size]), size
            assert checksum.crc32_of_file(descriptor, start, size) == expected
        assert checksum.crc32_of_file(descriptor, len(content) - 10, 1 << 30) == (zlib.crc32(content[-10:]), 10)
        assert checksum.crc32_of_file(descriptor, len(content) + 10, 10) == (0, 0)
    finally:
        os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        checksum.crc32_of_file(descriptor, 0, 10)
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        checksum.crc32_of_file(folder, 0, 10)
    os.close(folder)
