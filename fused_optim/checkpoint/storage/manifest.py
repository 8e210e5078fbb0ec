"""The manifest of a checkpoint: written last, so that a checkpoint that has one is whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from fused_optim.checkpoint.storage import checksums
from fused_optim.checkpoint.storage.damage import Damaged
from fused_optim.checkpoint.storage.folders import Folder
from fused_optim.checkpoint.storage.untrusted import load_json, number_in
from fused_optim.rules import ADAM

FILE = "fused_optim_checkpoint.json"
UNFINISHED = "fused_optim_unfinished"  # of 0.2 on object stores: there as long as a checkpoint had no manifest
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """``number``: checkpoints of a folder are numbered in the order in which they were written."""

    step: int
    number: int
    world_size: int
    form: str | None  # "native" or "unscaled"; None: of another optimizer, which earlier versions saved
    formats: dict[str, list[str]]  # of the moments
    files: dict[str, int]  # bytes of every file but this one
    checksums: str  # the CRC-32 of the file of checksums
    extra: dict[str, list[int]] = field(default_factory=dict)  # name -> by rank, whose state is the rank's
    versions: dict[str, str] = field(default_factory=dict)
    optimizer: str | None = None  # its kind, see ``collect.check_kind``; None: see :attr:`kind`

    @property
    def kind(self) -> str | None:
        """The kind of optimizer; None: unknown. Earlier versions named none, and only a FusedAdam had a form then."""
        return ADAM.name if self.optimizer is None and self.form is not None else self.optimizer

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def write(folder: Folder, manifest: Manifest) -> None:
    content = {"version": VERSION, **asdict(manifest)}
    if manifest.optimizer in (None, ADAM.name):  # releases before 0.3 know nothing of it
        del content["optimizer"]
    folder.write(FILE, json.dumps({**content, "crc": _crc(content)}, indent=1).encode())


def crc_of_checksums(folder: Folder) -> str:
    return f"{zlib.crc32(folder.read(checksums.FILE)):08x}"


def read(folder: Folder) -> Manifest:
    """The manifest of a checkpoint; no other file is read.

    Raises FileNotFoundError if there is none, Damaged if it is torn, ValueError if it is of a newer version, OSError.
    """
    content = load_json(folder.read(FILE), f"{folder}/{FILE}")
    version, crc = number_in(content, "version", f"{folder}/{FILE}"), content.pop("crc", None)
    torn = crc != _crc(content)
    del content["version"]
    content.pop("metrics", None)  # of earlier versions
    if version > VERSION:
        raise ValueError(f"{folder}: expected version {VERSION} at most, found {version}: update fused_optim")
    if torn:
        raise Damaged(f"{folder}/{FILE} is damaged: its checksum differs")
    return _manifest(folder, content)


def published(folder: Folder) -> bytes | None:
    """The manifest's bytes, which tell a checkpoint from another one published in its place;

    None without a manifest.
    """
    with suppress(FileNotFoundError):
        return folder.read(FILE)
    return None


def check_files(folder: Folder, files: Mapping[str, int]) -> None:
    """Raise Damaged where a file is missing or has another length."""
    sizes = folder.sizes()
    for name, expected in files.items():
        size = sizes.get(name)
        if size != expected:
            size = folder.size(name)  # listings of object stores may be late
        if size != expected:
            raise Damaged(f"{folder}/{name}: expected {expected} bytes, found {'none' if size is None else size}")


def check_whole(folder: Folder, manifest: Manifest) -> None:
    """Raise Damaged where files are not those of the manifest, as far as can be told without reading tensors' bytes."""
    check_files(folder, manifest.files)
    if crc_of_checksums(folder) != manifest.checksums:
        raise Damaged(f"{folder}/{checksums.FILE} is damaged: its checksum differs")


def _manifest(folder: Folder, content: dict[str, Any]) -> Manifest:
    """Raises Damaged for one that is not as :func:`write` writes it, or names files of other folders."""
    try:
        manifest = Manifest(**content)
        numbers = [manifest.step, manifest.number, manifest.world_size, *manifest.files.values()]
        numbers += [rank for ranks in manifest.extra.values() for rank in ranks]
        outside = next((name for name in manifest.files if name != PurePath(name).name), None)
    except (TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"{folder}/{FILE} is damaged: {error}") from error
    if not isinstance(manifest.optimizer, str | None):
        raise Damaged(f"{folder}/{FILE} is damaged: expected the name of an optimizer")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise Damaged(f"{folder}/{FILE} is damaged: expected numbers of at least 0")
    if outside is not None:
        raise Damaged(f"{folder}/{FILE} is damaged: {outside!r} is outside of its folder")
    return manifest


def _crc(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
