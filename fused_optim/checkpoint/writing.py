"""Writes checkpoints of torch.distributed.checkpoint on several threads, and sums up their bytes on the way.

Each thread writes a file of its own, from the memory that the state was copied to. Whatever fails in one of them fails
the save: torch's own writer loses what its threads raise.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import heapq
import io
import os
import pickle
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.futures import Future

from fused_optim.checkpoint.archives import Archives
from fused_optim.checkpoint.checksums import Range
from fused_optim.checkpoint.folders import Folder
from fused_optim.checkpoint.metadata import FILE
from fused_optim.checkpoint.threads import threads
from fused_optim.sharding.dtensor import has_own_chunks, local_tensor, placed_part_of

_FILE_BYTES = 1 << 24  # that make one more file worth while
_HEADER, _OBJECT = 2048, 1024  # bytes that torch writes beside those of a tensor, and for a small object, about
_TOGETHER = 1 << 20  # bytes of small writes that are gathered


class Planner(DefaultSavePlanner):
    """torch's; numbers, of which every state has some, are serialised once.

    One rank gets the plans of all, so they hold nothing twice of what is under ``SAME``, if all ranks have the same
    keys there (``alike``): of replicas of a shard one has it in its plan, where torch drops the others' later, and the
    first rank sends paths and numbers.
    """

    SAME = ("model.", "optimizer.")

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        self._alike = alike

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self.state_dict.items() for item in _items(key, value)]
        places = self.mappings
        same = [item for item in items if self._is_same(item.index.fqn)]
        items = [item for item in items if not self._is_same(item.index.fqn)]
        if not self.is_coordinator:
            same = [item for item in same if item.type != WriteItemType.BYTE_IO]
            places = {key: path for key, path in places.items() if not self._is_same(key)}
        self.plan = SavePlan(items + _own_items(same, self.state_dict), planner_data=places)
        return self.plan

    def _is_same(self, key: str) -> bool:
        """Whether all ranks are known to have it."""
        return self._alike and key.startswith(self.SAME)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO and type(object) in (bool, int, float, str, type(None)):
            return io.BytesIO(_serialised(type(object).__name__, repr(object), object))
        return super().transform_object(write_item, object)


def _items(key: str, value: Any) -> list[WriteItem]:
    """torch's, but none for empty shards of a tensor, and without counting anew where each shard lies."""
    if not isinstance(value, DTensor) or has_own_chunks(value):
        return create_default_local_save_plan({key: value}, True).items
    if value.device_mesh.get_coordinate() is None:
        return []
    sizes, offsets = map(torch.Size, placed_part_of(value.shape, value.device_mesh, value.placements))
    if not sizes.numel() and value.numel():
        return []
    properties = TensorProperties.create_from_tensor(local_tensor(value))
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, value.size())
    return [WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)]


def _own_items(items: Iterable[WriteItem], tensors: Mapping[str, Any]) -> list[WriteItem]:
    """Those that this rank writes: of shards that others have, too, as many bytes as these, by a rule that all know."""
    own, shared = [], []
    for item in items:
        replicas = _replicas(tensors.get(item.index.fqn))
        if replicas is None:
            own.append(item)
        else:
            shared.append((item, replicas))
    loads: dict[_Replicas, list[int]] = {}
    for item, replicas in sorted(shared, key=lambda each: (-_size(each[0]), each[0].index.fqn)):
        load = loads.setdefault(replicas, [0] * replicas.count)
        writer = load.index(min(load))
        load[writer] += _size(item)
        if writer == replicas.own:
            own.append(item)
    return own


@dataclass(frozen=True)
class _Replicas:
    """Ranks of a mesh that have the same shards: this one's number, and how many there are."""

    mesh: DeviceMesh
    dims: tuple[int, ...]
    own: int
    count: int


def _replicas(tensor: Any) -> _Replicas | None:
    """None where this rank's shard may be the only one, or placements do not say where it lies."""
    if not isinstance(tensor, DTensor) or has_own_chunks(tensor):
        return None
    at = tensor.device_mesh.get_coordinate()
    return None if at is None else _replicas_at(tensor.device_mesh, tuple(tensor.placements), tuple(at))


@functools.lru_cache(maxsize=64)
def _replicas_at(mesh: DeviceMesh, placements: tuple[Placement, ...], at: tuple[int, ...]) -> _Replicas | None:
    """Once for all tensors: large meshes take a millisecond to say how large they are."""
    shape = tuple(mesh.shape)
    dims = tuple(dim for dim, place in enumerate(placements) if place.is_replicate() and shape[dim] > 1)
    own, count = 0, 1
    for dim in dims:
        own, count = own * shape[dim] + at[dim], count * shape[dim]
    return _Replicas(mesh, dims, own, count) if dims else None


