"""Nested values of any structure: in param groups, in states, in what modules save beside tensors; tied parameters."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distributed
from fused_optim import FusedAdamW
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint.open import assembled, flat
from pairwise import pairwise

VALUES: dict[str, Any] = {
    "number": 0.25,
    "text": "warm",
    "tuple": (1, "a", None),
    "tensor": torch.arange(3.0),
    "dict": {"a": 1, "b": {"c": torch.ones(2, 2)}},
    "list": [torch.zeros(1), {"x": 3}, [torch.ones(1)]],
    "empty": {},
    "numbered": {1: "one", (2, 3): "pair"},
    "with.dots": {"a.b": 1.5},
    "unnamed": {"": 1, "a": {"": torch.ones(2)}},
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(full(a), full(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) and type(a) is type(b)


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


leaves = st.one_of(st.integers(), st.text(), st.none(), st.tuples(st.integers()), st.just(torch.ones(2)))
keys = st.text("ab", min_size=1)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=12
)


def nested(values: Any) -> Any:
    return st.dictionaries(keys, values, min_size=1, max_size=3)


@given(st.just({}) | nested(nested(nested(trees))))
def test_flattened_states_are_assembled_again(state: dict[str, Any]) -> None:
    values, places = flat(state)
    assert equal(assembled({places[key]: value for key, value in values.items()}) if values else {}, state)


@given(st.dictionaries(keys, st.dictionaries(keys, leaves, min_size=1)))
def test_keys_are_those_of_torch(state: dict[str, Any]) -> None:
    ours, theirs = flat({"model": state}), flatten_state_dict({"model": state})
    assert (ours[0].keys(), ours[1]) == (theirs[0].keys(), theirs[1])


def test_two_values_of_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have the same key 'a\.b\.c'"):
        flat({"a": {"b": {"c": 1}, "b.c": 2}})


class Noted(nn.Module):
    """Modules by numbers, of which the second is called as a setting is; and an extra state."""

    def __init__(self, note: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
        self.note = note

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def built(how: str, note: Any = None) -> tuple[Noted, FusedAdamW]:
    model = Noted(note)
    if how == "fsdp":
        fully_shard(model, mesh=distributed.mesh())
    groups = [{"params": list(layer.parameters())} for layer in model.layers]
    return model, FusedAdamW(groups)


def step(model: nn.Module, optimizer: FusedAdamW) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def groups_and_states(how: str, folder: str, form: str) -> None:
    model, optimizer = built(how)
    step(model, optimizer)
    optimizer.param_groups[1].update(VALUES)
    optimizer.state[model.layers[0].weight].update(VALUES)
    with Checkpointer(model, optimizer, folder, format=form, sigterm=False) as checkpointer:
        checkpointer.save(1)
    for before in (False, True):
        model, optimizer = built(how)
        if before:  # what is there is replaced
            step(model, optimizer)
            optimizer.param_groups[1].update(VALUES, number=0.5, dict={"a": 3})
        Checkpointer(model, optimizer, folder, sigterm=False).load(1)
        for name, value in VALUES.items():
            assert equal(optimizer.param_groups[1][name], value), name
            assert name not in optimizer.param_groups[0]
            assert equal(optimizer.state[model.layers[0].weight][name], value), name


@pytest.mark.parametrize("form", ["native", "unscaled"])
@pytest.mark.parametrize("how, ranks", [("plain", 1), ("fsdp", 1), ("fsdp", 3)])
def test_users_values(how: str, ranks: int, form: str, tmp_path: Path) -> None:
    distributed.run(ranks, groups_and_states, how, str(tmp_path), form)


def stages(folder: str) -> None:
    """Ranks own different parameters, so that param groups are saved by parameter."""
    rank = torch.distributed.get_rank()

    def own() -> tuple[nn.Module, FusedAdamW]:
        model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 3)})
        return model, FusedAdamW(model.parameters())

    model, optimizer = own()
    step(model, optimizer)
    optimizer.param_groups[0].update(VALUES)
    with Checkpointer(model, optimizer, folder, sigterm=False) as checkpointer:
        checkpointer.save(1)
    model, optimizer = own()
    Checkpointer(model, optimizer, folder, sigterm=False).load(1)
    for name, value in VALUES.items():
        assert equal(optimizer.param_groups[0][name], value), name


def test_users_values_of_stages(tmp_path: Path) -> None:
    distributed.run(2, stages, str(tmp_path))


CURRENT: dict[str, Any] = {
    "none": None,
    "empty": {},
    "other keys": {1: "another"},
    "more": {"a": 7, "z": torch.ones(1)},
}
CURRENT |= {"tensor": torch.ones(5), "same": ...}


def extra_states(how: str, folder: str, cases: list[tuple[str, str]]) -> None:
    for number, (name, value) in enumerate(VALUES.items()):
        model, optimizer = built(how, value)
        step(model, optimizer)
        with Checkpointer(model, optimizer, folder, sigterm=False) as checkpointer:
            checkpointer.save(number)
        for current in [current for saved, current in cases if saved == name]:
            model, optimizer = built(how, value if current == "same" else CURRENT[current])
            Checkpointer(model, optimizer, folder, sigterm=False).load(number)
            assert equal(model.note, value), (name, current)


@pytest.mark.parametrize("how, ranks", [("plain", 1), ("fsdp", 2)])
def test_extra_states_of_any_structure(how: str, ranks: int, tmp_path: Path) -> None:
    """Each value over each: plain or sharded, and either over or from every one."""
    cases = pairwise(["plain", "fsdp"], list(VALUES), list(CURRENT))
    distributed.run(ranks, extra_states, how, str(tmp_path), [case[1:] for case in cases if case[0] == how])


class Odd:
    """Nothing that a checkpoint may hold."""


class Extra:
    """An extra with one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("value", [torch.ones(2, device="meta"), Odd()])
