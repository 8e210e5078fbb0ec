"""A CRC-32 of each stored tensor of a torch.distributed.checkpoint folder, in a JSON file beside them.

torch reads a flipped bit as another value. The bytes are summed up as they lie in the files, nothing is deserialised;
where they lie is what ``.metadata`` says, whose own checksum ties the file to this checkpoint and no earlier one.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from fused_optim.checkpoint.folders import (
    Damaged,
    Folder,
    LocalFolder,
    PathLike,
    done_by,
    folder_at,
    kept_open,
    threads_to_read,
)
from fused_optim.checkpoint.metadata import FILE as METADATA
from fused_optim.checkpoint.metadata import inner_path, load_json, number_in, read_metadata, unfinished
from fused_optim.sharding.collective import (
    gather,
    gather_at_first,
    on_all_ranks,
    on_any,
    shared_out,
    this_rank,
    world_size,
)

FILE = "fused_optim_checksums.json"
VERSION = 1

Range = tuple[str, int, int]  # file, start, length
_Sum = str | FileNotFoundError | EOFError | Damaged  # a checksum, or why there is none


@dataclass(frozen=True)
class _Item:
    """A stored tensor, or one rank's part of it, or another object."""

    key: str  # in the flattened state dict
    offsets: tuple[int, ...] | None  # in the tensor; None: not a tensor
    range: Range

    def __str__(self) -> str:
        file, start, length = self.range
        at = f" at offsets {self.offsets}" if self.offsets else ""
        return f"{self.key}{at} (bytes {start} to {start + length} of {file})"


def write_checksums(path: PathLike, *, no_dist: bool = False) -> None:
    """Write the checksums of a finished checkpoint: after ``dcp.save``, or once the future of ``async_save`` is done.

    A collective over the default group where there is one: all ranks call it, and each reads a share of the files.
    ``no_dist=True``: this process reads all of them, for one rank alone. The checksums appear at once or not at all.
    Raises on every rank if it fails on one: ValueError for what is not as ``.metadata`` says, OSError.
    """
    folder = folder_at(path)
    with on_all_ranks(f"checksums of {folder}", no_dist):
        check_finished(folder)
        items = _items(read_metadata(folder))
        sums = _sum_up(folder, _share({item.range for item in items}, no_dist))
        of_rank = {item.range: _crc(folder, item, sums[item.range]) for item in items if item.range in sums}
    shares = [of_rank] if no_dist else gather_at_first(of_rank)
    with on_all_ranks(f"checksums of {folder}", no_dist):
        if no_dist or this_rank() == 0:
            write_file(folder, {range_: crc for share in shares for range_, crc in share.items()})


def verify_checksums(path: PathLike, *, no_dist: bool = False) -> None:
    """Compare a checkpoint with its checksums.

    A collective as :func:`write_checksums` is. Raises the same ValueError on every rank if any byte differs or is
    missing: it names the state, its offsets in the tensor and both checksums. Raises on every rank if it fails on one:
    FileNotFoundError for a checkpoint without checksums or ``.metadata``, ValueError for damaged ones, OSError for
    files that cannot be read.
    """
    verify_items(folder_at(path), None, True, no_dist)


def verify_items(
    folder: Folder,
    keys: Container[str] | None,
    required: bool,
    no_dist: bool = False,
    metadata: Metadata | None = None,
) -> None:
    """:func:`verify_checksums` for some keys of the state dict; without checksums nothing, unless ``required``.

    ``metadata``: of the folder, where it was read already.
    """
    described: Future[Metadata] = Future()
    if metadata is not None:
        described.set_result(metadata)
    with verifying(folder, keys, required, no_dist, None if metadata is None else described):
        pass


@contextmanager
def verifying(
    folder: Folder,
    keys: Container[str] | None,
    required: bool,
    no_dist: bool = False,
    metadata: Future[Metadata] | None = None,
) -> Iterator[None]:
    """:func:`verify_items`, which other threads do while the body runs. At its end is the collective that raises.

    ``metadata``: of the folder, where the body reads it. Bytes are summed up before it is there, as the checksums say
    where they are. A body that raises ends the threads, as Ctrl+C does.
    """
    doing, unwanted = f"verifying {folder}", threading.Event()
    thread = ThreadPoolExecutor(1, thread_name_prefix="verification")
    damages: list[str] = []
    try:
        with on_all_ranks(doing, no_dist):  # the system may have no thread left
            job = thread.submit(_own_damages, folder, keys, required, no_dist, metadata, unwanted)
        yield
        with on_all_ranks(doing, no_dist):
            damages = job.result()
    finally:
        unwanted.set()
        if metadata is not None:
            metadata.cancel()  # nobody waits for one that the body could not read
        thread.shutdown(wait=False)
    if not (damages if no_dist else on_any(bool(damages))):
        return
    of_ranks = gather((damages[:1], len(damages)), no_dist)
    if first := next((text for texts, _ in of_ranks for text in texts), None):
        more = sum(count for _, count in of_ranks) - 1
        raise Damaged(f"{folder} is damaged: {first}" + (f"; and {more} more" if more else ""))


def _own_damages(
    folder: Folder,
    keys: Container[str] | None,
    required: bool,
    no_dist: bool,
    metadata: Future[Metadata] | None,
    unwanted: threading.Event,
) -> list[str]:
    """Damages that this rank finds in its share."""
    if folder.size(FILE) is None:
        if required:
            check_finished(folder)
            raise FileNotFoundError(f"{folder} has no checksums: expected {FILE}, which write_checksums writes")
        return []
    check_finished(folder)
    expected = _read(folder)
    sums = {} if keys is not None else _sum_up(folder, _share(expected, no_dist), unwanted)
    items = _items(read_metadata(folder) if metadata is None else metadata.result())
    wanted = [item for item in items if keys is None or item.key in keys]
    others = {item.range for item in wanted} - (expected.keys() if keys is None else set())
    sums |= _sum_up(folder, _share(others, no_dist), unwanted)
    return list(_damages(folder, wanted, sums, expected))


