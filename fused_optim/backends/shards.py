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
from fused_optim.rules import Hyper, Rule


class Shards(Protocol):
    """The shards of one device from step to step, in one backend.

    A step is ``refresh``, ``set`` for each shard that it returns, ``run``, ``mark``. ``cached``: one per shard. Where
    gradients have a scale, ``run`` writes them: those of ``sharing`` must be set again before, to copies.
    ``works``: the shards that were set for this step; they keep contiguous copies of gradients alive until ``mark``.
    """

    works: dict[int, ShardWork]

    def refresh(self, cached: list[CachedShard], attribute: str) -> Sequence[int]:
        """Read this step's gradients. Returns the numbers of shards that have one and must be set (again)."""

    def set(self, shard: int, work: ShardWork, cached: CachedShard | None) -> bool:
        """Describe a shard for this step, and with ``cached`` for later ones, as long as nothing else changes.

        True if it is cached.
        """

    def written(self) -> Sequence[int]:
        """Cached shards with masters whose parameter was written since the last step, of those with a gradient."""

    def find_written(self, cached: list[CachedShard]) -> Sequence[int]:
        """All cached shards with masters whose parameter was written since the last call."""

    def sharing(self) -> Sequence[int]:
        """Numbers of shards whose gradients share memory with another gradient."""

    def takes_target(self, layout: StateLayout) -> bool:
        """True if the update of a shard with these states can write codes of a quantized weight itself."""

    def with_gradients(self) -> Sequence[int]:
        """The numbers of the shards that have a gradient in this step, ascending."""

    def updated(self, cached: list[CachedShard]) -> list[Tensor]:
        """The parameters that have a gradient in this step."""

    def groups_with_gradients(self) -> Sequence[int]:
        """The numbers of param groups that have a gradient in this step."""

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        """Update the shards that have a gradient. ``workspace``: GPU memory, if hyperparameters are GPU tensors."""

    def mark(self, cached: list[CachedShard]) -> None:
        """After a step: remember the parameters' version counters as those of their masters."""


def shards_on(
    device: torch.device,
    backend: Backend,
    groups: list[int],
    group_count: int,
    rule: Rule,
    states_on: torch.device | None = None,
) -> Shards:
    """The shards of ``device``; ``groups``: the param group of each, ascending.

    Those whose states are elsewhere, ``states_on``, cannot ``run``: see :mod:`fused_optim.backends.offloaded`.
    """
    if backend == "torch":
        return ReferenceShards(groups)
    return CompiledShards(device, backend, groups, group_count, rule, states_on)


class ReferenceShards:
    """Shards of the ``torch`` backend: described anew at every step."""

    def __init__(self, groups: list[int]) -> None:
        self._groups = groups
        self.works: dict[int, ShardWork] = {}

    def refresh(self, cached: list[CachedShard], attribute: str) -> Sequence[int]:
        self.works.clear()
        return [i for i, shard in enumerate(cached) if getattr(shard.param_ref(), attribute, None) is not None]

    def set(self, shard: int, work: ShardWork, cached: CachedShard | None) -> bool:
        self.works[shard] = work
        return False

    def written(self) -> Sequence[int]:
        return ()

    def find_written(self, cached: list[CachedShard]) -> Sequence[int]:
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

    def updated(self, cached: list[CachedShard]) -> list[Tensor]:
        return [param for i in self.works if (param := cached[i].param_ref()) is not None]

    def mark(self, cached: list[CachedShard]) -> None:
        self.works.clear()

    def groups_with_gradients(self) -> Sequence[int]:
        return [self._groups[i] for i in self.works]

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        groups = [GroupWork(hyper, []) for hyper in hypers]
        for i, work in sorted(self.works.items()):
            groups[self._groups[i]].shards.append(work)
        torch_reference.run(groups)
