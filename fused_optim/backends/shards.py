"""The shards of one device from step to step, in one backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fused_optim.backends import Backend, GroupWork, ShardWork, torch_reference
from fused_optim.backends.compiled import CompiledShards
from fused_optim.backends.engine import CachedShard
from fused_optim.memory.layout import StateLayout
from fused_optim.rule import Hyper, Rule


class Shards(Protocol):
    """The shards of one device from step to step, in one backend.

    A step is ``refresh``, ``set`` for each shard that it returns, ``run``. ``watched``: one per shard. Where gradients
    have a scale, ``run`` writes them: those of ``sharing`` must be set again before, to copies.
    ``works``: what was set for this step, until ``mark`` at the latest.
    """

    works: dict[int, ShardWork]

    def refresh(self, watched: list[CachedShard], attribute: str) -> Sequence[int]:
        """Take this step's gradients; the numbers of the shards that have one and must be set (again)."""

    def set(self, shard: int, work: ShardWork, watched: CachedShard | None) -> bool:
        """Describe a shard for this step, and with ``watched`` for later ones, as long as nothing else changes.

        Whether it is watched.
        """

    def let_go(self, shard: int) -> None:
        """Of what is kept of a shard whose parameter is gone: there will be no other step."""

    def written(self) -> Sequence[int]:
        """Cached shards that ``refresh`` found as they were, but whose parameter, beside a master, was written."""

    def find_written(self, watched: list[CachedShard]) -> Sequence[int]:
        """The same of all watched shards, with a gradient or without. A write is named once."""

    def sharing(self) -> Sequence[int]:
        """The shards whose gradients have memory in common with another's."""

    def takes_target(self, layout: StateLayout) -> bool:
        """Whether a shard with these states may have a target."""

    def with_gradients(self) -> Sequence[int]:
        """The numbers of the shards that have a gradient in this step, ascending."""

    def updated(self, watched: list[CachedShard]) -> list[Tensor]:
        """Their parameters."""

    def mark(self, watched: list[CachedShard]) -> None:
        """After a step: watched parameters are what belongs to their masters."""

    def groups_with_gradients(self) -> Sequence[int]:
        """Their param groups."""

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        """Update them. ``workspace``: memory of a GPU, needed where hyperparameters lie there."""


def shards_on(
    device: torch.device,
    backend: Backend,
    groups: list[int],
    group_count: int,
    rule: Rule,
    states_on: torch.device | None = None,
) -> Shards:
    """The shards of ``device``; ``groups``: the param group of each, ascending.

    Those whose states are elsewhere, ``states_on``, do everything but ``run``.
    """
    if backend == "torch":
        return ReferenceShards(groups)
    return CompiledShards(device, backend, groups, group_count, rule, states_on)


class ReferenceShards:
    """Shards of the ``torch`` backend: described anew at every step."""

    def __init__(self, groups: list[int]) -> None:
        self._groups = groups
        self.works: dict[int, ShardWork] = {}

    def refresh(self, watched: list[CachedShard], attribute: str) -> Sequence[int]:
        self.works.clear()
        return [i for i, shard in enumerate(watched) if getattr(shard.param_ref(), attribute, None) is not None]

    def set(self, shard: int, work: ShardWork, watched: CachedShard | None) -> bool:
        self.works[shard] = work
        return False

    def let_go(self, shard: int) -> None:
        self.works.pop(shard, None)

    def written(self) -> Sequence[int]:
        return ()

    def find_written(self, watched: list[CachedShard]) -> Sequence[int]:
        return ()

    def sharing(self) -> Sequence[int]:
        extents = {i: (work.grad.data_ptr(), work.grad.data_ptr() + work.grad.nbytes) for i, work in self.works.items()}
        found: set[int] = set()
        last, end = -1, 0  # of those before, the one that ends last
        for i in sorted(extents, key=extents.__getitem__):
            if extents[i][0] < end:
                found |= {last, i}
            if extents[i][1] > end:
                last, end = i, extents[i][1]
        return sorted(found)

    def takes_target(self, layout: StateLayout) -> bool:
        return False

    def with_gradients(self) -> Sequence[int]:
        return sorted(self.works)

    def updated(self, watched: list[CachedShard]) -> list[Tensor]:
        return [param for i in self.works if (param := watched[i].param_ref()) is not None]

    def mark(self, watched: list[CachedShard]) -> None:
        self.works.clear()

    def groups_with_gradients(self) -> Sequence[int]:
        return [self._groups[i] for i in self.works]

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        groups = [GroupWork(hyper, []) for hyper in hypers]
        for i, work in sorted(self.works.items()):
            groups[self._groups[i]].shards.append(work)
        torch_reference.run(groups)
