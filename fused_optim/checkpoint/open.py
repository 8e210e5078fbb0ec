"""Opens checkpoints, whatever their files: tensors and other objects by the flat keys of a state dict."""

from __future__ import annotations

import io
import math
import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fused_optim.checkpoint.folders import Folder, LocalFolder, PathLike, Replaced, folder_at
from fused_optim.checkpoint.metadata import (
    FILE,
    Refused,
    check_files,
    chunk_sizes,
    load_json,
    load_object,
    range_of,
    read_metadata,
    unfinished,
)
from fused_optim.checkpoint.publish import published
from fused_optim.checkpoint.read import load
from fused_optim.memory.host_memory import empty_host
from fused_optim.sharding.dtensor import has_own_chunks, keep_chunks, local_tensor, placed_part_of, rewrap_shaped
from fused_optim.sharding.model_files import INDEX_SUFFIX, SUFFIX, open_safetensors, read_index
from fused_optim.wire.safetensors import DTYPES

# --- nested state dicts as flat keys, as torch.distributed.checkpoint writes them, and back --------------------------


Place = tuple[str | int, ...]  # text: of a mapping; a number: of a list


def flat(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Place]]:
    """Values and places by key: torch's ``flatten_state_dict``, which loses some mappings; these stay whole.

    They are empty ones, and those with keys that are no texts, unless shards are in them. Raises ValueError where two
    values have one key.
    """
    values: dict[str, Any] = {}
    places: dict[str, Place] = {}
    for name, item in state.items():
        for path, value in _leaves((str(name),), item):
            key = ".".join(map(str, path))
            if key in values:
                raise ValueError(f"{places[key]} and {path} of a state dict have the same key {key!r}: rename one")
            values[key], places[key] = value, path
    return values, places


def _leaves(path: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, Mapping):
        # Models, optimizers, param groups and parameters' states are always flattened.
        is_structure = len(path) == 1 or (path[1] in ("state", "param_groups") and len(path) <= 3)
        has_other_keys = any(type(key) is not str for key in value)
        if not is_structure and (not value or (has_other_keys and not _holds_shards(value))):
            yield path, _plain(value)
            return
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)
    elif isinstance(value, list) and any(map(_holds, value)):
        for i, item in enumerate(value):
            yield from _leaves((*path, i), item)
    else:
        yield path, value


def _holds(value: Any) -> bool:
    return isinstance(value, Tensor | Mapping) or (isinstance(value, list) and any(map(_holds, value)))


def _holds_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_shards, value.values()))
    return any(map(_holds_shards, value)) if isinstance(value, list | tuple) else isinstance(value, DTensor)


def _plain(value: Any) -> Any:
    """The value with dicts in place of other mappings, whose classes few readers admit."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def path_after(place: Place, text: str) -> Place:
    """The end of a place that reads ``text``; what of it is not known of the place is one key.

    Where nothing is known of the place, which is the key alone then, every dot is taken for a step.
    """
    if len(place) == 1:
        return tuple(text.split("."))
    for count in range(1, len(place)):
        end = place[count:]
        joined = ".".join(map(str, end))
        if joined == text:
            return end
        if text.endswith(f".{joined}"):
            return text.removesuffix(f".{joined}"), *end
    return (text,)


def setting_after(place: Place, text: str) -> Place:
    """:func:`path_after` for an entry of a mapping."""
    first, *inner = path_after(place, text)
    return str(first), *inner


def assembled(values: Mapping[Place, Any]) -> Any:
    """The inverse of :func:`flat`: nested dicts and lists of values by their places."""
    if () in values:
        return values[()]
    inner: dict[str | int, dict[Place, Any]] = {}
    for (first, *rest), value in values.items():
        inner.setdefault(first, {})[tuple(rest)] = value
    built = {key: assembled(below) for key, below in inner.items()}
    return [built[key] for key in sorted(built)] if built and all(type(key) is int for key in built) else built


# --- a checkpoint on disk --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorInfo:
    """The shape and dtype of a stored tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source(ABC):
    """``kind``: of the files, in words. ``ranks``: how many have written them; None where that is not known."""

    kind: str
    path: Folder | Path
    ranks: int | None
    entries: dict[str, TensorInfo | None]  # by flat key; None: not a tensor
    published: bytes | None = None  # the manifest of a run's checkpoint

    def tensor_info(self, key: str) -> TensorInfo:
        found = self.entries[key]
        if found is None:
            raise ValueError(f"{key} in {self.path}: expected a tensor, found another object")
        return found

    def place(self, key: str) -> tuple[str | int, ...]:
        """The entry's path in the nested state dict, as far as it is known."""
        return (key,)

    @abstractmethod
    def nbytes(self, key: str) -> int:
        """Bytes that an entry takes in its file."""

    @abstractmethod
    def value(self, key: str) -> Any:
        """A whole tensor, or another object, as it was saved. Raises ValueError or OSError for another one."""

    def check(self, keys: Collection[str] | None = None) -> None:  # noqa: B027  nothing where opening checks it
        """Raise ValueError or OSError for files that cannot hold the described values of some keys, or of all."""

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Fill the tensors, this rank's part of DTensors; put other values in the places of None."""
        return {
            key: self.value(key) if buffer is None else _copy_part(buffer, self.value(key))
            for key, buffer in wanted.items()
        }


