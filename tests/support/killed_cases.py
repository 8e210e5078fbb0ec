"""Runs that save until they are killed, and what their newest checkpoint must hold."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import distributed
from distributed import Part, assert_same, join_all, part, shard_like
from fused_optim import FusedAdamW
from fused_optim.checkpoint import Checkpointer


def sharded(seed: int) -> tuple[nn.Module, FusedAdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).bfloat16()
    fully_shard(model, mesh=distributed.mesh())
    formats = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
    return model, FusedAdamW(model.parameters(), lr=0.01, **formats)


def step_sharded(model: nn.Module, optimizer: FusedAdamW, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = shard_like(torch.randn(param.shape, generator=generator).bfloat16(), param)
    optimizer.step()
    optimizer.zero_grad()


class Loss:
    """An extra."""

    value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def parts(model: nn.Module, optimizer: FusedAdamW) -> dict[str, Part]:
    states = optimizer.state_dict()["state"]
    found = {f"{i} {key}": part(value) for i, state in states.items() for key, value in sorted(state.items())}
    return found | {name: part(param) for name, param in model.named_parameters()}


def load_newest(folders: list[str], environment: Mapping[str, str]) -> list[tuple[int, dict[str, Part]]]:
    os.environ.update(environment)
    found = []
    for folder in folders:
        model, optimizer = sharded(1)
        loss = Loss()
        checkpointer = Checkpointer(model, optimizer, folder, extra={"loss": loss}, sigterm=False)
        step = checkpointer.load_latest()
        assert step is not None and loss.value == step == optimizer.param_groups[0]["step"]
        found.append((step, parts(model, optimizer)))
    return found


def straight_to(steps: list[int]) -> dict[int, dict[str, Part]]:
    model, optimizer = sharded(0)
    found = {}
    for step in range(1, max(steps) + 1):
        step_sharded(model, optimizer, step)
        if step in steps:
            found[step] = parts(model, optimizer)
    return found


def check_newest(folders: Sequence[Path | str], environment: Mapping[str, str] | None = None) -> list[int]:
    """They load on one rank and on three, and are what was trained. Returns their steps."""
    args = ([str(folder) for folder in folders], environment or {})
    by_ranks = {ranks: distributed.run(ranks, load_newest, *args, timeout=60 + 5 * len(folders)) for ranks in (1, 3)}
    steps = [step for step, _ in by_ranks[1][0]]
    expected = distributed.run(1, straight_to, steps)[0]
    for results in by_ranks.values():
        for i, step in enumerate(steps):
            assert {result[i][0] for result in results} == {step}
            assert_same(join_all([result[i][1] for result in results]), join_all([expected[step]]))
    return steps
