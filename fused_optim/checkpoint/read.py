"""Reads checkpoints of torch.distributed.checkpoint on several threads, straight into the tensors to be loaded.

Runs no code that a checkpoint might hold: metadata and tensors are unpickled by rules of their own, other objects by
``torch.load(weights_only=True)``. Of a tensor that is cut by rows, only the rows that are wanted are read.
"""

from __future__ import annotations

import functools
import io
import math
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from fused_optim.checkpoint.folders import Folder, done_by, kept_open, threads_to_read
from fused_optim.checkpoint.metadata import check_files, load_object, range_of
from fused_optim.memory.host_memory import HostBuffers, memory_of

_PIECE = 1 << 24  # bytes that one thread reads at a time
_UPLOADED = 1 << 23  # on their way to a GPU: memory for each thread is page-locked
_HEAD = 4096  # bytes of a stored tensor in which its description is


def load(state_dict: dict[str, Any], folder: Folder, metadata: Metadata) -> None:
    """Fill ``state_dict`` as ``dcp.load`` does, but on this rank only and without communication.

    Nothing is read before the files are known to be as long as the metadata says.
    """
    check_files(folder, metadata, flatten_state_dict(state_dict)[0].keys())
    planner = Planner()
    planner.set_up_planner(state_dict, metadata, is_coordinator=True)
    Reader(folder, metadata).read(planner.create_local_plan(), planner)


class Planner(DefaultLoadPlanner):
    """torch's, without running code of what is no tensor. Numbers, most of which are the same, are decoded once."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[bytes, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key, content = read_item.dest_index.fqn, value.getvalue()
        loaded = self._numbers[content] if content in self._numbers else load_object(value, key)
        if type(loaded) in (bool, int, float):
            self._numbers[content] = loaded
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded


class Reader:
    """Reads what is planned. Tensors may be in host memory or on GPUs, which get them through pinned memory."""

    def __init__(self, folder: Folder, metadata: Metadata) -> None:
        self._folder = folder
        self._stored: dict[Any, Any] = metadata.storage_data
        self._copying: dict[str, threading.Lock] = {}  # by what is loaded
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of the thread that asked, by device

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        tensors.sort(key=lambda item: self._place(item)[:2])
        with kept_open(self._folder) as folder, ThreadPoolExecutor(threads_to_read()) as pool:
            contents = done_by(pool, lambda item: folder.read(*self._place(item)), objects)
            for item, content in zip(objects, contents, strict=True):
                planner.load_bytes(item, io.BytesIO(content))
            targets = [planner.resolve_tensor(item).detach() for item in tensors]
            self._copying = {item.dest_index.fqn: threading.Lock() for item in tensors}
            devices = {target.device for target in targets if target.is_cuda}
            self._streams = {device: torch.cuda.current_stream(device) for device in devices}
            pairs = zip(tensors, targets, strict=True)
            prepared = done_by(pool, lambda pair: self._prepare(folder, *pair), pairs)
            pieces = [piece for of_item in prepared for piece in of_item]
            upload = _Upload({piece.target.device for piece in pieces if piece.target.is_cuda})
            done_by(pool, lambda piece: piece.read(folder, upload), pieces)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)

    def _place(self, item: ReadItem) -> tuple[str, int, int]:
        return range_of(item.storage_index.fqn, self._stored[item.storage_index])

    def _prepare(self, folder: Folder, item: ReadItem, target: Tensor) -> list[_Piece]:
        """The pieces still to be read into ``target``: none if the stored tensor had to be read as a whole."""
        file, start, length = self._place(item)
        stored = _describe(folder.read(file, start, min(length, _HEAD)), length)
        rows = None if stored is None else _rows(item, stored, target)
        if stored is not None and rows is not None:
            first, last = rows
            size = math.prod(stored.shape[1:]) * target.element_size()
            return list(_pieces(file, start + stored.offset + first * size, target, (last - first) * size))
        name = item.storage_index.fqn
        tensor = load_object(io.BytesIO(folder.read(file, start, length)), name)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: expected a tensor, found {type(tensor).__name__}")
        for dim, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        if tensor.shape != target.shape:
            raise ValueError(f"{name}: expected a part of shape {tuple(target.shape)}, found {tuple(tensor.shape)}")
        stream = self._streams.get(target.device)
        # One after the other: parts of a quantized weight change what all of it knows of itself.
        with self._copying[item.dest_index.fqn], nullcontext() if stream is None else torch.cuda.stream(stream):
            target.copy_(tensor)
        return []


# --- a stored tensor --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A contiguous tensor in a file of torch.save, whose bytes begin ``offset`` bytes after it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _describe(head: bytes, length: int) -> _Stored | None:
    """The tensor in a file of torch.save, from the file's first bytes: a zip archive that begins with ``data.pkl``.

    None unless it is one contiguous tensor in this machine's byte order.
    """
    try:
        header = head.index(b"PK\x03\x04", head.index(b"archive/data/0") - 30)
        offset = _content(head, header, b"archive/data/0")
    except ValueError:
        return None
    stored = _described(head[:offset]) if offset <= len(head) else None
    return stored if stored is not None and offset + stored.nbytes <= length else None


@functools.lru_cache(maxsize=1024)  # tensors of one shape and dtype are alike so far
def _described(head: bytes) -> _Stored | None:
    """``head``: all that comes before the bytes of the tensor."""
    try:
        tensor = _without_memory(head[_content(head, 0, b"archive/data.pkl") :])
        little = head[_content(head, head.index(b"archive/byteorder") - 30, b"archive/byteorder") :][:6] == b"little"
    except Exception:  # whatever it is, it is no tensor that can be read by its bytes
        return None
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and little
    if not plain or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous() or tensor.storage_offset():
        return None
    return _Stored(tensor.dtype, tuple(tensor.shape), len(head))


def _without_memory(pickled: bytes) -> Tensor:
    """A tensor of torch.save on the meta device, by torch's own reader of pickles, which runs no code."""
    unpickler = torch._weights_only_unpickler.Unpickler(io.BytesIO(pickled), encoding="utf-8")

    def storage(saved: tuple[Any, ...]) -> torch.TypedStorage:
        _, kind, name, _, numel = saved
        if name != "0":
            raise ValueError("not all of its storage")
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        whole = torch.UntypedStorage(numel * dtype.itemsize, device="meta")
        return torch.TypedStorage(wrap_storage=whole, dtype=dtype, _internal=True)

    unpickler.persistent_load = storage  # type: ignore[method-assign]
    return unpickler.load()  # type: ignore[no-any-return]