def _copy_part(buffer: Tensor, full: Tensor) -> Tensor:
    if isinstance(buffer, DTensor):
        (chunk,) = buffer.__create_chunk_list__()
        full = full[tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))]
    local_tensor(buffer).copy_(full)
    return buffer


# --- memory that states are read into: on the host, and placed as their parameters are -------------------------------


def buffer_for(param: Tensor, info: TensorInfo) -> Tensor:
    """An empty buffer in host memory that is placed as ``param`` is."""
    if not isinstance(param, DTensor):
        return empty_host(info.shape, info.dtype)
    if has_own_chunks(param):
        local = empty_host(local_tensor(param).shape, info.dtype)
        return keep_chunks(rewrap_shaped(local, param, info.shape), param)
    shape, _ = placed_part_of(info.shape, param.device_mesh, param.placements)
    return rewrap_shaped(empty_host(shape, info.dtype), param, info.shape)


def buffer_beside(param: Tensor, info: TensorInfo | None) -> Tensor | None:
    """A buffer for an entry beside the states: placed as ``param`` if it has its shape. None for an object."""
    if info is None or info.shape == param.shape:
        return None if info is None else buffer_for(param, info)
    return empty_host(info.shape, info.dtype)


def native_buffer_for(param: Tensor, info: TensorInfo) -> Tensor:
    """A buffer for a component in the native form. It can be cut by rows only: otherwise every rank reads all of it."""
    if isinstance(param, DTensor) and all(p.is_replicate() or p.is_shard(0) for p in param.placements):
        return buffer_for(param, info)
    return empty_host(info.shape, info.dtype)


# --- folders of torch.distributed.checkpoint -------------------------------------------------------------------------


_WRITER = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")

_Chunks = dict[tuple[int, ...], _StorageInfo]  # by offsets


