"""The folder that a run's checkpoints are in: one folder each, visible once it is whole.

On a disk a checkpoint is written beside, synced and renamed. Object stores cannot rename: there it is written in place
and is visible once it has its manifest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

from fused_optim.checkpoint.storage import manifest
from fused_optim.checkpoint.storage.folders import Folder
from fused_optim.checkpoint.storage.manifest import Manifest

logger = logging.getLogger("fused_optim")

_VISIBLE = re.compile(r"step-(\d{8,})")
_UNFINISHED, _DELETED = ".unfinished-", ".deleted-"


class CheckpointDirectory:
    """Only one rank changes it; all of them read. ``keep``: how many of the newest stay, None for all."""

    def __init__(self, folder: Folder, keep: int | None) -> None:
        self.folder = folder
        self._keep = keep

    def folder_of(self, step: int) -> Folder:
        """Where the checkpoint of a step is."""
        return self.folder.child(_name(step))

    def draft(self, step: int) -> Folder:
        """Where it is written."""
        return self.folder.child(_UNFINISHED + _name(step)) if self.folder.is_local else self.folder_of(step)

    def begin(self, step: int) -> None:
        """Make room for a draft: of one that was not finished, nothing stays."""
        draft = self.draft(step)
        self.folder.create()
        self._remove(draft.name)
        draft.create()
        if not self.folder.is_local:
            draft.write(manifest.UNFINISHED, b"")

    def finish(self, step: int, found: Manifest) -> None:
        """Make a draft, whose other files are written and synced, the newest checkpoint; drop the oldest."""
        draft = self.draft(step)
        manifest.write(draft, found)
        draft.sync()
        if self.folder.is_local:
            self._publish(draft.name)
        else:
            draft.remove(manifest.UNFINISHED)
        self._prune()

    def _publish(self, name: str) -> None:
        visible = name.removeprefix(_UNFINISHED)
        replaced = self.folder.child(visible).exists()  # of the same step, before training went back
        if replaced:
            self.folder.rename(visible, _DELETED + visible)
        self.folder.rename(name, visible)
        self.folder.sync()
        if replaced:
            self.folder.remove(_DELETED + visible)

    def discard(self, step: int) -> None:
        """Remove a draft that could not be finished."""
        self._remove(self.draft(step).name)

    def recover(self) -> None:
        """Finish what an interrupted run left behind: drafts that are whole are published, others removed."""
        for name in self.folder.names():
            if name.startswith(_DELETED):
                self.folder.remove(name)
            elif name.startswith(_UNFINISHED) and _VISIBLE.fullmatch(name.removeprefix(_UNFINISHED)):
                try:
                    manifest.read(self.folder.child(name))
                except (OSError, ValueError):
                    self.folder.remove(name)
                else:
                    self._publish(name)
            elif _VISIBLE.fullmatch(name) and _is_unfinished(self.folder.child(name)):
                self._remove(name)

    def newest_first(self) -> Iterator[Manifest]:
        """The checkpoints that are whole, as far as can be told without reading all of their bytes."""
        found = []
        for name in self.folder.names():
            if _VISIBLE.fullmatch(name) and not _is_unfinished(self.folder.child(name)):
                try:
                    found.append(manifest.read(self.folder.child(name)))
                except (OSError, ValueError) as error:
                    logger.warning("checkpoint skipped: %s", error)
        yield from sorted(found, key=lambda each: each.number, reverse=True)

    def next_number(self) -> int:
        return 1 + max((each.number for each in self.newest_first()), default=0)

    def _prune(self) -> None:
        """A checkpoint disappears at once, and is deleted then."""
        if self._keep is None:
            return
        for old in list(self.newest_first())[self._keep :]:
            try:
                self._remove(_name(old.step))
            except OSError as error:
                logger.warning("checkpoint of step %d cannot be removed: %s", old.step, error)

    def _remove(self, name: str) -> None:
        if self.folder.is_local:
            if self.folder.child(name).exists():
                self.folder.remove(_DELETED + name)
                self.folder.rename(name, _DELETED + name)
                self.folder.remove(_DELETED + name)
        else:
            place = self.folder.child(name)
            if place.size(manifest.FILE) is not None:
                place.write(manifest.UNFINISHED, b"")
                place.remove(manifest.FILE)
            self.folder.remove(name)


def _is_unfinished(place: Folder) -> bool:
    """Whether it is visible only because an object store cannot hide it."""
    return not place.is_local and place.size(manifest.FILE) is None and place.size(manifest.UNFINISHED) is not None


def _name(step: int) -> str:
    return f"step-{step:08d}"
