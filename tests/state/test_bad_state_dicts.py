"""A state dict that is faulty, on one rank or on all, is loaded on none and changes nothing.

Faults of moments and of the native form: ``test_native_checkpoint.py`` and ``tests/step/test_bad_input.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cases
import distributed
from cases import values
from distributed import assert_same
from fused_optim import load_optimizer_checkpoint
from fused_optim.sharding.dtensor import local_tensor
from pairwise import pairwise
from peers import FusedAdam, FusedAdamW

StateDict = dict[str, Any]
SHAPES = [(6, 128), (5, 32), (10,)]


def build(master: str, fmt: torch.dtype, seed: int = 0) -> tuple[nn.ParameterList, FusedAdam]:
    """Sharded where there are ranks; two param groups."""
    kind = cases.MASTER[master]
    tensors = [values(shape, kind.param_dtype, "cpu", seed=seed + i) for i, shape in enumerate(SHAPES)]
    model = nn.ParameterList(tensors)
    if dist.is_initialized():
        fully_shard(model, mesh=distributed.mesh())
    groups = [{"params": list(model)[:2]}, {"params": list(model)[2:], "lr": 0.02}]
    return model, FusedAdam(groups, exp_avg_dtype=fmt, exp_avg_sq_dtype=fmt, **kind.options)


def train(model: nn.ParameterList, optimizer: FusedAdam, steps: range = range(2)) -> None:
    for step in steps:
        for i, param in enumerate(model):
            grad = values(tuple(param.shape), param.dtype, "cpu", seed=50 + 10 * step + i)
            param.grad = distributed.shard_like(grad, param)
        optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.ParameterList, optimizer: FusedAdam) -> dict[str, Tensor]:
    """Parameters, states as they are kept, scales and hyperparameters."""
    found = {}
    for i, param in enumerate(model):
        found[f"{i}"] = local_tensor(param.detach()).clone()
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{i}: {key}"] = local_tensor(value).clone()
        if param in optimizer.store.layouts:
            found[f"{i}: scales"] = optimizer.store.layouts[param].scales.clone()
    for i, group in enumerate(optimizer.param_groups):
        numbers = [*group["betas"], group["lr"], group["eps"], group["weight_decay"], group["step"]]
        found[f"group {i}"] = torch.tensor(numbers, dtype=torch.float64)
    return found


def spoil_group(**changes: Any) -> Callable[[StateDict], None]:
    return lambda state_dict: state_dict["param_groups"][1].update(changes)


def own_steps(step: Any) -> Callable[[StateDict], None]:
    """As torch.optim.AdamW's: each parameter has a step."""

    def change(state_dict: StateDict) -> None:
        for group in state_dict["param_groups"]:
            del group["step"]
        for states in state_dict["state"].values():
            states["step"] = torch.tensor(2.0)
        state_dict["state"][2]["step"] = step

    return change


NAN = float("nan")
FAULTS: dict[str, tuple[Callable[[StateDict], Any], type[Exception], str]] = {
    "lr": (
        spoil_group(lr=-1),
        ValueError,
        "param group 1 of the state dict: lr: expected a finite .* got -1",
    ),
    "lr vector": (spoil_group(lr=torch.ones(2)), ValueError, "group 1 .*lr: expected a tensor of one element"),
    "betas": (spoil_group(betas=None), TypeError, "group 1 .*betas: expected two numbers, got NoneType"),
    "eps": (spoil_group(eps=NAN), ValueError, "group 1 .*eps: expected a finite number >= 0, got nan"),
    "weight decay": (spoil_group(weight_decay=-0.1), ValueError, "group 1 .*weight_decay: expected a finite number"),
    "amsgrad": (spoil_group(amsgrad=True), ValueError, "group 1 of the state dict: amsgrad=True is not supported"),
    "dtype": (
        spoil_group(exp_avg_dtype="torch.int3"),
        ValueError,
        "group 1 .*exp_avg_dtype: .*got torch.int3",
    ),
    "step": (spoil_group(step=-5), ValueError, "group 1 .*step: expected a whole number >= 0, got -5"),
    "no step": (spoil_group(step=None), TypeError, "group 1 .*step: expected a number, got NoneType"),
    "own step": (own_steps(torch.tensor(-5.0)), ValueError, "group 1 .*step: expected a whole number >= 0, got -5"),
    "version": (spoil_group(fused_optim_version=2), ValueError, "version 2"),
    "groups": (lambda d: d["param_groups"].pop(), ValueError, "has 1 param groups, the optimizer 2"),
    "parameters": (lambda d: d["param_groups"][0]["params"].pop(), ValueError, "group 0: .*has 1 parameters"),
    "twice": (spoil_group(params=[0]), ValueError, "lists 2 different parameters, the optimizer has 3"),
    "no groups": (lambda d: d.pop("param_groups"), KeyError, "param_groups"),
    "moment": (lambda d: d["state"][2].pop("exp_avg"), KeyError, "parameter 2 .*lacks exp_avg"),
    "shape": (lambda d: d["state"][2].update(exp_avg=torch.zeros(9)), ValueError, r"parameter 2 .*expected shape"),
}
KINDS = [("float32", torch.float32), ("bfloat16+rem16", torch.int8), ("bfloat16+float32", torch.bfloat16)]


