"""What others put into ``optimizer.state`` and read from it, beside the states of this optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import cases
import distributed
from cases import values
from distributed import same_bits
from fused_optim import enable_gradient_release
from fused_optim.checkpoint import Checkpointer
from fused_optim.compat import apex, transformer_engine
from fused_optim.sharding.dtensor import local_tensor
from pairwise import pairwise
from peers import FusedAdam

FORMS = pytest.mark.parametrize("form", ["unscaled", "native"])
MASTERS = pytest.mark.parametrize("master", ["float32", "bfloat16+float32", "bfloat16+rem16"])


def build(master: str, seed: int = 0, **options: Any) -> tuple[nn.Linear, FusedAdam]:
    kind = cases.MASTER[master]
    torch.manual_seed(seed)
    model = nn.Linear(128, 6).to(kind.param_dtype)
    return model, FusedAdam(model.parameters(), **{"exp_avg_dtype": torch.int8, **kind.options, **options})


def train(model: nn.Module, optimizer: FusedAdam) -> None:
    for i, param in enumerate(model.parameters()):
        param.grad = distributed.shard_like(values(tuple(param.shape), param.dtype, "cpu", seed=i), param)
    optimizer.step()
    optimizer.zero_grad()


# --- custom entries ---------------------------------------------------------------------------------------------------


def others(param: Tensor) -> dict[str, Any]:
    return {
        "anchor": param.detach().float() * 3,
        "visits": torch.arange(4),
        "note": "warm",
        "nested": {"history": [torch.ones(2), 5], "rate": 0.5},
    }


@FORMS
@MASTERS
def test_custom_entries_come_back(master: str, form: str) -> None:
    """As torch.optim's; here with their own dtypes, as copies."""
    model, optimizer = build(master, checkpoint_format=form)
    train(model, optimizer)
    for param in model.parameters():
        optimizer.state[param].update(others(param))
    other, fresh = build(master, seed=1)
    train(other, fresh)
    fresh.state[other.bias]["stale"] = 1
    other.load_state_dict(model.state_dict())
    state_dict = optimizer.state_dict()
    fresh.load_state_dict(state_dict)
    for index, (ours, theirs) in enumerate(zip(other.parameters(), model.parameters(), strict=True)):
        found, expected = fresh.state[ours], others(theirs)
        assert found.keys() == optimizer.state[theirs].keys()
        assert same_bits(found["anchor"], expected["anchor"]) and same_bits(found["visits"], expected["visits"])
        assert found["anchor"] is not state_dict["state"][index]["anchor"]
        assert found["note"] == "warm" and found["nested"]["rate"] == 0.5
        assert torch.equal(found["nested"]["history"][0], torch.ones(2)) and found["nested"]["history"][1] == 5
    assert fresh.state_bytes() == optimizer.state_bytes()
    train(model, optimizer)
    train(other, fresh)
    assert all(map(same_bits, other.parameters(), model.parameters()))
    assert copy.deepcopy(fresh).state_dict()["state"][0]["note"] == "warm"


def test_custom_entries_of_a_parameter_without_states(device: str) -> None:
    """As pruning keeps its masks; they are moved beside the parameter."""
    model, optimizer = build("float32")
    model, optimizer = model.to(device), FusedAdam(model.parameters())
    state_dict = optimizer.state_dict()
    state_dict["state"] = {1: {"mask": torch.ones(6, dtype=torch.bool)}}
    optimizer.load_state_dict(state_dict)
    assert list(optimizer.state[model.bias]) == ["mask"] and optimizer.state[model.bias]["mask"].device.type == device
    assert not optimizer.state.get(model.weight)
    assert list(optimizer.state_dict()["state"][1]) == ["mask"]
    train(model, optimizer)
    assert optimizer.state[model.bias]["mask"].all() and optimizer.state[model.bias]["exp_avg"].any()


