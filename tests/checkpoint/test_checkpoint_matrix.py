"""Every interface of torch with every placement, and tied parameters, in both forms; one launch for many cases."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import distributed
from checkpoint_cases import END, SAVED_AT, WAYS, Run, straight, trained_states, values
from distributed import Part, assert_same, join_all, part, shard_like
from fused_optim import FusedAdam
from pairwise import each_once

FORMS = pytest.mark.parametrize("form", ["unscaled", "native"])


def resume_each_way(how: str, form: str, ways: list[str], folder: str) -> dict[str, list[dict[str, Part]]]:
    """What each way loads into fresh objects, and what training makes of it."""
    saved = Run(how, "remainder16")
    saved.optimizer.checkpoint_format = form
    saved.train(0, SAVED_AT)
    found = {}
    for way in ways:
        save, load = WAYS[way]
        save(saved, f"{folder}/{way}")
        run = Run(how, "remainder16", fresh=True)
        run.optimizer.checkpoint_format = form
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            load(run, f"{folder}/{way}")
        run.optimizer.checkpoint_format = "unscaled"
        loaded = run.snapshot()
        run.train(SAVED_AT, END)
        found[way] = [loaded, run.snapshot()]
    return found


# FSDP2 alone: test_distributed_checkpoint.py
@pytest.mark.parametrize("how, form", each_once(product(["hsdp", "tp"], ["native", "unscaled"])))
def test_every_interface_with_every_placement(how: str, form: str, tmp_path: Path) -> None:
    # torch cannot cut a model's whole tensors into the strided shards of FSDP2 with tensor parallelism.
    ways = [way for way in WAYS if how != "tp" or way not in ("full", "broadcast")]
    results = distributed.run(4, resume_each_way, how, form, ways, str(tmp_path))
    for way in ways:
        for at, expected in enumerate(straight("remainder16")):
            joined = trained_states(join_all([result[way][at] for result in results]))
            assert_same(joined, trained_states(expected))


# --- tied parameters --------------------------------------------------------------------------------------------


class TiedRun:
    """An embedding and a head with one weight, sharded unevenly; the interface of ``Run``."""

    def __init__(self, form: str, *, fresh: bool = False) -> None:
        self.model = nn.Sequential(nn.Embedding(7, 64), nn.Linear(64, 7)).bfloat16()
        self.model[1].weight = self.model[0].weight
        for index, param in enumerate(self.model.parameters()):
            param.data.copy_(values(param.shape, index, fresh))
        fully_shard(self.model, mesh=distributed.mesh())
        formats = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
        lr = 0.5 if fresh else 0.01
        self.optimizer = FusedAdam(self.model.parameters(), lr=lr, checkpoint_format=form, **formats)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            for index, param in enumerate(self.model.parameters()):
                param.grad = shard_like(values(param.shape, index, step).to(param.dtype), param)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, Part]:
        found = {name: part(param) for name, param in self.model.named_parameters()}
        form, self.optimizer.checkpoint_format = self.optimizer.checkpoint_format, "unscaled"
        for index, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{index} {key}": part(value) for key, value in states.items()}
        self.optimizer.checkpoint_format = form
        return found | {"lr": part(torch.tensor(self.optimizer.param_groups[0]["lr"]))}


def save_tied(form: str, folder: str) -> list[dict[str, Part]]:
    run = TiedRun(form)
    run.train(0, SAVED_AT)
    saved = run.snapshot()
    for way in ("nested", "flat", "full"):
        WAYS[way][0](run, f"{folder}/{way}")
    run.train(SAVED_AT, END)
    return [saved, run.snapshot()]


def load_tied(form: str, folder: str) -> dict[str, list[dict[str, Part]]]:
    found = {}
    for way in ("nested", "flat", "full"):
        run = TiedRun(form, fresh=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            WAYS[way][1](run, f"{folder}/{way}")
        loaded = run.snapshot()
        run.train(SAVED_AT, END)
        found[way] = [loaded, run.snapshot()]
    return found


@FORMS
@pytest.mark.parametrize("source, target", [(2, 3), (4, 1)])
def test_tied_parameters_move_between_ranks(source: int, target: int, form: str, tmp_path: Path) -> None:
    saved = distributed.run(source, save_tied, form, str(tmp_path))
    loaded = distributed.run(target, load_tied, form, str(tmp_path))
    for at in (0, 1):
        expected = join_all([result[at] for result in saved])
        assert len(expected) == 9  # two parameters, the states of both, a learning rate
        for way in loaded[0]:
            assert_same(join_all([result[way][at] for result in loaded]), expected)