class DcpFolder(Source):
    """Tensors are read by ``read.Reader`` into buffers, or one after the other as they were saved."""

    kind = "torch.distributed.checkpoint"

    def __init__(self, folder: Folder) -> None:
        self.path: Folder = folder
        self.published = published(folder)  # before anything else is read
        self.metadata = metadata = read_metadata(folder)
        self.entries = {}
        for key, entry in metadata.state_dict_metadata.items():
            self.entries[key] = None
            if isinstance(entry, TensorStorageMetadata):
                self.entries[key] = TensorInfo(tuple(entry.size), entry.properties.dtype)
        self._chunks: dict[str, _Chunks] = {}
        for index, info in metadata.storage_data.items():
            self._chunks.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
        self._sizes = chunk_sizes(metadata)

    @property
    def ranks(self) -> int | None:  # type: ignore[override]
        """torch names files by the ranks that write them: ``__3_0.distcp``."""
        found = {_WRITER.match(info.relative_path) for info in self.metadata.storage_data.values()}
        return None if None in found else len({match["rank"] for match in found if match})

    def place(self, key: str) -> tuple[str | int, ...]:
        places: dict[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        return places.get(key, (key,))

    def nbytes(self, key: str) -> int:
        return sum(info.length for info in self._chunks.get(key, {}).values())

    def check(self, keys: Collection[str] | None = None) -> None:
        check_files(self.path, self.metadata, keys)
        for key in self.entries if keys is None else keys:
            info = self.entries[key]
            if info is None:
                continue
            parts = Counter(tuple(zip(at, self._sizes[key, at], strict=True)) for at in self._chunks.get(key, {}))
            parts[tuple((0, size) for size in info.shape)] -= 1
            if not _cancel(parts):
                size = math.prod(info.shape)
                raise ValueError(f"{key} in {self.path}: its parts do not hold each of its {size} elements once")

    def value(self, key: str) -> Any:
        chunks, info = self._chunks.get(key, {}), self.entries[key]
        if info is None:
            if len(chunks) != 1:
                raise ValueError(f"{key} in {self.path}: expected one object, found {len(chunks)}")
            return self._load(key, *chunks.values())
        whole: Tensor | None = None
        for at, stored in chunks.items():
            size = self._sizes[key, at]
            chunk = self._load(key, stored)
            if not isinstance(chunk, Tensor) or (chunk.shape, chunk.dtype) != (size, info.dtype):
                shown = f"{chunk.dtype} {tuple(chunk.shape)}" if isinstance(chunk, Tensor) else type(chunk).__name__
                expected = f"expected {info.dtype} {tuple(size)}, found {shown}"
                raise ValueError(f"{key} in {self.path}: {expected} in {stored.relative_path}")
            if tuple(chunk.shape) == info.shape:
                return chunk
            whole = chunk.new_empty(info.shape) if whole is None else whole
            whole[tuple(slice(o, o + n) for o, n in zip(at, size, strict=True))].copy_(chunk)
        return torch.empty(info.shape, dtype=info.dtype) if whole is None else whole

    def load(self, state_dict: dict[str, Any]) -> None:
        """Fill a state dict as ``dcp.load`` does, by this rank only. Raises Replaced if the checkpoint has changed."""
        try:
            load(state_dict, self.path, self.metadata)
        finally:  # if another checkpoint was published here meanwhile, errors before this are no damage
            if published(self.path) != self.published:
                raise Replaced(
                    f"{self.path} was replaced, or removed, by a run that saves there while it was read: load again"
                )

    def _load(self, key: str, stored: _StorageInfo) -> Any:
        content = io.BytesIO(self.path.read(*range_of(key, stored)))
        return load_object(content, f"{key} in {self.path}/{stored.relative_path}")

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        self.check(wanted.keys())
        try:
            return self._read(wanted)
        except Replaced:
            raise
        except Exception:
            for key, buffer in wanted.items():  # which one it was
                try:
                    self._read({key: buffer})
                except Refused:
                    raise
                except Exception as error:
                    files = ", ".join(sorted({info.relative_path for info in self._chunks[key].values()}))
                    text = f"{key} in {self.path} cannot be read; its file is damaged: {files}"
                    raise ValueError(text) from error
            raise

    def _read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        values = dict(wanted)
        self.load(values)
        return values


_Box = tuple[tuple[int, int], ...]  # of each dim its first index and how many follow


def _cancel(boxes: Mapping[_Box, int]) -> bool:
    """True if boxes, each counted so many times, add up to 0 at every element.

    Equal total sizes would not show that.
    """
    counts = {box: count for box, count in boxes.items() if count and all(size for _, size in box)}
    if () in counts or not counts:
        return not counts
    changes: defaultdict[int, Counter[_Box]] = defaultdict(Counter)  # from row to row
    for ((first, size), *others), count in counts.items():
        changes[first][tuple(others)] += count
        changes[first + size][tuple(others)] -= count
    return all(map(_cancel, changes.values()))


# --- files that hold whole tensors: of torch.save, and of safetensors ------------------------------------------------


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
    """Safetensors files. ``convert`` has put values that are no tensors into their headers."""

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


# --- any of them -----------------------------------------------------------------------------------------------------


def open_source(path: PathLike | Folder) -> Source:
    """A folder of torch.distributed.checkpoint, a file of torch.save, or safetensors files. Runs no code of them.

    Raises FileNotFoundError for a path that is missing or not whole, ValueError for other kinds and damaged files.
    """
    folder = folder_at(path)
    if folder.size(FILE) is not None:
        return DcpFolder(folder)
    if isinstance(folder, LocalFolder):
        if files := safetensors_files(folder.path):
            return SafetensorsFiles(folder.path, files)
        if folder.path.is_file():
            return TorchFile(folder.path)
    expected = (
        f"expected a folder of torch.distributed.checkpoint with a file {FILE}, which is written last, a file of "
        "torch.save, or safetensors files"
    )
    contents = "found nothing"
    if folder.exists():
        contents = f"found none of them; {unfinished(folder)}"
    raise FileNotFoundError(f"{folder}: {expected}; {contents}")


def open_checked(path: PathLike) -> Source:
    """:func:`open_source`, and compare all that is described with the files."""
    source = open_source(path)
    source.check()
    return source
