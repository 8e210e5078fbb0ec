"""``convert``: what comes out is what the optimizer itself saves, and it loads bit for bit on any number of ranks."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import distributed
from checkpoint_cases import WAYS
from distributed import Part, assert_same, join_all
from foreign_cases import SETTINGS, build, groups_of, train
from fused_optim import load_optimizer_checkpoint, save_master_safetensors, verify_checksums
from fused_optim.__main__ import main
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint.open import open_checked
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from fused_optim.tools.conversion import convert_checkpoint
from native_cases import NativeRun
from pairwise import pairwise
from peers import FusedAdam, FusedAdamW, FusedLion, FusedMuon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.save in one process
# Masters of `checkpoint_cases`, as the command line calls them.
KINDS = {"bfloat16": "float32", "remainder16": "remainder16", "remainder8": "remainder8", "float16": "float16"}
KINDS |= {"no master": None, "float32": None}


def save_both(folder: str, way: str, master: str) -> dict[str, Part]:
    run = NativeRun("fsdp", master)
    run.train(0, 2)
    for form in ("native", "unscaled"):
        run.optimizer.checkpoint_format = form
        WAYS[way][0](run, f"{folder}/{form}")
    return run.snapshot()


def load(paths: list[str], master: str) -> list[dict[str, Part]]:
    """Each into a new run of other values. Snapshots hold the bits as they are kept."""
    found = []
    for path in paths:
        run = NativeRun("fsdp", master, fresh=True)
        dcp.load({"model": get_model_state_dict(run.model)}, checkpoint_id=path)
        load_optimizer_checkpoint(run.model, run.optimizer, path)
        found.append(run.snapshot())
    return found


def stored(path: Path) -> dict[str, Any]:
    """All that a checkpoint holds."""
    checkpoint = open_checked(path)
    return {key: checkpoint.value(key) for key in sorted(checkpoint.entries)}


def assert_same_files(actual: Path, expected: Path) -> None:
    """The same keys and values, and the same places in nested state dicts."""
    one, other = stored(actual), stored(expected)
    assert list(one) == list(other)
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert distributed.same_bits(value, other[key]), key
        else:
            assert value == other[key], key
    places = [dcp.FileSystemReader(path).read_metadata().planner_data for path in (actual, expected)]
    assert places[0] == places[1]


@pytest.mark.parametrize(
    "way, master",
    [
        ("nested", "remainder16"),
        ("flat", "bfloat16"),
        *(
            pytest.param("nested", master, marks=pytest.mark.long)
            for master in ("bfloat16", "remainder8", "float16", "no master", "float32")
        ),
        pytest.param("flat", "remainder16", marks=pytest.mark.long),
    ],
)
def test_between_our_forms(way: str, master: str, tmp_path: Path) -> None:
    """Native and unscaled, there and back, also through safetensors: the files that the optimizer itself writes."""
    expected = join_all(distributed.run(2, save_both, str(tmp_path), way, master))
    there, back, via = tmp_path / "there", tmp_path / "back", tmp_path / "via"
    convert_checkpoint(tmp_path / "native", there, "unscaled")
    assert_same_files(there, tmp_path / "unscaled")
    convert_checkpoint(there, back, "native", master=KINDS[master])
    assert_same_files(back, tmp_path / "native")
    convert_checkpoint(tmp_path / "native", via, "safetensors")
    convert_checkpoint(via, tmp_path / "again", "native", master=KINDS[master])
    verify_checksums(tmp_path / "again")
    paths = [str(tmp_path / name) for name in ("there", "back", "again")]
    for ranks in (1, 3) if master == "remainder16" else (3,):
        for loaded in zip(*distributed.run(ranks, load, paths, master), strict=True):
            assert_same(join_all(loaded), expected)


def trained(**options: Any) -> tuple[nn.Module, FusedAdam]:
    model = build(torch.float32)
    optimizer = FusedAdam(
        groups_of(model),
        **{"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8", **SETTINGS, **options},
        decoupled_weight_decay=True,
    )
    train(model, optimizer, 0, 3)
    return model, optimizer


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)


def adamw(model: nn.Module, path: Path) -> torch.optim.Optimizer:
    """torch.optim.AdamW that has loaded a checkpoint by torch's own means."""
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    return optimizer