def test_extras_without_data_are_not_saved(value: Any, tmp_path: Path) -> None:
    model, optimizer = built("plain")
    checkpointer = Checkpointer(model, optimizer, tmp_path, extra={"mine": Extra(value)}, sigterm=False)
    checkpointer.save(1)
    with pytest.raises(RuntimeError, match=r"extra mine\.value: expected tensors"):
        checkpointer.wait()


def test_what_torch_itself_admits_may_be_registered(tmp_path: Path) -> None:
    """As other packages do, for all that they name."""
    model, optimizer = built("plain")
    extra = Extra(torch.eye(2).to_sparse())
    checkpointer = Checkpointer(model, optimizer, tmp_path, extra={"mine": extra}, sigterm=False)
    with torch.serialization.safe_globals([OrderedDict, set]):
        checkpointer.save(1)
        checkpointer.wait()
    extra.value = None
    assert checkpointer.load_latest() == 1
    assert torch.equal(extra.value.to_dense(), torch.eye(2))


# --- tied parameters ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding and a head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def tied(how: str, is_tied: bool) -> tuple[Tied, FusedAdamW]:
    model = Tied(is_tied)
    if how == "fsdp":
        fully_shard(model, mesh=distributed.mesh())
    return model, FusedAdamW(model.parameters())


def ties(how: str, folder: str) -> None:
    saved = {}
    for number, is_tied in enumerate((True, False)):
        model, optimizer = tied(how, is_tied)
        step(model, optimizer)
        with Checkpointer(model, optimizer, folder, sigterm=False) as checkpointer:
            checkpointer.save(number)
        saved[is_tied] = {name: full(value).clone() for name, value in model.state_dict().items()}
        saved[is_tied]["moment"] = full(optimizer.state[model.embed.weight]["exp_avg"]).clone()
    assert not torch.equal(saved[False]["embed.weight"], saved[False]["head.weight"])

    def load(is_tied: bool, number: int, **options: Any) -> tuple[Any, ...]:
        model, optimizer = tied(how, is_tied)
        checkpointer = Checkpointer(model, optimizer, folder, sigterm=False)
        before = full(model.embed.weight).detach().clone()
        try:
            checkpointer.load(number, **options)
        except (ValueError, RuntimeError) as error:
            assert torch.equal(full(model.embed.weight), before) and not optimizer.state
            return str(error), None, None
        return model, optimizer, checkpointer.report

    model, optimizer, report = load(True, 0)
    assert torch.equal(full(model.head.weight), saved[True]["head.weight"]) and not report.model
    for options in ({}, {"model_only": True}, {"partial": ["embed.*"]}):
        text, *_ = load(True, 1, **options)
        assert isinstance(text, str) and "the model lacks 1 of its tensors: head.weight (tied in the model)" in text
    for options in ({"strict": False}, {"partial": ["head.weight"]}):
        model, optimizer, report = load(True, 1, **options)
        assert report.model.removed == report.optimizer.differences.removed == ("head.weight",)
        assert torch.equal(full(model.embed.weight), saved[False]["embed.weight"])
        assert model.head.weight is model.embed.weight
        assert torch.equal(full(optimizer.state[model.embed.weight]["exp_avg"]), saved[False]["moment"])
    text, *_ = load(False, 0)
    assert isinstance(text, str) and "lacks the states of 1 of 2 parameters" in text


@pytest.mark.parametrize("how, ranks", [("plain", 1), ("fsdp", 1), ("fsdp", 2)])
def test_tied_parameters(how: str, ranks: int, tmp_path: Path) -> None:
    distributed.run(ranks, ties, how, str(tmp_path))
