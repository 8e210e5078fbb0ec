"""Saves in the background: one after the other, on all ranks."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from concurrent.futures import Executor, Future, thread, wait  # noqa: F401  the pools register first: the last one is called first
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fused_optim.checkpoint import extras, publish, verify
from fused_optim.checkpoint.archives import check_loadable
from fused_optim.checkpoint.collect import Collector
from fused_optim.checkpoint.lock import release_all
from fused_optim.checkpoint.publish import CheckpointDirectory, Manifest
from fused_optim.checkpoint.write import Saver
from fused_optim.options.reading import CheckpointFormat
from fused_optim.sharding.collective import gather, on_all_ranks, this_rank, world_size

logger = logging.getLogger("fused_optim")
# By place, the end of the save that was asked for last: those of all Checkpointers of this process, which may be
# gone, are made in the order in which they were asked for. The first rank, which changes folders, waits; others for it.
_ends: dict[str, threading.Event] = {}
_asking = threading.Lock()


class BackgroundSaves:
    """Saves for one Checkpointer; all ranks of ``group`` make the same calls. ``form``: of the optimizer's states."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        states: Collector,
        form: CheckpointFormat,
        group: dist.ProcessGroup | None,
        progress: bool,
    ) -> None:
        self._directory = directory
        self._states = states
        self._form = form
        self._group = group
        self._progress = progress
        self._saver = Saver(group)
        self._ranks = world_size()

    def submit(self, pool: Executor, step: int, staged: Future[dict[str, Any]]) -> Future[str | None]:
        """Queue a save behind those requested earlier. The future (:func:`watched`) has None or the error message.

        ``staged``: the copy of the state. A failure on one rank is a failure on every rank.
        """
        place, before, ended, started = self._directory.folder.place, None, threading.Event(), time.perf_counter()
        if this_rank() == 0:
            with _asking:
                before, _ends[place] = _ends.get(place), ended

        def save() -> str | None:
            if before is not None:
                before.wait()
            doing = f"saving step {step} to {self._directory.folder}"
            try:
                nbytes = self._save(step, staged, doing)
            except (Exception, CheckpointException) as error:
                failure = f"{doing} failed: {str(error).removeprefix(f'{doing}: ')}"
                logger.error("%s", failure, exc_info=True)
                return failure
            finally:
                ended.set()
            if self._progress and this_rank() == 0:
                seconds, gigabytes = time.perf_counter() - started, nbytes / 1e9
                text = f"saved {gigabytes:.2f} GB in {seconds:.1f} s, {gigabytes / seconds:.2f} GB/s"
                print(f"step {step}: {text}", file=sys.stderr, flush=True)
            return None

        try:
            return watched(pool.submit(save))
        except BaseException:  # the system has no thread left
            ended.set()
            raise

    def release(self) -> None:
        """Let other runs have the folder once this process's pending saves there have ended."""
        with _asking:
            last = _ends.pop(self._directory.folder.place, None)
        if last is not None:
            last.wait()
        self._directory.release()

    def plan(self, outline: dict[str, Any], doing: str) -> None:
        """Do in advance what the first save would begin with. Errors are only logged: the save will raise them."""
        try:
            self._add_extras(outline, doing)
            self._saver.plan(outline, doing)
        except (Exception, CheckpointException):
            logger.debug("%s failed", doing, exc_info=True)

    def _add_extras(self, state: dict[str, Any], doing: str) -> dict[str, list[int]]:
        """Replace ``state["extra"]`` by this rank's entries. Returns, by extra, the ranks that write one."""
        with on_all_ranks(doing, group=self._group):
            packed = {}
            for name, value in state.pop("extra").items():
                check_loadable(f"extra {name}", value)
                packed[name] = extras.pack(name, value)
        owners = extras.owners_of(gather({name: value.digest for name, value in packed.items()}, group=self._group))
        state.update(extras.own_entries(packed, owners, this_rank()))
        return owners

    def _save(self, step: int, staged: Future[dict[str, Any]], doing: str) -> int:
        """Write a draft and publish it. Returns its bytes."""
        group, directory, attempt = self._group, self._directory, ""
        self._check_ranks()
        with on_all_ranks(doing, group=group):
            if this_rank() == 0:
                attempt = directory.begin(step)
        attempt = gather(attempt, group=group)[0]
        try:
            with on_all_ranks(doing, group=group):
                state = staged.result()
            owners = self._add_extras(state, doing)
            draft = directory.draft(step, attempt)
            written = self._saver.save(state, draft, doing, may_differ=self._states.buffers)
            sizes = {name: size for of_rank in written for name, size in of_rank.sizes.items()}
            with on_all_ranks(doing, group=group):
                self._check_ranks()
                if this_rank() == 0:
                    sums = {range_: crc for of_rank in written for range_, crc in of_rank.checksums.items()}
                    sizes |= verify.write_file(draft, sums)
                    saved = Manifest(
                        step=step,
                        number=0,  # the folder gives it
                        world_size=world_size(),
                        form=self._form,
                        formats=self._states.formats(),
                        files=dict(sorted(sizes.items())),
                        checksums=publish.crc_of_checksums(draft),
                        extra=owners,
                        versions={"torch": torch.__version__},
                        optimizer=self._states.kind,
                    )
                    directory.finish(step, attempt, saved)
        except (Exception, CheckpointException):
            if this_rank() == 0:
                with suppress(OSError):
                    directory.discard(step, attempt)
            raise
        return sum(sizes.values())

    def _check_ranks(self) -> None:
        """Raise RuntimeError where the ranks cannot talk any more: each would take itself for the only one."""
        if world_size() != self._ranks:
            hint = "call wait() or close() before destroy_process_group()"
            raise RuntimeError(f"the process group of {self._ranks} ranks was destroyed before the save ended: {hint}")


# --- the end of the process waits for saves, and tells failures that nobody has asked for ----------------------------


_untold: dict[Future[str | None], None] = {}  # jobs whose outcome nobody has asked for


def watched(job: Future[str | None]) -> Future[str | None]:
    """Register a job, which returns None or an error message. The end of the process waits for it.

    A process whose jobs failed without anybody asking for their :func:`outcome` ends with an error and status 1.
    """
    _register()
    _untold[job] = None
    return job


@functools.cache
def _register() -> None:
    """With the first save: other programs' ends are left alone."""
    atexit.register(_tell)
    threading._register_atexit(_drain)  # type: ignore[attr-defined]  # Python has no public way
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """A child that was forked has none of the threads that save."""
    _untold.clear()
    _ends.clear()


def outcome(future: Future[str | None]) -> str | None:
    """Wait for a job. Returns its error message, or None."""
    try:
        return future.result()
    finally:
        _untold.pop(future, None)


def _drain() -> None:
    """Wait for all jobs before ``concurrent.futures`` closes its pools, which they use."""
    wait(list(_untold))
    release_all()


def _tell() -> None:
    """Report failures nobody has asked for, at the end of the process, when all threads have ended."""
    failures = []
    for future in list(_untold):
        try:
            failures.append(outcome(future))
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {error}")
    if failures := [text for text in failures if text is not None]:
        for text in failures:
            logger.error("%s", text)
            print(f"fused_optim: {text}", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an error that is raised here would not change the status
