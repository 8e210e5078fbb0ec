"""Parameters that others replace, with their states or without, as Gaussian splatting and pruning do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from peers import FusedAdamW

MASTERS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"store_param_remainders": True}),
    (torch.bfloat16, {"store_param_remainders": True, "param_remainder_bits": 8}),
]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def train(optimizer: FusedAdamW | torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = values(*param.shape, seed=step).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()


def replace(optimizer: Any, rows: slice) -> weakref.ref[nn.Parameter]:
    """Keeps some rows of the first parameter, and of its states, in the way of splatting's trainers."""
    (old,) = optimizer.param_groups[0]["params"]
    states = optimizer.state.pop(old)
    for name, state in states.items():
        if state.dim():
            states[name] = state[rows].clone()
    new = nn.Parameter(old.detach()[rows].clone())
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = states
    return weakref.ref(old)


@pytest.mark.parametrize(("dtype", "master"), MASTERS, ids=str)
def test_states_that_move_are_used(dtype: torch.dtype, master: dict[str, Any]) -> None:
    """A row is updated alike, whether the others are still there or not."""
    pruned = FusedAdamW([nn.Parameter(values(10, 3).to(dtype))], lr=0.1, **master)
    whole = FusedAdamW([nn.Parameter(values(10, 3).to(dtype))], lr=0.1, **master)
    train(pruned, range(3))
    train(whole, range(3))
    replace(pruned, slice(0, 4))
    for step in range(3, 6):
        grad = values(10, 3, seed=step).to(dtype)
        pruned.param_groups[0]["params"][0].grad = grad[:4].clone()
        whole.param_groups[0]["params"][0].grad = grad
        pruned.step()
        whole.step()
    assert torch.equal(pruned.param_groups[0]["params"][0], whole.param_groups[0]["params"][0][:4])
    assert pruned.param_groups[0]["step"] == 6


def test_codes_without_their_scales_are_refused() -> None:
    optimizer = FusedAdamW([nn.Parameter(values(8, 128))], exp_avg_dtype=torch.int8)
    train(optimizer, range(2))
    replace(optimizer, slice(0, 4))
    with pytest.raises(TypeError, match=r"exp_avg was made elsewhere: .*\(4, 128\), got torch.int8.*set_scaled_state"):
        train(optimizer, range(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cleared_states_start_anew(dtype: torch.dtype) -> None:
    """As a new optimizer, step counter included; nothing is kept of the old states."""
    param = nn.Parameter(values(8, 128).to(dtype))
    optimizer = FusedAdamW([param], lr=0.1)
    train(optimizer, range(40))
    old = weakref.ref(optimizer.state[param]["exp_avg"])
    optimizer.state.clear()
    fresh_param = nn.Parameter(param.detach().clone())
    fresh = FusedAdamW([fresh_param], lr=0.1)
    train(optimizer, range(40, 43))
    train(fresh, range(40, 43))
    gc.collect()
    assert old() is None and optimizer.param_groups[0]["step"] == 3
    assert torch.equal(param, fresh_param)


def test_a_group_that_is_added_with_an_old_step_starts_anew() -> None:
    optimizer = FusedAdamW([nn.Parameter(values(8, 128))], lr=0.1)
    train(optimizer, range(3))
    late = nn.Parameter(torch.ones(4, 32))
    optimizer.add_param_group({"params": [late], "step": 1000, "weight_decay": 0.0})
    late.grad = torch.full_like(late, 2.0)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [3, 1]
    torch.testing.assert_close(late, torch.full_like(late, 0.9))
