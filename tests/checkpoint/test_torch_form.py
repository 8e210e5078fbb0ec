"""``checkpoint_format="torch"``: from torch.optim.AdamW to FusedAdamW and back, in all forms that loops load."""

from __future__ import annotations

import copy
import pickle
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

import distributed
from cases import FORMAT, MASTERS, Format, Master
from distributed import Part, assert_same, join_all, one_thread, part, same_bits
from foreign_cases import SETTINGS, Model, build, groups_of, train
from fused_optim import load_optimizer_checkpoint
from peers import FusedAdam, FusedAdamW
from snippets import run_section

STEPS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")
INT8 = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
FORMS = ("unscaled", "native", "torch")


def adamw(model: Model, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups_of(model), **{**SETTINGS, **options})


def ours(model: Model, form: str = "torch", **options: Any) -> FusedAdamW:
    """With other hyperparameters than those that are loaded."""
    other = {"lr": 0.5, "weight_decay": 0.7, "betas": (0.5, 0.5), "seed": 3}
    return FusedAdamW(groups_of(model), checkpoint_format=form, **{**other, **options})


def steps_of(optimizer: FusedAdamW) -> list[int]:
    return [group["step"] for group in optimizer.param_groups]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
    """This rank's parts of parameters and moments, and each group's step and settings, in any layout."""
    state_dict = optimizer.state_dict()
    found = {}
    for i, (name, param) in enumerate(model.named_parameters()):
        found[name] = part(param)
        for key in MOMENTS:
            found[f"{name}: {key}"] = part(state_dict["state"][i][key])
    for number, group in enumerate(state_dict["param_groups"]):
        steps = {float(state_dict["state"][id_].get("step", group.get("step", -1))) for id_ in group["params"]}
        settings = [*(float(group[key]) for key in ("lr", "eps", "weight_decay")), *group["betas"], *sorted(steps)]
        found[f"group {number}"] = part(torch.tensor(settings, dtype=torch.float64))
    return found


def close_in(fmt: Format, state: str, loaded: Tensor, saved: Tensor) -> bool:
    """Whether a matrix is kept as exactly as its format promises, in blocks of 128."""
    moment = fmt.moment(state)
    magnitudes = [x.double().abs().view(-1, 128).numpy() for x in (loaded, saved)]
    if fmt is FORMAT["int8"]:
        magnitudes = [moment.code.coded(x, magnitudes[1].max(1, keepdims=True)) for x in magnitudes]
    magnitudes = [torch.from_numpy(x) for x in magnitudes]
    bound = moment.relative * magnitudes[1] + moment.absolute * magnitudes[1].amax(1, keepdim=True)
    signs = bool((loaded * saved >= 0).all())
    bound = bound * (1 + 5e-4)  # the nudge to the top code
    return signs and bool(((magnitudes[0] - magnitudes[1]).abs() <= bound).all())


