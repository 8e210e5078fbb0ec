"""Writes the bytes that ``torch.save`` writes for tensors, without running it for each.

Its files are ZIP archives. For tensors of one kind they differ only in the values and their CRC-32, so one tensor of
each kind is saved by torch, which shows the bytes around the values of all others. A save of many tensors then takes
little of the interpreter's time, which training needs for itself.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.backends.checksum import crc32
from fused_optim.checkpoint.metadata import load_object
from fused_optim.memory.host_memory import empty_host, memory_of

Write = Callable[[Any], object]

_NAME = b"/data/0"  # of the file that holds the values
# Of the ZIP format (APPNOTE 4.3): signatures, lengths of what precedes a name, where the CRC-32 is. Values are followed
# by a descriptor with their CRC-32; the directory at the end repeats it.
_HEADER, _HEADER_NAME, _HEADER_LENGTHS = b"PK\x03\x04", 30, 26
_DESCRIPTOR, _DESCRIPTOR_CRC = b"PK\x07\x08", 4
_ENTRY, _ENTRY_CRC = b"PK\x01\x02", 16


@dataclass(frozen=True)
class _Frame:
    """The bytes around the values; ``places``: where their CRC-32 is in those that follow."""

    before: bytes
    after: bytes
    places: tuple[int, ...]

    def write(self, values: memoryview, write: Write) -> None:
        after = bytearray(self.after)
        crc = crc32(values)
        for place in self.places:
            struct.pack_into("<I", after, place, crc)
        write(self.before)
        write(values)
        write(after)


class Archives:
    """Writes tensors as ``torch.save`` does, but for the identifier that torch gives each of its archives."""

    def __init__(self) -> None:
        self._frames: dict[tuple[Any, ...], _Frame | None] = {}

    def prepare(self, dtype: torch.dtype, shape: torch.Size) -> None:
        """Learn the bytes around the values of such a tensor before one is saved."""
        self.save(empty_host(shape, dtype), lambda content: None)

    def save(self, tensor: Tensor, write: Write) -> None:
        """Pass the bytes to ``write``, piece by piece. Of a view, only the elements that it shows."""
        if not _is_plain(tensor):
            torch.save(_whole(tensor), _Writer(write))  # type: ignore[arg-type]  # it only writes
            return
        kind = tensor.dtype, tensor.shape, tensor.stride()
        frame = self._frames.get(kind)
        if frame is not None:
            frame.write(memory_of(tensor), write)
        elif kind in self._frames:
            torch.save(_whole(tensor), _Writer(write))  # type: ignore[arg-type]
        else:
            recorder = _Recorder(tensor := _whole(tensor), write)
            torch.save(tensor, recorder)  # type: ignore[arg-type]
            self._frames[kind] = recorder.frame()


def _is_plain(tensor: Tensor) -> bool:
    """True if dtype and shape describe all but the values, which lie in memory one after the other."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor.__dict__
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and tensor.nbytes > 0
    )


def _whole(tensor: Tensor) -> Tensor:
    """The tensor with a storage of its own, of which torch.save writes all."""
    is_part = type(tensor) is Tensor and tensor.layout == torch.strided
    return tensor.clone() if is_part and tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


class _Writer:
    """The part of a file's interface that ``torch.save`` needs."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def write(self, content: Any) -> int:
        self._write(content)
        return memoryview(content).nbytes

    def flush(self) -> None: ...


class _Recorder(_Writer):
    """Keeps the bytes before and after the values."""

    def __init__(self, tensor: Tensor, write: Write) -> None:
        super().__init__(write)
        self._values = memory_of(tensor)
        self._before, self._after = bytearray(), bytearray()
        self._seen = False

    def write(self, content: Any) -> int:
        if self._seen:
            self._after += content
        elif memoryview(content).nbytes == len(self._values) and self._is_header_complete():
            self._seen = True
        else:
            self._before += content
        return super().write(content)

    def _is_header_complete(self) -> bool:
        """True if the values come next."""
        header = self._before.rfind(_HEADER)
        if header < 0:
            return False
        name, extra = struct.unpack_from("<HH", self._before, header + _HEADER_LENGTHS)
        end = header + _HEADER_NAME + name
        return self._before[end - len(_NAME) : end] == _NAME and end + extra == len(self._before)

    def frame(self) -> _Frame | None:
        """The frame; None unless the CRC-32 is in both places: torch can be told to leave it out."""
        entry = self._after.rfind(_ENTRY, 0, max(self._after.rfind(_NAME), 0))
        places = _DESCRIPTOR_CRC, entry + _ENTRY_CRC
        crc = struct.pack("<I", crc32(self._values))
        has_entry = entry >= 0 and self._after.startswith(_DESCRIPTOR)
        if not has_entry or any(self._after[place : place + 4] != crc for place in places):
            return None
        return _Frame(bytes(self._before), bytes(self._after), places)


# --- values that can be loaded again without running code of the file ------------------------------------------------


_DEEPEST = 50  # that states are nested: readers of nested values call themselves


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def check_loadable(what: str, state: Any) -> None:
    """Raise ValueError for a value that could be saved, but not loaded again without running code of the file.

    Classes that other packages have had torch admit are refused: the process that loads may not have imported them.
    ``what`` it is, for messages. Shards are not looked at, nor are other tensors of a model and an optimizer.
    """
    for path, value in _leaves(state, what):
        if _is_known(value):
            continue
        try:
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError("it has no data")
            load_object(io.BytesIO(saved(value)), "it", admits_registered=False)
        except Exception as error:
            expected = "expected tensors and plain values (numbers, texts, lists, tuples, dicts, sets of these)"
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise ValueError(f"{path}: {expected}, got {kind}, which could not be loaded again") from error


def _is_known(value: Any) -> bool:
    if isinstance(value, Tensor):
        known = type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized
        return isinstance(value, DTensor) or (known and not value.is_meta)
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        raise ValueError(f"{path[:100]}...: it is nested too deep to be loaded again: expected {depth - 1} at most")
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(key, f"{path}: the key {key!r}", depth + 1) if type(key) not in (str, int) else ()
            yield from _leaves(item, f"{path}.{key}", depth + 1)
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}.{i}", depth + 1)
    else:
        yield path, value
