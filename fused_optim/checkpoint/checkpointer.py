"""Checkpoints of a run in one folder: saved while training goes on, found and loaded again."""

from __future__ import annotations

import copy
import gc
import logging
import signal
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fused_optim.checkpoint.collect import Collector, check_ours
from fused_optim.checkpoint.commit import CheckpointReport, LoadPlan, Loads
from fused_optim.checkpoint.extras import RANDOM_STATES, RandomStates, Stateful, check_extra
from fused_optim.checkpoint.folders import Damaged, LocalFolder, PathLike, folder_at, is_damage
from fused_optim.checkpoint.plan import LoadOptions, Rename
from fused_optim.checkpoint.publish import CheckpointDirectory, ListedCheckpoint, have_rotated
from fused_optim.checkpoint.saves import BackgroundSaves, outcome
from fused_optim.checkpoint.stage import PinnedStager
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import whole_number
from fused_optim.options.reading import CheckpointFormat
from fused_optim.sharding.collective import (
    RaisedElsewhere,
    check_alike,
    gather,
    on_all_ranks,
    on_any,
    this_rank,
    world_size,
)

if TYPE_CHECKING:
    from fused_optim.checkpoint.termination import Termination

logger = logging.getLogger("fused_optim")

_UNDER_WAY = 2  # saves: one is written, another one copied
_writers: weakref.WeakValueDictionary[str, Checkpointer] = weakref.WeakValueDictionary()  # by place, of this process


