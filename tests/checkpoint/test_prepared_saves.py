"""``Checkpointer.prepare``: saves find their plan made; and what is asked while saves are under way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import distributed
from fused_optim import FusedAdamW
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint.write import Planner, Saver
from fused_optim.quantized import Float8BlockScaling, MXFP8BlockScaling, quantize_model_
from pairwise import pairwise

RECIPES = {"plain": None, "blocks": Float8BlockScaling(), "mx": MXFP8BlockScaling()}


def built(how: str, recipe: str, state_dtype: str) -> tuple[nn.Module, FusedAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)).bfloat16()
    if RECIPES[recipe] is not None:
        quantize_model_(model, RECIPES[recipe])
    if how == "fsdp":
        fully_shard(model, mesh=distributed.mesh())
    optimizer = FusedAdamW(model.parameters(), state_dtype=state_dtype)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


def extras(model: nn.Module) -> dict[str, Any]:
    """A state that changes, of as many bytes."""
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(model.parameters()), 0.9)}


def plans(how: str, recipe: str, state_dtype: str, form: str, folder: str) -> list[int]:
    """As many as were made by ``prepare``, the first save and the second one."""
    model, optimizer = built(how, recipe, state_dtype)
    made: list[int] = []
    create = Planner.create_local_plan

    def counted(self: Planner) -> Any:
        made[-1] += 1
        return create(self)

    with mock.patch.object(Planner, "create_local_plan", counted):
        checkpointer = Checkpointer(model, optimizer, folder, format=form, extra=extras(model), sigterm=False)
        made.append(0)
        checkpointer.prepare().result()
        for step in (1, 2):
            made.append(0)
            checkpointer.save(step)
            checkpointer.wait()
    saved = {name: value.clone() for name, value in optimizer.state_dict()["state"][0].items()}
    model, optimizer = built(how, recipe, state_dtype)
    optimizer.step()
    loading = Checkpointer(model, optimizer, folder, extra=extras(model), sigterm=False)
    assert loading.load_latest() == 2
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, saved[name]), name
    return made


WAYS = [("plain", 1, "int8"), ("fsdp", 1, "fp8"), ("fsdp", 2, "bf16")]


# Not all ways x recipes x forms: each two of them.
@pytest.mark.parametrize("way, recipe, form", pairwise(WAYS, list(RECIPES), ["native", "unscaled"]), ids=str)
def test_the_first_save_is_planned(way: tuple[str, int, str], recipe: str, form: str, tmp_path: Path) -> None:
    how, ranks, state_dtype = way
    for made in distributed.run(ranks, plans, how, recipe, state_dtype, form, str(tmp_path)):
        assert made == [1, 0, 0]


def differing(folder: str) -> str:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(torch.distributed.get_rank())
    checkpointer = Checkpointer(model, FusedAdamW(model.parameters()), folder, sigterm=False)
    checkpointer.prepare()
    checkpointer.save(1)
    with pytest.raises(RuntimeError) as error:
        checkpointer.wait()
    return str(error.value)


def test_what_was_planned_is_compared_by_the_first_save(tmp_path: Path) -> None:
    for text in distributed.run(2, differing, str(tmp_path)):
        assert "ranks have different values of model.weight" in text


def ask_meanwhile(folder: str) -> list[list[int]]:
    model, optimizer = built("fsdp", "plain", "int8")
    save = Saver.save

    def late(self: Saver, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2)
        return save(self, *args, **kwargs)

    with mock.patch.object(Saver, "save", late):
        checkpointer = Checkpointer(model, optimizer, folder, sigterm=False)
        checkpointer.prepare()
        found = [checkpointer.steps()]
        for step in (1, 2):
            checkpointer.save(step)
            for _ in range(20):
                checkpointer.steps()
        checkpointer.wait()
    return [*found, checkpointer.steps()]


def test_steps_are_listed_while_others_are_saved(tmp_path: Path) -> None:
    """Ranks do not take the messages of one for those of the other."""
    assert distributed.run(2, ask_meanwhile, str(tmp_path)) == [[[], [2, 1]]] * 2
