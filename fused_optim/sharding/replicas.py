"""Compares the plain tensors that several ranks have under one name: a checkpoint holds those of one rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fused_optim.sharding.collective import gather, on_all_ranks, world_size


def check_replicas(doing: str, named: Iterable[tuple[str, Iterable[Tensor]]]) -> None:
    """Raise ValueError, on all ranks, if tensors under one name differ between ranks. A collective.

    They are then parts of a parameter, or replicas that have diverged.
    """
    if world_size() == 1:
        return
    with on_all_ranks(doing):
        own_fingerprints = {name: [_fingerprint(tensor) for tensor in tensors] for name, tensors in named}
    first: dict[str, tuple[int, list[tuple[torch.Size, int]]]] = {}
    for rank, of_rank in enumerate(gather(own_fingerprints)):
        for name, fingerprints in of_rank.items():
            before, expected = first.setdefault(name, (rank, fingerprints))
            if fingerprints != expected:
                problem = f"ranks {before} and {rank} have different plain tensors for {name}"
                expected_instead = "expected a DTensor, or the same tensor on every rank that has it"
                raise ValueError(f"{doing}: {problem}, parts or replicas that have diverged; {expected_instead}")


def _fingerprint(tensor: Tensor) -> tuple[torch.Size, int]:
    """(shape, sum of the bits)."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.shape, int(tensor.contiguous().view(integers).sum(dtype=torch.int64))