# Not all faults x kinds x starts: each two.
@pytest.mark.parametrize("fault, kind, with_states", pairwise([*FAULTS], KINDS, [True, False]), ids=str)
def test_nothing_is_changed(fault: str, kind: tuple[str, torch.dtype], with_states: bool) -> None:
    master, fmt = kind
    change, error, message = FAULTS[fault]
    saved, (model, optimizer) = build(master, fmt), build(master, fmt, seed=9)
    train(*saved)
    if with_states:
        train(model, optimizer, range(5, 6))
    state_dict = copy.deepcopy(saved[1].state_dict())
    change(state_dict)
    before = everything(model, optimizer)
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(state_dict)
    assert_same(everything(model, optimizer), before)


def refuse(fault: str, faulty: int, master: str, fmt: torch.dtype) -> tuple[str, str]:
    """A fault of one rank's state dict; afterwards the right one loads, on all of them."""
    saved, (model, optimizer) = build(master, fmt), build(master, fmt, seed=9)
    train(*saved)
    train(model, optimizer, range(5, 6))
    right = saved[1].state_dict()
    wrong = {
        "state": {i: dict(s) for i, s in right["state"].items()},
        "param_groups": copy.deepcopy(right["param_groups"]),
    }
    if dist.get_rank() == faulty and fault != "hook":
        FAULTS[fault][0](wrong)
    elif dist.get_rank() == faulty:
        optimizer.register_load_state_dict_pre_hook(lambda *_: wrong["no such key"])
    before = everything(model, optimizer)
    with pytest.raises((KeyError, TypeError, ValueError)) as error:
        optimizer.load_state_dict(wrong)
    assert_same(everything(model, optimizer), before)
    optimizer._optimizer_load_state_dict_pre_hooks.clear()
    optimizer.load_state_dict(right)
    for ours, theirs in zip(model, saved[0], strict=True):
        local_tensor(ours.data).copy_(local_tensor(theirs.data))
    train(model, optimizer, range(5, 6))
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize(
    "fault, kind, ranks_and_faulty",
    pairwise(["lr", "own step", "groups", "moment", "shape", "hook"], KINDS, [(2, 1), (3, 0)]),
    ids=str,
)
def test_what_one_rank_refuses_is_loaded_on_none(
    fault: str, kind: tuple[str, torch.dtype], ranks_and_faulty: tuple[int, int]
) -> None:
    """Also FP32 states and parameters, whose loads need no communication otherwise."""
    ranks, faulty = ranks_and_faulty
    results = distributed.run(ranks, refuse, fault, faulty, *kind, timeout=20)
    for rank, (error, text) in enumerate(results):
        assert (error == "FailedElsewhere" and "another rank cannot load" in text) == (rank != faulty), results


def refuse_on_columns() -> None:
    """Where the state dict is placed otherwise, loading communicates: not before all ranks have checked it."""
    from torch.distributed.tensor import Shard

    full = values((8, 128), torch.float32, "cpu", seed=1)
    by_rows, by_columns = (distributed.shard(full, distributed.mesh(), [Shard(dim)]) for dim in (0, 1))
    source, target = FusedAdam([by_rows]), FusedAdam([by_columns])
    source.initialize_state()
    state_dict = source.state_dict()
    if dist.get_rank() == 0:
        state_dict["state"][0]["exp_avg_sq"] = 1.0
    with pytest.raises((TypeError, ValueError)):
        target.load_state_dict(state_dict)
    assert not target.state


def test_checks_come_before_communication() -> None:
    distributed.run(2, refuse_on_columns, timeout=20)


# --- what is no fault -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [-4e-21, -1e-12, torch.tensor(-4e-21), 0.0])
def test_a_schedule_that_ended_a_little_below_zero_loads(lr: Any, tmp_path: Any) -> None:
    _, optimizer = build("float32", torch.float32)
    train(*build("float32", torch.float32))
    saved = build("float32", torch.float32)
    train(*saved)
    state_dict = saved[1].state_dict()
    for group in state_dict["param_groups"]:
        group["lr"] = lr
    optimizer.load_state_dict(state_dict)
    assert all(float(group["lr"]) == float(lr) for group in optimizer.param_groups)
    torch.save(state_dict, tmp_path / "optimizer.pt")
    model, other = build("float32", torch.float32)
    load_optimizer_checkpoint(model, other, tmp_path / "optimizer.pt")
    assert all(float(group["lr"]) == float(lr) for group in other.param_groups)


