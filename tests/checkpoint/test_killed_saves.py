"""Processes that are killed while they save: earlier checkpoints stay whole, the last one is whole or refused.

FUSED_OPTIM_TEST_KILLS says how many for each test.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import distributed
from checkpoint_cases import kill_one_rank
from distributed import Part, assert_same, join_all, part, shard_like
from fused_optim import FusedAdamW, load_optimizer_checkpoint, write_checksums
from fused_optim.checkpoint import verify as checksums

pytestmark = pytest.mark.long
KILLS = int(os.environ.get("FUSED_OPTIM_TEST_KILLS", "2"))
ASYNCHRONOUS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
FORMATS = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}


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


# --- one of several ranks ---------------------------------------------------------------------------------------


def build_sharded(seed: int) -> tuple[nn.Module, FusedAdamW]:
    model, _ = build(seed)
    fully_shard(model, mesh=distributed.mesh())
    return model, FusedAdamW(model.parameters(), lr=0.01, checkpoint_format="native", **FORMATS)


def train_sharded(model: nn.Module, optimizer: FusedAdamW, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = shard_like(torch.randn(param.shape, generator=generator).bfloat16(), param)
    optimizer.step()
    optimizer.zero_grad()


def save_sharded_forever(folder: str, asynchronous: bool) -> None:
    """A checkpoint after each step, each in a folder of its own and with checksums once it is finished."""
    model, optimizer = build_sharded(seed=0)
    for step in range(1, 10_000):
        train_sharded(model, optimizer, step)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        path = f"{folder}/{step:05d}"
        if asynchronous:
            pending = dcp.async_save(state, checkpoint_id=path)
            train_sharded(model, optimizer, -step)  # while it is written
            pending.result()
        else:
            dcp.save(state, checkpoint_id=path)
        write_checksums(path)


def straight_steps(last: int, asynchronous: bool) -> list[dict[str, Part]]:
    """What the checkpoints of all steps must hold."""
    model, optimizer = build_sharded(seed=0)
    found = []
    for step in range(1, last + 1):
        train_sharded(model, optimizer, step)
        found.append(parts(model, optimizer))
        if asynchronous:
            train_sharded(model, optimizer, -step)
    return found


def parts(model: nn.Module, optimizer: FusedAdamW) -> dict[str, Part]:
    optimizer.checkpoint_format = "unscaled"
    states = optimizer.state_dict()["state"]
    optimizer.checkpoint_format = "native"
    found = {f"{i} {key}": part(value) for i, state in states.items() for key, value in state.items()}
    return found | {name: part(param) for name, param in model.named_parameters()}


def load_all(paths: list[str]) -> list[dict[str, Part] | str]:
    """Each into objects of its own: what was loaded, or why it was refused."""
    found: list[dict[str, Part] | str] = []
    for path in paths:
        model, optimizer = build_sharded(seed=1)
        try:
            dcp.load({"model": model.state_dict()}, checkpoint_id=path)
            report = load_optimizer_checkpoint(model, optimizer, path)
            assert set(report.steps) == {optimizer.param_groups[0]["step"]}
            found.append(parts(model, optimizer))
        except CheckpointException as error:
            with pytest.raises((OSError, RuntimeError), match="was not finished"):
                load_optimizer_checkpoint(model, optimizer, path)
            found.append(str(error))
    return found


@ASYNCHRONOUS
def test_one_rank_may_be_killed(asynchronous: bool, tmp_path: Path) -> None:
    chance = random.Random(1)
    last: list[Path] = []  # of each kill the checkpoint before the last, and the last
    for kill in range(KILLS):
        folder = tmp_path / str(kill)
        folder.mkdir()
        ready = folder / "00002" / ".metadata"  # saves have been made, and go on
        kill_one_rank(save_sharded_forever, (str(folder), asynchronous), ready, chance)
        *earlier, _ = paths = sorted(folder.iterdir())
        assert all((path / checksums.FILE).exists() for path in earlier)
        last += paths[-2:]
    steps = [int(path.name) for path in last]
    expected = join_steps(distributed.run(1, straight_steps, max(steps), asynchronous))
    for ranks in (1, 3):
        results = distributed.run(ranks, load_all, [str(path) for path in last], timeout=60 + 5 * KILLS)
        for i, (path, step) in enumerate(zip(last, steps, strict=True)):
            loaded = [result[i] for result in results]
            finished = (path / ".metadata").exists()
            assert finished or i % 2 == 1, f"{path}: an earlier checkpoint is lost"
            if finished:
                assert_same(join_all(loaded), expected[step - 1])
            else:
                assert all("metadata" in error for error in loaded)
    finished = sum((path / ".metadata").exists() for path in last[1::2])
    print(f"{KILLS} kills: the last checkpoint was whole {finished} times, refused {KILLS - finished} times")


def join_steps(results: list[list[dict[str, Part]]]) -> list[dict[str, torch.Tensor]]:
    return [join_all(list(step)) for step in zip(*results, strict=True)]