def _damages(
    folder: Folder, items: Iterable[_Item], sums: Mapping[Range, _Sum], expected: Mapping[Range, str]
) -> Iterator[str]:
    for item in items:
        if item.range not in sums:  # another rank's
            continue
        try:
            crc = _crc(folder, item, sums[item.range])
        except ValueError as error:
            yield str(error)
        else:
            wanted = expected.get(item.range, "none")
            if crc != wanted:
                yield f"{item}: expected CRC-32 {wanted}, found {crc}"


def _sum_up(folder: Folder, ranges: Iterable[Range], unwanted: threading.Event | None = None) -> dict[Range, _Sum]:
    """The checksums of bytes. Raises CancelledError once they are ``unwanted``."""

    def sum_up(bytes_: Range) -> _Sum:
        if unwanted is not None and unwanted.is_set():
            raise CancelledError
        try:
            return f"{opened.crc32(*bytes_):08x}"
        except (FileNotFoundError, EOFError, Damaged) as error:
            return error

    listed = sorted(ranges, key=lambda each: each[2], reverse=True)  # no large one is left to a single thread
    with kept_open(folder) as opened, ThreadPoolExecutor(threads_to_read()) as pool:
        return dict(zip(listed, done_by(pool, sum_up, listed), strict=True))


def _crc(folder: Folder, item: _Item, found: _Sum) -> str:
    """Raises ValueError for an item whose bytes are not there."""
    if isinstance(found, str):
        return found
    file, start, length = item.range
    text = f"{max((folder.size(file) or 0) - start, 0)}: the file is truncated"
    if isinstance(found, FileNotFoundError):
        text = f"none: {found.strerror or 'no such file'}"
    if isinstance(found, Damaged):
        text = f"none: {found}"
    raise ValueError(f"{item}: expected {length} bytes, found {text}")


def _items(metadata: Metadata) -> list[_Item]:
    """The items in the order of their bytes: neighbours in a file together.

    Raises Damaged for items that share bytes.
    """
    stored: Mapping[Any, Any] = metadata.storage_data
    items = [
        _Item(index.fqn, index.offset and tuple(index.offset), (info.relative_path, info.offset, info.length))
        for index, info in stored.items()
    ]
    _check_apart(METADATA, {item.range for item in items})
    return sorted(items, key=lambda item: item.range)


def _check_apart(who: str, ranges: Iterable[Range]) -> None:
    """Raise Damaged for ranges that share bytes: a few could ask for all of a large file again and again."""
    for (file, start, length), (next_file, next_start, _) in pairwise(sorted(ranges)):
        if file == next_file and start + length > next_start:
            shared = f"bytes {next_start} to {start + length} of {file} to several tensors"
            raise Damaged(f"{who} gives {shared}; it is damaged")


def check_finished(folder: Folder) -> None:
    is_file = isinstance(folder, LocalFolder) and folder.path.is_file()  # of torch.save, or safetensors
    if not is_file and folder.size(METADATA) is None:
        expected = "expected a folder of torch.distributed.checkpoint with a file .metadata, which is written last"
        raise FileNotFoundError(f"{folder}: {expected}; {unfinished(folder)}")


def _share(ranges: Iterable[Range], no_dist: bool) -> list[Range]:
    """This rank's: about as many bytes as any other's."""
    ordered, rank = sorted(ranges), 0 if no_dist else this_rank()
    takers = shared_out([length for _, _, length in ordered], 1 if no_dist else world_size())
    return [range_ for range_, taker in zip(ordered, takers, strict=True) if taker == rank]


# --- the file ---------------------------------------------------------------------------------------------------


def write_file(folder: Folder, checksums: Mapping[Range, str]) -> dict[str, int]:
    """The checksums of all ranges of a checkpoint whose ``.metadata`` is there. Returns the file's name and bytes."""
    files: dict[str, list[list[int | str]]] = {}
    for (file, start, length), crc in sorted(checksums.items()):
        files.setdefault(file, []).append([start, length, crc])
    content = {"version": VERSION, "checksum": "CRC-32", "metadata": _metadata_crc(folder), "files": files}
    encoded = json.dumps(content).encode()
    folder.write(FILE, encoded)
    return {FILE: len(encoded)}


def _read(folder: Folder) -> dict[Range, str]:
    file = f"{folder}/{FILE}"
    content = load_json(folder.read(FILE), file)
    version = number_in(content, "version", file)
    try:
        expected = content["metadata"]
        if version <= VERSION:
            ranges = {
                (inner_path(name), start, length): crc
                for name, rows in content["files"].items()
                for start, length, crc in rows
            }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{file} cannot be read ({type(error).__name__}); it is truncated or damaged") from error
    if version > VERSION:
        raise ValueError(f"{file}: expected version {VERSION} at most, found {version}: update fused_optim")
    if any(type(number) is not int or number < 0 for _, *numbers in ranges for number in numbers):
        raise Damaged(f"{file} cannot be read: bytes begin and end at numbers from 0 on; it is damaged")
    _check_apart(file, ranges)
    if (found := _metadata_crc(folder)) != expected:
        text = "it is damaged, or the checkpoint was saved again without new checksums"
        raise Damaged(f"{folder}/{METADATA}: expected CRC-32 {expected}, found {found}: {text}")
    return ranges


def _metadata_crc(folder: Folder) -> str:
    return f"{zlib.crc32(folder.read(METADATA)):08x}"
