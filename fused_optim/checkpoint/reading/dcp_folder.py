"""Folders of torch.distributed.checkpoint. Each rank reads for itself, so a failure leaves no rank waiting."""

from __future__ import annotations

import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fused_optim.checkpoint.reading.reader import load
from fused_optim.checkpoint.reading.source import Source, TensorInfo
from fused_optim.checkpoint.storage import manifest
from fused_optim.checkpoint.storage.damage import Replaced
from fused_optim.checkpoint.storage.folders import Folder
from fused_optim.checkpoint.storage.metadata import check_files, chunk_sizes, range_of, read_metadata
from fused_optim.checkpoint.storage.untrusted import Refused, load_object

_WRITER = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")

_Chunks = dict[tuple[int, ...], _StorageInfo]  # by offsets


class DcpFolder(Source):
    """Tensors are read by :class:`reader.Reader` into buffers, or one after the other as they were saved."""

    kind = "torch.distributed.checkpoint"

    def __init__(self, folder: Folder) -> None:
        self.path: Folder = folder
        self.published = manifest.published(folder)  # before anything else is read
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
            if manifest.published(self.path) != self.published:
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
