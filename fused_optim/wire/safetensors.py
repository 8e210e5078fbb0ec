"""safetensors files, as far as this form needs them: eight bytes of length, a JSON header, the tensors' bytes.

Written here so that a process which applies changes needs torch alone.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import torch
from torch import Tensor

DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors itself
_MOST_DIMS = 64  # that torch computes with


class DamagedFile(ValueError):
    """A file that is not what was written."""


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor. Not by way of numpy, which torch does not bring."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


def open_file(file: str | os.PathLike[str]) -> BinaryIO:
    """A file for reading. Raises :class:`DamagedFile` for a pipe, whose writer may never come, or a device."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFile(f"{os.fspath(file)}: expected a file, found something else")
    return os.fdopen(descriptor, "rb")


def write(file: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write flat tensors to a file that appears when it is complete."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        first, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = f"{os.fspath(file)}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # it might be a link, which is not followed
    with open(temporary, "xb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            target.write(raw(tensor))
        target.flush()
        os.fsync(target.fileno())
    os.replace(temporary, file)


def read(file: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors in host memory, and metadata. Raises :class:`DamagedFile`, before it takes memory for the tensors."""
    with open_file(file) as source:
        try:
            size = os.fstat(source.fileno()).st_size
            length = int.from_bytes(source.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise ValueError("its header is not complete")
            header = json.loads(source.read(length))
            metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
            places = _places(header, size - 8 - length)
            data = bytearray(size - 8 - length)
            if source.readinto(data) != len(data):  # type: ignore[attr-defined]
                raise ValueError("it was cut off while it was read")
            return {name: _tensor(memoryview(data), *place) for name, place in places.items()}, metadata
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
            raise DamagedFile(f"{os.fspath(file)} is no whole safetensors file: {error}") from error


def sizes_of(values: Any) -> tuple[int, ...]:
    """A shape, or offsets, of JSON. Raises ValueError for anything but a list of integers from 0 on."""
    if type(values) is not list or len(values) > _MOST_DIMS:
        raise ValueError(f"expected a list of at most {_MOST_DIMS} sizes")
    if not all(type(each) is int and 0 <= each < 1 << 63 for each in values):
        raise ValueError("expected sizes that are integers from 0 to 2**63 - 1")
    return tuple(values)


_Place = tuple[torch.dtype, tuple[int, ...], int, int]  # dtype, shape, first byte and end


def _places(header: Mapping[str, Any], size: int) -> dict[str, _Place]:
    """Places of the tensors. Raises ValueError unless they follow one another and fill the data."""
    places: dict[str, _Place] = {}
    for name, entry in header.items():
        first, end = sizes_of(entry["data_offsets"])
        places[name] = DTYPES[entry["dtype"]], sizes_of(entry["shape"]), first, end
    at = 0
    for name, (dtype, shape, first, end) in sorted(places.items(), key=lambda item: item[1][2:]):
        if first != at or end - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} of shape {shape} in {dtype} is not all of the bytes from {at} to {end}")
        at = end
    if at != size:
        raise ValueError("it has more, or fewer, bytes than its header says")
    return places


def _tensor(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...], first: int, end: int) -> Tensor:
    if first == end:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(data[first:end], dtype=torch.uint8)
    if first % dtype.itemsize:
        tensor = tensor.clone()
    return tensor.view(dtype).view(shape)
