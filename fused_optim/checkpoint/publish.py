"""The folder that a run's checkpoints are in: one folder each, visible once it is whole.

On a disk a checkpoint is written beside, synced and renamed. Object stores cannot rename: there every attempt has a
folder of its own, ``step-00000100.1f3a9c20``, which is a checkpoint once it has its manifest.
"""

from __future__ import annotations

import json
import logging
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any

from fused_optim.checkpoint import lock, metadata, verify
from fused_optim.checkpoint.folders import TEMPORARY, Damaged, Folder, is_damage
from fused_optim.checkpoint.metadata import CHECKPOINT, load_json, number_in
from fused_optim.rules import ADAM

logger = logging.getLogger("fused_optim")

_UNFINISHED, _DELETED = ".unfinished-", ".deleted-"


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint in the folder. ``problem``: why it cannot be whole. ``manifest``: None if others wrote it."""

    name: str
    step: int
    manifest: Manifest | None = None
    problem: str | None = None


class CheckpointDirectory:
    """A run's folder of checkpoints. Only one rank changes it; all of them read."""

    def __init__(self, folder: Folder, keep: int | None, keep_every: int | None) -> None:
        self.folder = folder
        self._keep, self._keep_every = keep, keep_every
        self._manifests: dict[str, Manifest] = {}  # by name, of the rank that alone changes them
        self._lock: lock.Lock | None = None  # from the first save on, of that rank

    def check_level(self) -> None:
        """Raise ValueError for the folder of a checkpoint, in which no other ones are looked for, nor saved."""
        if self.folder.size(metadata.FILE) is not None or self.folder.size(MANIFEST) is not None:
            hint = "load_optimizer_checkpoint reads it"
            if match := CHECKPOINT.fullmatch(self.folder.name):
                hint = f"open the folder above it, where load({int(match[1])}) reads it"
            raise ValueError(f"{self.folder} is a checkpoint: expected the folder of a run, which has some; {hint}")

    # --- reading ------------------------------------------------------------------------------------------------

    def newest_first(self) -> list[ListedCheckpoint]:
        """The checkpoints by their manifests; of several attempts at a step, only the last. Changes nothing.

        Raises OSError if the folder cannot be read now, ValueError for a checkpoint that is newer than this code.
        """
        self._manifests.clear()
        newest: dict[int, ListedCheckpoint] = {}
        listed = map(self._listed, self.folder.names())
        for checkpoint in _sorted(checkpoint for checkpoint in listed if checkpoint is not None):
            if checkpoint.step not in newest or newest[checkpoint.step].problem is not None:
                newest[checkpoint.step] = checkpoint
        return _sorted(newest.values())

    def _listed(self, name: str) -> ListedCheckpoint | None:
        match = CHECKPOINT.fullmatch(name)
        if match is None:
            return None
        step, place = int(match[1]), self.folder.child(name)
        try:
            saved = self._manifests.get(name) or read_manifest(place)
        except FileNotFoundError:
            if match[2] is not None or place.size(UNFINISHED) is not None:  # an unfinished attempt on object stores
                return None
            lacks = f"{place} has neither {MANIFEST} nor {metadata.FILE}: it is not whole"
            found = place.size(metadata.FILE) is not None  # of ``dcp.save`` or ``convert``
            return ListedCheckpoint(name, step, problem=None if found else lacks)
        except ValueError as error:
            if is_damage(error):
                return ListedCheckpoint(name, step, problem=str(error))
            raise
        if saved.step != step:
            raise ValueError(
                f"{place}: its manifest is of step {saved.step}; was the folder renamed? Name it as it was"
            )
        self._manifests[name] = saved
        return ListedCheckpoint(name, step, saved)

    def folder_of(self, checkpoint: ListedCheckpoint) -> Folder:
        """The checkpoint's folder."""
        return self.folder.child(checkpoint.name)

    def check_whole(self, checkpoint: ListedCheckpoint) -> None:
        """Raise Damaged if files are missing or torn, as far as can be told without reading tensors' bytes."""
        if checkpoint.manifest is not None:
            check_whole(self.folder_of(checkpoint), checkpoint.manifest)

    # --- writing ------------------------------------------------------------------------------------------------

    def draft(self, step: int, attempt: str) -> Folder:
        """The folder that an attempt to save a step is written to."""
        prefix = _UNFINISHED if self.folder.is_local else ""
        return self.folder.child(f"{prefix}step-{step:08d}.{attempt}")

    def begin(self, step: int) -> str:
        """Make room for a draft. Returns the attempt's name.

        The first time the folder becomes this process's, until :meth:`release`, which waits up to a minute where it is
        not known whether its last owner lives; and what interrupted runs have left is put in order. Raises ValueError
        where it is another run's.
        """
        self.folder.create()
        if self._lock is None:
            held = lock.hold(self.folder)
            self._tidy()
            self._lock = held
        self._lock.check()
        attempt = secrets.token_hex(4)
        self.draft(step, attempt).create()
        return attempt

    def release(self) -> None:
        """Let other runs have the folder: all saves are made."""
        lock.release(self.folder)

    def _check_owner(self) -> None:
        assert self._lock is not None
        self._lock.check()

    def finish(self, step: int, attempt: str, saved: Manifest) -> None:
        """Make a draft, whose other files are written and synced, the newest checkpoint; drop what need not stay.

        Raises Damaged, before anything is changed, where a file is not as it was written; ValueError where the folder
        is another run's meanwhile.
        """
        draft = self.draft(step, attempt)
        check_sizes(draft, saved.files)
        earlier = []  # those that cannot be read prevent no save, and stay; known manifests are not read again
        for name in self.folder.names():
            try:
                listed = self._listed(name)
            except (OSError, ValueError) as error:
                logger.warning("left as it is: %s", error)
            else:
                earlier += [listed] if listed is not None and listed.manifest is not None else []
        newest = max((known.number for known in self._manifests.values()), default=0)  # listings may be late
        saved = replace(saved, number=newest + 1)
        self._check_owner()
        write_manifest(draft, saved)
        draft.sync()
        read_manifest(draft)
        name = draft.name
        if self.folder.is_local:
            self._check_owner()
            name = self._publish(draft.name)
        self._manifests[name] = saved
        self._prune([ListedCheckpoint(name, step, saved), *(other for other in _sorted(earlier) if other.name != name)])

    def _publish(self, name: str) -> str:
        """Rename a draft, and return its name now. An earlier checkpoint of the step is removed only then."""
        attempt = name.removeprefix(_UNFINISHED)
        visible = attempt.partition(".")[0]
        if self.folder.child(visible).exists():
            attempt = attempt if attempt != visible else f"{visible}.{secrets.token_hex(4)}"
            self.folder.rename(name, attempt)
            self.folder.sync()
            self._remove(visible)
            self.folder.rename(attempt, visible)
        else:
            self.folder.rename(name, visible)
        self.folder.sync()
        self._manifests.pop(visible, None)
        return visible

    def discard(self, step: int, attempt: str) -> None:
        """Remove a draft that could not be finished."""
        self._remove(self.draft(step, attempt).name)

    def _tidy(self) -> None:
        """Finish what interrupted runs left behind: drafts that are whole are published, others removed."""
        drafts = [name for name in self.folder.names() if self._is_draft(name)]
        for name in drafts:
            try:
                check_whole(place := self.folder.child(name), read_manifest(place))
            except (OSError, ValueError) as error:
                if not is_damage(error):
                    raise
                self._remove(name)
            else:
                self._publish(name)
        for name in self.folder.names():
            if name.startswith(_DELETED) or (name.startswith(f".{lock.FILE}") and name.endswith(TEMPORARY)):
                self.folder.remove(name)

    def _is_draft(self, name: str) -> bool:
        if name.startswith(_UNFINISHED):
            return CHECKPOINT.fullmatch(name.removeprefix(_UNFINISHED)) is not None
        place, match = self.folder.child(name), CHECKPOINT.fullmatch(name)
        if self.folder.is_local or match is None or place.size(MANIFEST) is not None:
            return False
        return match[2] is not None or place.size(UNFINISHED) is not None

    def _prune(self, newest_first: list[ListedCheckpoint]) -> None:
        """Remove checkpoints that need not stay, and earlier attempts at steps that do. Others' and torn ones stay.

        A checkpoint is renamed first, so that it disappears at once, and then deleted.
        """
        latest: dict[int, str] = {}  # of several attempts at a step only the newest can stay
        for checkpoint in newest_first:
            latest.setdefault(checkpoint.step, checkpoint.name)
        steps = [*latest]
        kept = {latest[step] for step in steps[: self._keep]}
        if self._keep_every is not None:
            kept |= {latest[step] for step in steps if step % self._keep_every == 0}
        for checkpoint in newest_first:
            try:
                if checkpoint.name not in kept:
                    self._check_owner()
                    self._remove(checkpoint.name)
            except (OSError, ValueError) as error:
                logger.warning("checkpoint of step %d cannot be removed: %s", checkpoint.step, error)

    def _remove(self, name: str) -> None:
        if self.folder.is_local:
            if self.folder.child(name).exists():
                self.folder.remove(_DELETED + name)
                self.folder.rename(name, _DELETED + name)
                self.folder.remove(_DELETED + name)
        else:
            place = self.folder.child(name)
            if "." not in name and place.size(MANIFEST) is not None:
                place.write(UNFINISHED, b"")  # without its manifest it would look like one of dcp.save
            place.remove(MANIFEST)
            self.folder.remove(name)
        self._manifests.pop(name, None)


