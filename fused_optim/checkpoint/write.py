"""Writes states that are alike again and again, as ``dcp.save`` would, in little of the interpreter's time.

What is saved in the background takes that time from training. So the ranks agree once on who writes what, and send it
around and describe the checkpoint anew only where a state has changed its layout.
"""

from __future__ import annotations

import errno
import functools
import io
import itertools
import pickle
import threading
import zlib
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fused_optim.backends.checksum import crc32
from fused_optim.checkpoint.archives import Archives, check_loadable
from fused_optim.checkpoint.folders import Folder, retried, threads, to_disk
from fused_optim.checkpoint.metadata import FILE
from fused_optim.checkpoint.open import flat
from fused_optim.checkpoint.stage import plain_tensors
from fused_optim.checkpoint.verify import Range
from fused_optim.memory.host_memory import empty_host, memory_of
from fused_optim.options.checks import some_of
from fused_optim.sharding.collective import (
    distinct,
    gather_at_first,
    on_all_ranks,
    on_any,
    scatter_from_first,
    shared_out,
    this_rank,
    world_size,
)
from fused_optim.sharding.dtensor import has_own_chunks, local_tensor, placed_part_of
from fused_optim.state.values import LazyTensor, Values


@dataclass
class _Agreed:
    """The ranks' common plan for states of one layout.

    The metadata is kept pickled: as objects, of which large worlds have millions, it would slow down every garbage
    collection of training.
    """

    layout: dict[str, Any] | None
    plan: SavePlan  # of this rank
    files: RankFiles
    metadata: bytes  # of all ranks, with the places of their items; on the first rank
    results: list[WriteResult] = field(default_factory=list)  # of the last save, of this rank
    is_compared: bool = False  # whether what all ranks have as a whole is the same on all of them


