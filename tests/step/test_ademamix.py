"""FusedAdEMAMix: the paper's update and schedules, formats, masters, backends, sharding, quantized weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import FORMATS, MASTERS, Format, Master, values
from distributed import same_bits
from fused_optim import FusedAdamW
from fused_optim.formats.masters import Master as Kept
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from fused_optim.rules import exponential_minus_one
from peers import FusedAdEMAMix
from rule_runs import assert_goes_on_on_other_ranks, assert_same_on_ranks, backend, contents, params, steps

F32, BF16 = torch.float32, torch.bfloat16
STATES = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
WARMS = {"betas": (0.9, 0.99, 0.999), "alpha": 8.0, "t_alpha": 20, "t_beta3": 30}


class Paper:
    """Algorithm 1 of the paper and its schedulers, in double precision, as the authors' code spells them."""

    def __init__(self, param: Tensor, options: dict[str, Any]) -> None:
        self.param = param.detach().double().cpu().numpy().copy()
        self.fast, self.slow, self.square = (np.zeros_like(self.param) for _ in range(3))
        self.options, self.count = options, 0

    def alpha(self) -> float:
        alpha, warmup = self.options["alpha"], self.options["t_alpha"]
        return alpha if warmup is None else min(self.count * alpha / warmup, alpha)

    def beta3(self) -> float:
        (start, _, end), warmup = self.options["betas"], self.options["t_beta3"]
        if warmup is None or self.count >= warmup:
            return end
        life = [math.log(0.5) / math.log(beta) - 1 for beta in (start, end)]  # half-lives
        share = self.count / warmup
        return math.pow(0.5, 1 / ((1 - share) * life[0] + share * life[1] + 1))

    def step(self, grad: Tensor) -> None:
        self.count += 1
        (beta1, beta2, _), beta3 = self.options["betas"], self.beta3()
        g = grad.double().cpu().numpy()
        self.fast = beta1 * self.fast + (1 - beta1) * g
        self.slow = beta3 * self.slow + (1 - beta3) * g
        self.square = beta2 * self.square + (1 - beta2) * g * g
        mixed = self.fast / (1 - beta1**self.count) + self.alpha() * self.slow
        root = np.sqrt(self.square / (1 - beta2**self.count)) + self.options["eps"]
        self.param -= self.options["lr"] * (mixed / root + self.options["weight_decay"] * self.param)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.5, **WARMS}, {"maximize": True, "alpha": 2.0}], ids=str)
@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_the_papers_update(options: dict[str, Any], name: str) -> None:
    with backend(name):
        optimizer = FusedAdEMAMix(params(F32), lr=1e-2, **options)
        group = optimizer.param_groups[0]
        papers = [Paper(param, dict(group)) for param in optimizer.store.params]
        for number in range(50):
            steps(optimizer, range(number, number + 1))
            for param, paper in zip(optimizer.store.params, papers):
                paper.step(-param.grad if group["maximize"] else param.grad)
    for param, paper in zip(optimizer.store.params, papers):
        np.testing.assert_allclose(param.detach().numpy(), paper.param, rtol=50 * 2.0**-22, atol=5e-6)
        for state, expected in zip(STATES, (paper.fast, paper.slow, paper.square)):
            np.testing.assert_allclose(optimizer.state[param][state].numpy(), expected, rtol=50 * 2.0**-22, atol=1e-6)


@pytest.mark.parametrize("x", [0.0, -1e-12, -1e-4, -0.1, -1.0, -39.0])
def test_the_schedules_exponential(x: float) -> None:
    assert math.isclose(exponential_minus_one(x), math.expm1(x), rel_tol=1e-14)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("master", MASTERS, ids=str)
@pytest.mark.parametrize("options", [{}, WARMS], ids=["constant", "warming"])
def test_the_engine_is_the_reference(fmt: Format, master: Master, options: dict[str, Any]) -> None:
    found = []
    for name in ("torch", "cpu"):
        with backend(name):
            optimizer = FusedAdEMAMix(
                params(master.param_dtype), lr=1e-2, state_dtype=fmt.dtype, **master.options, **options
            )
            steps(optimizer, range(5))
            found.append(contents(optimizer))
    assert all(map(same_bits, *found))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_the_cuda_engine_is_the_reference(fmt: Format, master: Master) -> None:
    """States bit for bit; parameters within what division on GPUs may be off."""
    found = []
    for name in ("torch", "cuda"):
        with backend(name):
            optimizer = FusedAdEMAMix(
                params(master.param_dtype, "cuda"), lr=1e-2, state_dtype=fmt.dtype, **master.options, **WARMS
            )
            steps(optimizer, range(5))
            found.append(optimizer)
    reference, compiled = found
    for ours, theirs in zip(compiled.store.params, reference.store.params, strict=True):
        for state in STATES:
            assert same_bits(compiled.state[ours][state], reference.state[theirs][state]), state
        kind = compiled.store.layouts[ours].master
        exact = ours.dtype == F32 or kind in (Kept.FLOAT32, Kept.REMAINDER16)
        bound = 1e-6 if exact else 2.0**-7
        torch.testing.assert_close(
            compiled.store[ours].read_master(), reference.store[theirs].read_master(), rtol=bound, atol=1e-6
        )


