"""States and steps that others write into ``optimizer.state``, as torch.optim.AdamW's checkpoints have them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import distributed
from cases import MASTER, values
from distributed import same_bits
from fused_optim.state import torch_form
from fused_optim.tools.conversion import convert_checkpoint
from peers import FusedAdam, FusedAdamW, FusedMuon

STEPS = 3
FORMS = ("unscaled", "native", "torch")


def build(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 6), nn.Linear(6, 128)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for i, param in enumerate(model.parameters()):
            param.grad = values(tuple(param.shape), param.dtype, "cpu", seed=100 * step + i)
        optimizer.step()


# --- a step in the states ---------------------------------------------------------------------------------------------


def assigned(states: dict[str, Any], step: int) -> None:
    states["step"] = torch.tensor(float(step))


def updated(states: dict[str, Any], step: int) -> None:
    states.update(step=step)


def exchanged(states: dict[str, Any], step: int) -> None:
    kept = dict(states)
    states.clear()
    states.update({"step": torch.tensor([step]), **kept})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("write", [assigned, updated, exchanged])
@pytest.mark.parametrize("step", [0, 1, 1000])
def test_a_step_in_the_states_is_the_groups(step: int, write: Callable[..., None], form: str) -> None:
    """As in torch.optim.AdamW, whose next updates these are. Saves have it; the states do not keep it."""
    models = build(), build()
    groups = [[{"params": m[0].parameters(), "lr": 0.1}, {"params": m[1].parameters(), "lr": 0.2}] for m in models]
    ours, theirs = FusedAdamW(groups[0], checkpoint_format=form), torch.optim.AdamW(groups[1])  # type: ignore[arg-type]
    for model, optimizer in zip(models, (ours, theirs), strict=True):
        train(model, optimizer, 0, STEPS)
        for param in model[0].parameters():
            (write if optimizer is ours else assigned)(optimizer.state[param], step)
    saved = copy.deepcopy(ours).state_dict()
    train(models[0], ours, STEPS, STEPS + 2)
    train(models[1], theirs, STEPS, STEPS + 2)
    torch.testing.assert_close([*models[0].parameters()], [*models[1].parameters()], rtol=1e-6, atol=1e-7)
    assert [group["step"] for group in ours.param_groups] == [step + 2, STEPS + 2]
    assert not any("step" in states for states in ours.state.values())
    shown = [
        int(saved["state"][i]["step"]) if form == "torch" else saved["param_groups"][i // 2]["step"] for i in (0, 2)
    ]
    assert shown == [step, STEPS]


def test_steps_of_some_parameters_are_said_or_refused() -> None:
    model = build()
    optimizer = FusedAdamW(model.parameters())
    train(model, optimizer, 0, STEPS)
    optimizer.state[model[0].weight]["step"] = torch.tensor(1.0)
    with pytest.warns(UserWarning, match="param group 0, at step 3: 1 of 4 parameters were saved at an earlier step"):
        train(model, optimizer, STEPS, STEPS + 1)
    optimizer.state[model[0].weight]["step"] = torch.tensor(0.5)
    with pytest.raises(ValueError, match=r"param group 0: step: expected a whole number >= 0, got 0\.5"):
        optimizer.step()


# --- a program that names torch's class -------------------------------------------------------------------------------


def test_our_classes_in_place_of_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_form._adamw_settings.cache_clear()
    torch_form.muon_keys.cache_clear()
    model, matrix = build(), nn.Parameter(torch.ones(4, 128))
    theirs, muons = torch.optim.AdamW(model.parameters()), set(torch.optim.Muon([matrix]).param_groups[0])
    monkeypatch.setattr(torch.optim, "AdamW", FusedAdamW)
    monkeypatch.setattr(torch.optim, "Muon", FusedMuon)
    optimizer = torch.optim.AdamW(model.parameters(), checkpoint_format="torch")  # type: ignore[call-arg]
    train(model, optimizer, 0, STEPS)
    saved = optimizer.state_dict()
    assert [float(states["step"]) for states in saved["state"].values()] == [STEPS] * 4
    assert saved["param_groups"][0].keys() == theirs.state_dict()["param_groups"][0].keys()
    theirs.load_state_dict(saved)
    muon = torch.optim.Muon([matrix])
    matrix.grad = torch.ones_like(matrix)
    muon.step()
    torch.save(muon.state_dict(), tmp_path / "muon.pt")
    convert_checkpoint(tmp_path / "muon.pt", tmp_path / "torch", "torch")
    assert torch_form.muon_keys() == muons - {"params"}


# --- ZeroRedundancyOptimizer ------------------------------------------------------------------------------------------

Run = tuple[nn.Module, ZeroRedundancyOptimizer]


def zero(kind: type, master: str, seed: int, **options: Any) -> Run:
    model = build(MASTER[master].param_dtype, seed)
    given = options if kind is torch.optim.AdamW else {**MASTER[master].options, **options}
    return model, ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1 if seed == 0 else 0.7, **given)


def consolidated(run: Run) -> dict[str, Any]:
    """As all ranks load it."""
    file = io.BytesIO()
    run[1].consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save({"model": run[0].state_dict(), "optimizer": run[1].state_dict()}, file)
    whole = [file.getvalue()]
    dist.broadcast_object_list(whole, src=0)
    found: dict[str, Any] = torch.load(io.BytesIO(whole[0]), weights_only=True)
    return found


def load(run: Run, saved: dict[str, Any]) -> None:
    saved = copy.deepcopy(saved)
    run[0].load_state_dict(saved["model"])
    run[1].load_state_dict(saved["optimizer"])


def everything(run: Run) -> dict[str, Tensor]:
    """The parameters, and the states of those that are this rank's, in FP32."""
    local: Any = run[1].optim
    found = {name: param.detach().clone() for name, param in run[0].named_parameters()}
    if isinstance(local, FusedAdam):
        local.checkpoint_format = "unscaled"
    for i, states in local.state_dict()["state"].items():
        found |= {f"{i}: {name}": states[name].float().clone() for name in states if name != "step"}
    return found


