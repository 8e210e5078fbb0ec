"""Under ``checkpoint_format="torch"`` param groups are dicts as torch.optim.AdamW's; our own keys lie beside them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from distributed import same_bits
from foreign_cases import SETTINGS, build, groups_of, train
from fused_optim import FusedAdam, FusedAdamW
from fused_optim.checkpoint import Checkpointer

STEPS = 3
INT8 = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}


def ours(model: nn.Module, form: str = "torch", **options: Any) -> FusedAdamW:
    return FusedAdamW(groups_of(model), checkpoint_format=form, **{**SETTINGS, **options})


def torchs(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups_of(model), **SETTINGS)


def steps_of(optimizer: FusedAdamW) -> list[set[float]]:
    return [{float(optimizer.state[param]["step"]) for param in group["params"]} for group in optimizer.param_groups]


# --- compiled code ----------------------------------------------------------------------------------------------------


def small() -> tuple[nn.Module, FusedAdam]:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, FusedAdam(model.parameters(), lr=0.1, weight_decay=0.01, checkpoint_format="torch")


def decayed_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[float]:
    """Reads and writes the param groups, as code around a scheduler does."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.step()
    return rates


def test_compiled_code_reads_and_writes_param_groups() -> None:
    """Values as torch.optim.AdamW's, uncompiled; and the checkpoint is one that AdamW continues from."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, optimizer = small()
    expected = copy.deepcopy(model)
    theirs = torch.optim.AdamW(expected.parameters(), lr=0.1, weight_decay=0.01)
    graphs = CompileCounter()
    compiled = torch.compile(decayed_step, backend=graphs)
    for seed in range(STEPS):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        assert compiled(model, optimizer, x) == decayed_step(expected, theirs, x)
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()), rtol=1e-5, atol=1e-6)
    assert graphs.frame_count and steps_of(optimizer) == [{STEPS}]
    theirs.load_state_dict(optimizer.state_dict())
    decayed_step(expected, theirs, torch.ones(8, 16))


def test_a_compiled_step_reads_no_group() -> None:
    torch._dynamo.reset()
    model, usual = build(), build()
    pair = ours(model), ours(usual, "unscaled")
    for optimizer, each in zip(pair, (model, usual), strict=True):
        for param in each.parameters():
            param.grad = torch.ones_like(param)
        torch.compile(optimizer.step, backend="eager")()
    assert all(map(same_bits, model.parameters(), usual.parameters())) and steps_of(pair[0]) == [{1.0}, {1.0}]


def test_saves_in_other_forms_leave_compiled_code_as_it_is(tmp_path: Path) -> None:
    """A Checkpointer saves in a form of its own, and what it saves resumes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, optimizer = small()
    graphs = CompileCounter()
    compiled = torch.compile(decayed_step, backend=graphs)
    x = torch.ones(8, 16)
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        for _ in range(STEPS):
            compiled(model, optimizer, x)
        count, keys = graphs.frame_count, {*optimizer.param_groups[0]}
        checkpointer.save(STEPS)
        assert {*optimizer.param_groups[0]} == keys and steps_of(optimizer) == [{STEPS}]
        compiled(model, optimizer, x)
    assert graphs.frame_count == count
    resumed, loaded = small()
    with Checkpointer(resumed, loaded, tmp_path, sigterm=False) as checkpointer:
        assert checkpointer.load_latest() == STEPS
    assert loaded.param_groups[0].keys() == optimizer.param_groups[0].keys() and steps_of(loaded) == [{STEPS}]
    decayed_step(resumed, loaded, x)
    assert all(map(same_bits, resumed.parameters(), model.parameters()))


# --- what is theirs and what is ours ----------------------------------------------------------------------------------


def test_the_step_is_in_the_states_as_adamws() -> None:
    """After each step, without a state dict; and in none of the groups."""
    model, other = build(), build()
    optimizer, theirs = ours(model), torchs(other)
    for step in range(STEPS):
        train(model, optimizer, step, step + 1)
        train(other, theirs, step, step + 1)
        for param, same in zip(model.parameters(), other.parameters(), strict=True):
            assert same_bits(optimizer.state[param]["step"], theirs.state[same]["step"])
    for mine, group in zip(optimizer.param_groups, theirs.param_groups, strict=True):
        assert type(mine) is dict and mine.keys() == group.keys()


def test_a_change_of_form_keeps_groups_and_values() -> None:
    model = build()
    optimizer = ours(model, "unscaled", **INT8)
    train(model, optimizer, 0, STEPS)
    groups, before = list(optimizer.param_groups), copy.deepcopy(optimizer.state_dict()["param_groups"])
    keys = [set(group) for group in groups]
    groups[0].update(step=7, bias_correction=False, mine="kept")
    optimizer.checkpoint_format = "torch"
    assert [set(group) - {"mine"} for group in groups] == [set(group) for group in torchs(build()).param_groups]
    optimizer.checkpoint_format = "unscaled"
    assert all(now is group for now, group in zip(optimizer.param_groups, groups, strict=True))
    assert [set(group) - {"mine"} for group in groups] == keys
    found = optimizer.state_dict()["param_groups"]
    assert found[1] == before[1] and found[0] == {**before[0], "step": 7, "bias_correction": False, "mine": "kept"}


