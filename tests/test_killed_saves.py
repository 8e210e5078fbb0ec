"""A process that is killed while it saves: earlier checkpoints stay whole, the last one is whole or refused."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fused_optim import FusedAdamW

KILLS = int(os.environ.get("FUSED_OPTIM_TEST_KILLS", "3"))
FORMATS = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8, "store_param_remainders": True}


def build(seed: int) -> tuple[nn.Module, FusedAdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).bfloat16()
    return model, FusedAdamW(model.parameters(), lr=0.01, **FORMATS)


def train(model: nn.Module, optimizer: FusedAdamW, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).bfloat16()
    optimizer.step()
    optimizer.zero_grad()


def save_forever(folder: Path, asynchronous: bool) -> None:
    """A checkpoint after each step, each in a folder of its own."""
    model, optimizer = build(seed=0)
    pending = None
    for step in range(1, 10_000):
        train(model, optimizer, step)
        names = ("model", "optimizer")
        state = dict(zip(names, get_state_dict(model, optimizer), strict=True))
        path = folder / f"{step:05d}"
        if pending is not None:
            pending.result()
        if asynchronous:
            pending = dcp.async_save(state, checkpoint_id=path)
        else:
            dcp.save(state, checkpoint_id=path)
        print(step, flush=True)


def load(path: Path) -> tuple[nn.Module, FusedAdamW]:
    model, optimizer = build(seed=1)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


def assert_is_step(loaded: tuple[nn.Module, FusedAdamW], step: int) -> None:
    model, optimizer = build(seed=0)
    for number in range(1, step + 1):
        train(model, optimizer, number)
    assert loaded[1].param_groups[0]["step"] == step
    for actual, expected in zip(loaded[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(actual, expected)
        states = loaded[1].state[actual], optimizer.state[expected]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_saves_may_be_killed(asynchronous: bool, tmp_path: Path) -> None:
    moments = random.Random(0)
    for kill in range(KILLS):
        folder = tmp_path / str(kill)
        command = [sys.executable, __file__, str(folder), "async" if asynchronous else "sync"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()  # the first checkpoint is under way, or written
            process.stdout.readline()
            time.sleep(moments.uniform(0.0, 0.3))
            process.send_signal(signal.SIGKILL)
        paths = sorted(folder.iterdir())
        for path in paths[:-2] if asynchronous else paths[:-1]:
            assert (path / ".metadata").exists()
        for path in paths[-3:]:
            if (path / ".metadata").exists():
                assert_is_step(load(path), int(path.name))
            else:
                with pytest.raises(CheckpointException, match="metadata"):
                    load(path)


if __name__ == "__main__":
    save_forever(Path(sys.argv[1]), sys.argv[2] == "async")