def resumed(master: str, form: str, options: dict[str, Any]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """In a fresh run and in one that has states already, beside the one that went on."""
    source = zero(FusedAdamW, master, 0, checkpoint_format=form, **options)
    train(*source, 0, STEPS)
    saved = consolidated(source)
    runs = [zero(FusedAdamW, master, 1, checkpoint_format=form, **options) for _ in range(2)]
    train(*runs[1], 0, 1)
    for run in runs:
        load(run, saved)
        train(*run, STEPS, STEPS + 2)
    train(*source, STEPS, STEPS + 2)
    assert [group["step"] for run in runs for group in run[1].optim.param_groups] == [STEPS + 2] * 2
    expected = everything(source)
    return [(everything(run), expected) for run in runs]


@pytest.mark.parametrize(
    "master", ["float32", "bfloat16+float32", "bfloat16+rem16", "bfloat16+rem8", "bfloat16+float16"]
)
@pytest.mark.parametrize("form", ["unscaled", "native"])
def test_consolidated_states_resume_bit_for_bit(form: str, master: str) -> None:
    for options in ({}, {"state_dtype": "int8"}, {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16}):
        for results in distributed.run(2, resumed, master, form, options):
            for found, expected in results:
                assert [*found] == [*expected] and all(map(same_bits, found.values(), expected.values())), options


def from_adamw(master: str, options: dict[str, Any]) -> list[float]:
    """From ZeRO with AdamW to ZeRO with ours and back: how far all of it is from AdamW alone."""
    source = zero(torch.optim.AdamW, master, 0)
    train(*source, 0, STEPS)
    saved = consolidated(source)
    fresh, trained = (zero(FusedAdamW, master, 1, checkpoint_format="torch", **options) for _ in range(2))
    train(*trained, 0, 1)
    for run in (fresh, trained):
        load(run, saved)
        train(*run, STEPS, STEPS + 1)
    runs = [fresh, trained]
    if master == "float32":  # AdamW has no other moments of other parameters, and ZeRO does not cast them
        runs.append(zero(torch.optim.AdamW, master, 1))
        load(runs[-1], consolidated(fresh))
    for run in runs:
        train(*run, STEPS + 1, STEPS + 2)
    train(*source, STEPS, STEPS + 2)
    pairs = [(p, q) for run in runs for p, q in zip(*(r[0].parameters() for r in (run, source)), strict=True)]
    return [float((p - q).abs().max()) for p, q in pairs]


@pytest.mark.parametrize(
    "master, options, bound",
    [("float32", {}, 1e-6), ("float32", {"state_dtype": "int8"}, 0.02), ("bfloat16+rem16", {}, 0.02)],
)
def test_zero_changes_the_optimizer_at_a_checkpoint(master: str, options: dict[str, Any], bound: float) -> None:
    for errors in distributed.run(2, from_adamw, master, options):
        assert max(errors) < bound
