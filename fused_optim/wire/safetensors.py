"""safetensors files, as far as this form needs them: eight bytes of length, a JSON header, the tensors' bytes.

Written here so that a process which applies changes needs torch alone.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from typing import Any

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


class DamagedFile(ValueError):
    """A file that is not what was written."""


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor. Not by way of numpy, which torch does not bring."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


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
    with open(temporary, "wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            target.write(raw(tensor))
        target.flush()
        os.fsync(target.fileno())
    os.replace(temporary, file)


def read(file: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors in host memory, and metadata. Raises :class:`DamagedFile`."""
    with open(file, "rb") as source:
        content = bytearray(source.read())
    try:
        length = int.from_bytes(content[:8], "little")
        if len(content) < 8 or not 2 <= length <= min(_LONGEST_HEADER, len(content) - 8):
            raise ValueError("its header is not complete")
        header = json.loads(content[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        data = memoryview(content)[8 + length :]
        tensors = {name: _tensor(data, entry) for name, entry in header.items()}
        if max((entry["data_offsets"][1] for entry in header.values()), default=0) != len(data):
            raise ValueError("it has more, or fewer, bytes than its header says")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise DamagedFile(f"{os.fspath(file)} is no whole safetensors file: {error}") from error
    return tensors, {str(key): str(value) for key, value in metadata.items()}


def _tensor(data: memoryview, entry: Mapping[str, Any]) -> Tensor:
    dtype, (first, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
    if not 0 <= first <= end <= len(data):
        raise ValueError("a tensor lies beyond its end")
    if first == end:
        return torch.empty(entry["shape"], dtype=dtype)
    found = torch.frombuffer(data[first:end], dtype=torch.uint8)
    if first % dtype.itemsize:
        found = found.clone()
    return found.view(dtype).view(entry["shape"])