def test_to_torch_and_back(tmp_path: Path) -> None:
    """torch.optim.AdamW continues from what is written, as it does from the optimizer's own "torch" form."""
    model, optimizer = trained(checkpoint_format="native")
    save(tmp_path / "native", model, optimizer)
    optimizer.checkpoint_format = "torch"
    save(tmp_path / "own", model, optimizer)
    convert_checkpoint(tmp_path / "native", tmp_path / "torch", "torch")
    assert_same_files(tmp_path / "torch", tmp_path / "own")

    other = build(torch.float32, seed=9)
    loaded = adamw(other, tmp_path / "torch")
    for param, ours in zip(other.parameters(), model.parameters(), strict=True):
        assert float(loaded.state[param]["step"]) == 3.0
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(loaded.state[param][name], optimizer.get_unscaled_state(ours, name))
    assert [group["lr"] for group in loaded.param_groups] == [0.02, 0.02]

    save(tmp_path / "adamw", other, loaded)
    convert_checkpoint(tmp_path / "adamw", tmp_path / "back", "native", exp_avg_dtype="int8", exp_avg_sq_dtype="int8")
    optimizer.checkpoint_format = "native"
    again, fresh = build(torch.float32, seed=5), optimizer.state_dict()
    resumed = FusedAdam(
        groups_of(again),
        exp_avg_dtype="int8",
        exp_avg_sq_dtype="int8",
        checkpoint_format="native",
        decoupled_weight_decay=True,
    )
    report = load_optimizer_checkpoint(again, resumed, tmp_path / "back")
    assert (report.source, report.steps) == ("fused_optim", (3, 3))
    for i, states in resumed.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same(flat(states[name]), flat(fresh["state"][i][name]))


def test_safetensors_load_into_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained(checkpoint_format="native")
    save(tmp_path / "native", model, optimizer)
    convert_checkpoint(tmp_path / "native", tmp_path / "safetensors", "safetensors")
    again = build(torch.float32, seed=5)
    resumed = FusedAdam(groups_of(again), exp_avg_dtype="int8", exp_avg_sq_dtype="int8", decoupled_weight_decay=True)
    report = load_optimizer_checkpoint(again, resumed, tmp_path / "safetensors")
    assert (report.source, report.parameters, report.steps) == ("fused_optim", 6, (3, 3))
    assert [group["lr"] for group in resumed.param_groups] == [0.02, 0.02]
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(resumed.get_unscaled_state(ours, name), optimizer.get_unscaled_state(theirs, name))


def flat(state: Any) -> dict[str, Tensor]:
    """The parts of a state, which is one tensor where it has no scales."""
    parts = state if isinstance(state, dict) else {"": state}
    return {part: torch.as_tensor(value) for part, value in parts.items()}


def test_the_masters_alone(tmp_path: Path) -> None:
    """The same files, by content, as ``save_master_safetensors`` writes of the optimizer."""
    model = build(torch.bfloat16)
    optimizer = FusedAdam(
        groups_of(model), checkpoint_format="native", exp_avg_dtype="int8", decoupled_weight_decay=True
    )
    train(model, optimizer, 0, 2)
    save(tmp_path / "native", model, optimizer)
    save_master_safetensors(model, optimizer, tmp_path / "own")
    convert_checkpoint(tmp_path / "native", tmp_path / "masters", "masters")
    found, expected = (read_sharded(tmp_path / name) for name in ("masters", "own"))
    assert found.keys() == expected.keys()
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))


