"""``sync_params_from_master`` of weights with one scale for all shards: ranks agree before anything is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import distributed
from distributed import mesh, shard
from fused_optim import FusedAdamW
from fused_optim.quantized import Float8CurrentScaling, quantize_model_

ROWS = [Shard(0)]


def quantized_weight(factor: float, on: DeviceMesh) -> nn.Parameter:
    layer = nn.Linear(32, 16, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.mul_(factor)
    quantize_model_(nn.Sequential(layer), Float8CurrentScaling())
    return nn.Parameter(shard(layer.weight.data, on, ROWS))


def in_other_orders(is_ordered: bool) -> tuple[str, bool]:
    """Weights of one shape, whose scales would be exchanged; the last rank has another order unless ``is_ordered``."""
    torch.manual_seed(0)
    named = [(str(i), quantized_weight(4.0**i, mesh())) for i in range(3)]
    is_last = dist.get_rank() == dist.get_world_size() - 1
    optimizer = FusedAdamW(named[::-1] if is_last and not is_ordered else named)
    optimizer.initialize_state()
    before = [param.full_tensor().dequantize() for _, param in named]
    text = ""
    try:
        optimizer.sync_params_from_master()
    except RuntimeError as error:
        text = str(error)
    after = [param.full_tensor().dequantize() for _, param in named]
    return text, all(map(torch.equal, before, after))


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_are_synchronized_in_one_order(world_size: int) -> None:
    found = distributed.run(world_size, in_other_orders, False, timeout=20)
    assert all("ranks have other options, param groups or parameters than others" in text for text, _ in found), found
    assert all(is_unchanged for _, is_unchanged in found)
    assert distributed.run(world_size, in_other_orders, True, timeout=20) == [("", True)] * world_size


def on_some_ranks() -> Tensor:
    """The last rank shares a plain parameter with the others, and none of their quantized weights."""
    last = dist.get_world_size() - 1
    torch.manual_seed(0)
    named = [("shared", nn.Parameter(shard(torch.randn(6, 32).bfloat16(), mesh(), ROWS)))]
    others = DeviceMesh("cpu", list(range(last)))
    if dist.get_rank() < last:
        named.append(("own", quantized_weight(1.0, others)))
    optimizer = FusedAdamW(named)
    for _ in range(2):
        for _, param in named:
            param.grad = shard(torch.ones(param.shape, dtype=torch.bfloat16), param.device_mesh, ROWS)
        optimizer.step()
    before = named[0][1].to_local().clone()
    optimizer.sync_params_from_master()
    return before - named[0][1].to_local()


def test_ranks_without_such_weights_are_not_asked() -> None:
    assert not any(found.any() for found in distributed.run(3, on_some_ranks, timeout=30))
