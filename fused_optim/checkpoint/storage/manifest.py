"""The manifest of a checkpoint: written last, so that a checkpoint that has one is whole."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from fused_optim.checkpoint.storage import checksums
from fused_optim.checkpoint.storage.folders import Folder
from fused_optim.checkpoint.storage.untrusted import load_json

FILE = "fused_optim_checkpoint.json"
UNFINISHED = "fused_optim_unfinished"  # a file that is there as long as a checkpoint of an object store has no manifest
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """``number``: checkpoints of a folder are numbered in the order in which they were written."""

    step: int
    number: int
    world_size: int
    form: str | None  # "native" or "unscaled"; None: of another optimizer
    formats: dict[str, list[str]]  # of the moments
    files: dict[str, int]  # bytes of every file but this one
    checksums: str  # the CRC-32 of the file of checksums
    extra: dict[str, list[int]] = field(default_factory=dict)  # name -> by rank, whose state is the rank's
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def write(folder: Folder, manifest: Manifest) -> None:
    content = {"version": VERSION, **asdict(manifest)}
    folder.write(FILE, json.dumps({**content, "crc": _crc(content)}, indent=1).encode())


def list_files(folder: Folder) -> dict[str, int]:
    """The sizes of the files that are there."""
    sizes = {name: folder.size(name) for name in folder.names() if name not in (FILE, UNFINISHED)}
    return {name: size for name, size in sorted(sizes.items()) if size is not None}


def crc_of_checksums(folder: Folder) -> str:
    return f"{zlib.crc32(folder.read(checksums.FILE)):08x}"


def read(folder: Folder) -> Manifest:
    """Raises ValueError for a checkpoint that is not whole, or of a newer version. Tensors' bytes are not read."""
    if folder.size(FILE) is None:
        raise ValueError(f"{folder} has no {FILE}, which is written last: it is not whole")
    try:
        content = load_json(folder.read(FILE), f"{folder}/{FILE}")
        version, crc = int(content.pop("version")), content.pop("crc")
        torn = crc != _crc({"version": version, **content})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}/{FILE} is torn ({type(error).__name__})") from error
    if version > VERSION:
        raise ValueError(f"{folder}: expected version {VERSION} at most, found {version}: update fused_optim")
    if torn:
        raise ValueError(f"{folder}/{FILE} is damaged: its checksum differs")
    manifest = _manifest(folder, content)
    for name, expected in manifest.files.items():
        if (found := folder.size(name)) != expected:
            raise ValueError(f"{folder}/{name}: expected {expected} bytes, found {'none' if found is None else found}")
    if crc_of_checksums(folder) != manifest.checksums:
        raise ValueError(f"{folder}/{checksums.FILE} is damaged: its checksum differs")
    return manifest


def _manifest(folder: Folder, content: dict[str, Any]) -> Manifest:
    """Raises ValueError for one that is not as :func:`write` writes it, or names files of other folders."""
    try:
        found = Manifest(**content)
        numbers = [found.step, found.number, found.world_size, *found.files.values()]
        numbers += [rank for ranks in found.extra.values() for rank in ranks]
        outside = next((name for name in found.files if name != PurePath(name).name), None)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder}/{FILE} is damaged: {error}") from error
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{folder}/{FILE} is damaged: expected numbers of at least 0")
    if outside is not None:
        raise ValueError(f"{folder}/{FILE} is damaged: {outside!r} is outside of its folder")
    return found


def _crc(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