def read_sharded(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: safetensors.torch.load_file(folder / name) for name in set(index["weight_map"].values())}
    tensors = {key: files[name][key] for key, name in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


def test_files_of_torch_and_what_is_beside(tmp_path: Path) -> None:
    """Other entries go along, as they are; quantized weights, too."""
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 64)).bfloat16()
    quantize_model_(model, MXFP8BlockScaling(), lambda _, name: name == "0")
    optimizer = FusedAdam(model.parameters(), exp_avg_dtype="int8")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    more = {"rng": torch.arange(5), "epoch": 3}
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "more": more}
    torch.save(state, tmp_path / "checkpoint.pt")
    convert_checkpoint(tmp_path / "checkpoint.pt", tmp_path / "native", "native", master="remainder8")
    found = stored(tmp_path / "native")
    assert torch.equal(found["more.rng"], more["rng"]) and found["more.epoch"] == 3
    assert torch.equal(found["model.0.weight"].dequantize(), model[0].weight.dequantize())
    assert {key.rpartition(".")[2] for key in found if "1.weight.master" in key} == {"rem8", "check"}
    assert found["optimizer.state.0.weight.master_param"].dtype == torch.float32, "a quantized weight has no low bits"

    dcp_to_torch_save(tmp_path / "native", tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=False)
    assert (
        again["optimizer"]["param_groups"][0]["step"] == 1
        and "bits" in again["optimizer"]["state"]["1.weight"]["exp_avg"]
    )


def test_the_parameter_is_the_one_that_remainders_complete(tmp_path: Path) -> None:
    """FP32 masters round to nearest even, remainders half up: the parameter beside them is written anew."""
    model = nn.Sequential(nn.Linear(128, 32, bias=False)).bfloat16()
    optimizer = FusedAdam(model.parameters(), lr=0.0, store_param_remainders=False)
    optimizer.initialize_state()
    tie = torch.full((32, 128), 1.0 + 2.0**-8)  # between two BF16 numbers, of which the lower one is even
    optimizer.set_scaled_state(model[0].weight, "master_param", tie)
    optimizer.sync_params_from_master()
    assert float(model[0].weight.detach()[0, 0]) == 1.0
    save(tmp_path / "float32", model, optimizer)
    convert_checkpoint(tmp_path / "float32", tmp_path / "native", "native", master="remainder16")
    other = nn.Sequential(nn.Linear(128, 32, bias=False)).bfloat16()
    resumed = FusedAdam(other.parameters())
    dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / "native")
    load_optimizer_checkpoint(other, resumed, tmp_path / "native")
    assert float(other[0].weight.detach()[0, 0]) == 1.0 + 2.0**-7
    assert torch.equal(resumed.master_state_dict(other)["0.weight"], tie)


# --- what cannot be -----------------------------------------------------------------------------------------------


def refuse(match: str, *args: Any, **options: Any) -> None:
    with pytest.raises((ValueError, OSError), match=match):
        convert_checkpoint(*args, **options)


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path / "source", model, optimizer)
    source, target = tmp_path / "source", tmp_path / "target"
    refuse("source is there already", source, source, "native")
    refuse("layout: expected one of unscaled, native", source, target, "apex")
    refuse("exp_avg_dtype: expected one of float32, .*, got 'int7'", source, target, "native", exp_avg_dtype="int7")
    refuse("master: expected one of float32, float16", source, target, "native", master="24")
    refuse("formats are chosen for the native form only", source, target, "unscaled", exp_avg_dtype="int8")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "model")
    refuse("holds no states of an optimizer", tmp_path / "model", target, "native")
    states = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    del states["state"]["first.odd"]["exp_avg_sq"]
    torch.save(states, tmp_path / "lacking.pt")
    refuse("first.odd: .* lacks its exp_avg_sq", tmp_path / "lacking.pt", target, "native")
    states = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    for group in states["param_groups"]:
        group.pop("step")
    torch.save(states, tmp_path / "stepless.pt")
    refuse("has its states but no step", tmp_path / "stepless.pt", target, "torch")
    _, uncorrected = trained(bias_correction=False)
    torch.save(uncorrected.state_dict(), tmp_path / "uncorrected.pt")
    refuse("torch.optim.AdamW always corrects", tmp_path / "uncorrected.pt", target, "torch")
    assert not [path for path in tmp_path.iterdir() if "target" in path.name], "nothing is left behind"