def written(optimizer: FusedAdamW) -> FusedAdamW:
    return optimizer


def through_pickle(optimizer: FusedAdamW) -> FusedAdamW:
    loaded: FusedAdamW = pickle.loads(pickle.dumps(optimizer))
    return loaded


def through_torch_save(optimizer: FusedAdamW) -> FusedAdamW:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    loaded: FusedAdamW = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [written, copy.deepcopy, through_pickle, through_torch_save])
def test_own_keys_that_are_written_into_a_group_are_taken(copied: Callable[[FusedAdamW], FusedAdamW]) -> None:
    model = build()
    optimizer = ours(model)
    train(model, optimizer, 0, STEPS)
    optimizer.param_groups[0].update(step=7, bias_correction=False, exp_avg_dtype=torch.int8)
    optimizer = copied(optimizer)
    optimizer.step()  # without gradients; formats are converted
    first, second = optimizer.param_groups
    assert "bias_correction" not in first and first.keys() == second.keys()
    assert optimizer.state[first["params"][0]]["exp_avg"].dtype == torch.int8
    assert optimizer.state[second["params"][0]]["exp_avg"].dtype == torch.float32
    optimizer.checkpoint_format = "unscaled"
    assert [(group["step"], group["bias_correction"]) for group in optimizer.param_groups] == [
        (7, False),
        (STEPS, True),
    ]


# --- groups that come by other ways -----------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", ["a copy", "split", "regrouped", "exchanged for a while"])
def test_groups_that_users_replace_continue(replaced: str) -> None:
    """A parameter's step, formats and settings follow it; values are those of groups that were not replaced."""
    model, usual = build(), build()
    optimizer, expected = ours(model, **INT8), ours(usual, **INT8)
    train(model, optimizer, 0, STEPS)
    train(usual, expected, 0, STEPS)
    first, second = optimizer.param_groups
    if replaced == "a copy":
        optimizer.param_groups[0] = {**first, "params": list(first["params"])}
    elif replaced == "split":
        parts = [{**first, "params": first["params"][:1]}, {**first, "params": first["params"][1:]}]
        optimizer.param_groups[:1] = parts
    elif replaced == "regrouped":
        optimizer.param_groups = [copy.copy(first), copy.copy(second)]
    else:
        optimizer.param_groups = [{**first, "params": [nn.Parameter(torch.ones(3))]}]
        optimizer.step()
        optimizer.param_groups = [first, second]
    train(model, optimizer, STEPS, STEPS + 1)
    train(usual, expected, STEPS, STEPS + 1)
    assert all(map(same_bits, model.parameters(), usual.parameters()))
    assert all(each == {STEPS + 1} for each in steps_of(optimizer))


def test_groups_appended_by_hand_start_with_the_defaults() -> None:
    optimizer = ours(build(), **INT8)
    late = nn.Parameter(torch.ones(4, 128))
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [late]})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert optimizer.state[late]["exp_avg"].dtype == torch.int8 and float(optimizer.state[late]["step"]) == 1
    assert optimizer.param_groups[2].keys() == optimizer.param_groups[0].keys()
    expected = nn.Parameter(torch.ones(4, 128))
    theirs = torch.optim.AdamW([{**optimizer.param_groups[0], "params": [expected]}])
    expected.grad = torch.ones_like(expected)
    theirs.step()
    torch.testing.assert_close(late, expected)


def test_an_id_that_is_used_again_finds_nothing() -> None:
    """A dict may lie where a removed group has lain."""
    optimizer = ours(build())
    for _ in range(20):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "bias_correction": False})
        del optimizer.param_groups[2]
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [nn.Parameter(torch.ones(3))]})
        assert optimizer.store.groups[2]["bias_correction"]
        del optimizer.param_groups[2]


def test_schedulers_and_loads_keep_what_they_put_there() -> None:
    model = build()
    optimizer = ours(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, 0, STEPS)
    scheduler.step()
    assert "initial_lr" in optimizer.param_groups[0]
    loaded = ours(build(), "unscaled")
    loaded.load_state_dict(optimizer.state_dict())
    back = ours(build())
    back.load_state_dict(loaded.state_dict())
    for target in (loaded, back):
        assert [group["initial_lr"] for group in target.param_groups] == [SETTINGS["lr"]] * 2
        assert [group["lr"] for group in target.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert steps_of(back) == [{STEPS}, {STEPS}]
    assert [group.keys() for group in back.param_groups] == [group.keys() for group in optimizer.param_groups]
