"""Writes checkpoints of torch.distributed.checkpoint on several threads, and sums up their bytes on the way.

Each thread writes a file of its own, from the memory that the state was copied to. Whatever fails in one of them fails
the save: torch's own writer loses what its threads raise.
"""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fused_optim.backends.checksum import crc32
from fused_optim.checkpoint.storage.checksums import Range
from fused_optim.checkpoint.storage.folders import Folder, retried, to_disk
from fused_optim.checkpoint.storage.threads import threads
from fused_optim.checkpoint.writing.archives import Archives
from fused_optim.checkpoint.writing.planner import size_of
from fused_optim.memory.host_memory import empty_host
from fused_optim.sharding.collective import shared_out
from fused_optim.state.values import LazyTensor, Values

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
        """Write this rank's plan. Returns where each item is, in the same order for the same plan."""
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