@contextmanager
def _collection_paused() -> Iterator[None]:
    """No garbage collection while the caller waits: going through many objects that stay takes as long as making them.

    Never in other threads: they would switch on what a loop that collects by hand has switched off.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Checkpointer:
    """Saves a model, its optimizer and what belongs to them in the background, and loads them on any number of ranks.

    ::

        with Checkpointer(model, optimizer, "checkpoints", extra={"scheduler": scheduler}, every=100) as checkpointer:
            for step in range(checkpointer.load_latest() or 0, steps):
                ...  # forward, backward, optimizer.step(), scheduler.step()
                checkpointer.save(step + 1)

    A save copies the state beside the next forward and backward pass (:class:`PinnedStager`) and is written by threads.
    It is visible once it is whole: written beside, synced, and renamed. Each checkpoint is a folder of
    torch.distributed.checkpoint, ``step-00000100``, with its checksums and a manifest.

    Args:
        model: its parameters, buffers and extra state are saved. Sharded in any way, but not by FSDP1.
        optimizer: one of this package. TypeError for others.
        folder: that all ranks see; a path, or what fsspec opens (``s3://...``). From the first save to :meth:`close`,
            or the end of the process, no other run saves there.
        random_states: the generators of Python, NumPy and torch are saved, too, each rank's own, as the extra
            ``random_states``.
        extra: by name, what else is saved: schedulers, loaders, averages; whatever has ``state_dict`` and
            ``load_state_dict``. Sharded tensors (DTensors) in their states are saved as those of the model. All else
            must be plain values and tensors, and each rank gets its own back; on another number of ranks only states
            that were the same on all of them can be loaded.
        keep: how many of the newest checkpoints stay; None: all.
        keep_every: checkpoints of steps that are multiples of it stay, too.
        every: :meth:`save` saves steps that are multiples of it; None: whenever it is called.
        format: the form of the optimizer's states, "native" or "unscaled"; see ``docs/checkpoints.md``. Either loads.
        progress: the first rank prints a line for each checkpoint, to stderr.
        sigterm: SIGTERM, by which clusters announce that they take the machine away, lets the next :meth:`save` on all
            ranks save, wait for it and raise SystemExit(143). So call it after every step. Of several Checkpointers
            that save, the last one raises. Repeats of the signal are ignored for two minutes; then it ends the process.
            Signals are Python's main thread's: in another one this does nothing. False: signals are left alone.
        readonly: only load; nothing in ``folder`` is changed, and ``sigterm`` does nothing.

    What writing raises is raised by the next call of any method, as a RuntimeError on every rank; the checkpoints that
    are there stay, and the step can be saved again. A process that ends waits for its saves; where one has failed, and
    nobody was told, it ends with an error and status 1. All methods are collectives: all ranks call them.

    Nothing in ``folder`` is changed before the first save, which removes what interrupted runs have left there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ShardedOptimizer,
        folder: PathLike,
        *,
        extra: Mapping[str, Stateful] | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        every: int | None = None,
        format: CheckpointFormat = "native",
        progress: bool = False,
        sigterm: bool = False,
        readonly: bool = False,
        random_states: bool = False,
    ) -> None:
        check_ours(model, optimizer)
        kept = ("keep", keep), ("keep_every", keep_every)
        keep, keep_every = (None if count is None else whole_number(name, count, 1) for name, count in kept)
        if format not in ("native", "unscaled"):
            raise ValueError(f"format: expected 'native' or 'unscaled', got {format!r}")
        self._extra = check_extra(extra or {})
        if random_states:
            if RANDOM_STATES in self._extra:
                raise ValueError(f"extra {RANDOM_STATES!r}: random_states=True saves one of that name; rename yours")
            self._extra[RANDOM_STATES] = RandomStates()
        self._every = None if every is None else whole_number("every", every, 1)
        self._form = format
        self._states = Collector(model, optimizer)
        self._states.check_form(format)
        place = folder_at(folder)
        if isinstance(place, LocalFolder):  # which stays where it is meant, wherever the process goes
            place = LocalFolder(place.path.absolute())
        self._directory = CheckpointDirectory(place, keep, keep_every)
        self._stager = PinnedStager(optimizer)
        # Of their own: the thread that writes makes collectives while this one and training make others.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._writing_group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        options = {"every": every, "keep": (keep, keep_every), "format": format, "sigterm": sigterm}
        check_alike("Checkpointer", {**options, "readonly": readonly}, self._group)
        with on_all_ranks(f"opening {place}", group=self._group):
            if this_rank() == 0:
                self._directory.check_level()
        self._termination: Termination | None = None
        if sigterm and not readonly:
            from fused_optim.checkpoint.termination import Termination

            self._termination = Termination()
            weakref.finalize(self, self._termination.close).atexit = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="Checkpointer")
        self._saves: deque[Future[str | None]] = deque()
        self._readonly, self._is_closed = readonly, False
        self._background = BackgroundSaves(self._directory, self._states, format, self._writing_group, progress)
        self._loads = Loads(model, optimizer, self._extra, self._states, self._group)
        self.report: CheckpointReport | None = None

    # --- saving -------------------------------------------------------------------------------------------------

    def prepare(self) -> Future[None]:
        """Allocate the memory for saves, and plan them, in the background, once the optimizer has its states.

        Otherwise the first save does, which takes longer than all else.
        """
        doing = f"planning saves to {self._directory.folder}"
        with on_all_ranks(doing, group=self._group):
            state = self._collect()
            outline = self._stager.outline({"model": state["model"], "optimizer": state["optimizer"]})
            outline["extra"] = copy.deepcopy(state["extra"])
            memory = self._stager.prepare(state)

        def plan() -> None:
            self._background.plan(outline, doing)
            memory.result()

        return self._thread.submit(plan)

    def save(self, step: int, *, force: bool = False) -> None:
        """Start to save what there is after ``step`` steps, unless ``every`` says otherwise; ``force``: even then.

        Returns at once; if two saves are under way, when the first of them is done. What is saved is what there is now,
        also where the step was saved or loaded before: its number says nothing about that. The new checkpoint then
        takes the place of the earlier one, once it is whole. Warns where masters are still to start from initial values
        of quantized weights, which files do not hold: call ``optimizer.initialize_state()`` before.

        Raises RuntimeError where an earlier save has failed, once this one was started, and SystemExit after a last
        save where SIGTERM came. TypeError or ValueError for what is no step; ValueError where another Checkpointer of
        this process saves in the same folder.
        """
        step = whole_number("step", step, 0)
        if self._readonly:
            raise ValueError(f"{self._directory.folder} was opened with readonly=True: nothing is saved there")
        if self._is_closed:
            raise ValueError(f"the Checkpointer of {self._directory.folder} was closed: nothing is saved any more")
        writer = _writers.setdefault(self._directory.folder.place, self)
        if writer is not self:
            raise ValueError(f"another Checkpointer saves in {self._directory.folder}: give each a folder of its own")
        due = force or self._every is None or step % self._every == 0
        if not due and self._termination is None:
            return
        ending, failures = self._agree(step)
        if due or ending:
            while len(self._saves) >= _UNDER_WAY:
                failures += self._finish_oldest()
            staged: Future[dict[str, Any]] = Future()
            try:
                with _collection_paused():
                    self._states.warn_of_masters()
                    staged = self._stager.stage(self._collect())
            except Exception as error:  # the other ranks have to know
                staged.set_exception(error)
            self._saves.append(self._background.submit(self._thread, step, staged))
        if ending:
            for failure in failures:
                logger.error("%s", failure)
            self.wait()
            assert self._termination is not None
            if self._termination.end():  # no other Checkpointer is to make its last save
                raise SystemExit(128 + signal.SIGTERM)
        elif failures:
            raise RuntimeError("; ".join(failures))

    def _agree(self, step: int) -> tuple[bool, list[str]]:
        """(True if some rank was asked to end, failures of the saves that have ended on all ranks).

        Takes these saves off the queue. Raises ValueError if ranks were given different steps.
        """
        asked, ended = False, sum(save.done() for save in self._saves)
        if self._termination is not None:
            self._termination.is_used = True
            asked = self._termination.asked and not self._termination.has_ended
        if self._group is not None and world_size() > 1:
            flags = torch.tensor([int(asked), -ended, step, -step], dtype=torch.int64)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
            asked, ended, last, first = bool(flags[0]), -int(flags[1]), int(flags[2]), -int(flags[3])
            if first != last:
                raise ValueError(f"save({step}): ranks were given steps from {first} to {last}; all save the same one")
        if asked and self._termination is not None:
            self._termination.note()
        return asked, [failure for _ in range(ended) for failure in self._finish_oldest()]

    def _collect(self) -> dict[str, Any]:
        extra = {name: value.state_dict() for name, value in self._extra.items()}
        model, optimizer = self._states.model_state(), self._states.optimizer_state(self._form, "stager")
        return {"model": model, "optimizer": optimizer, "extra": extra}

    def wait(self) -> None:
        """Wait until all saves are on the disk. Raises RuntimeError if one has failed."""
        failures = []
        while self._saves:
            failures += self._finish_oldest()
        if failures:
            raise RuntimeError("; ".join(failures))

    def _finish_oldest(self) -> list[str]:
        """Wait for the oldest save. Returns its failure, if any, after which its step can be saved again."""
        failure = outcome(self._saves.popleft())
        return [] if failure is None else [failure]

    # --- loading ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there and whole, as far as file sizes tell, the newest first."""
        with on_all_ranks(f"opening {self._directory.folder}", group=self._group):
            steps = []
            for checkpoint in self._directory.newest_first() if this_rank() == 0 else []:
                try:
                    self._check(checkpoint)
                    steps.append(checkpoint.step)
                except (OSError, ValueError) as error:
                    if not is_damage(error):
                        raise
        return gather(steps, group=self._group)[0]

    def path(self, step: int) -> str:
        """Return the path of a step's checkpoint, for ``load_optimizer_checkpoint`` and other readers.

        Raises FileNotFoundError if there is none.
        """
        return str(self._directory.folder_of(self._find(step)))

    def _list(self) -> list[ListedCheckpoint]:
        with on_all_ranks(f"opening {self._directory.folder}", group=self._group):
            listed = self._directory.newest_first() if this_rank() == 0 else []
        return gather(listed, group=self._group)[0]

    def _find(self, step: int) -> ListedCheckpoint:
        for checkpoint in self._list():
            if checkpoint.step == step:
                return checkpoint
        raise FileNotFoundError(f"{self._directory.folder} has no whole checkpoint of step {step}")

    def load_latest(
        self,
        *,
        without: Collection[str] = (),
        verify: bool = True,
        strict: bool = True,
        partial: Collection[str] = (),
        rename: Rename | None = None,
        model_only: bool = False,
        dry_run: bool = False,
    ) -> int | None:
        """Load the newest checkpoint that is whole, and return its step; None if there is none at all.

        One that is torn, or of which a byte has changed, is passed over with a warning. Where a run that saves removes
        checkpoints meanwhile, its newer ones are loaded. Folders of ``dcp.save`` and
        ``convert`` that are named as checkpoints are loaded, too; they have no extras. Raises ValueError if none is
        whole, and for one of a newer version; OSError for what cannot be opened; and whatever :meth:`load` does.
        """
        options = LoadOptions.checked(strict, partial, rename, without, model_only, dry_run)
        self.wait()
        listed = self._list()
        while listed:
            try:
                return self._load_newest(listed, verify, options)
            except Exception:  # on all ranks, whatever it is on each
                earlier, listed = listed, self._list()
                if not have_rotated(earlier, listed):
                    raise
        return None

    def _load_newest(self, listed: Sequence[ListedCheckpoint], verify: bool, options: LoadOptions) -> int:
        """Load the first of these checkpoints that is whole, and return its step."""
        problems = []
        for checkpoint in listed:
            try:
                planned = self._compare(checkpoint, verify, options)
            except Exception as error:  # on all ranks, whatever it is on each
                if on_any(not is_damage(error) and not isinstance(error, RaisedElsewhere), self._group):
                    raise
                if have_rotated(listed, self._list()):
                    raise
                problems.append(str(error))
                logger.warning("checkpoint passed over: %s: %s", self._directory.folder_of(checkpoint), problems[-1])
            else:
                return self._load(planned)
            gc.collect()  # errors keep what was read of this one, and each other in circles
        none = f"{self._directory.folder} has {len(listed)} checkpoints, of which none is whole"
        raise ValueError(f"{none}; the newest: {problems[0]}")

    def load(
        self,
        step: int,
        *,
        without: Collection[str] = (),
        verify: bool = True,
        strict: bool = True,
        partial: Collection[str] = (),
        rename: Rename | None = None,
        model_only: bool = False,
        dry_run: bool = False,
    ) -> int:
        """Load the checkpoint of a step, and return the step. On any number of ranks, into any formats of states.

        Args:
            step: of a checkpoint that is there.
            without: names of extras that stay as they are.
            verify: compare all bytes with their checksums first.
            strict: False: load what fits; what is new in the model or of another shape stays as it is, and what the
                checkpoint has beyond the model is left out. ``report`` lists them.
            partial: names of the model, or shell patterns (``head.*``), of which alone that is so.
            rename: names of parameters or modules in the checkpoint and what they are called in the model
                (``{"encoder": "backbone.encoder"}``, the longest match counts), or a function from one to the other.
            model_only: neither the optimizer nor extras.
            dry_run: compare only.

        Code that a checkpoint might hold is not run. Raises on every rank if it fails on one: FileNotFoundError if
        there is no such checkpoint, ValueError if it is damaged, or of another model or kind of optimizer, naming what
        it lacks and what it has beyond it. Nothing was changed then, but where reading the model fails after all was
        compared: load again.
        """
        options = LoadOptions.checked(strict, partial, rename, without, model_only, dry_run)
        self.wait()
        checkpoint = self._find(step)
        while True:
            try:
                return self._load(self._compare(checkpoint, verify, options))
            except Exception:  # on all ranks, whatever it is on each
                earlier, checkpoint = checkpoint, self._find(step)
                if not have_rotated([earlier], [checkpoint]):  # the step was not saved again meanwhile
                    raise

    def _compare(self, checkpoint: ListedCheckpoint, verify: bool, options: LoadOptions) -> Future[LoadPlan]:
        """Raises Damaged or FileNotFoundError for what is not whole, others for what cannot be told now."""
        folder = self._directory.folder_of(checkpoint)
        with on_all_ranks(f"opening {folder}", group=self._group):
            self._check(checkpoint)
        with _collection_paused():
            return self._loads.compare(checkpoint, folder, verify, options)

    def _check(self, checkpoint: ListedCheckpoint) -> None:
        if checkpoint.problem is not None:
            raise Damaged(checkpoint.problem)
        self._directory.check_whole(checkpoint)

    def _load(self, planned: Future[LoadPlan]) -> int:
        self.report = None
        plan = planned.result()
        if not plan.options.dry_run:
            with _collection_paused():
                self._loads.load(plan)
        self.report = plan.report
        if self.report.model or self.report.restarted or self.report.extras_left:
            logger.warning("%s: %s", plan.source.path, self.report)
        return self.report.step

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all saves, and let SIGTERM do what it did before; one that came after the last save does so now.

        Raises RuntimeError if a save has failed.
        """
        try:
            self.wait()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Release the thread, the process groups, the folder's lock and the SIGTERM handler."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.shutdown(wait=False)
        if _writers.get(place := self._directory.folder.place) is self:
            self._background.release()
            del _writers[place]
        for group in (self._group, self._writing_group):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._group = self._writing_group = None
        if self._termination is not None:
            self._termination.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.wait()
        except RuntimeError as failure:
            logger.error("%s", failure)
        if not isinstance(error, SystemExit) and self._termination is not None and self._termination.asked:
            logger.error("SIGTERM ends this process after", exc_info=error)
        self._let_go()