def _content(head: bytes, header: int, name: bytes) -> int:
    """The offset at which a zip archive's member begins, from its header. Raises ValueError for another member."""
    if head[header : header + 4] != b"PK\x03\x04" or head[header + 8 : header + 10] != b"\0\0":  # stored as it is
        raise ValueError(name)
    names, extra = (int.from_bytes(head[header + at : header + at + 2], "little") for at in (26, 28))
    if head[header + 30 : header + 30 + names] != name:
        raise ValueError(name)
    return header + 30 + names + extra


def _rows(item: ReadItem, stored: _Stored, target: Tensor) -> tuple[int, int] | None:
    """The first row that is wanted and the one after the last; None where that is not all, or no plain copy."""
    plain = type(target) in (Tensor, torch.nn.Parameter) and target.is_contiguous() and not target.is_neg()
    if not plain or target.dtype != stored.dtype or target.device.type not in ("cpu", "cuda"):
        return None
    if tuple(item.lengths) != tuple(target.shape) or tuple(item.lengths[1:]) != stored.shape[1:]:
        return None
    if not stored.shape:
        return 0, 1
    first = int(item.storage_offsets[0])
    return (first, first + int(item.lengths[0])) if first + item.lengths[0] <= stored.shape[0] else None


# --- bytes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Bytes of a file and where they go to: a flat uint8 tensor."""

    file: str
    start: int
    target: Tensor

    def read(self, folder: Folder, upload: _Upload) -> None:
        if self.target.device.type == "cpu":
            folder.read_into(self.file, self.start, memory_of(self.target))
        else:
            upload.read(folder, self)


def _pieces(file: str, start: int, target: Tensor, size: int) -> Iterator[_Piece]:
    flat = target.reshape(-1).view(torch.uint8)
    at_once = _UPLOADED if target.is_cuda else _PIECE
    for first in range(0, size, at_once):
        yield _Piece(file, start + first, flat[first : min(first + at_once, size)])


class _Upload:
    """Copies to some GPUs through page-locked memory: who reads takes a part of it, and the part's stream of a GPU."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._parts: SimpleQueue[_Part] = SimpleQueue()
        # What is queued may still write the tensors.
        before = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        for memory in _staging(threads_to_read()) if devices else []:
            streams = {device: torch.cuda.Stream(device) for device in devices}
            for device, stream in streams.items():
                stream.wait_event(before[device])
            self._parts.put(_Part(memory, streams))

    def read(self, folder: Folder, piece: _Piece) -> None:
        part = self._parts.get()
        try:
            memory, stream = part.memory[: piece.target.nbytes], part.streams[piece.target.device]
            folder.read_into(piece.file, piece.start, memory_of(memory))
            with torch.cuda.stream(stream):
                piece.target.copy_(memory, non_blocking=True)
            stream.synchronize()
        finally:
            self._parts.put(part)


@dataclass(frozen=True)
class _Part:
    memory: Tensor
    streams: dict[torch.device, torch.cuda.Stream]


def _staging(count: int) -> list[Tensor]:
    """Buffers to copy through to GPUs: page-locked if the system permits it; otherwise the driver copies once more."""
    sizes = [_UPLOADED] * count
    try:
        return HostBuffers(sizes, locked=True, shared=False).tensors
    except RuntimeError:
        return HostBuffers(sizes, locked=False, shared=False).tensors
