"""Parameters that were frozen at the save and are trained now, or the other way round, and those without a gradient."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

import distributed
from checkpoint_cases import values
from distributed import Part, assert_same, join_all, part, shard_like
from fused_optim import FusedAdamW, export_optimizer_checkpoint, load_optimizer_checkpoint
from fused_optim.checkpoint import Checkpointer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAMES = ("late", "unused", "used")  # "late" gets gradients after the checkpoint only, "unused" never
SAVED_AT, END = 3, 6
OURS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "int8": (torch.bfloat16, {"state_dtype": "int8"}),
    "fp32": (torch.float32, {}),
}


def build(kind: str, frozen: Iterable[str] = (), seed: int = 0, names: Iterable[str] = NAMES) -> tuple[Any, Any]:
    """Sharded; ``kind``: "adamw", or one of ours."""
    dtype, options = OURS.get(kind, (torch.float32, {}))
    weights = {
        name: nn.Parameter(values((6, 128), seed, i).to(dtype), requires_grad=name not in frozen)
        for i, name in enumerate(names)
    }
    model = nn.ParameterDict(weights)
    fully_shard(model, mesh=distributed.mesh())
    group = {"params": list(model.parameters()), "lr": 0.01 if seed == 0 else 0.5}
    return model, AdamW([group]) if kind == "adamw" else FusedAdamW([group], **options)


def train(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for i, (name, param) in enumerate(model.named_parameters()):
            if param.requires_grad and (name == "used" or (name == "late" and step >= SAVED_AT)):
                param.grad = shard_like(values(param.shape, 9, i, step).to(param.dtype), param)
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Part]:
    states, names = optimizer.state_dict()["state"], [name for name, _ in model.named_parameters()]
    found = {
        f"{names[i]} {key}": part(torch.as_tensor(each))
        for i in sorted(states)
        for key, each in sorted(states[i].items())
    }
    return found | {name: part(param) for name, param in model.named_parameters()}


def save(kind: str, form: str, folder: str, frozen: tuple[str, ...]) -> None:
    model, optimizer = build(kind, frozen)
    train(model, optimizer, 0, SAVED_AT)
    with Checkpointer(model, optimizer, folder, sigterm=False, format=form) as checkpointer:
        checkpointer.save(SAVED_AT)


def resume(kind: str, folder: str, frozen: tuple[str, ...], how: str) -> tuple[dict[str, Part], str]:
    """Trained on, and what the load says. ``how``: into a fresh optimizer, or one that has all states."""
    model, optimizer = build(kind, frozen, seed=1)
    if how == "used":
        for param in model.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        optimizer.step()
        for param in model.parameters():  # and a gradient that is left over
            param.grad = torch.ones_like(param) if param.requires_grad else None
    with Checkpointer(model, optimizer, folder, sigterm=False, readonly=True) as checkpointer:
        assert checkpointer.load_latest() == SAVED_AT
        report = load_optimizer_checkpoint(model, optimizer, checkpointer.path(SAVED_AT))
    if how == "used":
        assert all(param.grad is not None for param in model.parameters() if param.requires_grad)
        optimizer.zero_grad()
    train(model, optimizer, SAVED_AT, END)
    return snapshot(model, optimizer), f"{report.parameters} and {report.without_states}"


def straight(kind: str, frozen: tuple[str, ...] = ()) -> dict[str, Part]:
    """Nothing was ever frozen but what is in the end: without gradients a parameter stays as it is."""
    model, optimizer = build(kind)
    train(model, optimizer, 0, SAVED_AT)
    for name in frozen:
        model[name].requires_grad_(False)
    train(model, optimizer, SAVED_AT, END)
    return snapshot(model, optimizer)


def check(kind: str, form: str, then: tuple[str, ...], now: tuple[str, ...], how: str, ranks: int, path: Path) -> str:
    """Saved on as many ranks, resumed on another number, the same as the run that had no break."""
    distributed.run(ranks, save, kind, form, str(path), then)
    results = distributed.run(3 - ranks, resume, kind, str(path), now, how)
    expected = join_all(distributed.run(1, straight, kind, now))
    found = join_all([result[0] for result in results])
    if now:
        found = {key: value for key, value in found.items() if key in expected}
    assert_same(found, expected)
    return str(results[0][1])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["native", "unscaled"])
@pytest.mark.parametrize("kind", OURS)
def test_frozen_at_the_save(kind: str, form: str, ranks: int, tmp_path: Path) -> None:
    """They start anew: zero moments, masters from the parameters."""
    how = "used" if ranks == 1 else "fresh"
    assert check(kind, form, ("late",), (), how, ranks, tmp_path) == "2 and 1"


@pytest.mark.parametrize("kind", OURS)
def test_frozen_at_the_load(kind: str, tmp_path: Path) -> None:
    """Their states stay."""
    assert check(kind, "native", (), ("late",), "fresh", 2, tmp_path) == "3 and 0"


# --- exports -----------------------------------------------------------------------------------------------------


def export(kind: str, path: str, frozen: tuple[str, ...]) -> dict[str, Any]:
    """The states that torch.optim.AdamW has after loading what was exported, by both of its ways."""
    model, optimizer = build(kind, frozen)
    train(model, optimizer, 0, SAVED_AT)
    export_optimizer_checkpoint(model, optimizer, path)
    other, adamw = build("adamw", frozen, seed=1)
    if path.endswith(".pt"):
        state = torch.load(path)
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(other, adamw, state, options=options)
        positions = {name: i for i, name in enumerate(NAMES)}
        plain = AdamW([nn.Parameter(torch.zeros(6, 128)) for _ in NAMES])
        plain.load_state_dict(
            {
                "state": {positions[name]: states for name, states in state["state"].items()},
                "param_groups": [
                    {**each, "params": [positions[name] for name in each["params"]]} for each in state["param_groups"]
                ],
            }
        )
        assert set(state["param_groups"][0]["params"]) == set(NAMES)
        assert len(plain.state) == len(state["state"]) == len(NAMES) - len(frozen)
    else:
        wanted = {"optimizer": get_optimizer_state_dict(other, adamw)}
        dcp.load(wanted, checkpoint_id=path)
        set_optimizer_state_dict(other, adamw, wanted["optimizer"])
    assert adamw.param_groups[0]["lr"] == 0.01
    return snapshot(other, adamw)


def by_torch(frozen: tuple[str, ...]) -> dict[str, Part]:
    """torch.optim's own states."""
    model, optimizer = build("adamw", frozen)
    train(model, optimizer, 0, SAVED_AT)
    return snapshot(model, optimizer)


@pytest.mark.parametrize("target", ["file.pt", "folder"])
@pytest.mark.parametrize("frozen", [("late",), ("late", "unused"), ()], ids=["one", "two", "none"])
def test_exports(frozen: tuple[str, ...], target: str, tmp_path: Path) -> None:
    """What is frozen has no states, as with torch.optim; what had no gradient has zeros: its group's step goes on."""
    expected = join_all(distributed.run(1, by_torch, frozen))
    for ranks in (1, 2):
        for kind in OURS:
            found = join_all(distributed.run(ranks, export, kind, str(tmp_path / f"{ranks}{kind}{target}"), frozen))
            trained = set(NAMES) - set(frozen)
            assert {key.split()[0] for key in found if " " in key} == trained
            if kind == "fp32":
                for key in ("used step", "used exp_avg", "used exp_avg_sq"):
                    torch.testing.assert_close(found[key], expected[key])
            for name in trained - {"used"}:
                assert not found[f"{name} exp_avg"].any() and not found[f"{name} exp_avg_sq"].any()