def _sorted(checkpoints: Iterable[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """The checkpoints, the newest first. One without a manifest is as old as its neighbours by step."""
    listed = list(checkpoints)

    def age(checkpoint: ListedCheckpoint) -> tuple[int, int]:
        if checkpoint.manifest is not None:
            return checkpoint.manifest.number, 0
        before = (o.manifest.number for o in listed if o.manifest is not None and o.step <= checkpoint.step)
        return max(before, default=0), checkpoint.step + 1

    return sorted(listed, key=age, reverse=True)


def have_rotated(earlier: Sequence[ListedCheckpoint], now: Sequence[ListedCheckpoint]) -> bool:
    """True if checkpoints of the earlier listing are gone and new ones are there, as while another run saves."""
    before, after = (
        {(c.name, 0 if c.manifest is None else c.manifest.number) for c in listing} for listing in (earlier, now)
    )
    return bool(before - after) and bool(after - before)


# --- the manifest: written last, so that a checkpoint that has one is whole ------------------------------------------


MANIFEST = "fused_optim_checkpoint.json"
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


def write_manifest(folder: Folder, manifest: Manifest) -> None:
    content = {"version": VERSION, **asdict(manifest)}
    if manifest.optimizer in (None, ADAM.name):  # releases before 0.3 know nothing of it
        del content["optimizer"]
    folder.write(MANIFEST, json.dumps({**content, "crc": _crc_of(content)}, indent=1).encode())


def crc_of_checksums(folder: Folder) -> str:
    return f"{zlib.crc32(folder.read(verify.FILE)):08x}"


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a checkpoint; no other file is read.

    Raises FileNotFoundError if there is none, Damaged if it is torn, ValueError if it is of a newer version, OSError.
    """
    content = load_json(folder.read(MANIFEST), f"{folder}/{MANIFEST}")
    version, crc = number_in(content, "version", f"{folder}/{MANIFEST}"), content.pop("crc", None)
    torn = crc != _crc_of(content)
    del content["version"]
    if version > VERSION:
        raise ValueError(f"{folder}: expected version {VERSION} at most, found {version}: update fused_optim")
    if torn:
        raise Damaged(f"{folder}/{MANIFEST} is damaged: its checksum differs")
    return _manifest(folder, content)


def published(folder: Folder) -> bytes | None:
    """The manifest's bytes, which tell a checkpoint from another one published in its place;

    None without a manifest.
    """
    with suppress(FileNotFoundError):
        return folder.read(MANIFEST)
    return None


def check_sizes(folder: Folder, files: Mapping[str, int]) -> None:
    """Raise Damaged for a file that is missing or has another length."""
    sizes = folder.sizes()
    for name, expected in files.items():
        size = sizes.get(name)
        if size != expected:
            size = folder.size(name)  # listings of object stores may be late
        if size != expected:
            raise Damaged(f"{folder}/{name}: expected {expected} bytes, found {'none' if size is None else size}")


def check_whole(folder: Folder, manifest: Manifest) -> None:
    """Raise Damaged for files that differ from the manifest, as far as can be told without reading tensors' bytes."""
    check_sizes(folder, manifest.files)
    if crc_of_checksums(folder) != manifest.checksums:
        raise Damaged(f"{folder}/{verify.FILE} is damaged: its checksum differs")


def _manifest(folder: Folder, content: dict[str, Any]) -> Manifest:
    """Raises Damaged for one that is not as :func:`write_manifest` writes it, or names files of other folders."""
    try:
        manifest = Manifest(**content)
        numbers = [manifest.step, manifest.number, manifest.world_size, *manifest.files.values()]
        numbers += [rank for ranks in manifest.extra.values() for rank in ranks]
        outside = next((name for name in manifest.files if name != PurePath(name).name), None)
    except (TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"{folder}/{MANIFEST} is damaged: {error}") from error
    if not isinstance(manifest.optimizer, str | None):
        raise Damaged(f"{folder}/{MANIFEST} is damaged: expected the name of an optimizer")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise Damaged(f"{folder}/{MANIFEST} is damaged: expected numbers of at least 0")
    if outside is not None:
        raise Damaged(f"{folder}/{MANIFEST} is damaged: {outside!r} is outside of its folder")
    return manifest


def _crc_of(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
