"""The folder that a run's checkpoints are in: one folder each, visible once it is whole.

On a disk a checkpoint is written beside, synced and renamed. Object stores cannot rename: there every attempt has a
folder of its own, ``step-00000100.1f3a9c20``, which is a checkpoint once it has its manifest.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fused_optim.checkpoint.storage import lock, manifest, metadata
from fused_optim.checkpoint.storage.damage import is_damage
from fused_optim.checkpoint.storage.folders import TEMPORARY, Folder
from fused_optim.checkpoint.storage.manifest import Manifest
from fused_optim.checkpoint.storage.metadata import CHECKPOINT
from fused_optim.checkpoint.storage.retention import Retention

logger = logging.getLogger("fused_optim")

_UNFINISHED, _DELETED = ".unfinished-", ".deleted-"
_PINNED = "fused_optim_pinned"  # a file of earlier versions: its checkpoint stays as long as it is there


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint in the folder. ``problem``: why it cannot be whole. ``manifest``: None if others wrote it."""

    name: str
    step: int
    manifest: Manifest | None = None
    problem: str | None = None


class CheckpointDirectory:
    """A run's folder of checkpoints. Only one rank changes it; all of them read."""

    def __init__(self, folder: Folder, retention: Retention) -> None:
        self.folder = folder
        self._retention = retention
        self._manifests: dict[str, Manifest] = {}  # by name, of the rank that alone changes them
        self._lock: lock.Lock | None = None  # from the first save on, of that rank

    def check_level(self) -> None:
        """Raise ValueError for the folder of a checkpoint, in which no other ones are looked for, nor saved."""
        if self.folder.size(metadata.FILE) is not None or self.folder.size(manifest.FILE) is not None:
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

    def _own(self) -> list[ListedCheckpoint]:
        """All attempts with readable manifests, the newest first. Known manifests are not read again.

        Checkpoints that cannot be read prevent no save, and stay.
        """
        attempts = []
        for name in self.folder.names():
            try:
                attempt = self._listed(name)
            except (OSError, ValueError) as error:
                logger.warning("left as it is: %s", error)
            else:
                attempts += [attempt] if attempt is not None and attempt.manifest is not None else []
        return _sorted(attempts)

    def _listed(self, name: str) -> ListedCheckpoint | None:
        match = CHECKPOINT.fullmatch(name)
        if match is None:
            return None
        step, place = int(match[1]), self.folder.child(name)
        try:
            saved = self._manifests.get(name) or manifest.read(place)
        except FileNotFoundError:
            return self._without_manifest(name, step, is_attempt=match[2] is not None)
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

    def _without_manifest(self, name: str, step: int, is_attempt: bool) -> ListedCheckpoint | None:
        """A checkpoint of ``dcp.save`` or ``convert`` under this name;

        None for an unfinished attempt on object stores.
        """
        place = self.folder.child(name)
        if is_attempt or place.size(manifest.UNFINISHED) is not None:
            return None
        if place.size(metadata.FILE) is not None:
            return ListedCheckpoint(name, step)
        return ListedCheckpoint(
            name, step, problem=f"{place} has neither {manifest.FILE} nor {metadata.FILE}: it is not whole"
        )

    def folder_of(self, checkpoint: ListedCheckpoint) -> Folder:
        """The checkpoint's folder."""
        return self.folder.child(checkpoint.name)

    def check_whole(self, checkpoint: ListedCheckpoint) -> None:
        """Raise Damaged if files are missing or torn, as far as can be told without reading tensors' bytes."""
        if checkpoint.manifest is not None:
            manifest.check_whole(self.folder_of(checkpoint), checkpoint.manifest)

    # --- writing ------------------------------------------------------------------------------------------------

    def draft(self, step: int, attempt: str) -> Folder:
        """The folder that an attempt to save a step is written to."""
        prefix = _UNFINISHED if self.folder.is_local else ""
        return self.folder.child(f"{prefix}{_name(step)}.{attempt}")

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
        manifest.check_files(draft, saved.files)
        earlier = self._own()
        newest = max((known.number for known in self._manifests.values()), default=0)  # listings may be late
        saved = replace(saved, number=newest + 1)
        self._check_owner()
        manifest.write(draft, saved)
        draft.sync()
        manifest.read(draft)
        name = draft.name
        if self.folder.is_local:
            self._check_owner()
            name = self._publish(draft.name)
        self._manifests[name] = saved
        self._prune([ListedCheckpoint(name, step, saved), *(other for other in earlier if other.name != name)])

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
                manifest.check_whole(place := self.folder.child(name), manifest.read(place))
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
        if self.folder.is_local or match is None or place.size(manifest.FILE) is not None:
            return False
        return match[2] is not None or place.size(manifest.UNFINISHED) is not None

    def _prune(self, newest_first: list[ListedCheckpoint]) -> None:
        """Remove checkpoints that need not stay, and earlier attempts at steps that do. Others' and torn ones stay.

        A checkpoint is renamed first, so that it disappears at once, and then deleted.
        """
        kept = self._retention.keeps(newest_first)
        for checkpoint in newest_first:
            try:
                if checkpoint.name not in kept and self.folder_of(checkpoint).size(_PINNED) is None:
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
            if "." not in name and place.size(manifest.FILE) is not None:
                place.write(manifest.UNFINISHED, b"")  # without its manifest it would look like one of dcp.save
            place.remove(manifest.FILE)
            self.folder.remove(name)
        self._manifests.pop(name, None)


def _sorted(checkpoints: Iterable[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """The checkpoints, the newest first."""
    listed = list(checkpoints)
    return sorted(listed, key=lambda checkpoint: _age(checkpoint, listed), reverse=True)


def _age(checkpoint: ListedCheckpoint, others: Iterable[ListedCheckpoint]) -> tuple[int, int]:
    """A number that grows with the time of writing. Without a manifest it is that of the neighbours by step."""
    if checkpoint.manifest is not None:
        return checkpoint.manifest.number, 0
    before = (o.manifest.number for o in others if o.manifest is not None and o.step <= checkpoint.step)
    return max(before, default=0), checkpoint.step + 1


def _name(step: int) -> str:
    return f"step-{step:08d}"


def have_rotated(earlier: Sequence[ListedCheckpoint], now: Sequence[ListedCheckpoint]) -> bool:
    """True if checkpoints of the earlier listing are gone and new ones are there, as while another run saves."""
    before, after = (
        {(c.name, 0 if c.manifest is None else c.manifest.number) for c in listing} for listing in (earlier, now)
    )
    return bool(before - after) and bool(after - before)
