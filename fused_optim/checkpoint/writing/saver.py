"""Saves states that are alike again and again, as ``dcp.save`` would, in little of the interpreter's time.

What is saved in the background takes that time from training. So the ranks agree once on who writes what, and send it
around and describe the checkpoint anew only where a state has changed its layout.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from fused_optim.checkpoint.storage.folders import Folder
from fused_optim.checkpoint.storage.metadata import FILE
from fused_optim.checkpoint.writing.archives import Archives
from fused_optim.checkpoint.writing.planner import Planner, layout_of, size_of
from fused_optim.checkpoint.writing.replicas import check_replicas
from fused_optim.checkpoint.writing.writer import RankFiles, Writer, Written
from fused_optim.sharding.collective import (
    distinct,
    gather_at_first,
    on_all_ranks,
    on_any,
    scatter_from_first,
    this_rank,
    world_size,
)


@dataclass
class _Agreed:
    """The ranks' common plan for states of one layout.

    The metadata is kept pickled: as objects, of which large worlds have millions, it would slow down every garbage
    collection of training.
    """

    layout: dict[str, Any] | None
    plan: SavePlan  # of this rank
    files: RankFiles
    metadata: bytes  # of all ranks, with the places of their items; on the first rank
    results: list[WriteResult] = field(default_factory=list)  # of the last save, of this rank
    is_compared: bool = False  # whether what all ranks have as a whole is the same on all of them


class Saver:
    """Saves for one group; all ranks of ``group`` make the same calls."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._archives = Archives()
        self._agreed: _Agreed | None = None

    def save(
        self, state: Mapping[str, Any], folder: Folder, doing: str, may_differ: Collection[str] = ()
    ) -> list[Written]:
        """Write a checkpoint into ``folder``. Returns what each rank has written, on the first rank.

        Of tensors that are no shards ranks must have the same, but of the keys ``may_differ``, of which those of the
        first rank are saved. Raises on every rank where it fails on one; ``doing`` is what the message begins with.
        """
        agreed, self._agreed = self._agreed, None  # what fails is planned anew
        writer = Writer(folder, self._archives)
        planner, layout = self._planner_of(state, doing)
        if agreed is None or on_any(layout is None or layout != agreed.layout, self._group):
            agreed = self._agree(planner, layout, doing)
        if not agreed.is_compared and world_size() > 1:
            check_replicas(planner.state_dict, Planner.SAME, may_differ, self._group)
        agreed.is_compared = True
        with on_all_ranks(doing, group=self._group):
            plan = planner.finish_plan(agreed.plan)
            results = writer.write(plan, planner, agreed.files)
        moved = self._moved(agreed, results)
        with on_all_ranks(doing, group=self._group):
            if this_rank() == 0:
                agreed.metadata = _described(agreed.metadata, moved)
                folder.write(FILE, agreed.metadata)
                writer.written.sizes[FILE] = len(agreed.metadata)
        self._agreed = agreed
        return gather_at_first(writer.written, self._group)

    def plan(self, state: Mapping[str, Any], doing: str) -> None:
        """Let the ranks agree on who writes what of states with the layout of this one, of which no bytes are read."""
        planner, layout = self._planner_of(state, doing)
        self._agreed = self._agree(planner, layout, doing)
        described = [each.tensor_data for each in self._agreed.plan.items if each.tensor_data is not None]
        for dtype, shape in dict.fromkeys((each.properties.dtype, each.chunk.sizes) for each in described):
            self._archives.prepare(dtype, shape)

    def _planner_of(self, state: Mapping[str, Any], doing: str) -> tuple[Planner, dict[str, Any] | None]:
        """(a planner that knows the state, the state's layout)."""
        planner = Planner()
        with on_all_ranks(doing, group=self._group):
            planner.set_up_planner(dict(state), StorageMeta(), this_rank() == 0)
            layout = layout_of(planner.state_dict)
        return planner, layout

    def _agree(self, planner: Planner, layout: dict[str, Any] | None, doing: str) -> _Agreed:
        shared = sorted(key for key in planner.state_dict if key.startswith(Planner.SAME))
        planner.alike = len(distinct(shared, self._group)) == 1
        with on_all_ranks(doing, group=self._group):
            local_plan = planner.create_local_plan()
        plans = gather_at_first(local_plan, self._group)
        shares: list[tuple[SavePlan, RankFiles]] = []
        described = b""
        with on_all_ranks(doing, group=self._group):
            if this_rank() == 0:
                plans, metadata = planner.create_global_plan(plans)
                total = sum(size_of(item) for plan in plans for item in plan.items)
                shares = [(plan, RankFiles(f"__{rank}_", total)) for rank, plan in enumerate(plans)]
                described = pickle.dumps(metadata)
        return _Agreed(layout, *scatter_from_first(shares, self._group), described)

    def _moved(self, agreed: _Agreed, results: list[WriteResult]) -> list[list[WriteResult]]:
        """Changed write results since the last save, by rank, on the first rank: larger numbers take more bytes."""
        pairs = itertools.zip_longest(results, agreed.results)
        moved = [result for result, last in pairs if result is not None and result != last]
        agreed.results = results
        return gather_at_first(moved, self._group) if on_any(bool(moved), self._group) else []


def _described(pickled: bytes, moved: list[list[WriteResult]]) -> bytes:
    """Metadata with the places to which items have moved."""
    if not moved:
        return pickled
    metadata: Metadata = pickle.loads(pickled)
    set_places(metadata, itertools.chain.from_iterable(moved))
    return pickle.dumps(metadata)


def set_places(metadata: Metadata, results: Iterable[WriteResult]) -> None:
    """Note where items have been written."""
    metadata.storage_data = (metadata.storage_data or {}) | {each.index: each.storage_data for each in results}
    metadata.storage_meta = StorageMeta()
    metadata.version = CURRENT_DCP_VERSION