def test_each_state_has_a_format_of_its_own() -> None:
    formats = {"exp_avg_dtype": BF16, "exp_avg_slow_dtype": torch.int8, "exp_avg_sq_dtype": torch.float8_e4m3fn}
    optimizer = FusedAdEMAMix(params(BF16), **formats)
    steps(optimizer, range(2))
    wide = optimizer.store.params[0]
    dtypes = {name: state.dtype for name, state in optimizer.state[wide].items()}
    assert dtypes == {
        "exp_avg": BF16,
        "exp_avg_slow": torch.int8,
        "exp_avg_sq": torch.uint8,
        "master_param": torch.int16,
    }
    assert "exp_avg_slow_dtype=int8" in repr(optimizer)


def test_states_of_another_rule_are_refused() -> None:
    saved = FusedAdEMAMix(params(F32)).state_dict()
    with pytest.raises(ValueError, match="expected the update rule adam, found ademamix"):
        FusedAdamW(params(F32)).load_state_dict(saved)


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_quantized_weights(name: str) -> None:
    """The master moves as an FP32 parameter does, and the weight is the master rounded."""
    layer = nn.Linear(128, 64, bias=False)
    plain = nn.Parameter(layer.weight.detach().clone())
    model = nn.Sequential(layer)
    quantize_model_(model, MXFP8BlockScaling())
    weight = model[0].weight
    with backend(name):
        ours, theirs = FusedAdEMAMix([weight], lr=1e-2, **WARMS), FusedAdEMAMix([plain], lr=1e-2, **WARMS)
        for number in range(4):
            weight.grad = plain.grad = values((64, 128), F32, "cpu", seed=number)
            ours.step()
            theirs.step()
    assert same_bits(ours.state[weight]["master_param"], plain.detach())
    expected = nn.Sequential(nn.Linear(128, 64, bias=False))
    with torch.no_grad():
        expected[0].weight.copy_(plain)
    quantize_model_(expected, MXFP8BlockScaling())
    assert same_bits(weight.detach().dequantize(), expected[0].weight.detach().dequantize())


# --- sharded ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("fmt", [torch.int8, torch.float8_e4m3fn, F32], ids=str)
def test_bits_do_not_depend_on_the_sharding(ranks: int, fmt: torch.dtype) -> None:
    assert_same_on_ranks(FusedAdEMAMix, {"state_dtype": fmt, **WARMS}, ranks)


@pytest.mark.parametrize(("form", "saving", "loading"), [("unscaled", 2, 3), ("native", 3, 1), ("native", 1, 2)])
def test_checkpoints_go_on_on_other_ranks(form: str, saving: int, loading: int, tmp_path: Path) -> None:
    options = {"state_dtype": torch.int8, **WARMS}
    assert_goes_on_on_other_ranks(FusedAdEMAMix, options, tmp_path, form, saving, loading)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.9, 0.99)}, "betas: expected three numbers, got 2"),
        ({"betas": (0.9, 0.99, 1.0)}, r"betas\[2\]: expected a number in \[0, 1\), got 1.0"),
        ({"alpha": -1.0}, "alpha"),
        ({"t_alpha": 0}, "t_alpha"),
        ({"t_beta3": 10, "betas": (0.0, 0.99, 0.999)}, r"t_beta3: expected 0 < betas\[0\] <= betas\[2\]"),
        ({"t_beta3": 10, "betas": (0.99, 0.99, 0.9)}, r"t_beta3: expected 0 < betas\[0\] <= betas\[2\]"),
        ({"eps": 0.0}, "eps: expected at least"),
        ({"t_beta": 1}, "did you mean"),
    ],
    ids=str,
)
def test_arguments_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        FusedAdEMAMix(params(F32), **options)
