"""Reads checkpoints entry by entry: what is in memory at any time is one tensor.

Folders of torch.distributed.checkpoint, files of torch.save, and safetensors files are seen through the same flat keys.
No code is run that a checkpoint might bring along, and what is described is compared with what is there before it is
used: a file that pretends to hold more, or something else, is refused with its name.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from fused_optim.checkpoint.reading.sources import Stored, open_source
from fused_optim.checkpoint.storage import metadata as dcp_metadata
from fused_optim.checkpoint.storage.folders import Folder, LocalFolder, PathLike, folder_at
from fused_optim.checkpoint.storage.metadata import check_files, chunk_sizes, read_metadata
from fused_optim.checkpoint.storage.untrusted import load_json, load_object
from fused_optim.optional import optional
from fused_optim.sharding.model_files import read_index

OBJECTS = "fused_optim_objects"  # in the header of safetensors files: what is no tensor, as JSON
_INDEX = ".safetensors.index.json"
_SUFFIX = ".safetensors"
_WRITER = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")


class Checkpoint(Protocol):
    """Entries by flat key. It is a ``sources.Source``, too."""

    @property
    def path(self) -> Folder | Path: ...

    @property
    def kind(self) -> str:
        """In words."""

    @property
    def entries(self) -> Mapping[str, Stored | None]:
        """By flat key; None: not a tensor."""

    @property
    def ranks(self) -> int | None:
        """How many ranks have written it; None where that is not known."""

    def nbytes(self, key: str) -> int:
        """Bytes that an entry takes in its file."""

    def value(self, key: str) -> Any:
        """A whole tensor, or another object. Raises ValueError or OSError for what is not as described."""

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Fill whole tensors; read what is no tensor where there is None."""


class _Reading:
    """Reads many entries by :meth:`value`, one after the other."""

    def value(self, key: str) -> Any:
        raise NotImplementedError

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        return {
            key: self.value(key) if buffer is None else buffer.copy_(self.value(key)) for key, buffer in wanted.items()
        }


def open_checkpoint(path: PathLike) -> Checkpoint:
    """Raises FileNotFoundError for what is not there, ValueError for what is none of these or is damaged."""
    folder = folder_at(path)
    if folder.size(dcp_metadata.FILE) is not None:
        return FolderCheckpoint(folder)
    if isinstance(folder, LocalFolder):
        file = folder.path
        if file.name.endswith(_INDEX):
            file = file.parent
        if parts := _safetensors_files(file):
            return SafetensorsCheckpoint(file, parts)
        if file.is_file():
            return FileCheckpoint(file)
    expected = f"expected a folder with {dcp_metadata.FILE} (of torch.distributed.checkpoint, which writes it last)"
    raise FileNotFoundError(f"{path}: {expected}, safetensors files, or a file of torch.save; found none of them")


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------------