def test_an_eps_that_is_too_small_is_loaded_and_refused_by_the_next_step() -> None:
    """Before which it can be changed."""
    model, optimizer = build("float32", torch.float32)
    state_dict = optimizer.state_dict()
    for group in state_dict["param_groups"]:
        group["eps"] = 0.0
    optimizer.load_state_dict(state_dict)
    with pytest.raises(ValueError, match=r"param group 0: eps: expected at least 2\.7e-17 where"):
        train(model, optimizer, range(1))
    for group in optimizer.param_groups:
        group["eps"] = 1e-15
    train(model, optimizer, range(1))


def test_dtypes_may_have_any_spelling() -> None:
    _, optimizer = build("float32", torch.float32)
    state_dict = optimizer.state_dict()
    for dtype in ("int8", "torch.int8", torch.int8, "uint8", torch.float8_e4m3fn):
        state_dict["param_groups"][0].update(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
        optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["exp_avg_dtype"] == torch.float32


# --- keys of param groups ---------------------------------------------------------------------------------------------

FOREIGN = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


def test_what_only_torch_knows_is_not_kept() -> None:
    """Else the next checkpoint of this optimizer could not be loaded: it lacks ``param_groups.0.foreach``."""
    param = nn.Parameter(torch.ones(4, 32))
    theirs = torch.optim.AdamW([param], lr=0.3)
    param.grad = torch.ones_like(param)
    theirs.step()
    theirs.param_groups[0]["initial_lr"] = 0.7
    ours = FusedAdamW([nn.Parameter(torch.zeros(4, 32))])
    keys = set(ours.param_groups[0])
    assert set(FOREIGN) & set(theirs.state_dict()["param_groups"][0])
    ours.load_state_dict(theirs.state_dict())
    group = ours.param_groups[0]
    assert set(group) == keys | {"initial_lr"} and set(ours.state_dict()["param_groups"][0]) == set(group)
    assert (group["lr"], group["initial_lr"], group["step"]) == (0.3, 0.7, 1)


def test_schedulers_keys_and_those_that_groups_have_are_loaded() -> None:
    schedulers = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "initial_weight_decay")
    _, saved = build("float32", torch.float32)
    for i, key in enumerate((*schedulers, "tag", "unknown")):
        saved.param_groups[1][key] = i / 8
    _, fresh = build("float32", torch.float32)
    fresh.param_groups[1]["tag"] = None
    fresh.load_state_dict(saved.state_dict())
    assert {key: fresh.param_groups[1][key] for key in schedulers} == {k: i / 8 for i, k in enumerate(schedulers)}
    assert fresh.param_groups[1]["tag"] == len(schedulers) / 8 and not set(schedulers) & set(fresh.param_groups[0])
    assert fresh.param_groups[1]["unknown"] == (len(schedulers) + 1) / 8  # a user's own

    _, fresh = build("float32", torch.float32)
    other = saved.state_dict()
    for group in other["param_groups"]:  # of another optimizer
        del group["fused_optim_version"], group["fused_optim_native"]
    fresh.load_state_dict(other)
    assert "unknown" not in fresh.param_groups[1] and fresh.param_groups[1]["initial_lr"] == 0.0


@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR", "SWALR", "StepLR", "CosineAnnealingWarmRestarts"])
def test_schedulers_go_on_after_a_load(schedule: str) -> None:
    """Beside torch.optim.AdamW with the same."""
    arguments: dict[str, dict[str, Any]] = {
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3, "cycle_momentum": True},
        "SWALR": {"swa_lr": 0.01},
        "StepLR": {"step_size": 2},
        "CosineAnnealingWarmRestarts": {"T_0": 3},
    }
    scheduler = torch.optim.swa_utils.SWALR if schedule == "SWALR" else getattr(torch.optim.lr_scheduler, schedule)
    rates = []
    for kind in (FusedAdamW, torch.optim.AdamW):
        found = []
        first, second = (kind([nn.Parameter(torch.ones(2))], lr=0.05) for _ in range(2))
        running = scheduler(first, **arguments[schedule])
        for optimizer in (first, second):
            if optimizer is second:
                second.load_state_dict(copy.deepcopy(first.state_dict()))
                resumed = scheduler(second, **arguments[schedule])
                resumed.load_state_dict(running.state_dict())
                running = resumed
                second.load_state_dict(copy.deepcopy(first.state_dict()))
            for _ in range(4):
                for param in optimizer.param_groups[0]["params"]:
                    param.grad = torch.ones(2)
                optimizer.step()
                running.step()
                found.append((optimizer.param_groups[0]["lr"], tuple(optimizer.param_groups[0]["betas"])))
        rates.append(found)
    assert rates[0] == rates[1]