def through_dcp(form: str, flat: bool, path: str) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    runs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(128, 6)
        fully_shard(model, mesh=distributed.mesh())
        optimizer = FusedAdam(model.parameters(), exp_avg_dtype=torch.int8, checkpoint_format=form)
        train(model, optimizer)
        for param in model.parameters():
            optimizer.state[param]["anchor"] = torch.full_like(param, 7.0 - seed).detach()
            optimizer.state[param]["visits"] = 5 + seed
        runs.append((model, optimizer))
    dcp.save(get_optimizer_state_dict(*runs[0], options=options), checkpoint_id=path)
    model, optimizer = runs[1]
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    for param in model.parameters():
        states = optimizer.state[param]
        assert states["visits"] == 5 and (local_tensor(states["anchor"]) == 7).all()
        assert states["anchor"].placements == param.placements


@pytest.mark.parametrize("ranks, flat, form", pairwise([1, 2, 3], [False, True], ["unscaled", "native"]))
def test_custom_entries_through_distributed_checkpoints(ranks: int, flat: bool, form: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.run(ranks, through_dcp, form, flat, str(tmp_path), timeout=30)


# --- removed states ---------------------------------------------------------------------------------------------------

REMOVALS: dict[str, Callable[[FusedAdam, Tensor], Any]] = {
    "clear": lambda optimizer, param: optimizer.state[param].clear(),
    "del": lambda optimizer, param: optimizer.state.__delitem__(param),
    "pop": lambda optimizer, param: optimizer.state.pop(param),
    "others stay": lambda optimizer, param: [
        optimizer.state[param].pop(name) for name in list(optimizer.state[param]) if name != "mask"
    ],
}


def remove_one(master: str, options: dict[str, Any], how: str, saves: bool) -> None:
    """The weight starts anew from what it is; the bias goes on, bit for bit."""
    (model, optimizer), (twin, usual) = (build(master, **options) for _ in range(2))
    for _ in range(2):
        train(model, optimizer)
        train(twin, usual)
    start = local_tensor(model.weight.detach()).clone().float()
    optimizer.state[model.weight]["mask"] = 1
    REMOVALS[how](optimizer, model.weight)
    if saves:
        assert "exp_avg" not in optimizer.state_dict()["state"].get(0, {})
    train(model, optimizer)
    train(twin, usual)
    assert same_bits(*(local_tensor(each.bias.detach()) for each in (model, twin)))
    grad = local_tensor(
        distributed.shard_like(values((6, 128), model.weight.dtype, "cpu", seed=0), model.weight)
    ).float()
    found = optimizer.get_unscaled_state(model.weight, "exp_avg")
    torch.testing.assert_close(found, 0.1 * grad, rtol=0.15, atol=0.02)
    found = optimizer.get_unscaled_state(model.weight, "exp_avg_sq")
    torch.testing.assert_close(found, 0.001 * grad.square(), rtol=0.3, atol=1e-4)
    assert float((local_tensor(model.weight.detach()).float() - start).abs().max()) < 0.02
    assert optimizer.state[model.weight].get("mask") == (1 if how == "others stay" else None)
    assert float(optimizer.state_dict()["state"][1].get("step", 3)) == 3


@pytest.mark.parametrize(
    "master, options, how, backend, saves",
    pairwise(
        ["float32", "bfloat16+float32", "bfloat16+rem16", "bfloat16+rem8"],
        [{}, {"skip_nonfinite": True}, {"checkpoint_format": "torch"}, {"exp_avg_sq_dtype": "fp8"}],
        list(REMOVALS),
        ["", "torch"],
        [False, True],
    ),
    ids=str,
)
def test_a_parameter_without_states_starts_anew(
    master: str, options: dict[str, Any], how: str, backend: str, saves: bool, use_backend: Callable[[str], None]
) -> None:
    """As in torch.optim; the step is its group's."""
    use_backend(backend)
    remove_one(master, options, how, saves)


@pytest.mark.parametrize("how", ["step", "initialize_state", "gradient release"])
@pytest.mark.parametrize("removed", ["all", "a group"])
def test_a_group_without_states_counts_anew(how: str, removed: str) -> None:
    """However its states are created: as those of a new optimizer, bit for bit."""
    found = []
    for is_fresh in (False, True):
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
        with torch.no_grad():
            for i, param in enumerate(model.parameters()):
                param.copy_(values(tuple(param.shape), torch.float32, "cpu", seed=i))
        optimizer = FusedAdam([{"params": layer.parameters()} for layer in model], lr=0.0)
        for _ in range(0 if is_fresh else 3):
            train(model, optimizer)
        for param in optimizer.store.params if removed == "all" else model[1].parameters():
            optimizer.state.pop(param, None)
        if how == "initialize_state":
            optimizer.initialize_state()
        elif how == "gradient release":
            enable_gradient_release(model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        assert optimizer.param_groups[1]["step"] == 1
        found.append(list(model[1].parameters()))
    assert all(map(same_bits, *found))


# --- set_scaled_state -------------------------------------------------------------------------------------------------


@MASTERS
@pytest.mark.parametrize("fmt", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("face", [FusedAdam, transformer_engine.FusedAdam, apex.FusedAdam])
def test_setting_a_state_creates_what_lacks(face: type[FusedAdam], fmt: torch.dtype, master: str) -> None:
    """As TransformerEngine's does, for this parameter only."""
    kind = cases.MASTER[master]
    params = [nn.Parameter(values((4, 128), kind.param_dtype, "cpu", seed=i)) for i in range(2)]
    options = {"master_weights": True, **kind.options}
    optimizer = face(params, exp_avg_dtype=fmt, exp_avg_sq_dtype=fmt, **options)
    expected = face(params[:1], exp_avg_dtype=fmt, exp_avg_sq_dtype=fmt, **options)
    expected.initialize_state()
    value = values((4, 128), torch.float32, "cpu", seed=5).square()
    for each in (optimizer, expected):
        each.set_scaled_state(params[0], "exp_avg_sq", value)
    for name in expected.state[params[0]]:
        assert same_bits(optimizer.get_unscaled_state(params[0], name), expected.get_unscaled_state(params[0], name))
    assert optimizer.get_unscaled_state(params[0], "exp_avg_sq").any() and params[1] not in optimizer.store


def test_a_master_that_is_set_first_is_the_master() -> None:
    param = nn.Parameter(torch.ones(4, 128, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], lr=0.0, store_param_remainders=False)
    optimizer.set_scaled_state(param, "master_param", torch.full((4, 128), 1.001))
    assert (optimizer.get_unscaled_state(param, "master_param") == 1.001).all()


# --- entries that are no parameters', and parameters that left --------------------------------------------------------


def entries() -> dict[Any, Any]:
    return {"test": 1, "flag": False, "averages": {"loss": torch.ones(3), "by name": [2.5]}, ("a", 1): None}


@pytest.mark.parametrize("form", ["unscaled", "native", "torch"])
@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_entries_under_other_keys_are_kept_saved_and_loaded(when: str, form: str) -> None:
    """As by torch.optim.AdamW: what is loaded takes the place of all that was there."""
    found = []
    for kind in (torch.optim.AdamW, FusedAdam):
        (model, other), options = (nn.Linear(128, 6), nn.Linear(128, 6)), {"lr": 0.01}
        options |= {} if kind is torch.optim.AdamW else {"exp_avg_dtype": "int8", "checkpoint_format": form}
        optimizer, loaded = kind(model.parameters(), **options), kind(other.parameters(), **options)
        given = entries()
        if when == "later":
            train(model, optimizer)
        optimizer.state.update(given)
        train(model, optimizer)
        assert all(optimizer.state[key] is value for key, value in given.items())
        loaded.state.update({"stale": 2, "test": 0})
        loaded.load_state_dict(optimizer.state_dict())
        train(other, loaded)
        twin = copy.deepcopy(loaded)
        for each in (loaded, twin):
            kept = {key: value for key, value in each.state.items() if not isinstance(key, Tensor)}
            assert torch.equal(kept["averages"].pop("loss"), torch.ones(3))
            found.append(kept)
        if kind is FusedAdam:
            optimizer.summary(), optimizer.diagnostics(), optimizer.initialize_state()
            assert loaded.state_bytes() == optimizer.state_bytes() > 0
    assert found[0] == found[1] == found[2] == found[3] and "stale" not in found[0]


@pytest.mark.parametrize("is_stepped", [False, True])
def test_states_of_parameters_that_left_the_groups(is_stepped: bool) -> None:
    """Left out of saves. Kept as torch.optim keeps them, and counted, if a step has made them; else memory is freed."""
    model, optimizer = build("float32", store_param_remainders=None)
    old, bias = list(model.parameters())
    if is_stepped:
        train(model, optimizer)
    else:
        optimizer.initialize_state()
        optimizer.state[old]["mask"] = 1
    before, bytes_before = optimizer.state_dict(), optimizer.state_bytes()
    new = nn.Parameter(old.detach().clone())
    optimizer.param_groups[0]["params"] = [new, bias]  # as Accelerate's preparation for FSDP2
    saved = optimizer.state_dict()
    assert [*saved["state"]] == [1] and same_bits(saved["state"][1]["exp_avg"], before["state"][1]["exp_avg"])
    new.grad = torch.ones_like(new)
    optimizer.step()
    assert [*optimizer.state_dict()["state"]] == [0, 1]
    own = 6 * 128 * (1 + 4) + 6 * 4  # codes, FP32, scales
    assert optimizer.state_bytes() == bytes_before + own * is_stepped
    if not is_stepped:
        assert optimizer.state[old] == {"mask": 1}
        return
    moved = optimizer.get_unscaled_state(new, "exp_avg_sq").clone()
    optimizer.param_groups[0]["params"] = [old, bias]
    assert same_bits(optimizer.state_dict()["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    assert same_bits(optimizer.store.departed[0].read("exp_avg_sq"), moved)
    fresh = optimizer.state_dict()
    optimizer.load_state_dict(fresh)  # which replaces all states, as torch.optim's does
    assert not optimizer.store.departed and optimizer.state_bytes() == bytes_before and new not in optimizer.state


def through_the_checkpointer(form: str, path: str) -> dict[Any, Any]:
    """Parts of a model, as the stages of a pipeline have them, where there are several ranks."""
    stages = nn.ModuleList(nn.Linear(128, 6) for _ in range(2))
    model = nn.ModuleDict({str(i): stages[i] for i in ([dist.get_rank()] if dist.is_initialized() else range(2))})
    optimizers = [FusedAdam(model.parameters(), exp_avg_dtype="int8") for _ in range(2)]
    train(model, optimizers[0])
    optimizers[0].state.update(entries())
    for optimizer in optimizers:
        with Checkpointer(model, optimizer, path, format=form, sigterm=False) as checkpointer:
            checkpointer.save(1) if optimizer is optimizers[0] else checkpointer.load_latest()
    train(model, optimizers[1])
    assert len(optimizers[1].state) == 4 + 2 * len(model)
    return {key: value for key, value in optimizers[1].state.items() if not isinstance(key, Tensor)}


@FORMS
@pytest.mark.parametrize("ranks", [0, 2])
def test_entries_under_other_keys_are_in_checkpoints(ranks: int, form: str, tmp_path: Path) -> None:
    arguments = through_the_checkpointer, form, str(tmp_path)
    for found in distributed.run(ranks, *arguments) if ranks else [through_the_checkpointer(*arguments[1:])]:
        assert torch.equal(found["averages"].pop("loss"), torch.ones(3)) and found["averages"] == {"by name": [2.5]}
        assert {key: found[key] for key in entries() if key != "averages"} == {"test": 1, "flag": False, ("a", 1): None}
