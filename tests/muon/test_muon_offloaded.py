"""FusedMuon with a part of its states in host memory: ranks put matrices together in one order, whatever they hold."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import distributed
from distributed import Part, mesh, part, shard
from fused_optim import FusedMuon
from fused_optim.state import host_states

SHAPES = [(1, 64), (7, 32), (16, 16), (2, 128), (9, 24), (2, 3, 8)]  # uneven and empty shards


def trained(fraction: float) -> tuple[list[Part], list[bool]]:
    """The parameters, and which of them have states in host memory."""
    torch.manual_seed(0)
    params = [nn.Parameter(shard(torch.randn(shape), mesh(), [Shard(0)])) for shape in SHAPES]
    with mock.patch.object(host_states, "OFFLOADED_FROM", ("cuda", "cpu")):
        optimizer = FusedMuon(params, lr=0.1, experts=True, offload_states=True, offload_fraction=fraction)
        for _ in range(3):
            for param in params:
                param.grad = shard(torch.randn(param.shape), mesh(), [Shard(0)])
            optimizer.step()
    return [part(param) for param in params], [optimizer.store.layouts[param].offloaded for param in params]


@pytest.mark.parametrize("fraction", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_same_matrices_in_host_memory(ranks: int, fraction: float) -> None:
    found = distributed.run(ranks, trained, fraction, timeout=20)
    expected = distributed.run(ranks, trained, 0.0)
    for (parts, offloaded), (usual, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(parts, usual, rtol=0, atol=0)
        assert offloaded == found[0][1]
    elements = [torch.Size(shape).numel() for shape in SHAPES]
    share = sum(n for n, there in zip(elements, found[0][1], strict=True) if there) / sum(elements)
    assert abs(share - fraction) < 0.2
