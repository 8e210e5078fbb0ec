"""FusedMuon where ranks hold different parameters: experts or pipeline stages on meshes of some of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import distributed
from cases import values
from distributed import Part, join_all, part, same_bits
from fused_optim import FusedMuon
from fused_optim.matrices import shards

DENSE, EXPERT = (64, 32), (2, 32, 32)


def gradient(shape: tuple[int, ...], seed: int) -> Tensor:
    return values(shape, torch.float32, "cpu", seed=seed)


def trained(mesh: DeviceMesh | None, experts: dict[int, DeviceMesh | None], bucket: int) -> dict[str, Part]:
    """``experts``: the numbers of those that this rank has a part of."""
    placed: dict[str, nn.Parameter] = {}
    seeds: dict[str, int] = {}
    meshes = {f"expert {number}": own for number, own in experts.items()}
    meshes |= {f"dense {number}": mesh for number in range(3)}
    for name, own in meshes.items():
        seeds[name] = int(name.split()[1]) + 50 * name.startswith("dense")
        full = gradient(DENSE if name.startswith("dense") else EXPERT, seeds[name]) * 0.1
        placed[name] = nn.Parameter(full if own is None else distributed.shard(full, own, [Shard(0)]))
    with mock.patch.object(shards, "BUCKET_BYTES", bucket):
        optimizer = FusedMuon([*placed.items()], lr=0.02, experts=True, momentum_dtype="int8")
        for step in range(3):
            for name, param in placed.items():
                full = gradient(tuple(param.shape), 100 * (step + 1) + seeds[name])
                own = meshes[name]
                param.grad = full if own is None else distributed.shard(full, own, [Shard(0)])
            optimizer.step()
    return {name: part(param.detach()) for name, param in placed.items()}


def on_stages(counts: Sequence[int], bucket: int) -> dict[str, Part]:
    """Each of two stages has experts of its own, which its ranks share; dense matrices are on all ranks."""
    both = distributed.mesh(2, 2, names=("stage", "shard"))
    stage = both.get_local_rank("stage")
    first = sum(counts[:stage])
    own = range(first, first + counts[stage])
    return trained(distributed.mesh(), dict.fromkeys(own, both["shard"]), bucket)


def alone(count: int) -> dict[str, Part]:
    return trained(None, dict.fromkeys(range(count)), 1 << 30)


@pytest.mark.parametrize("bucket", [1 << 30, 22_000, 1])
@pytest.mark.parametrize("counts", [(1, 2), (0, 2), (1, 5)], ids=str)
def test_ranks_may_have_other_numbers_of_experts(counts: tuple[int, int], bucket: int) -> None:
    found = distributed.run(4, on_stages, counts, bucket, timeout=60)
    expected = join_all(distributed.run(1, alone, sum(counts)))
    seen: set[str] = set()
    for ranks in (found[:2], found[2:]):  # who has shards of the same experts
        experts = join_all([{name: own for name, own in each.items() if name.startswith("expert")} for each in ranks])
        assert all(same_bits(value, expected[name]) for name, value in experts.items())
        seen |= experts.keys()
    assert seen == {f"expert {number}" for number in range(sum(counts))}
    dense = join_all([{name: own for name, own in each.items() if name.startswith("dense")} for each in found])
    assert len(dense) == 3 and all(same_bits(value, expected[name]) for name, value in dense.items())
