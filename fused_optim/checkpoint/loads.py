"""What a Checkpointer does with a checkpoint that it has found: all is compared first, then loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from fused_optim.checkpoint import extras
from fused_optim.checkpoint.collect import Collector, check_kind
from fused_optim.checkpoint.extras import Stateful
from fused_optim.checkpoint.reading.dcp_folder import DcpFolder
from fused_optim.checkpoint.reading.leeway import Differences, Leeway
from fused_optim.checkpoint.reading.load import Loader, LoadReport, checked
from fused_optim.checkpoint.reading.model import ModelLoader, flat_names
from fused_optim.checkpoint.storage import checksums, manifest
from fused_optim.checkpoint.storage.checksums import verifying
from fused_optim.checkpoint.storage.damage import Replaced
from fused_optim.checkpoint.storage.directory import Found
from fused_optim.checkpoint.storage.folders import Folder
from fused_optim.checkpoint.storage.garbage import without_collection
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.sharding.collective import distinct, on_all_ranks, this_rank, tied_names, world_size

logger = logging.getLogger("fused_optim")


@dataclass(frozen=True)
class CheckpointReport:
    """What was loaded, or would be. ``model``: how the checkpoint's model differs from this one."""

    step: int
    model: Differences
    optimizer: LoadReport | None = None  # None: the model alone
    extras_left: tuple[str, ...] = ()  # that the checkpoint has and nobody takes

    @property
    def restarted(self) -> tuple[str, ...]:
        """Parameters whose states another update rule has made."""
        return () if self.optimizer is None else self.optimizer.differences.restarted

    def __str__(self) -> str:
        parts = [f"step {self.step}", *([f"model: {self.model}"] if self.model else [])]
        parts += [] if self.optimizer is None else [str(self.optimizer)]
        parts += [f"extras left out: {', '.join(self.extras_left)}"] if self.extras_left else []
        return "; ".join(parts)


@dataclass(frozen=True)
class LoadOptions:
    """See :meth:`Checkpointer.load`."""

    leeway: Leeway = field(default_factory=Leeway)
    without: frozenset[str] = frozenset()
    model_only: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Compared:
    """A checkpoint that fits."""

    source: DcpFolder
    model: ModelLoader
    optimizer: Loader | None  # None: the model alone is loaded
    extra: dict[str, Any]  # the states, by name
    report: CheckpointReport


class Loads:
    """Loads checkpoints into one model and its optimizer; all ranks of ``group`` make the same calls."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: ShardedOptimizer,
        extra: Mapping[str, Stateful],
        states: Collector,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._model, self._optimizer, self._extra = model, optimizer, extra
        self._states, self._group = states, group

    def compare(self, found: Found, folder: Folder, verify: bool, options: LoadOptions) -> Future[Compared]:
        """What is to be loaded, or why it does not fit, on all ranks. Raises Damaged for what is not as it was written.

        Changes nothing. The checkpoint is opened, and states are read into host memory, while other threads verify.
        """
        required = found.manifest is not None  # what others wrote has checksums if they saw to it
        compared: Future[Compared] = Future()
        described: Future[Metadata] = Future()
        with verifying(folder, None, required, metadata=described) if verify else nullcontext():
            with on_all_ranks(f"opening {folder}", group=self._group):
                source = DcpFolder(folder)
                if verify and not required and this_rank() == 0 and folder.size(checksums.FILE) is None:
                    what = "as a save of torch's own, or a copy that lacks files"
                    logger.warning("%s has no manifest or checksums, %s: its bytes are not verified", folder, what)
                if found.manifest is not None and manifest.read(folder) != found.manifest:
                    raise Replaced(f"{folder} was replaced by a run that saves there before it was read: load again")
            described.set_result(source.metadata)
            try:
                with without_collection():
                    compared.set_result(self._compare(found, source, options))
            except Exception as error:  # of which damage may be the reason
                compared.set_exception(error)
        return compared

    def _compare(self, found: Found, source: DcpFolder, options: LoadOptions) -> Compared:
        doing, group = f"loading {source.path}", self._group
        names: list[str] = []
        with on_all_ranks(doing, group=group):
            model_state = self._states.model_state()
            names = flat_names(model_state)
        everyone = {name for each in distinct(names, group) for name in each}
        with on_all_ranks(doing, group=group):
            extra = {} if options.model_only else self._read_extras(found, source, options)
            model = ModelLoader(model_state, source, everyone, tied_names(self._model), options.leeway)
        optimizer = None if options.model_only else self._compared(found, source, options.leeway)
        report = CheckpointReport(
            found.step,
            model.differences,
            None if optimizer is None else optimizer.report,
            () if options.model_only else self._extras_left(found, options),
        )
        if optimizer is not None and not options.dry_run:
            optimizer.read()
        return Compared(source, model, optimizer, extra, report)

    def load(self, compared: Compared) -> None:
        """Where reading fails now, the model may have been changed."""
        doing, group, optimizer = f"loading {compared.source.path}", self._group, compared.optimizer
        with without_collection():
            with on_all_ranks(doing, group=group):
                set_model_state_dict(self._model, compared.model.load())
            if optimizer is not None:
                optimizer.load()
        with on_all_ranks(doing, group=group):
            for name, state in compared.extra.items():
                self._extra[name].load_state_dict(state)

    def _compared(self, found: Found, source: DcpFolder, leeway: Leeway) -> Loader:
        """What loads the optimizer. Nothing has been changed."""
        kind = None if found.manifest is None else found.manifest.kind
        with on_all_ranks(f"loading {source.path}", group=self._group):
            check_kind(self._optimizer, kind, str(source.path), any_rule=bool(leeway.partial))
        return checked(self._model, self._optimizer, source, verify=False, leeway=leeway)

    def _read_extras(self, found: Found, source: DcpFolder, options: LoadOptions) -> dict[str, Any]:
        owners = {} if found.manifest is None else found.manifest.extra
        states = {}
        for name, current in self._extra.items():
            if name in options.without:
                continue
            if name not in owners:
                raise ValueError(
                    f"{source.path} has no extra {name!r}: load without it: load(step, without=[{name!r}])"
                )
            owner = extras.owner_for(name, owners[name], this_rank(), world_size())
            states[name] = extras.read(name, owner, current, source)
        return states

    def _extras_left(self, found: Found, options: LoadOptions) -> tuple[str, ...]:
        saved = set() if found.manifest is None else set(found.manifest.extra)
        return tuple(sorted(saved - set(self._extra) - options.without))