@functools.lru_cache(maxsize=4096)
def _serialised(kind: str, text: str, value: Any) -> bytes:
    """``kind`` and ``text`` tell values apart that compare equal: 1, 1.0 and True, 0.0 and -0.0."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@dataclass(frozen=True)
class _Part:
    """What a rank writes: its files are ``<prefix>0.distcp`` and so on. ``total``: bytes of all ranks."""

    prefix: str
    total: int


class Writer(StorageWriter):
    """Of ``dcp.save``. Raises OSError that names the bytes needed where the disk is full.

    ``archives``: those of earlier saves. ``checksums``: of what this rank has written. ``nbytes``: how much that is.
    """

    def __init__(self, folder: Folder, archives: Archives | None = None) -> None:
        self._folder = folder
        self._archives = archives or Archives()
        self.checksums: dict[Range, str] = {}
        # Conversions run on torch's threads themselves, and only so many at a time as there are cores for.
        self._converting = threading.Semaphore(max(1, threads() // torch.get_num_threads()))

    @property
    def nbytes(self) -> int:
        return sum(length for _, _, length in self.checksums)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        total = sum(_size(item) for plan in plans for item in plan.items)
        return [dataclasses.replace(plan, storage_data=_Part(f"__{i}_", total)) for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        part: _Part = plan.storage_data
        needed, free = sum(map(_size, plan.items)), self._folder.free()
        if free is not None and needed > free:
            raise self._no_room(part, needed)
        files = _shares(plan.items, min(threads(), 1 + needed // _FILE_BYTES))
        self._folder.create()
        stop = threading.Event()

        def write(number: int) -> list[WriteResult]:
            try:
                return self._write_file(f"{part.prefix}{number}.distcp", files[number], planner, stop)
            except OSError as error:
                stop.set()
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                raise self._no_room(part, needed) if full else error from error
            except BaseException:
                stop.set()
                raise

        with ThreadPoolExecutor(len(files)) as pool:
            results = [result for written in pool.map(write, range(len(files))) for result in written]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _no_room(self, part: _Part, needed: int) -> OSError:
        takes = f"the checkpoint takes about {part.total} bytes, of which this rank writes {needed}"
        return OSError(errno.ENOSPC, f"no room in {self._folder}: {takes}; {self._folder.free()} are free")

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner, stop: threading.Event
    ) -> list[WriteResult]:
        results = []
        with self._folder.open(name, "wb") as raw:
            stream = _Stream(raw)
            for item in items:
                if stop.is_set():
                    break
                start = stream.begin()
                self._write_item(item, planner, stream)
                stream.flush()
                length = stream.position - start
                self.checksums[name, start, length] = f"{stream.crc:08x}"
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            if self._folder.is_local:
                os.fsync(raw.fileno())
        return results

    def _write_item(self, item: WriteItem, planner: SavePlanner, stream: _Stream) -> None:
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
            return
        tensor = data.detach()
        if type(tensor) is not Tensor or tensor.device.type != "cpu":
            with self._converting:
                tensor = tensor.cpu()
        if type(tensor) is Tensor and tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # a view, with all of which it is a part
        self._archives.save(tensor, stream.write)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
        metadata.storage_meta = self.storage_meta()
        if hasattr(filesystem, "CURRENT_DCP_VERSION"):
            metadata.version = filesystem.CURRENT_DCP_VERSION
        self._folder.write(FILE, pickle.dumps(metadata))


def _size(item: WriteItem) -> int:
    """About the bytes that an item takes in its file."""
    size = item.tensor_storage_size()
    return _OBJECT if size is None else int(size) + _HEADER


def _shares(items: Sequence[WriteItem], files: int) -> list[list[WriteItem]]:
    """As many bytes for each file: the largest first, each to the file that has least."""
    shares: list[list[WriteItem]] = [[] for _ in range(files)]
    least = [(0, i) for i in range(files)]
    sizes = list(map(_size, items))
    for number in sorted(range(len(items)), key=sizes.__getitem__, reverse=True):
        size, i = heapq.heappop(least)
        shares[i].append(items[number])
        heapq.heappush(least, (size + sizes[number], i))
    return shares


class _Stream:
    """A file that is written: gathers small writes, and sums up the bytes of each item."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._small = bytearray()
        self.position = 0
        self.crc = 0

    def begin(self) -> int:
        """The position at which the next item begins."""
        self.crc = 0
        return self.position

    def write(self, content: Any) -> int:
        with memoryview(content).cast("B") as view:
            self.position += len(view)
            self.crc = zlib.crc32(view, self.crc)
            if len(self._small) + len(view) < _TOGETHER:
                self._small += view
            else:
                self.flush()
                self._write(view)
            return len(view)

    def flush(self) -> None:
        if self._small:
            self._write(memoryview(self._small))
            self._small = bytearray()

    def _write(self, view: memoryview) -> None:
        while view:
            view = view[self._raw.write(view) :]
