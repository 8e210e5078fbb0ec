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
class Found:
    """A checkpoint that is there. ``problem``: why it cannot be whole; ``manifest``: None of one that others wrote."""

    name: str
    step: int
    manifest: Manifest | None = None
    problem: str | None = None


class CheckpointDirectory:
    """Only one rank changes it; all of them read."""

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

    def newest_first(self) -> list[Found]:
        """What is there, from manifests alone; of attempts at the same step only the last. Changes nothing.

        Raises OSError for what cannot be read now and may be read later, ValueError for what is newer than this code.
        """
        self._manifests.clear()
        newest: dict[int, Found] = {}
        for each in _sorted(each for name in self.folder.names() if (each := self._found(name)) is not None):
            if each.step not in newest or newest[each.step].problem is not None:
                newest[each.step] = each
        return _sorted(newest.values())

    def _own(self) -> list[Found]:
        """All attempts with manifests that can be read, the newest first. Those that are known are not read again.

        Others keep no save from being made, and stay.
        """
        found = []
        for name in self.folder.names():
            try:
                each = self._found(name)
            except (OSError, ValueError) as error:
                logger.warning("left as it is: %s", error)
            else:
                found += [each] if each is not None and each.manifest is not None else []
        return _sorted(found)

    def _found(self, name: str) -> Found | None:
        match = CHECKPOINT.fullmatch(name)
        if match is None:
            return None
        step, place = int(match[1]), self.folder.child(name)
        try:
            found = self._manifests.get(name) or manifest.read(place)
        except FileNotFoundError:
            return self._without_manifest(name, step, is_attempt=match[2] is not None)
        except ValueError as error:
            if is_damage(error):
                return Found(name, step, problem=str(error))
            raise
        if found.step != step:
            raise ValueError(
                f"{place}: its manifest is of step {found.step}; was the folder renamed? Name it as it was"
            )
        self._manifests[name] = found
        return Found(name, step, found)

    def _without_manifest(self, name: str, step: int, is_attempt: bool) -> Found | None:
        """What ``dcp.save`` or ``convert`` has written under this name; on object stores perhaps an attempt."""
        place = self.folder.child(name)
        if is_attempt or place.size(manifest.UNFINISHED) is not None:
            return None
        if place.size(metadata.FILE) is not None:
            return Found(name, step)
        return Found(name, step, problem=f"{place} has neither {manifest.FILE} nor {metadata.FILE}: it is not whole")

    def folder_of(self, found: Found) -> Folder:
        """Where a checkpoint is."""
        return self.folder.child(found.name)

    def check_whole(self, found: Found) -> None:
        """Raise Damaged where it is not, as far as can be told without reading tensors' bytes."""
        if found.manifest is not None:
            manifest.check_whole(self.folder_of(found), found.manifest)

    # --- writing ------------------------------------------------------------------------------------------------

    def draft(self, step: int, attempt: str) -> Folder:
        """Where an attempt to save a step is written."""
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
        """All saves are made: other runs may have the folder."""
        lock.release(self.folder)

    def _check_owner(self) -> None:
        assert self._lock is not None
        self._lock.check()

    def finish(self, step: int, attempt: str, found: Manifest) -> None:
        """Make a draft, whose other files are written and synced, the newest checkpoint; drop what need not stay.

        Raises Damaged, before anything is changed, where a file is not as it was written; ValueError where the folder
        is another run's meanwhile.
        """
        draft = self.draft(step, attempt)
        manifest.check_files(draft, found.files)
        earlier = self._own()
        known = max((each.number for each in self._manifests.values()), default=0)  # listings may be late
        found = replace(found, number=known + 1)
        self._check_owner()
        manifest.write(draft, found)
        draft.sync()
        manifest.read(draft)
        name = draft.name
        if self.folder.is_local:
            self._check_owner()
            name = self._publish(draft.name)
        self._manifests[name] = found
        self._prune([Found(name, step, found), *(each for each in earlier if each.name != name)])

    def _publish(self, name: str) -> str:
        """Rename a draft; its name now. One of the same step, from before training went back, goes only then."""
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

    def _prune(self, newest_first: list[Found]) -> None:
        """Remove what need not stay, and earlier attempts at what does. What is not whole, or not ours, stays.

        A checkpoint disappears at once, and is deleted then.
        """
        kept = self._retention.keeps(newest_first)
        for each in newest_first:
            try:
                if each.name not in kept and self.folder.child(each.name).size(_PINNED) is None:
                    self._check_owner()
                    self._remove(each.name)
            except (OSError, ValueError) as error:
                logger.warning("checkpoint of step %d cannot be removed: %s", each.step, error)

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


def _sorted(found: Iterable[Found]) -> list[Found]:
    """The newest first."""
    listed = list(found)
    return sorted(listed, key=lambda each: _age(each, listed), reverse=True)


def _age(found: Found, others: Iterable[Found]) -> tuple[int, int]:
    """A number that grows with the time of writing. What has no manifest is as old as its neighbours by step."""
    if found.manifest is not None:
        return found.manifest.number, 0
    before = (each.manifest.number for each in others if each.manifest is not None and each.step <= found.step)
    return max(before, default=0), found.step + 1


def _name(step: int) -> str:
    return f"step-{step:08d}"


def have_rotated(earlier: Sequence[Found], now: Sequence[Found]) -> bool:
    """Whether some checkpoints that were there are gone, for others."""
    before, after = (
        {(f.name, 0 if f.manifest is None else f.manifest.number) for f in each} for each in (earlier, now)
    )
    return bool(before - after) and bool(after - before)
