"""Rounding goes by the parameters' names where they have some, so that it does not matter which optimizer has which."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from cases import MASTER, values
from distributed import same_bits
from fused_optim import load_optimizer_checkpoint
from peers import FusedAdam

# What rotates: second moments, FP16 masters, parameters without master.
CASES: dict[str, dict[str, Any]] = {
    "int8": {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"},
    "bfloat16": {"exp_avg_sq_dtype": torch.bfloat16},
    "float16 master": MASTER["bfloat16+float16"].options,
    "no master": MASTER["bfloat16"].options,
}
EACH = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(128, 6, dtype=torch.bfloat16), nn.Linear(128, 40, dtype=torch.bfloat16)
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(values(tuple(param.shape), torch.float32, "cpu", seed=i))


def step(model: nn.Module, optimizers: list[FusedAdam], steps: range) -> None:
    for number in steps:
        for i, param in enumerate(model.parameters()):
            param.grad = values(tuple(param.shape), torch.bfloat16, "cpu", seed=100 * number + i)
        for optimizer in optimizers:
            optimizer.step()


def everything(model: nn.Module, optimizers: list[FusedAdam]) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        for optimizer in optimizers:
            found |= {f"{name}: {key}": value.clone() for key, value in optimizer.state.get(param, {}).items()}
    return found


def trained(split: Callable[[nn.Module], list[list[tuple[str, Tensor]]]], options: dict[str, Any]) -> dict[str, Tensor]:
    model = Model()
    optimizers = [FusedAdam(part, lr=0.01, seed=5, **options) for part in split(model)]
    step(model, optimizers, range(4))
    return everything(model, optimizers)


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    assert list(a) == list(b)
    return {name for name, value in a.items() if not same_bits(value, b[name])}


SPLITS: dict[str, Callable[[nn.Module], list[list[tuple[str, Tensor]]]]] = {
    "per parameter": lambda model: [[pair] for pair in model.named_parameters()],
    "per stage": lambda model: [
        [pair for pair in model.named_parameters() if layer in pair[0]] for layer in ("one", "two")
    ],
    "in another order": lambda model: [list(model.named_parameters())[::-1]],
    "wrapped": lambda model: [[(f"module._orig_mod.{name}", param) for name, param in model.named_parameters()]],
}


@EACH
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_any_optimizers_round_alike(split: Callable[[nn.Module], Any], options: dict[str, Any]) -> None:
    expected = trained(lambda model: [list(model.named_parameters())], options)
    assert not differing(trained(split, options), expected)


@EACH
def test_names_and_the_seed_matter(options: dict[str, Any]) -> None:
    """Other names, and positions, round in another way; parameters differ among each other."""
    expected = trained(lambda model: [list(model.named_parameters())], options)
    other = trained(lambda model: [[(f"{name}.x", param) for name, param in model.named_parameters()]], options)
    positions = trained(lambda model: [list(model.parameters())], options)
    assert differing(other, expected) and differing(positions, expected) and differing(positions, other)


def run(named: bool, **options: Any) -> tuple[Model, FusedAdam]:
    model = Model()
    params = model.named_parameters() if named else model.parameters()
    return model, FusedAdam(list(params), lr=0.01, seed=5, **CASES["int8"], **options)


def reload(model: Model, optimizer: FusedAdam, named: bool, how: str, path: Path) -> tuple[Model, FusedAdam]:
    other, fresh = run(named, checkpoint_format=optimizer.checkpoint_format)
    if how == "load_state_dict":
        other.load_state_dict(model.state_dict())
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return other, fresh
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    _without_names(saved["optimizer"])
    dcp.save(saved, checkpoint_id=path, no_dist=True)
    if how == "load_optimizer_checkpoint":
        dcp.load({"model": other.state_dict()}, checkpoint_id=path, no_dist=True)
        load_optimizer_checkpoint(other, fresh, path)
        return other, fresh
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
    _without_names(loaded["optimizer"])
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    set_state_dict(other, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    return other, fresh


def _without_names(state_dict: dict[str, Any]) -> None:
    """A checkpoint of parameters without names lacks this key, which torch.distributed.checkpoint would ask for."""
    for group in state_dict["param_groups"]:
        group.pop("param_names", None)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["load_state_dict", "dcp", "load_optimizer_checkpoint"])
@pytest.mark.parametrize("form", ["unscaled", "native"])
def test_checkpoints_of_runs_that_counted_parameters_go_on_so(form: str, how: str, tmp_path: Path) -> None:
    """Bit for bit, in an optimizer with names, and after a second checkpoint, too; those with names likewise."""
    for named in (False, True):
        model, optimizer = run(named, checkpoint_format=form)
        step(model, [optimizer], range(3))
        other, loaded = reload(model, optimizer, True, how, tmp_path / f"first {named}")
        step(model, [optimizer], range(3, 5))
        step(other, [loaded], range(3, 5))
        assert not differing(everything(other, [loaded]), everything(model, [optimizer]))
        again, last = reload(other, loaded, True, how, tmp_path / f"second {named}")
        for twin in (copy.deepcopy(last), pickle.loads(pickle.dumps(last))):
            assert twin.store.rounds_by_names is named
        step(model, [optimizer], range(5, 7))
        step(again, [last], range(5, 7))
        assert not differing(everything(again, [last]), everything(model, [optimizer]))


# --- names beside parameters that users change ------------------------------------------------------------------------


def calls(optimizer: FusedAdam) -> list[Callable[[], object]]:
    late = {"params": [nn.Parameter(torch.ones(3))], "param_names": ["late", "later"]}
    return [optimizer.step, optimizer.state_dict, optimizer.summary, lambda: optimizer.add_param_group(late)]


@pytest.mark.parametrize("change", ["removed", "appended", "moved to the other group"])
@pytest.mark.parametrize("is_stepped", [False, True])
def test_params_without_their_names_are_refused(change: str, is_stepped: bool) -> None:
    """By all that reads names; with both lists changed alike the run goes on, each name beside its parameter."""
    model = Model()
    pairs = list(model.named_parameters())
    optimizer = FusedAdam([{"params": pairs[:2]}, {"params": pairs[2:]}], exp_avg_sq_dtype="int8")
    step(model, [optimizer], range(1 if is_stepped else 0))
    first, second = optimizer.param_groups
    before = everything(model, [optimizer])
    if change == "appended":
        first["params"].append(nn.Parameter(torch.ones(2, 128)))
    else:
        moved = first["params"].pop(0)
        second["params"] += [moved] * (change != "removed")
    count = len(optimizer.param_groups)
    for call in calls(optimizer):
        with pytest.raises(ValueError, match=r"param group has \d parameters but \d names: .* param_names alike"):
            call()
    assert len(optimizer.param_groups) == count and not differing(everything(model, [optimizer]), before)
    names = {param: name for name, param in pairs}
    for group in optimizer.param_groups:
        group["param_names"] = [names.get(param, "new") for param in group["params"]]
    step(model, [optimizer], range(1, 2))
    assert all(
        f"({name!r}, " in optimizer.store.describe(p)
        for name, p in pairs
        if change != "removed" or p is not pairs[0][1]
    )