class Saver:
    """Saves for one group; all ranks of ``group`` make the same calls."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._archives = Archives()
        self._agreed: _Agreed | None = None

    def save(
        self, state: Mapping[str, Any], folder: Folder, doing: str, may_differ: Collection[str] = ()
    ) -> list[Written]:
        """Write a checkpoint into ``folder``. Returns what each rank has written, on the first rank.

        Of tensors that are no shards ranks must have the same, but of the keys ``may_differ``, of which those of the
        first rank are saved. Raises on every rank where it fails on one; ``doing`` is what the message begins with.
        """
        agreed, self._agreed = self._agreed, None  # what fails is planned anew
        writer = Writer(folder, self._archives)
        planner, layout = self._planner_of(state, doing)
        if agreed is None or on_any(layout is None or layout != agreed.layout, self._group):
            agreed = self._agree(planner, layout, doing)
        if not agreed.is_compared and world_size() > 1:
            check_replicas(planner.state_dict, Planner.SAME, may_differ, self._group)
        agreed.is_compared = True
        with on_all_ranks(doing, group=self._group):
            plan = planner.finish_plan(agreed.plan)
            results = writer.write(plan, planner, agreed.files)
        moved = self._moved(agreed, results)
        with on_all_ranks(doing, group=self._group):
            if this_rank() == 0:
                agreed.metadata = _described(agreed.metadata, moved)
                folder.write(FILE, agreed.metadata)
                writer.written.sizes[FILE] = len(agreed.metadata)
        self._agreed = agreed
        return gather_at_first(writer.written, self._group)

    def plan(self, state: Mapping[str, Any], doing: str) -> None:
        """The agreement of ranks on the writer of each item, for states with this layout; no bytes are read."""
        planner, layout = self._planner_of(state, doing)
        self._agreed = self._agree(planner, layout, doing)
        described = [each.tensor_data for each in self._agreed.plan.items if each.tensor_data is not None]
        for dtype, shape in dict.fromkeys((each.properties.dtype, each.chunk.sizes) for each in described):
            self._archives.prepare(dtype, shape)

    def _planner_of(self, state: Mapping[str, Any], doing: str) -> tuple[Planner, dict[str, Any] | None]:
        """(a planner that knows the state, the state's layout)."""
        planner = Planner()
        with on_all_ranks(doing, group=self._group):
            planner.set_up_planner(dict(state), StorageMeta(), this_rank() == 0)
            layout = layout_of(planner.state_dict)
        return planner, layout

    def _agree(self, planner: Planner, layout: dict[str, Any] | None, doing: str) -> _Agreed:
        shared = sorted(key for key in planner.state_dict if key.startswith(Planner.SAME))
        planner.alike = len(distinct(shared, self._group)) == 1
        with on_all_ranks(doing, group=self._group):
            local_plan = planner.create_local_plan()
        plans = gather_at_first(local_plan, self._group)
        shares: list[tuple[SavePlan, RankFiles]] = []
        described = b""
        with on_all_ranks(doing, group=self._group):
            if this_rank() == 0:
                plans, metadata = planner.create_global_plan(plans)
                total = sum(size_of(item) for plan in plans for item in plan.items)
                shares = [(plan, RankFiles(f"__{rank}_", total)) for rank, plan in enumerate(plans)]
                described = pickle.dumps(metadata)
        return _Agreed(layout, *scatter_from_first(shares, self._group), described)

    def _moved(self, agreed: _Agreed, results: list[WriteResult]) -> list[list[WriteResult]]:
        """Changed write results since the last save, by rank, on the first rank: larger numbers take more bytes."""
        pairs = itertools.zip_longest(results, agreed.results)
        moved = [result for result, last in pairs if result is not None and result != last]
        agreed.results = results
        return gather_at_first(moved, self._group) if on_any(bool(moved), self._group) else []


def _described(pickled: bytes, moved: list[list[WriteResult]]) -> bytes:
    """Metadata with the places to which items have moved."""
    if not moved:
        return pickled
    metadata: Metadata = pickle.loads(pickled)
    set_places(metadata, itertools.chain.from_iterable(moved))
    return pickle.dumps(metadata)


def set_places(metadata: Metadata, results: Iterable[WriteResult]) -> None:
    """Note the places of written items."""
    metadata.storage_data = (metadata.storage_data or {}) | {each.index: each.storage_data for each in results}
    metadata.storage_meta = StorageMeta()
    metadata.version = CURRENT_DCP_VERSION


# --- plans: the items that each rank writes, and the layouts by which plans are used again ---------------------------


_HEADER, _OBJECT = 2048, 1024  # bytes that torch writes beside those of a tensor, and for a small object, about


class Planner(DefaultSavePlanner):
    """torch's; numbers, of which every state has some, are serialised once.

    One rank gets the plans of all, so they hold nothing twice of what is under ``SAME``, if all ranks have the same
    keys (``alike``): of replicas of a shard one has it in its plan, where torch drops the others' later, and the
    first rank sends paths and numbers.
    """

    SAME = ("model.", "optimizer.")

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        self.alike = alike

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.mappings = flat(state_dict)
        self.is_coordinator = is_coordinator

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

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """torch's, but a whole tensor is written by the first rank that has it: buffers may differ between ranks."""
        seen: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            whole = {item.index for item in plan.items if item.type == WriteItemType.TENSOR}
            again = whole & seen
            items = [item for item in plan.items if item.index not in again]
            plans.append(replace(plan, items=items))
            seen |= whole
        return super().create_global_plan(plans)

    def _is_same(self, key: str) -> bool:
        """True if all ranks are known to have the key."""
        return self.alike and key.startswith(self.SAME)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO and type(object) in (bool, int, float, str, type(None)):
            return io.BytesIO(_serialised(type(object).__name__, repr(object), object))
        if not isinstance(object, Tensor):
            check_loadable(write_item.index.fqn, object)
        return super().transform_object(write_item, object)


def layout_of(flat: Mapping[str, Any]) -> dict[str, Hashable] | None:
    """The facts that a flattened state dict's plan depends on; None if shards have chunk lists of their own."""
    layout: dict[str, Hashable] = {}
    for key, value in flat.items():
        if not isinstance(value, Tensor):
            layout[key] = type(value).__name__
            continue
        if has_own_chunks(value):
            return None
        placed = (value.device_mesh, value.placements) if isinstance(value, DTensor) else ()
        layout[key] = type(value), value.dtype, value.shape, value.layout, value.requires_grad, placed
    return layout


def _items(key: str, value: Any) -> list[WriteItem]:
    """torch's write items, but none for empty shards, and with offsets that are computed once per layout."""
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
    """The items that this rank writes.

    Shards that others hold, too, are shared out by size, by a rule that all know.
    """
    written: list[WriteItem] = []
    shared: dict[_Replicas, list[WriteItem]] = {}
    for item in items:
        replicas = _replicas(tensors.get(item.index.fqn))
        if replicas is None:
            written.append(item)
        else:
            shared.setdefault(replicas, []).append(item)
    for replicas, held in shared.items():
        held.sort(key=lambda item: item.index.fqn)
        takers = shared_out(list(map(size_of, held)), replicas.count)
        written += [item for item, taker in zip(held, takers, strict=True) if taker == replicas.own]
    return written


@dataclass(frozen=True)
class _Replicas:
    """Ranks of a mesh that have the same shards: this one's number, and how many there are."""

    mesh: DeviceMesh
    dims: tuple[int, ...]
    own: int
    count: int


def _replicas(tensor: Any) -> _Replicas | None:
    """The ranks that hold the same shard. None if only this one may, or placements do not say where it lies."""
    if not isinstance(tensor, DTensor) or has_own_chunks(tensor):
        return None
    at = tensor.device_mesh.get_coordinate()
    return None if at is None else _replicas_at(tensor.device_mesh, tuple(tensor.placements), tuple(at))


@functools.lru_cache(maxsize=64)
def _replicas_at(mesh: DeviceMesh, placements: tuple[Placement, ...], at: tuple[int, ...]) -> _Replicas | None:
    """:func:`_replicas`, cached for all tensors: large meshes take a millisecond to say how large they are."""
    shape = tuple(mesh.shape)
    dims = tuple(dim for dim, place in enumerate(placements) if place.is_replicate() and shape[dim] > 1)
    own, count = 0, 1
    for dim in dims:
        own, count = own * shape[dim] + at[dim], count * shape[dim]
    return _Replicas(mesh, dims, own, count) if dims else None


@functools.lru_cache(maxsize=4096)
def _serialised(kind: str, text: str, value: Any) -> bytes:
    """The pickled value. ``kind`` and ``text`` tell equal values apart: 1, 1.0 and True, 0.0 and -0.0."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def size_of(item: WriteItem) -> int:
    """Bytes that an item takes in its file, about."""
    size = item.tensor_storage_size()
    return _OBJECT if size is None else int(size) + _HEADER


# --- files: each thread writes one, and sums up its bytes on the way -------------------------------------------------


_FILE_BYTES = 1 << 24  # that make one more file worth while
_TOGETHER = 1 << 20  # bytes of small writes that are gathered


@dataclass(frozen=True)
class RankFiles:
    """The files of a rank: ``<prefix>0.distcp`` and so on. ``total``: bytes that all ranks write."""

    prefix: str
    total: int


@dataclass
class Written:
    """Record of a rank's writes: the checksums of its items, and the sizes of its files in bytes by name."""

    checksums: dict[Range, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


class Writer:
    """Writes a rank's files. Raises OSError that names the bytes needed where the disk is full.

    ``archives``: those of earlier saves. ``files``: how many at most, each by a thread and in the order of the plan.
    """

    def __init__(self, folder: Folder, archives: Archives, files: int | None = None) -> None:
        self._folder = folder
        self._most_files = threads() if files is None else files
        self._archives = archives
        self.written = Written()
        self._own = _OfThread()

    def write(self, plan: SavePlan, planner: SavePlanner, files: RankFiles) -> list[WriteResult]:
        """Write this rank's plan. Returns the place of each item, in the same order for the same plan."""
        self._folder.create()
        needed, free = sum(map(size_of, plan.items)), self._folder.free()
        if free is not None and needed > free:
            raise self._no_room(files, needed)
        shares: list[list[WriteItem]] = [[] for _ in range(min(self._most_files, 1 + needed // _FILE_BYTES))]
        for item, file in zip(plan.items, shared_out(list(map(size_of, plan.items)), len(shares)), strict=True):
            shares[file].append(item)
        stop = threading.Event()

        def write(number: int) -> list[WriteResult]:
            try:
                name = f"{files.prefix}{number}.distcp"
                if self._folder.is_local:
                    return self._write_file(name, shares[number], planner, stop)
                return retried(lambda: self._write_file(name, shares[number], planner, stop))
            except OSError as error:
                stop.set()
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                raise self._no_room(files, needed) if full else error from error
            except BaseException:
                stop.set()
                raise

        with ThreadPoolExecutor(len(shares)) as pool:
            return [result for written in pool.map(write, range(len(shares))) for result in written]

    def _no_room(self, files: RankFiles, needed: int) -> OSError:
        takes = f"the checkpoint takes about {files.total} bytes, of which this rank writes {needed}"
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
                self.written.checksums[name, start, length] = f"{stream.crc:08x}"
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            if self._folder.is_local:
                to_disk(raw.fileno())
        self.written.sizes[name] = stream.position
        return results

    def _write_item(self, item: WriteItem, planner: SavePlanner, stream: _Stream) -> None:
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
            return
        tensor = data.detach()
        if isinstance(tensor, LazyTensor):
            tensor = self._own.read(tensor.source)
        elif type(tensor) is not Tensor or tensor.device.type != "cpu":
            tensor = tensor.cpu()
        self._archives.save(tensor, stream.write)


class _OfThread(threading.local):
    """Each thread decodes into memory whose pages are made once."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, values: Values) -> Tensor:
        """The values, decoded into memory that the next call of this thread writes over."""
        nbytes = values.shape.numel() * values.dtype.itemsize
        if nbytes > self._memory.nbytes:
            self._memory = empty_host((nbytes,), torch.uint8)
        out = self._memory[:nbytes].view(values.dtype).view(values.shape)
        values.read_into(out)
        return out


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
            self.crc = crc32(view, self.crc)
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


# --- tensors that ranks hold as a whole: a checkpoint has one of each ------------------------------------------------


def check_replicas(
    tensors: Mapping[str, Any], prefixes: tuple[str, ...], may_differ: Collection[str], group: dist.ProcessGroup | None
) -> None:
    """Raise ValueError, on all ranks, for keys under ``prefixes`` that ranks of ``group`` have different tensors for.

    A collective. All bytes are summed up, so this is for the first save.
    """
    digests_here = {
        key: _digest(value)
        for key, value in tensors.items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
        if key.startswith(prefixes) and key not in may_differ
    }
    first: dict[str, int] = {}
    differing: dict[str, None] = {}
    for digests in distinct(sorted(digests_here.items()), group):
        differing |= {key: None for key, digest in digests if first.setdefault(key, digest) != digest}
    if differing:
        reason = "neither is it sharded (a DTensor), so a checkpoint can hold only one of them"
        hint = "let ranks start from the same weights and average gradients (DDP), or save each rank in its own folder"
        raise ValueError(f"ranks have different values of {some_of(list(differing))}: {reason}; {hint}")


def _digest(value: Tensor) -> int:
    crc = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode())
    for part in plain_tensors(value):
        plain = part.detach().cpu().contiguous()
        crc = crc32(memory_of(plain), crc) if plain.nbytes else crc
    return crc
