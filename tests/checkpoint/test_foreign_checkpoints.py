"""Optimizer checkpoints on disk: torch.optim's, TransformerEngine's, Apex's and ours, loaded all or not at all.

Every load goes into a freshly built model and optimizer with other values and hyperparameters.
"""

from __future__ import annotations

import pickle
import re
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
from cases import values
from distributed import Part, assert_same, join_all, one_thread, part, shard_like, two_gpus
from foreign_cases import SETTINGS, Model, build, groups_of, train
from fused_optim import FusedAdam, export_optimizer_checkpoint, load_optimizer_checkpoint
from fused_optim.adam import MOMENTS
from fused_optim.formats.masters import Master, split_remainder
from fused_optim.memory.layout import MASTER
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.tools.comparison import compare_checkpoints
from fused_optim.tools.conversion import convert_checkpoint
from fused_optim.tools.inspector import inspect_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.save in one process
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
STEPS = 3


def fresh(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Model, FusedAdam]:
    model = build(dtype, seed=7)
    return model, FusedAdam(
        groups_of(model), lr=0.5, weight_decay=0.7, betas=(0.5, 0.5), seed=3, **options, decoupled_weight_decay=True
    )


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for a, b in zip(target.parameters(), source.parameters(), strict=True):
            local_tensor(a).copy_(local_tensor(b))


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
    """This rank's parts of parameters, moments and masters, and the group settings."""
    found = {}
    state = optimizer.state_dict()["state"]
    for i, (name, param) in enumerate(model.named_parameters()):
        found[name] = part(param)
        for key in (*MOMENTS, MASTER):
            if key in state.get(i, {}):
                found[f"{name}: {key}"] = part(state[i][key])
    for i, group in enumerate(optimizer.param_groups):
        settings = [float(group[key]) for key in ("lr", "eps", "weight_decay")] + list(group["betas"])
        found[f"group {i}"] = part(torch.tensor([*settings, float(group.get("step", -1))], dtype=torch.float64))
    return found


def without_steps(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:-1] if name.startswith("group") else value for name, value in found.items()}


# --- ways to write ----------------------------------------------------------------------------------------------


def save_nested(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}, checkpoint_id=path)