class FolderCheckpoint(_Reading):
    """A folder of torch.distributed.checkpoint."""

    kind = "torch.distributed.checkpoint"

    def __init__(self, folder: Folder) -> None:
        self.path = folder
        self.metadata = read_metadata(folder)
        self._sizes = chunk_sizes(self.metadata)
        self._parts: dict[str, list[tuple[MetadataIndex, Any]]] = {}
        for index, info in self.metadata.storage_data.items():
            self._parts.setdefault(index.fqn, []).append((index, info))
        check_files(folder, self.metadata)
        for key, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._check_parts(key, entry)
        self.entries: dict[str, Stored | None] = {
            key: Stored(tuple(entry.size), entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
            for key, entry in self.metadata.state_dict_metadata.items()
        }

    @property
    def ranks(self) -> int | None:
        """torch names files by the ranks that write them: ``__3_0.distcp``."""
        found = {_WRITER.match(info.relative_path) for info in self.metadata.storage_data.values()}
        return None if None in found else len({match["rank"] for match in found if match})

    def nbytes(self, key: str) -> int:
        return sum(info.length for _, info in self._parts.get(key, ()))

    def value(self, key: str) -> Any:
        parts, entry = self._parts.get(key, []), self.metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            if len(parts) != 1:
                raise ValueError(f"{key} in {self.path}: expected one object, found {len(parts)}")
            return self._load(key, parts[0][1])
        whole: Tensor | None = None
        for index, info in parts:
            at, size = self._place(index)
            part = self._load(key, info)
            if not isinstance(part, Tensor) or (tuple(part.shape), part.dtype) != (size, entry.properties.dtype):
                shown = f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
                expected = f"expected {entry.properties.dtype} {size}, found {shown}"
                raise ValueError(f"{key} in {self.path}: {expected} in {info.relative_path}")
            if part.shape == entry.size:
                whole = part
                continue
            whole = part.new_empty(entry.size) if whole is None else whole
            whole[tuple(slice(o, o + n) for o, n in zip(at, size, strict=True))].copy_(part)
        return torch.empty(entry.size, dtype=entry.properties.dtype) if whole is None else whole

    def _load(self, key: str, info: Any) -> Any:
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{key} in {self.path} was transformed as it was written ({info.transform_descriptors})")
        content = io.BytesIO(self.path.read(info.relative_path, info.offset, info.length))
        return load_object(content, f"{key} in {self.path}/{info.relative_path}")

    def _place(self, index: MetadataIndex) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where a part begins, and its shape."""
        at = tuple(index.offset or ())
        return at, tuple(self._sizes[index.fqn, at])

    def _check_parts(self, key: str, entry: TensorStorageMetadata) -> None:
        """So that nothing is allocated that the files cannot fill."""
        filled = 0
        for index, _ in self._parts.get(key, ()):
            _, size = self._place(index)
            filled += math.prod(size)
        if filled != math.prod(entry.size):
            raise ValueError(f"{key} in {self.path}: {filled} of its {math.prod(entry.size)} elements were saved")


# --- torch.save ---------------------------------------------------------------------------------------------------


class FileCheckpoint(_Reading):
    """A file of torch.save, which is mapped into memory."""

    kind = "torch.save"
    ranks = 1

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source = open_source(path)
        self.entries = self._source.entries

    def nbytes(self, key: str) -> int:
        value = self.value(key)
        return value.nbytes if isinstance(value, Tensor) else 0

    def value(self, key: str) -> Any:
        return self._source.read({key: None})[key]


# --- safetensors --------------------------------------------------------------------------------------------------


def _safetensors_files(path: Path) -> list[Path]:
    """Of a folder: those that its index names, or all where there is none."""
    if path.is_file():
        return [path] if path.suffix == _SUFFIX else []
    indices = sorted(path.glob(f"*{_INDEX}"))
    if not indices:
        return sorted(path.glob(f"*{_SUFFIX}"))
    return sorted({file for index in indices for file in read_index(index).values()})


class SafetensorsCheckpoint(_Reading):
    """Safetensors files. What is no tensor is in their headers, where ``convert`` has put it."""

    kind = "safetensors"
    ranks = None

    def __init__(self, path: Path, files: list[Path]) -> None:
        safetensors = optional("safetensors", f"reading {path}", "tools")
        self.path = path
        self._files: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        self.entries: dict[str, Stored | None] = {}
        for file in files:
            try:
                opened: Any = safetensors.safe_open(file, framework="pt")
                self._objects |= load_json((opened.metadata() or {}).get(OBJECTS, "{}").encode(), str(file))
            except (safetensors.SafetensorError, ValueError) as error:
                text = f"{file} cannot be read as safetensors ({error}); it is truncated or damaged"
                raise ValueError(text) from error
            for key in opened.keys():  # noqa: SIM118
                part = opened.get_slice(key)
                self._files[key] = opened
                self.entries[key] = Stored(tuple(part.get_shape()), _DTYPES[part.get_dtype()])
        self.entries |= dict.fromkeys(self._objects)

    def nbytes(self, key: str) -> int:
        stored = self.entries[key]
        return 0 if stored is None else math.prod(stored.shape) * stored.dtype.itemsize

    def value(self, key: str) -> Any:
        return self._objects[key] if key in self._objects else self._files[key].get_tensor(key)


_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64},
}
