"""Checkpoints of a run in one folder: saved while training goes on, found and loaded again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from fused_optim.adam import MOMENTS, FusedAdam
from fused_optim.checkpoint import extras
from fused_optim.checkpoint.collect import Collector
from fused_optim.checkpoint.extras import Stateful, check_extra
from fused_optim.checkpoint.reading.dcp_folder import DcpFolder
from fused_optim.checkpoint.reading.load import load_from
from fused_optim.checkpoint.storage import checksums, manifest
from fused_optim.checkpoint.storage.directory import CheckpointDirectory
from fused_optim.checkpoint.storage.folders import PathLike, folder_at
from fused_optim.checkpoint.storage.manifest import Manifest
from fused_optim.checkpoint.storage.torch_errors import SINGLE_PROCESS
from fused_optim.checkpoint.termination import EXIT_STATUS, Termination
from fused_optim.checkpoint.writing.saver import Saver
from fused_optim.checkpoint.writing.staging import PinnedStager
from fused_optim.options import CheckpointFormat
from fused_optim.sharding.collective import gather, on_all_ranks, this_rank, world_size
from fused_optim.sharding.dtensor import has_own_chunks

logger = logging.getLogger("fused_optim")

_UNDER_WAY = 2  # saves: one is written, another one copied


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
        model: its parameters, buffers and extra state are saved. Sharded in any way but FSDP1 under a FusedAdam.
        optimizer: a FusedAdam, or one of torch.optim's, which loads what it has saved itself.
        folder: of this run alone, that all ranks see; a path, or what fsspec opens (``s3://...``).
        extra: by name, what else is saved: schedulers, loaders, averages; whatever has ``state_dict`` and
            ``load_state_dict``. Sharded tensors (DTensors) in their states are saved as those of the model. All else
            must be plain values and tensors, and each rank gets its own back; on another number of ranks only states
            that were the same on all of them can be loaded.
        keep: how many of the newest checkpoints stay; None: all.
        every: :meth:`save` saves steps that are multiples of it; None: whenever it is called.
        format: the form of a FusedAdam's states, "native" or "unscaled"; see ``docs/checkpoints.md``. Either loads.
        progress: the first rank prints a line for each checkpoint, to stderr.
        sigterm: SIGTERM, by which clusters announce that they take the machine away, lets the next :meth:`save` on all
            ranks save, wait for it and raise SystemExit(143). So call it after every step. Signals are Python's main
            thread's: in another one this does nothing.

    What writing raises is raised by the next call of any method, as a RuntimeError on every rank; the checkpoints that
    are there stay. All methods are collectives: all ranks call them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        folder: PathLike,
        *,
        extra: Mapping[str, Stateful] | None = None,
        keep: int | None = 3,
        every: int | None = None,
        format: CheckpointFormat = "native",
        progress: bool = False,
        sigterm: bool = True,
    ) -> None:
        for name, number in (("keep", keep), ("every", every)):
            if number is not None and number < 1:
                raise ValueError(f"{name}: expected a number of at least 1 or None, got {number}")
        if format not in ("native", "unscaled"):
            raise ValueError(f"format: expected 'native' or 'unscaled', got {format!r}")
        self._model, self._optimizer, self._form = model, optimizer, format
        self._extra = check_extra(extra or {})
        self._every, self._progress = every, progress
        self._states = Collector(model, optimizer)
        self._check_form()
        self._directory = CheckpointDirectory(folder_at(folder), keep)
        self._stager = PinnedStager(optimizer)
        # Of their own: the thread that writes makes collectives while this one and training make others.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._signals = dist.new_group(backend="gloo") if world_size() > 1 else None
        self._termination = Termination() if sigterm else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="Checkpointer")
        self._saves: deque[Future[str | None]] = deque()
        self._last: int | None = None
        self._ended = False
        self._saver = Saver(self._group)
        if self._group is None:
            warnings.filterwarnings("ignore", SINGLE_PROCESS)
        with on_all_ranks(f"opening {self._directory.folder}", group=self._group):
            if this_rank() == 0:
                self._directory.recover()

    def _check_form(self) -> None:
        if isinstance(self._optimizer, FusedAdam):
            self._optimizer.store.locate()
            if self._form == "native" and any(map(has_own_chunks, self._optimizer.store.params)):
                raise ValueError("shards with chunk lists of their own load from format='unscaled' only")

    # --- saving -------------------------------------------------------------------------------------------------

    def prepare(self) -> Future[None]:
        """Allocate the memory for saves in the background, once the optimizer has its states.

        Otherwise the first save allocates it, which takes longer than all else that it does.
        """
        return self._stager.prepare(self._collect())

    def save(self, step: int, *, force: bool = False) -> None:
        """Start to save what there is after ``step`` steps, unless ``every`` says otherwise; ``force``: even then.

        Returns at once; if two saves are under way, when the first of them is done. A step that was just saved, or
        loaded, is not saved again. Raises RuntimeError where an earlier save has failed, and SystemExit after a last
        save where SIGTERM came.
        """
        due = force or self._every is None or step % self._every == 0
        if not due and self._termination is None:
            return
        ending = self._agree()
        if (due or ending) and step != self._last:
            while len(self._saves) >= _UNDER_WAY:
                self._finish_oldest()
            self._start(step)
        if ending:
            self._ended = True
            self.close()
            raise SystemExit(EXIT_STATUS)

    def _agree(self) -> bool:
        """Whether some rank is to end. Takes leave of saves that have ended on all ranks, and raises if one failed."""
        asked = self._termination is not None and self._termination.asked
        ended = sum(1 for save in self._saves if save.done())
        if self._signals is not None:
            flags = torch.tensor([int(asked), -ended], dtype=torch.int32)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._signals)
            asked, ended = bool(flags[0]), -int(flags[1])
        for _ in range(ended):
            self._finish_oldest()
        return asked

    def _start(self, step: int) -> None:
        started = time.perf_counter()
        staged: Future[dict[str, Any]] = Future()
        try:
            staged = self._stager.stage(self._collect())
        except Exception as error:  # the other ranks have to know
            staged.set_exception(error)
        self._last = step
        self._saves.append(self._thread.submit(self._save, step, staged, started))

    def _collect(self) -> dict[str, Any]:
        return {
            "model": self._states.model_state(),
            "optimizer": self._states.optimizer_state(self._form, "stager"),
            "extra": {name: value.state_dict() for name, value in self._extra.items()},
        }

    def wait(self) -> None:
        """Until all saves are on the disk. Raises RuntimeError if one has failed."""
        while self._saves:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        failure = self._saves.popleft().result()
        if failure is not None:
            raise RuntimeError(failure)

    # --- in the thread that writes, on all ranks ------------------------------------------------------------------

    def _save(self, step: int, staged: Future[dict[str, Any]], started: float) -> str | None:
        """What went wrong, on every rank if it did on one."""
        doing = f"saving step {step} to {self._directory.folder}"
        try:
            nbytes = self._write(step, staged, doing)
        except (Exception, CheckpointException) as error:
            if this_rank() == 0:
                with suppress(OSError):
                    self._directory.discard(step)
            cause = str(error).removeprefix(f"{doing}: ")
            failure = f"{doing} failed: {cause}"
            logger.error("%s", failure, exc_info=True)
            return failure
        if self._progress and this_rank() == 0:
            seconds = time.perf_counter() - started
            print(
                f"step {step}: saved {nbytes / 1e9:.2f} GB in {seconds:.1f} s, {nbytes / 1e9 / seconds:.2f} GB/s",
                file=sys.stderr,
                flush=True,
            )
        return None

    def _write(self, step: int, staged: Future[dict[str, Any]], doing: str) -> int:
        group = self._group
        with on_all_ranks(doing, group=group):
            state = staged.result()
            packed = {name: extras.pack(name, each) for name, each in state.pop("extra").items()}
            if this_rank() == 0:
                self._directory.begin(step)
        owners = extras.owners_of(gather({name: each.digest for name, each in packed.items()}, group=group))
        state.update(extras.own_entries(packed, owners, this_rank()))
        sums = self._saver.save(state, self._directory.draft(step), doing)
        with on_all_ranks(doing, group=group):
            if this_rank() == 0:
                self._publish(step, {range_: crc for each in sums for range_, crc in each.items()}, owners)
        return sum(length for each in sums for _, _, length in each)

    def _publish(self, step: int, sums: dict[checksums.Range, str], owners: dict[str, list[int]]) -> None:
        draft = self._directory.draft(step)
        checksums.write_file(draft, sums)
        found = Manifest(
            step=step,
            number=self._directory.next_number(),
            world_size=world_size(),
            form=self._form if isinstance(self._optimizer, FusedAdam) else None,
            formats=self._formats(),
            files=manifest.list_files(draft),
            checksums=manifest.crc_of_checksums(draft),
            extra=owners,
            versions={"torch": torch.__version__},
        )
        self._directory.finish(step, found)

    def _formats(self) -> dict[str, list[str]]:
        groups = self._optimizer.param_groups
        found = {name: {str(g[f"{name}_dtype"]) for g in groups if f"{name}_dtype" in g} for name in MOMENTS}
        return {name: sorted(dtype.removeprefix("torch.") for dtype in dtypes) for name, dtypes in found.items()}

    # --- loading ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, the newest first."""
        return [found.step for found in self._list()]

    def _list(self) -> list[Manifest]:
        with on_all_ranks(f"opening {self._directory.folder}", group=self._group):
            found = list(self._directory.newest_first()) if this_rank() == 0 else []
        return gather(found, group=self._group)[0]

    def load_latest(self, *, without: Collection[str] = (), verify: bool = True) -> int | None:
        """Load the newest checkpoint that is whole, and return its step; None if there is none.

        One of which a byte has changed is passed over with a warning. Raises ValueError if that leaves none, and
        whatever :meth:`load` does.
        """
        self.wait()
        listed, errors = self._list(), []
        for found in listed:
            try:
                self._verify(found, verify)
            except (OSError, RuntimeError, ValueError) as error:
                logger.warning("checkpoint passed over: %s", error)
                errors.append(error)
            else:
                return self._load(found, without)
        if listed:
            none = f"{self._directory.folder} has {len(listed)} checkpoints, of which none is whole"
            raise ValueError(f"{none}; the newest: {errors[0]}")
        return None

    def load(self, step: int, *, without: Collection[str] = (), verify: bool = True) -> int:
        """Load the checkpoint of a step, and return the step. ``verify``: compare all bytes with their checksums first.

        On any number of ranks, into any formats of states. ``without``: names of extras that stay as they are. Code
        that a checkpoint might hold is not run. Raises on every rank if it fails on one: FileNotFoundError if there is
        no such checkpoint, ValueError if it is damaged or of another model.
        """
        self.wait()
        found = next((each for each in self._list() if each.step == step), None)
        if found is None:
            raise FileNotFoundError(f"{self._directory.folder} has no whole checkpoint of step {step}")
        self._verify(found, verify)
        return self._load(found, without)

    def _verify(self, found: Manifest, verify: bool) -> None:
        if verify:
            checksums.verify_items(self._directory.folder_of(found.step), None, required=True)

    def _load(self, found: Manifest, without: Collection[str]) -> int:
        folder = self._directory.folder_of(found.step)
        doing = f"loading {folder}"
        with on_all_ranks(doing, group=self._group):
            source = DcpFolder(folder)
            states = {name: self._read_extra(name, found, source) for name in self._extra if name not in without}
            model = {"model": self._states.model_state()}
            source.load(model)
            set_model_state_dict(self._model, model["model"])
        if isinstance(self._optimizer, FusedAdam):
            load_from(self._model, self._optimizer, source, verify=False)
        else:
            with on_all_ranks(doing, group=self._group):
                self._load_other_optimizer(source)
        with on_all_ranks(doing, group=self._group):
            for name, state in states.items():
                self._extra[name].load_state_dict(state)
        self._last = found.step
        return found.step

    def _load_other_optimizer(self, source: DcpFolder) -> None:
        state = {"optimizer": self._states.optimizer_state(self._form, None)}
        source.load(state)
        set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"], options=self._states.options)

    def _read_extra(self, name: str, found: Manifest, source: DcpFolder) -> dict[str, Any]:
        if name not in found.extra:
            raise ValueError(f"{source.path} has no extra {name!r}: load without it: load(step, without=[{name!r}])")
        owner = extras.owner_for(name, found.extra[name], this_rank(), world_size())
        return extras.read(name, owner, self._extra[name], source)

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all saves, and let SIGTERM do what it did before; one that came after the last save does so now."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False)
            if self._termination is not None:
                self._termination.restore()
        if self._termination is not None and self._termination.asked and not self._ended:
            self._ended = True
            os.kill(os.getpid(), signal.SIGTERM)

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
        if self._termination is not None:
            self._termination.restore()
