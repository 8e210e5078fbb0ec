"""Files that hold whole tensors: of torch.save, and of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from fused_optim.checkpoint.reading.source import Source, TensorInfo
from fused_optim.checkpoint.storage.untrusted import load_json, load_object
from fused_optim.sharding.model_files import INDEX_SUFFIX, SUFFIX, open_safetensors, read_index
from fused_optim.wire.safetensors import DTYPES

OBJECTS = "fused_optim_objects"  # in the header of safetensors files: what is no tensor, as JSON


class TorchFile(Source):
    """A file of torch.save. Memory-mapped, so that a rank reads little more than its own part."""

    kind = "torch.save"
    ranks = 1

    def __init__(self, path: Path) -> None:
        self.path = path
        content = load_object(path, str(path))
        if isinstance(content, (tuple, list)):  # of get_state_dict
            content = dict(enumerate(content))
        if not isinstance(content, Mapping):
            raise ValueError(f"{path}: expected a dict of torch.save, found {type(content).__name__}")
        self._values, self._places = flatten_state_dict(dict(content))
        self.entries = {
            key: TensorInfo(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
            for key, value in self._values.items()
        }

    def place(self, key: str) -> tuple[str | int, ...]:
        return self._places[key]

    def nbytes(self, key: str) -> int:
        value = self._values[key]
        return value.nbytes if isinstance(value, Tensor) else 0

    def value(self, key: str) -> Any:
        if isinstance(self._values[key], DTensor):
            hint = "save full tensors (StateDictOptions(full_state_dict=True)), or with torch.distributed.checkpoint"
            raise TypeError(f"{key} in {self.path} is one rank's shard; {hint}")
        return self._values[key]


def safetensors_files(path: Path) -> list[Path]:
    """The safetensors files of a file, folder or index path: those that indices name, or all if there is no index."""
    if path.name.endswith(INDEX_SUFFIX):
        path = path.parent
    if path.is_file():
        return [path] if path.suffix == SUFFIX else []
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if not indices:
        return sorted(path.glob(f"*{SUFFIX}"))
    return sorted({file for index in indices for file in read_index(index).values()})


class SafetensorsFiles(Source):
    """Safetensors files. What is no tensor is in their headers, where ``convert`` has put it."""

    kind = "safetensors"
    ranks = None

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        self.entries = {}
        for file in files:
            opened = open_safetensors(file, f"reading {path}", "tools")
            self._objects |= load_json((opened.metadata() or {}).get(OBJECTS, "{}").encode(), str(file))
            for key in opened.keys():  # noqa: SIM118
                part = opened.get_slice(key)
                self._files[key] = opened
                if part.get_dtype() not in _DTYPES:
                    raise ValueError(f"{key!r} in {file}: elements of {part.get_dtype()} are not supported")
                self.entries[key] = TensorInfo(tuple(part.get_shape()), _DTYPES[part.get_dtype()])
        self.entries |= dict.fromkeys(self._objects)

    def nbytes(self, key: str) -> int:
        info = self.entries[key]
        return 0 if info is None else info.nbytes

    def value(self, key: str) -> Any:
        return self._objects[key] if key in self._objects else self._files[key].get_tensor(key)


_DTYPES = {
    **DTYPES,
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64},
}