def assert_close(loaded: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Settings, steps and what has no blocks bit for bit, int8 moments to half a code."""
    assert list(loaded) == list(saved)
    for name, value in loaded.items():
        coded = name.split(": ")[-1] if "weight: " in name else None
        if coded is None:
            assert same_bits(value, saved[name]), name
        else:
            assert close_in(FORMAT["int8"], coded, value, saved[name]), name
            assert not same_bits(value, saved[name]), f"{name} was not encoded"


# --- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_the_state_dict_is_torchs(master: Master, device: str) -> None:
    """The same keys, types, shapes and dtypes as of torch.optim.AdamW with FP32 parameters; and it loads there."""
    model = build(master.param_dtype).to(device)
    optimizer = ours(model, **INT8, **master.options)
    train(model, optimizer, 0, STEPS)
    theirs_model = build().to(device)
    theirs = adamw(theirs_model)
    train(theirs_model, theirs, 0, STEPS)
    found, expected = optimizer.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys() and found["state"].keys() == expected["state"].keys()
    for id_, states in expected["state"].items():
        assert list(found["state"][id_]) == list(states)
        for name, value in states.items():
            mine = found["state"][id_][name]
            assert (type(mine), mine.shape, mine.dtype) == (type(value), value.shape, value.dtype)
            assert mine.device == value.device
    for mine, group in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert mine.keys() == group.keys() and mine["params"] == group["params"]
        unset = ("lr", "betas", "eps", "weight_decay")
        assert {k: v for k, v in mine.items() if k not in unset} == {k: v for k, v in group.items() if k not in unset}
    target = torch.optim.AdamW(groups_of(theirs_model), lr=0.125)
    target.load_state_dict(found)
    for param, source in zip(theirs_model.parameters(), model.parameters(), strict=True):
        assert float(target.state[param]["step"]) == STEPS
        for name in MOMENTS:
            assert same_bits(target.state[param][name], optimizer.get_unscaled_state(source, name))


def test_adams_l2_is_said() -> None:
    model = build()
    optimizer = FusedAdam(groups_of(model), decoupled_weight_decay=False, checkpoint_format="torch")
    train(model, optimizer, 0, 1)
    assert [group["decoupled_weight_decay"] for group in optimizer.state_dict()["param_groups"]] == [False, False]


def test_what_torch_cannot_continue_is_refused() -> None:
    optimizer = ours(build(), bias_correction=False)
    with pytest.raises(ValueError, match="bias_correction=False"):
        optimizer.state_dict()


def test_switches_are_the_optimizers() -> None:
    """``fused`` says which implementation AdamW is to take."""
    optimizer, target = ours(build(), fused=True), build(seed=8)
    assert "fused" not in optimizer.param_groups[0]
    back = adamw(target)
    back.load_state_dict(optimizer.state_dict())
    assert [group["fused"] for group in back.param_groups] == [True, True]


# --- what is running --------------------------------------------------------------------------------------------------


def test_running_groups_and_states_are_our_own() -> None:
    """Whatever the form is, which is that of state dicts alone."""
    model = build()
    optimizer = ours(model, "unscaled")
    train(model, optimizer, 0, STEPS)
    groups, before = optimizer.param_groups, copy.deepcopy(optimizer.param_groups)
    optimizer.checkpoint_format = "torch"
    saved = optimizer.state_dict()
    assert float(saved["state"][0]["step"]) == STEPS and "step" not in saved["param_groups"][0]
    assert optimizer.param_groups is groups and [set(g) for g in groups] == [set(g) for g in before]
    assert set(optimizer.state[model.first.bias]) == {"exp_avg", "exp_avg_sq"} and steps_of(optimizer) == [STEPS] * 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_go_on_as_the_original(copied: Callable[[FusedAdamW], FusedAdamW]) -> None:
    model = build()
    optimizer = ours(model, **INT8)
    train(model, optimizer, 0, STEPS)
    twin = copied(optimizer)
    assert twin.checkpoint_format == "torch" and twin.defaults == optimizer.defaults
    assert [set(group) for group in twin.param_groups] == [set(group) for group in optimizer.param_groups]
    assert steps_of(twin) == [STEPS, STEPS]
    other = build()
    for param, mine in zip(other.parameters(), (p for g in twin.param_groups for p in g["params"]), strict=True):
        mine.grad = torch.ones_like(param)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    twin.step()
    assert steps_of(twin) == steps_of(optimizer) == [STEPS + 1, STEPS + 1]
    mine = [p for g in twin.param_groups for p in g["params"]]
    assert all(map(same_bits, mine, model.parameters()))
    twin.checkpoint_format = optimizer.checkpoint_format = "unscaled"
    assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_schedulers_multiply_what_is_shown() -> None:
    model, usual = build(), build()
    pair = ours(model), ours(usual, "unscaled")
    for optimizer in pair:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in pair[0].param_groups] == [group["lr"] for group in pair[1].param_groups]
    train(model, pair[0], 0, STEPS)
    train(usual, pair[1], 0, STEPS)
    assert all(map(same_bits, model.parameters(), usual.parameters()))


# --- every form into every other ---------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_as", FORMS)
@pytest.mark.parametrize("loaded_by", FORMS)
def test_every_form_loads_in_every_form(saved_as: str, loaded_by: str) -> None:
    source, model = build(torch.bfloat16), build(torch.bfloat16, seed=7)
    saved, loaded = ours(source, saved_as, **INT8), ours(model, loaded_by, **INT8)
    train(source, saved, 0, STEPS)
    with torch.no_grad():
        for param, other in zip(model.parameters(), source.parameters(), strict=True):
            param.copy_(other)
    loaded.load_state_dict(saved.state_dict())
    assert [group["step"] for group in loaded.store.groups] == [STEPS, STEPS]
    for param, other in zip(model.parameters(), source.parameters(), strict=True):
        for name in MOMENTS:
            assert same_bits(loaded.get_unscaled_state(param, name), saved.get_unscaled_state(other, name))
        master = other.detach().float() if saved_as == "torch" else saved.store.master(other)
        assert same_bits(loaded.store.master(param), master)
    train(model, loaded, STEPS, STEPS + 1)


# --- through torch.distributed.checkpoint ---------------------------------------------------------------------------

# How loops take state dicts and load them: torch's nested and flattened ones, and whole ones that rank 0 has.
WAYS = {
    "nested": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "offloaded": StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> dict[str, Part]:
    for way, options in WAYS.items():
        state = get_optimizer_state_dict(model, optimizer, options=options)
        if not way.startswith("full"):
            dcp.save({"optimizer": state}, checkpoint_id=f"{folder}/{way}")
        elif dist.get_rank() == 0:
            torch.save(state, f"{folder}/{way}")
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/model")
    dist.barrier()
    return snapshot(model, optimizer)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, way: str) -> None:
    """Into a state dict that torch makes of an optimizer that has no states yet."""
    options = WAYS[way]
    if way.startswith("full"):
        reads = dist.get_rank() == 0 or not options.broadcast_from_rank0
        state = torch.load(f"{folder}/{way}", weights_only=True) if reads else {}
    elif options.flatten_optimizer_state_dict and isinstance(optimizer, FusedAdamW):
        load_optimizer_checkpoint(model, optimizer, f"{folder}/{way}")  # torch's own function asks for our keys
        return
    else:
        wrapped = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.load(wrapped, checkpoint_id=f"{folder}/{way}")
        state = wrapped["optimizer"]
    set_optimizer_state_dict(model, optimizer, state, options=options)


def start(folder: str) -> dict[str, Part]:
    model = build()
    optimizer = adamw(model)
    train(model, optimizer, 0, STEPS)
    return save(model, optimizer, folder)


def detour(folder: str, options: dict[str, Any]) -> dict[str, dict[str, Part]]:
    """FusedAdamW loads what AdamW has saved, each way, and saves what it made of it, for AdamW and for itself."""
    found = {}
    for way in WAYS:
        model = build(seed=7)
        optimizer = ours(model, **options)
        dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/model")
        load(model, optimizer, folder, way)
        found[way] = snapshot(model, optimizer)
        train(model, optimizer, STEPS, STEPS + 1)
        found[f"{way}, a step on"] = snapshot(model, optimizer)
    return {**found, "saved": save(model, optimizer, f"{folder}/ours")}


def go_back(folder: str) -> dict[str, dict[str, Part]]:
    found = {}
    for way in WAYS:
        model = build(seed=8)
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
        dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/ours/model")
        load(model, optimizer, f"{folder}/ours", way)
        found[way] = snapshot(model, optimizer)
        train(model, optimizer, STEPS + 1, STEPS + 2)
    return found


@one_thread()
@pytest.mark.parametrize("ranks", [(2, 3, 1), (1, 2, 2)], ids=str)
def test_adamw_to_ours_and_back_through_dcp(ranks: tuple[int, int, int], tmp_path: Path) -> None:
    """Int8 moments are AdamW's to half a code; AdamW continues from these and from the step, bit for bit."""
    saved = join_all(distributed.run(ranks[0], start, str(tmp_path)))
    results = distributed.run(ranks[1], detour, str(tmp_path), INT8)
    for way in WAYS:
        loaded = join_all([result[way] for result in results])
        states = {name: value for name, value in loaded.items() if "exp_avg" in name or "group" in name}
        assert_close(states, {name: saved[name] for name in states})
    ended = join_all([result["saved"] for result in results])
    assert all(ended[f"group {number}"][-1] == STEPS + 1 for number in range(2))
    results = distributed.run(ranks[2], go_back, str(tmp_path))
    for way in WAYS:
        assert_same(join_all([result[way] for result in results]), ended)


@one_thread()
def test_fp32_moments_make_the_detour_bit_for_bit(tmp_path: Path) -> None:
    saved = join_all(distributed.run(2, start, str(tmp_path)))
    results = distributed.run(1, detour, str(tmp_path), {})
    expected = join_all([results[0]["nested, a step on"]])
    for way in WAYS:
        loaded = join_all([results[0][way]])
        names = [name for name in loaded if "exp_avg" in name or "group" in name]
        assert_same({name: loaded[name] for name in names}, {name: saved[name] for name in names})
        assert_same(join_all([results[0][f"{way}, a step on"]]), expected)
    back = distributed.run(3, go_back, str(tmp_path))
    assert_same(join_all([result["nested"] for result in back]), join_all([results[0]["saved"]]))


def test_load_optimizer_checkpoint_reads_it(tmp_path: Path) -> None:
    """Whatever the running form is."""
    source = build()
    saved = ours(source)
    train(source, saved, 0, STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"optim": get_optimizer_state_dict(source, saved)}, checkpoint_id=tmp_path)
    for form in FORMS:
        model = build(seed=7)
        loaded = ours(model, form)
        report = load_optimizer_checkpoint(model, loaded, tmp_path)
        assert str(report) == f"torch.optim.AdamW checkpoint, 6 parameters, step {STEPS}, no masters needed"
        for param, other in zip(model.parameters(), source.parameters(), strict=True):
            for name in MOMENTS:
                assert same_bits(loaded.get_unscaled_state(param, name), saved.get_unscaled_state(other, name))


def test_frozen_parameters_are_absent() -> None:
    """As in AdamW's."""
    state_dicts = []
    for build_optimizer in (adamw, ours):
        model = build()
        model.first.bias.requires_grad_(False)
        optimizer = build_optimizer(model)
        for param in model.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        optimizer.step()
        state_dicts.append(get_optimizer_state_dict(model, optimizer, options=WAYS["flat"]))
    assert state_dicts[1].keys() == state_dicts[0].keys()
    assert not optimizer.state.get(model.first.bias)


def test_documented_way_there_and_back_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group
        names = run_section("integrations.md", "From torch.optim.AdamW and back")
    model, fused, adamw = (names[name] for name in ("model", "fused", "adamw"))
    assert fused.state[model.weight]["exp_avg"].dtype == torch.int8
    assert fused.param_groups[0]["step"] == 2
    assert float(adamw.state[model.weight]["step"]) == 3 and adamw.param_groups[0]["lr"] == 1e-3
