"""Reads checkpoints of torch.distributed.checkpoint on several threads, straight into the tensors to be loaded.

Runs no code that a checkpoint might hold: metadata and tensors are unpickled by rules of their own, other objects by
``torch.load(weights_only=True)``. Of a tensor that is cut by rows, only the rows that are wanted are read.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import pickle
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fused_optim.checkpoint.folders import Folder
from fused_optim.checkpoint.metadata import read_metadata
from fused_optim.checkpoint.threads import threads

SINGLE_PROCESS = "torch.distributed is disabled"  # a warning of torch.distributed.checkpoint
_PIECE = 1 << 25  # bytes that one thread reads at a time
_HEAD = 4096  # bytes of a stored tensor in which its description is


class Refused(ValueError):
    """Raised for what might run code if it were read."""


def load(state_dict: dict[str, Any], folder: Folder, metadata: Metadata | None = None) -> None:
    """``dcp.load`` by this rank alone, without communication, of its parts. Raises what went wrong."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SINGLE_PROCESS)
        dcp.load(state_dict, storage_reader=Reader(folder, metadata), planner=Planner(), no_dist=True)


def refused_global(error: BaseException) -> str | None:
    """What a file wants to be imported that ``torch.load(weights_only=True)`` does not admit."""
    found = re.search(r"\bGLOBAL ([\w.]+)", str(error))
    return found[1] if found else None


class Planner(DefaultLoadPlanner):
    """torch's, without running code of what is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            named = refused_global(error)
            if named is None:  # damaged
                raise
            hint = "if you trust it, admit it by torch.serialization.add_safe_globals"
            raise Refused(f"{key} names {named}, which might run code, and is not read; {hint}") from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded


class Reader(StorageReader):
    """Of ``dcp.load``. Tensors to be loaded may be in host memory or on GPUs, which get them through pinned memory."""

    def __init__(self, folder: Folder, metadata: Metadata | None = None) -> None:
        self._folder = folder
        self._metadata = metadata
        self._stored: dict[Any, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(self._folder) if self._metadata is None else self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        tensors.sort(key=lambda item: self._place(item)[:2])
        upload = _Upload()
        with ThreadPoolExecutor(threads()) as pool:
            contents = pool.map(lambda item: self._folder.read(*self._place(item)), objects)
            for item, content in zip(objects, contents, strict=True):
                planner.load_bytes(item, io.BytesIO(content))
            targets = [planner.resolve_tensor(item).detach() for item in tensors]
            prepared = pool.map(self._prepare, tensors, targets)
            pieces = [piece for found in prepared for piece in found]
            for _ in pool.map(lambda piece: piece.read(self._folder, upload), pieces):
                pass
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> tuple[str, int, int]:
        info = self._stored[item.storage_index]
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{item.storage_index.fqn} was transformed as it was written: not supported")
        return info.relative_path, info.offset, info.length

    def _prepare(self, item: ReadItem, target: Tensor) -> list[_Piece]:
        """What is still to be read into ``target``: nothing, where the stored tensor had to be read as a whole."""
        file, start, length = self._place(item)
        stored = _describe(self._folder.read(file, start, min(length, _HEAD)), length)
        rows = None if stored is None else _rows(item, stored, target)
        if stored is not None and rows is not None:
            first, last = rows
            size = math.prod(stored.shape[1:]) * target.element_size()
            return list(_pieces(file, start + stored.offset + first * size, target, (last - first) * size))
        tensor = torch.load(io.BytesIO(self._folder.read(file, start, length)), map_location="cpu", weights_only=True)
        for dim, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        if tensor.shape != target.shape:
            name, found = item.storage_index.fqn, tuple(tensor.shape)
            raise ValueError(f"{name}: expected a part of shape {tuple(target.shape)}, found {found}")
        target.copy_(tensor)
        return []


# --- a stored tensor --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A contiguous tensor in a file of torch.save, whose bytes begin ``offset`` bytes after it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class _TensorUnpickler(pickle.Unpickler):
    """Of the description of one plain tensor; anything else is an error."""

    def find_class(self, module: str, name: str) -> Any:
        return _NAMED[module, name]

    def persistent_load(self, key: Any) -> Any:
        kind, dtype, name, _, numel = key
        if (kind, name) != ("storage", "0"):
            raise KeyError(key)
        return dtype, numel


_STORAGES = {
    **{"FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16, "HalfStorage": torch.float16},
    **{"ByteStorage": torch.uint8, "CharStorage": torch.int8, "ShortStorage": torch.int16, "IntStorage": torch.int32},
    **{"LongStorage": torch.int64, "DoubleStorage": torch.float64, "BoolStorage": torch.bool},
}
_NAMED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): lambda *args: args,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


def _describe(head: bytes, length: int) -> _Stored | None:
    """What the beginning of a file of torch.save says, which is a zip archive: ``data.pkl`` first, then the bytes.

    None where it holds anything but a plain contiguous tensor as this machine has it in memory.
    """
    try:
        stream = io.BytesIO(head)
        stream.seek(_content(head, 0, b"archive/data.pkl"))
        storage, first, shape, stride, *_ = _TensorUnpickler(stream).load()
        header = head.index(b"PK\x03\x04", head.index(b"archive/data/0") - 30)
        offset = _content(head, header, b"archive/data/0")
        little = head[_content(head, head.index(b"archive/byteorder") - 30, b"archive/byteorder") :][:6] == b"little"
        dtype, numel = storage
        size = numel * dtype.itemsize
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, pickle.UnpicklingError):
        return None
    dense = torch.empty(shape, device="meta").stride() == tuple(stride) and math.prod(shape) == numel
    fits = first == 0 and little and offset + size <= length
    return _Stored(dtype, tuple(shape), offset) if dense and fits else None


def _content(head: bytes, header: int, name: bytes) -> int:
    """Where the content of a member of a zip archive begins, by its header. Raises ValueError if it is another one."""
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
    for first in range(0, size, _PIECE):
        yield _Piece(file, start + first, flat[first : min(first + _PIECE, size)])


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class _Upload:
    """Copies to GPUs through pinned memory: each thread has a piece of it, and a stream of its own for each GPU."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._before: dict[torch.device, torch.cuda.Event] = {}
        if torch.cuda.is_initialized():  # what is queued may still write the tensors
            for index in range(torch.cuda.device_count()):
                device = torch.device("cuda", index)
                self._before[device] = torch.cuda.current_stream(device).record_event()

    def read(self, folder: Folder, piece: _Piece) -> None:
        device = piece.target.device
        if not hasattr(self._own, "memory"):
            self._own.memory, self._own.streams = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True), {}
        if device not in self._own.streams:
            self._own.streams[device] = torch.cuda.Stream(device)
            self._own.streams[device].wait_event(self._before[device])
        memory = self._own.memory[: piece.target.nbytes]
        folder.read_into(piece.file, piece.start, memory_of(memory))
        with torch.cuda.stream(self._own.streams[device]):
            piece.target.copy_(memory, non_blocking=True)
        self._own.streams[device].synchronize()
