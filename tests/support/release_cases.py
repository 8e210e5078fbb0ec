"""A model that is trained with gradient release and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cases import FORMATS, MASTER, Format, Master, values
from distributed import same_bits
from peers import FusedAdamW


class Layers(nn.Module):
    """Some layers in a row; the weight of the third is used twice, that of the last not at all."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 96, dtype=dtype), nn.Linear(96, 128, bias=False, dtype=dtype)
        self.third, self.norm = nn.Linear(128, 128, dtype=dtype), nn.LayerNorm(128, dtype=dtype)
        self.unused = nn.Linear(7, 5, dtype=dtype)
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(values(tuple(param.shape), torch.float32, "cpu", seed=i) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.norm(self.third(torch.tanh(self.third(x))))


def loss_of(model: nn.Module, step: int, rank: int = 0) -> Tensor:
    param = next(model.parameters())
    inputs = values((6, 128), torch.float32, "cpu", seed=10 * step + rank).to(param.device, param.dtype)
    return model(inputs).float().square().sum()


def make(model: nn.Module, fmt: Format, master: Master, **options: Any) -> FusedAdamW:
    formats = {"exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype}
    params = list(model.named_parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02, "weight_decay": 0.1}]
    return FusedAdamW(groups, lr=0.01, **formats, **master.options, **options)


def train(model: nn.Module, optimizer: FusedAdamW, steps: range, rank: int = 0) -> None:
    for step in steps:
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(optimizer: FusedAdamW) -> list[Tensor]:
    found = [torch.tensor([group["step"] for group in optimizer.param_groups])]
    for param in optimizer.store.params:
        found += [param.detach(), *optimizer.state[param].values(), optimizer.store.layouts[param].scales]
    return found


class Pair:
    """A model with gradient release and the same without it."""

    def __init__(self, fmt: Format = FORMATS[-1], master: Master = MASTER["float32"], device: str = "cpu") -> None:
        self.models = [Layers(master.param_dtype).to(device) for _ in range(2)]
        self.optimizers = [make(model, fmt, master) for model in self.models]
        self.released, self.usual = self.optimizers
        self.model = self.models[0]

    def train(self, steps: Iterable[int]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            train(model, optimizer, steps)

    def each(self, change: Callable[[Any, FusedAdamW], Any]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            change(model, optimizer)

    def assert_same(self) -> None:
        assert all(map(same_bits, everything(self.released), everything(self.usual)))
        assert all(map(same_bits, self.models[0].parameters(), self.models[1].parameters()))


def gradients(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.grad is not None}