def test_remainders_need_their_parameters(tmp_path: Path) -> None:
    model = build(torch.bfloat16)
    optimizer = FusedAdam(
        groups_of(model), checkpoint_format="native", exp_avg_dtype="int8", decoupled_weight_decay=True
    )
    train(model, optimizer, 0, 1)
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "states")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "model")
    refuse("give the checkpoint of the model", tmp_path / "states", tmp_path / "target", "unscaled")
    assert not (tmp_path / "target").exists()
    command = ["convert", tmp_path / "states", tmp_path / "target", "--to", "unscaled", "--model", tmp_path / "model"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fused_optim", *map(str, command)])
        main()
    master = stored(tmp_path / "target")["optim.state.first.weight.master_param"]
    assert torch.equal(master, optimizer.master_state_dict(model)["first.weight"])


# Not all rules x dtypes x options: each two of them.
@pytest.mark.parametrize(
    "rule, dtype, options, form",
    pairwise(
        [FusedAdamW, FusedLion, FusedMuon],
        [torch.bfloat16, torch.float32, torch.float16],
        [{}, {"master_bits": 24}, {"store_param_remainders": False}, {"state_dtype": "bf16"}, {"state_dtype": "int8"}],
        ["unscaled", "native"],
    ),
    ids=str,
)
def test_the_native_form_loads_whatever_is_packed(
    rule: Any, dtype: torch.dtype, options: dict[str, Any], form: Any, tmp_path: Path
) -> None:
    """States without scales and whole masters are the same in both forms."""

    def build_run(seed: int) -> tuple[nn.Linear, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(64, 64, bias=False).to(dtype)
        return model, rule(model.parameters(), **options)

    model, optimizer = build_run(0)
    model.weight.grad = torch.randn(64, 64).to(dtype)
    optimizer.step()
    with Checkpointer(model, optimizer, tmp_path / "saved", format=form, sigterm=False) as checkpointer:
        checkpointer.save(1)
    convert_checkpoint(tmp_path / "saved" / "step-00000001", tmp_path / "native" / "step-00000001", "native")
    loaded, into = build_run(1)
    assert Checkpointer(loaded, into, tmp_path / "native", readonly=True, sigterm=False).load_latest() == 1
    assert torch.equal(into.master_state_dict(loaded)["weight"], optimizer.master_state_dict(model)["weight"])
    for spec in optimizer.rule.for_group(optimizer.param_groups[0]).states:
        states = (each.get_unscaled_state(each.store.params[0], spec.name) for each in (into, optimizer))
        assert torch.equal(*states), spec.name


@pytest.mark.parametrize("has_group_step", [True, False])
def test_the_groups_step_counts_and_a_parameters_own_where_there_is_none(has_group_step: bool, tmp_path: Path) -> None:
    """For loads and conversions alike; both numbers come from files that others have edited or merged."""
    _, optimizer = trained()
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["step"] = 5
        if not has_group_step:
            group.pop("step")
    for states in state["state"].values():
        states["step"] = torch.tensor(7.0)
    torch.save(state, tmp_path / "both.pt")
    expected = 5 if has_group_step else 7
    fresh = FusedAdam(groups_of(again := build(torch.float32, seed=5)), decoupled_weight_decay=True)
    assert load_optimizer_checkpoint(again, fresh, tmp_path / "both.pt").steps == (expected, expected)
    convert_checkpoint(tmp_path / "both.pt", tmp_path / "converted", "unscaled")
    report = load_optimizer_checkpoint(
        again, FusedAdam(groups_of(again), decoupled_weight_decay=True), tmp_path / "converted"
    )
    assert report.steps == (expected, expected)
    loaded = FusedAdam(groups_of(again), decoupled_weight_decay=True)
    loaded.load_state_dict(state)
    assert [group["step"] for group in loaded.param_groups] == [expected, expected]