def save_flat(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    dcp.save(get_optimizer_state_dict(model, optimizer, options=FLAT), checkpoint_id=path)


def save_positions(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=path)


def save_full(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        torch.save({"epoch": 1, "optimizer": state}, path)
    dist.barrier()


def save_full_positions(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    state = optimizer.state_dict()
    full = {i: {k: v.full_tensor() if v.dim() else v for k, v in s.items()} for i, s in state["state"].items()}
    if dist.get_rank() == 0:
        torch.save({**state, "state": full}, path)
    dist.barrier()


WAYS: dict[str, Callable[..., None]] = {
    "nested": save_nested,
    "flat": save_flat,
    "positions": save_positions,
    "full": save_full,
    "full positions": save_full_positions,
}


# --- torch.optim ------------------------------------------------------------------------------------------------


def save_adamw(folder: str) -> dict[str, Part]:
    model = build()
    optimizer = torch.optim.AdamW(groups_of(model), **SETTINGS)
    train(model, optimizer, 0, STEPS)
    for way, save in WAYS.items():
        save(model, optimizer, f"{folder}/{way}")
    return snapshot(model, optimizer)


def load_adamw(folder: str) -> dict[str, dict[str, Part]]:
    found = {}
    for way in WAYS:
        model, optimizer = fresh()
        report = load_optimizer_checkpoint(model, optimizer, f"{folder}/{way}")
        assert str(report) == f"torch.optim.AdamW checkpoint, 6 parameters, step {STEPS}, no masters needed", way
        assert [group["step"] for group in optimizer.param_groups] == [STEPS, STEPS]
        found[way] = snapshot(model, optimizer)
    return found


def test_adamw_checkpoints_load_on_other_ranks_bit_for_bit(tmp_path: Path) -> None:
    saved = without_steps(join_all(distributed.run(2, save_adamw, str(tmp_path))))
    for ranks in (1, 3, 4):
        results = distributed.run(ranks, load_adamw, str(tmp_path))
        for way in WAYS:
            loaded = without_steps(join_all([result[way] for result in results]))
            states = {name: value for name, value in loaded.items() if "exp_avg" in name or "group" in name}
            assert_same(states, {name: saved[name] for name in states})
            assert len(states) == 14, way


def test_adamw_checkpoint_of_bfloat16_parameters_seeds_masters(tmp_path: Path, device: str) -> None:
    source = build(torch.bfloat16).to(device)
    theirs = torch.optim.AdamW(groups_of(source), **SETTINGS)
    train(source, theirs, 0, STEPS)
    torch.save(theirs.state_dict(), tmp_path / "optimizer.pt")
    model = build(torch.bfloat16, seed=7).to(device)
    optimizer = FusedAdam(groups_of(model), exp_avg_dtype=torch.bfloat16, decoupled_weight_decay=True)
    copy_parameters(source, model)
    report = load_optimizer_checkpoint(model, optimizer, tmp_path / "optimizer.pt")
    assert str(report) == "torch.optim.AdamW checkpoint, 6 parameters, step 3, masters seeded from parameters"
    masters = optimizer.master_state_dict(model)
    for (name, param), origin in zip(model.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(param, origin) and torch.equal(masters[name], origin.float())
        for moment in MOMENTS:
            assert torch.equal(optimizer.get_unscaled_state(param, moment), theirs.state[origin][moment].float())
        assert optimizer.state[param]["exp_avg"].dtype == torch.bfloat16


def test_steps_that_differ_within_a_group_continue_from_the_largest(tmp_path: Path) -> None:
    source = build()
    theirs = torch.optim.AdamW(groups_of(source), **SETTINGS)
    train(source, theirs, 0, STEPS)
    theirs.state[source.first.bias]["step"] -= 1
    theirs.state[source.second.bias]["step"] -= 1
    del theirs.state[source.second.odd]  # never had a gradient
    torch.save(theirs.state_dict(), tmp_path / "optimizer.pt")
    model, optimizer = fresh()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load_optimizer_checkpoint(model, optimizer, tmp_path / "optimizer.pt")
    assert len(caught) == 1 and "2 of 5 parameters" in str(caught[0].message)  # that have steps
    assert [group["step"] for group in optimizer.param_groups] == [STEPS, STEPS]
    assert (report.parameters, report.without_states) == (5, 1)
    train(model, optimizer, STEPS, STEPS + 1)


def test_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    source = build()
    torch.save(torch.optim.AdamW(groups_of(source), **SETTINGS).state_dict(), tmp_path / "optimizer.pt")
    model, optimizer = fresh()
    train(model, optimizer, 0, STEPS)
    report = load_optimizer_checkpoint(model, optimizer, tmp_path / "optimizer.pt")
    assert (report.parameters, report.without_states, report.steps) == (0, 6, (0, 0))
    assert [group["lr"] for group in optimizer.param_groups] == [SETTINGS["lr"]] * 2
    assert not any(optimizer.state.values())


def test_learning_rates_kept_as_tensors_are_loaded(tmp_path: Path) -> None:
    source = build()
    theirs = torch.optim.AdamW(groups_of(source), **{**SETTINGS, "lr": torch.tensor(0.25)})
    train(source, theirs, 0, STEPS)
    dcp.save(get_optimizer_state_dict(source, theirs), checkpoint_id=tmp_path, no_dist=True)
    model, optimizer = fresh()
    load_optimizer_checkpoint(model, optimizer, tmp_path)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]
    train(model, optimizer, STEPS, STEPS + 1)


def test_tied_parameters_are_found_by_any_of_their_names(tmp_path: Path) -> None:
    source, model = build(), build(seed=7)
    for tied in (source, model):
        tied.last = tied.first.odd
    theirs = torch.optim.AdamW(source.parameters(), **SETTINGS)
    train(source, theirs, 0, STEPS)
    state_dict = get_optimizer_state_dict(source, theirs)
    state_dict["state"]["first.odd"] = state_dict["state"].pop("last")
    names = state_dict["param_groups"][0]["params"]
    names[names.index("last")] = "first.odd"
    torch.save(state_dict, tmp_path / "optimizer.pt")
    optimizer = FusedAdam(model.parameters())
    load_optimizer_checkpoint(model, optimizer, tmp_path / "optimizer.pt")
    saved = theirs.state[source.first.odd]["exp_avg"]
    assert torch.equal(optimizer.state[model.first.odd]["exp_avg"], saved)


# --- TransformerEngine and Apex ---------------------------------------------------------------------------------


def fused_adam_states(masters: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """A state dict as TransformerEngine and Apex write it, the parameters it belongs to and their masters."""
    model = Model(torch.float32, seed=0)
    state, params, full = {}, {}, {}
    for i, (name, param) in enumerate(model.named_parameters()):
        shape = tuple(param.shape)
        full[name] = param.detach().clone()
        params[name], low = split_remainder(full[name], Master.REMAINDER16)
        state[name] = {"exp_avg": values(shape, torch.float32, "cpu", seed=i + 900)}
        state[name]["exp_avg_sq"] = values(shape, torch.float32, "cpu", seed=i + 950).square()
        if masters != "none":
            state[name]["master_param"] = low if masters == "remainders" else full[name]
    names = list(params)
    settings = {**SETTINGS, "bias_correction": True, "step": 11}
    groups = [{**settings, "params": names[:3]}, {**settings, "weight_decay": 0.03, "params": names[3:]}]
    return {"state": state, "param_groups": groups}, params, full


def with_positions(state_dict: dict[str, Any]) -> dict[str, Any]:
    ids = {name: i for i, name in enumerate(state_dict["state"])}
    groups = [{**group, "params": [ids[name] for name in group["params"]]} for group in state_dict["param_groups"]]
    return {"state": {ids[name]: states for name, states in state_dict["state"].items()}, "param_groups": groups}


MASTERS = {"float32": "masters loaded", "remainders": "masters loaded", "none": "masters seeded from parameters"}


def load_fused_adam(masters: str, path: str) -> dict[str, Part]:
    model, optimizer = fresh(torch.bfloat16)
    for name, param in model.named_parameters():
        local_tensor(param.detach()).copy_(local_tensor(shard_like(fused_adam_states(masters)[1][name], param)))
    report = load_optimizer_checkpoint(model, optimizer, path)
    expected = f"TransformerEngine or Apex FusedAdam checkpoint, 6 parameters, step 11, {MASTERS[masters]}"
    assert str(report) == expected
    return snapshot(model, optimizer)


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("how", ["folder", "names.pt", "positions.pt"])
def test_fused_adam_checkpoints_load_bit_for_bit(masters: str, how: str, tmp_path: Path) -> None:
    saved, params, full = fused_adam_states(masters)
    path = str(tmp_path / how)
    if how == "folder":
        dcp.save({"optimizer": saved}, checkpoint_id=path, no_dist=True)
    else:
        torch.save(saved if how == "names.pt" else with_positions(saved), path)
    loaded = join_all(distributed.run(3, load_fused_adam, masters, path))
    for name, param in params.items():
        expected = param if masters == "none" else full[name]
        assert torch.equal(loaded[f"{name}: master_param"], expected.float())
        assert torch.equal(loaded[name], expected.to(torch.bfloat16))
        for moment in MOMENTS:
            assert torch.equal(loaded[f"{name}: {moment}"], saved["state"][name][moment])


# --- ours -------------------------------------------------------------------------------------------------------


OURS = {"exp_avg_sq_dtype": torch.int8}


def save_ours(form: str, path: str) -> dict[str, Part]:
    model = build(torch.bfloat16)
    optimizer = FusedAdam(groups_of(model), checkpoint_format=form, **OURS, **SETTINGS, decoupled_weight_decay=True)
    train(model, optimizer, 0, STEPS)
    save_nested(model, optimizer, path)
    optimizer.checkpoint_format = "unscaled"
    found = snapshot(model, optimizer)
    train(model, optimizer, STEPS, STEPS + 2)
    return found | {f"end {name}": value for name, value in snapshot(model, optimizer).items()}


def load_ours(path: str) -> dict[str, Part]:
    model, optimizer = fresh(torch.bfloat16, **OURS)
    optimizer.seed = 0
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    report = load_optimizer_checkpoint(model, optimizer, path)
    assert str(report) == f"fused_optim checkpoint, 6 parameters, step {STEPS}, masters loaded"
    found = snapshot(model, optimizer)
    train(model, optimizer, STEPS, STEPS + 2)
    return found | {f"end {name}": value for name, value in snapshot(model, optimizer).items()}


@pytest.mark.parametrize("form", ["unscaled", "native"])
def test_our_checkpoints_resume_bit_for_bit(form: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = join_all(distributed.run(2, save_ours, form, path))
    for ranks in (1, 3):
        assert_same(join_all(distributed.run(ranks, load_ours, path)), saved)


@two_gpus
@pytest.mark.parametrize("form", ["unscaled", "native"])
def test_our_checkpoints_resume_on_gpus(form: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = join_all(distributed.run(2, save_ours, form, path, on="cuda"))
    assert_same(join_all(distributed.run(1, load_ours, path, on="cuda")), saved)


# --- exports ----------------------------------------------------------------------------------------------------


def assert_next_step_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """To a few FP32 roundings, of the summands where they cancel out."""
    for name, value in theirs.items():
        if not name.startswith("group"):
            rounding = 2**-22 * float(value.abs().max())
            torch.testing.assert_close(ours[name], value, rtol=2**-22, atol=rounding, msg=name)
    assert_same(*({name: value[:-1] for name, value in found.items() if "group" in name} for found in (ours, theirs)))


def test_plain_adamw_continues_from_an_export(tmp_path: Path, device: str) -> None:
    model = build().to(device)
    ours = FusedAdam(groups_of(model), **SETTINGS, decoupled_weight_decay=True)
    train(model, ours, 0, STEPS)
    export_optimizer_checkpoint(model, ours, tmp_path / "optimizer.pt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["optimizer.pt"]
    other = build(seed=7).to(device)
    theirs = torch.optim.AdamW(groups_of(other), lr=0.5)
    copy_parameters(model, other)
    theirs.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert set(theirs.param_groups[0]) == set(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0])
    assert all(float(state["step"]) == STEPS for state in theirs.state.values())
    train(model, ours, STEPS, STEPS + 1)
    train(other, theirs, STEPS, STEPS + 1)
    assert_next_step_close(*(join_all([snapshot(*pair)]) for pair in ((model, ours), (other, theirs))))


def export(folder: str) -> dict[str, Part]:
    model = build()
    optimizer = FusedAdam(groups_of(model), **SETTINGS, decoupled_weight_decay=True)
    train(model, optimizer, 0, STEPS)
    export_optimizer_checkpoint(model, optimizer, f"{folder}/optimizer")
    export_optimizer_checkpoint(model, optimizer, f"{folder}/optimizer.pth")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/model")
    train(model, optimizer, STEPS, STEPS + 1)
    return snapshot(model, optimizer)


def continue_with_adamw(folder: str, how: str) -> dict[str, Part]:
    model = build(seed=7)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
    dcp.load(model.state_dict(), checkpoint_id=f"{folder}/model")
    options = {"nested": None, "flat": FLAT, "file": FULL}[how]
    if how == "file":
        state = torch.load(f"{folder}/optimizer.pth", weights_only=True)
    else:
        state = get_optimizer_state_dict(model, optimizer, options=options)
        wrapped = {"optimizer": state}
        dcp.load(wrapped, checkpoint_id=f"{folder}/optimizer")
        state = wrapped["optimizer"]
    set_optimizer_state_dict(model, optimizer, state, options=options)
    train(model, optimizer, STEPS, STEPS + 1)
    return snapshot(model, optimizer)


@two_gpus
def test_sharded_adamw_continues_from_an_export_on_gpus(tmp_path: Path) -> None:
    ours = join_all(distributed.run(2, export, str(tmp_path), on="cuda"))
    for how in ("nested", "file"):
        assert_next_step_close(ours, join_all(distributed.run(1, continue_with_adamw, str(tmp_path), how, on="cuda")))


def test_sharded_adamw_continues_from_an_export(tmp_path: Path) -> None:
    ours = join_all(distributed.run(2, export, str(tmp_path)))
    for ranks, how in [(3, "nested"), (1, "flat"), (3, "file")]:
        assert_next_step_close(ours, join_all(distributed.run(ranks, continue_with_adamw, str(tmp_path), how)))


def test_exports_hold_the_values_of_any_format(tmp_path: Path, device: str) -> None:
    model = build(torch.bfloat16).to(device)
    optimizer = FusedAdam(
        groups_of(model),
        exp_avg_dtype=torch.int8,
        exp_avg_sq_dtype=torch.float8_e4m3fn,
        **SETTINGS,
        decoupled_weight_decay=True,
    )
    train(model, optimizer, 0, STEPS)
    export_optimizer_checkpoint(model, optimizer, tmp_path / "optimizer.pt")
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)["state"]
    for name, param in model.named_parameters():
        assert sorted(state[name]) == ["exp_avg", "exp_avg_sq", "step"]
        for moment in MOMENTS:
            assert torch.equal(state[name][moment], optimizer.get_unscaled_state(param, moment).cpu())


def test_exports_that_torch_cannot_continue_are_refused(tmp_path: Path) -> None:
    model, optimizer = fresh(bias_correction=False)
    with pytest.raises(ValueError, match="bias_correction"):
        export_optimizer_checkpoint(model, optimizer, tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match="layout"):
        export_optimizer_checkpoint(model, optimizer, tmp_path / "optimizer.pt", layout="other")
    assert not list(tmp_path.iterdir())


# --- faults -----------------------------------------------------------------------------------------------------


def refuse(path: str, dtype: torch.dtype = torch.float32) -> str:
    """The error of loading into a trained optimizer, of which nothing changes."""
    model, optimizer = fresh(dtype)
    train(model, optimizer, 0, 1)
    before = {name: values for name, (_, _, values) in snapshot(model, optimizer).items()}
    with pytest.raises(Exception) as error:
        load_optimizer_checkpoint(model, optimizer, path)
    assert_same({name: values for name, (_, _, values) in snapshot(model, optimizer).items()}, before)
    return str(error.value)


def check_refused(path: Path, message: str, dtype: torch.dtype = torch.float32) -> None:
    errors = distributed.run(2, refuse, str(path), dtype, timeout=30)
    assert all(re.search(message, error) for error in errors), errors


def save_valid_folder(path: str) -> None:
    model = build()
    optimizer = torch.optim.AdamW(groups_of(model), **SETTINGS)
    train(model, optimizer, 0, 1)
    save_nested(model, optimizer, path)


@pytest.mark.parametrize(
    "fault, message",
    [
        ("damaged", r"(exp_avg|step|param_groups).* cannot be read; its file is damaged"),
        ("incomplete", r"exp_avg.*: a part at .* is stored, but not described"),
        ("nothing", "found nothing"),
    ],
)
def test_damaged_folders_are_refused_on_every_rank(fault: str, message: str, tmp_path: Path) -> None:
    """Other damages: test_faults.py."""
    path = tmp_path / "checkpoint"
    distributed.run(2, save_valid_folder, str(path))
    shard, metadata = path / "__1_0.distcp", path / ".metadata"
    if fault == "damaged":
        shard.write_bytes(b"?" * shard.stat().st_size)
    elif fault == "incomplete":
        content = pickle.loads(metadata.read_bytes())
        content.state_dict_metadata["optim.state.first.weight.exp_avg"].chunks.pop()
        metadata.write_bytes(pickle.dumps(content))
    check_refused(path.with_name("other") if fault == "nothing" else path, message)


def spoil(state_dict: dict[str, Any], fault: str) -> None:
    state, groups = state_dict["state"], state_dict["param_groups"]
    if fault == "shape":
        state["second.odd"]["exp_avg"] = torch.zeros(7, 5)
    elif fault == "dtype":
        state["second.odd"]["exp_avg_sq"] = torch.zeros(5, 7, dtype=torch.int32)
    elif fault == "moment":
        del state["second.odd"]["exp_avg_sq"]
    elif fault == "step":
        del groups[1]["step"]
    elif fault == "unexpected":
        state["third.odd"] = state["second.odd"]
    elif fault == "unlisted":
        groups[1]["params"].remove("second.odd")
        del state["second.odd"]
    elif fault == "lr":
        del groups[1]["lr"]
    elif fault == "betas":
        groups[1]["betas"] = (0.9, 1.5)
    elif fault == "amsgrad":
        state["second.odd"]["max_exp_avg_sq"] = torch.zeros(5, 7)
    elif fault == "states":
        for states in state.values():
            states["momentum_buffer"] = states.pop("exp_avg")
            del states["exp_avg_sq"]
        groups.clear()
    elif fault == "split":
        groups[1]["params"] = groups[1]["params"][1:]
        groups[0]["params"] = [*groups[0]["params"], "second.weight"]


@pytest.mark.parametrize("how", ["folder", "file"])
@pytest.mark.parametrize(
    "fault, message",
    [
        ("shape", r"'second.odd'.*: exp_avg: expected shape \(5, 7\), .* has \(7, 5\)"),
        ("dtype", r"'second.odd'.*: exp_avg_sq: expected .*, got torch.int32"),
        ("moment", r"'second.odd'.* lacks exp_avg_sq"),
        ("step", r"'second.weight'.* no step"),
        ("unexpected", r"the model lacks 1 of its parameters: third.odd"),
        ("unlisted", r"lacks the states of 1 of 6 parameters: .*'second.odd'"),
        ("lr", r"param group 1: .* lacks its lr"),
        ("betas", r"param group 1 .*betas\[1\]"),
        ("amsgrad", r"'second.odd'.*amsgrad"),
        ("states", "was saved with momentum_buffer: another optimizer's"),
        ("split", "different values of weight_decay for .*'second.weight'.*'second.odd'"),
    ],
)
def test_wrong_checkpoints_are_refused_on_every_rank(fault: str, message: str, how: str, tmp_path: Path) -> None:
    saved, _, _ = fused_adam_states("none")
    spoil(saved, fault)
    path = tmp_path / how
    if how == "folder":
        dcp.save({"optimizer": saved}, checkpoint_id=path, no_dist=True)
    else:
        torch.save(saved, path)
    check_refused(path, message)


def test_remainders_need_bfloat16_parameters(tmp_path: Path) -> None:
    torch.save(fused_adam_states("remainders")[0], tmp_path / "optimizer.pt")
    check_refused(tmp_path / "optimizer.pt", "int16 remainders belong to a torch.bfloat16 parameter")


def test_truncated_files_are_refused_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    torch.save(fused_adam_states("none")[0], path)
    path.write_bytes(path.read_bytes()[:-2000])
    check_refused(path, "cannot be read by torch.load")


def refuse_one_rank(path: str) -> str:
    """Rank 1 finds another file than rank 0."""
    return refuse(f"{path}.{dist.get_rank()}")


def test_a_failure_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    torch.save(fused_adam_states("none")[0], tmp_path / "optimizer.0")
    errors = distributed.run(2, refuse_one_rank, str(tmp_path / "optimizer"), timeout=30)
    assert "rank 1 failed: FileNotFoundError" in errors[0] and "found nothing" in errors[1]


def test_several_optimizers_in_one_checkpoint_are_refused(tmp_path: Path) -> None:
    saved, _, _ = fused_adam_states("none")
    torch.save({"optimizer": saved, "teacher": saved}, tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match=r"several optimizers .* 'optimizer\.' and 'teacher\.'"):
        load_optimizer_checkpoint(*fresh(), tmp_path / "optimizer.pt")


def test_positions_must_fit_the_groups(tmp_path: Path) -> None:
    state_dict = with_positions(fused_adam_states("none")[0])
    moved = state_dict["param_groups"][1]["params"].pop(0)
    state_dict["param_groups"][0]["params"].append(moved)
    torch.save(state_dict, tmp_path / "optimizer.pt")
    model, optimizer = fresh()
    with one_thread(), pytest.raises(ValueError, match=r"expected param groups of \[3, 3\] parameters, found \[4, 2\]"):
        load_optimizer_checkpoint(model, optimizer, tmp_path / "optimizer.pt")


def numbered_names(kind: type, seed: int, inner: str = "") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Parameters of one shape, whose names are numbers and no positions: param groups have the last one first."""
    torch.manual_seed(seed)
    parts = nn.ParameterList(torch.randn(2, 128) for _ in range(3))
    groups = [{"params": [parts[2]], "lr": 0.1}, {"params": [parts[0], parts[1]], "lr": 0.2}]
    return nn.ModuleDict({inner: parts}) if inner else parts, kind(groups)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdam])
@one_thread()
def test_names_that_are_numbers_are_no_positions(kind: type, way: str, tmp_path: Path) -> None:
    """Each parameter gets its own moments; positions are no names either, and are not renamed."""
    source, saved = numbered_names(kind, 0)
    for i, param in enumerate(source.parameters()):
        param.grad = torch.full_like(param, 1.0 + i)
    saved.step()
    path = tmp_path / "checkpoint"
    state_dict = get_optimizer_state_dict(source, saved) if way == "full" else saved.state_dict()
    if "full" in way:
        torch.save({"optimizer": state_dict}, path)
    else:
        WAYS[way](source, saved, str(path))
    by_name = "positions" not in way
    for inner, rename in (("", None), ("layers", {"": "layers"} if by_name else {"0": "layers.2"})):
        model, optimizer = numbered_names(FusedAdam, 1, inner)
        load_optimizer_checkpoint(model, optimizer, path, rename=rename)  # type: ignore[arg-type]
        for i, param in enumerate(model.parameters()):
            assert torch.equal(optimizer.state[param]["exp_avg"], torch.full_like(param, 0.1 * (1.0 + i)))
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    target = tmp_path / "converted"
    convert_checkpoint(path, target, "unscaled")
    model, optimizer = numbered_names(FusedAdam, 2)
    load_optimizer_checkpoint(model, optimizer, target)
    for i, param in enumerate(model.parameters()):
        assert torch.equal(optimizer.state[param]["exp_avg"], torch.full_like(param, 0.1 * (1.0 + i)))


def test_positions_are_not_taken_for_a_parameters_name(tmp_path: Path) -> None:
    """Of a checkpoint with numbers for its states, which weight is whose is not known."""
    model, optimizer = numbered_names(FusedAdam, 0)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "numbered.pt")
    named = get_optimizer_state_dict(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": named}, tmp_path / "named.pt")
    parameters = inspect_checkpoint(tmp_path / "numbered.pt")["parameters"]
    assert not any("parameter" in found for found in parameters.values())
    assert all("parameter" in found for found in inspect_checkpoint(tmp_path / "named.pt")["parameters"].values())
    found = compare_checkpoints(tmp_path / "numbered.pt", tmp_path / "named.pt")
    assert found["tensors"] == found["equal"] == 0
