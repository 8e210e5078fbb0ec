"""What a usual step costs the host: the calls that Python makes, however many parameters there are.

Times depend on the machine, calls do not: ``sys.setprofile`` sees those of Python functions and of C functions that
are called from Python. What it counts differs by a few from one Python and torch to another.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_optim.backends import load_engine
from fused_optim.quantized import Float8CurrentScaling, Float8DelayedScaling, MXFP8BlockScaling, QuantizedTensor, Recipe
from peers import FusedAdamW

MOST = {"plain": 120, "decoupled": 120, "mxfp8": 147, "delayed": 185, "current": 191}  # with Python 3.12 fewer
RECIPES: dict[str, Recipe] = {
    "mxfp8": MXFP8BlockScaling(),
    "delayed": Float8DelayedScaling(),
    "current": Float8CurrentScaling(),
}


@pytest.fixture(autouse=True)
def _engine_on_the_cpu(use_backend: Callable[[str], None]) -> None:
    """The reference makes calls for each parameter."""
    if load_engine("cpu")[0] is None:
        pytest.skip("no cpu engine")
    use_backend("cpu")


def params_of(kind: str, count: int) -> list[Tensor]:
    if kind in RECIPES:
        full = torch.ones(1, 128, dtype=torch.bfloat16)
        return [torch.nn.Parameter(QuantizedTensor.from_values(full, RECIPES[kind])) for _ in range(count)]
    return [torch.nn.Parameter(torch.ones(1, 32)) for _ in range(count)]


def calls_of(function: Callable[[], Any]) -> Counter[str]:
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[str(getattr(called, "__qualname__", called))] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def calls_of_a_step(kind: str, count: int) -> Counter[str]:
    """Of one that only does what every step must: the two before it have created and described everything."""
    params = params_of(kind, count)
    attribute = "decoupled_grad" if kind == "decoupled" else "grad"
    formats = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
    optimizer = FusedAdamW(params, lr=1e-3, use_decoupled_grad=kind == "decoupled", **formats)
    for step in range(3):
        for param in params:
            setattr(param, attribute, torch.ones(param.shape, dtype=param.dtype))
        if step == 2:
            return calls_of(optimizer.step)
        optimizer.step()
    raise AssertionError


@pytest.mark.parametrize("kind", MOST)
def test_a_step_makes_few_calls_whatever_the_number_of_parameters(kind: str) -> None:
    few, many = calls_of_a_step(kind, 2), calls_of_a_step(kind, 20)
    assert many == few
    assert 0 < few.total() <= MOST[kind], few
