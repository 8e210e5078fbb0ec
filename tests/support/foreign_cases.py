"""What the tests of other optimizers' checkpoints share: a model of two layers, its settings and its training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import distributed
from cases import values
from distributed import shard_like

SHAPES = {"weight": (7, 256), "odd": (5, 7), "bias": (10,)}
SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(values(shape, dtype, "cpu", seed=10 * seed + i)))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.first = Layer(dtype, seed)
        self.second = Layer(dtype, seed + 1)


def build(dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    """Sharded where there are ranks; on four of them by columns and by rows, as tensor parallelism and FSDP2 do."""
    model = Model(dtype, seed).to(distributed.device())
    if dist.is_initialized() and dist.get_world_size() == 4:
        place(model.first, [Shard(0), Shard(1)])
        place(model.second, [_StridedShard(0, split_factor=2), Shard(0)])
    elif dist.is_initialized():
        fully_shard(model, mesh=distributed.mesh())
    return model


def place(layer: Layer, matrices: list[Placement]) -> None:
    for name, param in list(layer.named_parameters()):
        placements = matrices if param.dim() > 1 else [Shard(0), Replicate()]
        placed = distributed.shard(param.detach(), distributed.mesh(2, 2), placements)
        layer.register_parameter(name, nn.Parameter(placed))


def groups_of(model: Model) -> list[dict[str, Any]]:
    first, second = list(model.first.parameters()), list(model.second.parameters())
    return [{"params": first}, {"params": second, "weight_decay": 0.03}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for i, param in enumerate(model.parameters()):
            grad = values(tuple(param.shape), torch.float32, "cpu", seed=100 * step + i + 50)
            param.grad = shard_like(grad.to(param.dtype), param)
        optimizer.step()
    optimizer.zero_grad()
