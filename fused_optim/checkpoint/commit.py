"""Loading a checkpoint for a Checkpointer: everything is compared first, then loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from fused_optim.checkpoint import extras
from fused_optim.checkpoint.collect import Collector, check_kind
from fused_optim.checkpoint.extras import Stateful
from fused_optim.checkpoint.folders import Folder, Replaced
from fused_optim.checkpoint.load import Loader, LoadReport, prepare
from fused_optim.checkpoint.open import DcpFolder
from fused_optim.checkpoint.plan import Differences, LoadOptions, ModelLoader, flat_names
from fused_optim.checkpoint.publish import ListedCheckpoint, read_manifest
from fused_optim.checkpoint.verify import FILE as CHECKSUMS
from fused_optim.checkpoint.verify import verifying
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.sharding.collective import distinct, on_all_ranks, this_rank, tied_names, world_size

logger = logging.getLogger("fused_optim")


@dataclass(frozen=True)
class CheckpointReport:
    """The report of a load or a dry run. ``model``: how the checkpoint's model differs from this one."""

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
class LoadPlan:
    """A checkpoint that was compared with the model and the optimizer and fits; made by :meth:`Loads.compare`."""

    options: LoadOptions
    source: DcpFolder
    model: ModelLoader
    optimizer: Loader | None  # None: the model alone is loaded
    extra: dict[str, Any]  # the states, by name
    report: CheckpointReport


@dataclass(frozen=True)
class Loads:
    """Loads checkpoints into one model and its optimizer; all ranks of ``group`` make the same calls."""

    model: nn.Module
    optimizer: ShardedOptimizer
    extra: Mapping[str, Stateful]
    states: Collector
    group: dist.ProcessGroup | None

    def compare(
        self, checkpoint: ListedCheckpoint, folder: Folder, verify: bool, options: LoadOptions
    ) -> Future[LoadPlan]:
        """The plan to load a checkpoint, or the error that says why it does not fit; the same kind on all ranks.

        Raises Damaged for a checkpoint whose bytes are not those that were written. Changes nothing. The checkpoint is
        opened, and states are read into host memory, while other threads verify the checksums.
        """
        required = checkpoint.manifest is not None  # what others wrote has checksums if they saw to it
        planned: Future[LoadPlan] = Future()
        described: Future[Metadata] = Future()
        with verifying(folder, None, required, metadata=described) if verify else nullcontext():
            with on_all_ranks(f"opening {folder}", group=self.group):
                source = DcpFolder(folder)
                if verify and not required and this_rank() == 0 and folder.size(CHECKSUMS) is None:
                    kind = "as a save of torch's own, or a copy that lacks files"
                    logger.warning("%s has no manifest or checksums, %s: its bytes are not verified", folder, kind)
                if checkpoint.manifest is not None and read_manifest(folder) != checkpoint.manifest:
                    raise Replaced(f"{folder} was replaced by a run that saves there before it was read: load again")
            described.set_result(source.metadata)
            try:
                planned.set_result(self._plan(checkpoint, source, options))
            except Exception as error:  # of which damage may be the reason
                planned.set_exception(error)
        return planned

    def _plan(self, checkpoint: ListedCheckpoint, source: DcpFolder, options: LoadOptions) -> LoadPlan:
        doing, group, saved = f"loading {source.path}", self.group, checkpoint.manifest
        names: list[str] = []
        with on_all_ranks(doing, group=group):
            model_state = self.states.model_state()
            names = flat_names(model_state)
        everyone = {name for of_rank in distinct(names, group) for name in of_rank}
        with on_all_ranks(doing, group=group):
            owners, extra = {} if saved is None else saved.extra, {}
            for name, current in self.extra.items():
                if options.model_only or name in options.without:
                    continue
                if name not in owners:
                    hint = f"load without it: load(step, without=[{name!r}])"
                    raise ValueError(f"{source.path} has no extra {name!r}: {hint}")
                owner = extras.owner_for(name, owners[name], this_rank(), world_size())
                extra[name] = extras.read(name, owner, current, source)
            model = ModelLoader(model_state, source, everyone, tied_names(self.model), options)
            kind = None if saved is None else saved.kind
            if not options.model_only:
                check_kind(self.optimizer, kind, str(source.path), any_rule=bool(options.partial))
        if options.model_only:
            return LoadPlan(options, source, model, None, extra, CheckpointReport(checkpoint.step, model.differences))
        optimizer = prepare(self.model, self.optimizer, source, options, verify=False)
        left = set() if saved is None else saved.extra.keys() - self.extra.keys() - options.without
        report = CheckpointReport(checkpoint.step, model.differences, optimizer.report, tuple(sorted(left)))
        if not options.dry_run:
            optimizer.read()
        return LoadPlan(options, source, model, optimizer, extra, report)

    def load(self, plan: LoadPlan) -> None:
        """Load the model, the optimizer and extras. If reading fails here, the model may be partly changed."""
        doing, group, optimizer = f"loading {plan.source.path}", self.group, plan.optimizer
        with on_all_ranks(doing, group=group):
            set_model_state_dict(self.model, plan.model.load())
        if optimizer is not None:
            optimizer.load()
        with on_all_ranks(doing, group=group):
            for name, state in plan.extra.items():
                self.extra[name].load_state_dict(state)
