"""States that others put into ``optimizer.state``, as Megatron-LM does before it loads a checkpoint into them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_optim import FusedAdam

SHAPE = (8, 128)


def moments(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    return {"exp_avg": first.to(dtype), "exp_avg_sq": second.square().to(dtype)}


def build(**options: Any) -> tuple[Tensor, FusedAdam]:
    param = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return param, FusedAdam([param], lr=0.1, **options)


def test_fp32_states_are_kept_themselves_and_used() -> None:
    """Whoever put them there may still write into them; the step is torch's from the same states."""
    param, optimizer = build()
    given = moments()
    optimizer.state[param].update({name: torch.zeros(SHAPE) for name in given})
    kept = optimizer.state_dict()["state"][0]  # as a checkpoint's loader asks for what to fill
    for name, value in given.items():
        kept[name].copy_(value)
    optimizer.param_groups[0]["step"] = 4
    reference = param.clone()
    expected = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.0)
    expected.load_state_dict(
        {"state": {0: {**given, "step": torch.tensor(4.0)}}, "param_groups": expected.state_dict()["param_groups"]}
    )
    param.grad = reference.grad = torch.ones(SHAPE)
    optimizer.step()
    expected.step()
    torch.testing.assert_close(param, reference, rtol=1e-6, atol=1e-7)


def test_a_first_step_with_such_states_is_real() -> None:
    param, optimizer = build()
    optimizer.state[param].update(moments())
    param.grad = torch.zeros(SHAPE)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], 0.9 * moments()["exp_avg"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_formats_encode_them(dtype: torch.dtype) -> None:
    param, optimizer = build(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.float16)
    given = moments(dtype)
    optimizer.state[param].update(given)
    assert optimizer.get_unscaled_state(param, "exp_avg").shape == SHAPE
    for name, tolerance in (("exp_avg", 0.02), ("exp_avg_sq", 0.002)):
        error = (optimizer.get_unscaled_state(param, name) - given[name].float()).abs()
        assert float(error.max()) <= tolerance * float(given[name].float().abs().max())
    assert optimizer.state[param]["exp_avg"].dtype == torch.int8


@pytest.mark.parametrize(
    "given, error, text",
    [
        ({"master_param": torch.zeros(SHAPE)}, ValueError, "master_param"),
        ({"exp_avg": torch.zeros(3)}, TypeError, r"exp_avg .*\(8, 128\).*\(3,\)"),
        ({"exp_avg": torch.zeros(SHAPE, dtype=torch.uint8)}, TypeError, "exp_avg .*uint8"),
    ],
)
def test_what_cannot_be_adopted_is_refused(given: dict[str, Tensor], error: type[Exception], text: str) -> None:
    param, optimizer = build()
    optimizer.state[param].update(given)
    param.grad = torch.ones(SHAPE)
    with pytest.raises(error, match=text):
        optimizer.step()
    assert torch.equal(param, build()[0]) and optimizer.param_groups[0]["step"] == 0


def test_what_others_keep_there_stays() -> None:
    param, optimizer = build()
    mark = object()
    optimizer.state[param]["mark"] = mark
    optimizer.initialize_state()
    assert optimizer.state[param]["mark"] is mark and not optimizer.state[param]["exp_avg"].any()
