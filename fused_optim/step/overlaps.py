"""Parameters that share memory, as ``decoder.weight.data = encoder.weight.data.t()`` makes them.

torch.optim updates one after the other. Here shards are updated at the same time, so such parameters take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from fused_optim.adapters import adapter_of
from fused_optim.sharding.dtensor import has_values, local_tensor


class Extent(NamedTuple):
    """The addresses of a shard's elements: the first, and the one after the last."""

    memory: int
    first: int
    end: int

    @staticmethod
    def of(param: Tensor) -> Extent | None:
        """None without elements of its own in memory."""
        local = local_tensor(param)
        if adapter_of(param) is not None or not local.numel() or not has_values(local) or local._is_zerotensor():
            return None
        with torch._C.DisableTorchFunctionSubclass():
            steps = zip(local.shape, local.stride(), strict=True)
            last = sum((size - 1) * step for size, step in steps)
            first, memory = local.data_ptr(), local.untyped_storage().data_ptr()
            return Extent(memory, first, first + (last + 1) * local.element_size())


class Sharing:
    """The parameters that have elements in common. ``params``: by position in the param groups."""

    def __init__(self, params: Mapping[int, Tensor]) -> None:
        self._extents = {i: Extent.of(param) for i, param in params.items()}
        self.pairs = self._pairs(params)  # each in ascending order

    def is_changed(self, moved: Mapping[int, Tensor], params: Sequence[Tensor]) -> bool:
        """True if other parameters share elements than before, now that those in ``moved`` may have new memory."""
        found = {i: Extent.of(param) for i, param in moved.items()}
        if all(self._extents[i] == extent for i, extent in found.items()):
            return False
        self._extents |= found
        return self._pairs({i: params[i] for i in self._extents}) != self.pairs

    def _pairs(self, params: Mapping[int, Tensor]) -> list[tuple[int, int]]:
        clusters: list[list[int]] = []
        end = memory = 0
        for extent, i in sorted((extent, i) for i, extent in self._extents.items() if extent is not None):
            if extent.memory != memory or extent.first >= end:
                clusters.append([])
                memory, end = extent.memory, 0
            clusters[-1].append(i)
            end = max(end, extent.end)
        pairs = (pair for cluster in clusters for pair in combinations(sorted(cluster), 2))
        return sorted((i, j) for i, j in pairs if _have_common_elements(params[i], params[j]))

    def turns(self) -> dict[int, int]:
        """After how many others a parameter's turn comes; without those whose turn is the first."""
        turns: dict[int, int] = {}
        for i, j in sorted(self.pairs, key=lambda pair: pair[::-1]):
            turns[j] = max(turns.get(j, 0), turns.get(i, 0) + 1)
        return turns

    def check_masters(self, has_master: Callable[[int], bool], describe: Callable[[int], str]) -> None:
        """Raise ValueError where parameters that share memory have masters of their own."""
        for i, j in self.pairs:
            if has_master(i) or has_master(j):
                text = f"{describe(i)} and {describe(j)} share memory, and their masters cannot both be what is there"
                raise ValueError(f"{text}: let them be one parameter, or use master_bits=0")


def _have_common_elements(one: Tensor, other: Tensor) -> bool:
    a, b = local_tensor(one).detach(), local_tensor(other).detach()
    first = min(a.storage_offset(), b.storage_offset())
    if a.dtype != b.dtype:
        return True
    ends = [
        x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) for x in (a, b)
    ]
    marked = torch.zeros(max(ends) - first + 1, dtype=torch.bool, device=a.device)
    marked.as_strided(a.shape, a.stride(), a.storage_offset() - first).fill_(True)
    return bool(marked.as_strided(b.shape, b.stride(), b.storage_offset() - first).any())
