"""Plans for FusedMuon: which parameters are under Muon by their names, what a step moves, and who does its work."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_optim.adam import FusedAdamW
from fused_optim.matrices.exchange import Dtypes
from fused_optim.matrices.shards import Kind, in_buckets
from fused_optim.muon import ALGORITHM, FusedMuon
from fused_optim.muon_groups import is_muons_by_name
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import some_of
from fused_optim.tools.names import ALGORITHMS

_SENT = Kind((), Dtypes(torch.bfloat16, torch.bfloat16))  # there and back
_SENT_BYTES = torch.bfloat16.itemsize
_NS_STEPS = 5  # FusedMuon's default


def muon_names(named: Sequence[tuple[str, Tensor]], algorithm: str) -> set[str]:
    """The parameters that are under Muon, by names and shapes, if that is the algorithm.

    Raises ValueError for another algorithm, and for parameters that cannot be placed.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected {' or '.join(ALGORITHMS)}, got {algorithm!r}")
    if algorithm == "adamw":
        return set()
    names = [name for name, _ in named]
    found = {name: is_muons_by_name(name, param.dim(), names) for name, param in named}
    if unknown := [name for name, is_muons in found.items() if is_muons is None]:
        raise ValueError(f"cannot tell by name whether Muon or AdamW is for {some_of(unknown)}")
    return {name for name, is_muons in found.items() if is_muons}


def known_names(named: Sequence[tuple[str, Tensor]], muon: Collection[str]) -> set[str]:
    """The names that were given of parameters under Muon. Raises ValueError for others than the parameters' names."""
    if isinstance(muon, str):
        raise ValueError(f"muon: expected a collection of names, got {muon!r}")
    if unknown := sorted(set(muon) - {name for name, _ in named}):
        raise ValueError(f"muon: there are no parameters {some_of(unknown)}")
    return set(muon)


def optimizer_of(named: Sequence[tuple[str, Tensor]], muon: Collection[str], **options: Any) -> ShardedOptimizer:
    """FusedMuon if some parameters are under Muon, else FusedAdamW."""
    if not muon:
        return FusedAdamW(named, **options)
    sorted_: dict[str, list[tuple[str, Tensor]]] = {"muon": [], "adamw": []}
    for name, param in named:
        sorted_["muon" if name in muon else "adamw"].append((name, param))
    groups = [{"params": own, ALGORITHM: kind} for kind, own in sorted_.items() if own]
    return FusedMuon(groups, experts=True, **options)


def muon_facts(named: Sequence[tuple[str, Tensor]], muon: Collection[str]) -> dict[str, Any]:
    """What orthogonalization takes.

    ``buckets`` of a step; ``buffer_bytes``: of the largest send buffer of this rank; ``sent_bytes``: through all of
    them in a step, what it keeps itself included; ``flops``: of the products of all ranks, and ``most_flops``, of the
    one that has most, as the plain form of five steps counts them; ``most_work_to_mean``.
    """
    params = dict(enumerate(param for name, param in named if name in muon and param.requires_grad))
    buckets = in_buckets(params, [_SENT] * len(params))
    work: list[int] = []
    buffers: list[int] = []
    for _, meshes in buckets:
        for on_mesh, _ in meshes:
            buffers += [_SENT_BYTES * elements for elements in on_mesh.sent_elements]
            work = _added(work, on_mesh.work)
    total, most = sum(work), max(work, default=0)
    flops = sum(map(_flops, params.values()))
    return {
        "parameters": len(params),
        "elements": sum(param.numel() for param in params.values()),
        "buckets": len(buckets),
        "buffer_bytes": max(buffers, default=0),
        "sent_bytes": sum(buffers),
        "flops": flops,
        "most_flops": round(flops * most / total) if total else 0,
        "most_work_to_mean": most * len(work) / total if total else 1.0,
    }


def _added(some: list[int], others: list[int]) -> list[int]:
    size = max(len(some), len(others))
    first, second = ([*each, *[0] * (size - len(each))] for each in (some, others))
    return [a + b for a, b in zip(first, second, strict=True)]


def _flops(param: Tensor) -> int:
    """Of X X^T, of its square, of X times a polynomial of it."""
    *experts, rows, columns = param.shape
    smaller, larger = sorted((rows, columns))
    return _NS_STEPS * (4 * smaller**2 * larger + 2 * smaller**3) * (experts[0] if experts else 1)


def algorithm_counts(facts: Mapping[str, Any]) -> str:
    return f"{facts['parameters']:,} parameters of {facts['elements']:,} elements under Muon, the others under AdamW"
