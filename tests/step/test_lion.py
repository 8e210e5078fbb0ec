"""FusedLion: the paper's update, formats and masters, backends, sharding, checkpoints, quantized weights."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import FORMATS, MASTERS, Format, Master, values
from distributed import same_bits
from fused_optim.formats.states import STATE_FORMATS
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from peers import FusedLion
from rule_runs import (
    SHAPES,
    assert_goes_on_on_other_ranks,
    assert_same_on_ranks,
    backend,
    contents,
    gradient,
    params,
    steps,
)

F32, BF16 = torch.float32, torch.bfloat16
ALL_FORMATS = pytest.mark.parametrize("fmt", FORMATS, ids=str)
ALL_MASTERS = pytest.mark.parametrize("master", MASTERS, ids=str)


# --- the update -------------------------------------------------------------------------------------------------------


class Paper:
    """Algorithm 2 of the paper, in double precision."""

    def __init__(self, param: Tensor, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        self.param = param.detach().double().cpu().numpy().copy()
        self.average = np.zeros_like(self.param)
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay

    def step(self, grad: Tensor) -> None:
        g = grad.double().cpu().numpy()
        direction = np.sign(self.betas[0] * self.average + (1 - self.betas[0]) * g)
        self.param -= self.lr * (direction + self.weight_decay * self.param)
        self.average = self.betas[1] * self.average + (1 - self.betas[1]) * g


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.5}, {"betas": (0.95, 0.98)}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_the_papers_update(options: dict[str, Any], name: str) -> None:
    with backend(name):
        optimizer = FusedLion(params(F32), lr=1e-2, **options)
        maximize = options.pop("maximize", False) if (options := dict(options)) else False
        given = {"betas": (0.9, 0.99), "weight_decay": 0.0, **options}
        papers = [Paper(param, 1e-2, **given) for param in optimizer.param_groups[0]["params"]]
        for number in range(100):
            for i, param in enumerate(optimizer.param_groups[0]["params"]):
                param.grad = gradient(param, number, i)
                papers[i].step(-param.grad if maximize else param.grad)
            optimizer.step()
    bound = 100 * 2.0**-23  # a step rounds the parameter twice
    for param, paper in zip(optimizer.param_groups[0]["params"], papers):
        np.testing.assert_allclose(param.detach().numpy(), paper.param, rtol=bound, atol=1e-6)
        np.testing.assert_allclose(optimizer.state[param]["exp_avg"].numpy(), paper.average, rtol=bound, atol=1e-6)


@ALL_FORMATS
@ALL_MASTERS
def test_the_engine_is_the_reference(fmt: Format, master: Master) -> None:
    found = []
    for name in ("torch", "cpu"):
        with backend(name):
            optimizer = FusedLion(params(master.param_dtype), lr=1e-2, state_dtype=fmt.dtype, **master.options)
            steps(optimizer, range(5))
            found.append(contents(optimizer))
    assert all(map(same_bits, *found))


@ALL_FORMATS
def test_one_state_in_every_format(fmt: Format) -> None:
    optimizer = FusedLion(params(BF16), state_dtype=fmt.dtype)
    steps(optimizer, range(1))
    wide = optimizer.param_groups[0]["params"][0]
    assert list(optimizer.state[wide]) == ["exp_avg", "master_param"]
    assert optimizer.summary()["formats"][0]["exp_avg"] == STATE_FORMATS[fmt.dtype].name
    assert "exp_avg_sq" not in str(optimizer.summary()) + repr(optimizer)


def test_low_precision_follows_fp32() -> None:
    """With the state in 8 bits few signs differ: the parameters stay near those of FP32 states."""
    exact, coded = FusedLion(params(F32), lr=1e-3), FusedLion(params(F32), lr=1e-3, state_dtype="int8")
    steps(exact, range(50))
    steps(coded, range(50))
    ours, theirs = (optimizer.param_groups[0]["params"][0].detach() for optimizer in (coded, exact))
    moved = (theirs - values(SHAPES[0], F32, "cpu", seed=0)).pow(2).mean().sqrt()
    assert 0 < (ours - theirs).pow(2).mean().sqrt() < 0.1 * moved


# --- what the base gives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["unscaled", "native"])
@ALL_FORMATS
def test_state_dicts(form: str, fmt: Format) -> None:
    optimizer = FusedLion(params(BF16), state_dtype=fmt.dtype, checkpoint_format=form)
    steps(optimizer, range(3))
    own = [nn.Parameter(param.detach().clone()) for param in optimizer.param_groups[0]["params"]]
    fresh = FusedLion(own, state_dtype=fmt.dtype)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(optimizer, range(3, 5))
    steps(fresh, range(3, 5))
    assert all(map(same_bits, contents(optimizer), contents(fresh)))


def test_clipping_and_tensors_as_rates() -> None:
    clipped, scaled = FusedLion(params(F32), lr=torch.tensor(1e-2)), FusedLion(params(F32), lr=1e-2)
    for optimizer in (clipped, scaled):
        for i, param in enumerate(optimizer.param_groups[0]["params"]):
            param.grad = gradient(param, 0, i)
    clipped.clip_grad_norm_(0.5)
    torch.nn.utils.clip_grad_norm_(scaled.param_groups[0]["params"], 0.5)
    clipped.step()
    scaled.step()
    for ours, theirs in zip(*(optimizer.param_groups[0]["params"] for optimizer in (clipped, scaled))):
        assert torch.equal(ours, theirs)
        ours, theirs = clipped.state[ours]["exp_avg"], scaled.state[theirs]["exp_avg"]
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("backend", ["torch", ""])
def test_gradients_that_are_no_number_show(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the parameter as in its state, by every backend."""
    monkeypatch.setenv("FUSED_OPTIM_BACKEND", backend)
    param = nn.Parameter(torch.ones(8))
    optimizer = FusedLion([param])
    param.grad = torch.tensor([1.0, math.nan, *[0.0] * 6])
    optimizer.step()
    assert param.isnan().tolist() == [False, True, *[False] * 6]
    assert optimizer.state[param]["exp_avg"].isnan().tolist() == param.isnan().tolist()


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]: expected a number in \[0, 1\)"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay: expected a finite number >= 0"),
        ({"exp_avg_dtype": "int3"}, ValueError, "exp_avg_dtype: expected one of"),
        ({"exp_avg_sq_dtype": "int8"}, TypeError, r"FusedLion\(\) got an unexpected argument 'exp_avg_sq_dtype'"),
        ({"master_bit": 24}, TypeError, "did you mean master_bits"),
        ({"master_bits": 8}, ValueError, "master_bits: expected 32"),
        ({"checkpoint_format": "torch"}, ValueError, "checkpoint_format='torch' is torch.optim.AdamW's layout"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedLion(params(F32), **options)


def test_diagnostics_have_one_state() -> None:
    optimizer = FusedLion(params(BF16), lr=1e-2, state_dtype="int8")
    steps(optimizer, range(2))
    steps_to_come = optimizer.diagnostics()["groups"][0]
    assert steps_to_come["exp_avg_error"] < 0.1 and not any(key.startswith("exp_avg_sq") for key in steps_to_come)
    assert steps_to_come["update_rms"] == pytest.approx(1e-2, rel=1e-3)  # every element moves by the learning rate


# --- sharded ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("fmt", [torch.int8, torch.float8_e4m3fn, F32], ids=str)
def test_bits_do_not_depend_on_the_sharding(ranks: int, fmt: torch.dtype) -> None:
    assert_same_on_ranks(FusedLion, {"state_dtype": fmt}, ranks)


@pytest.mark.parametrize(("form", "saving", "loading"), [("unscaled", 2, 3), ("native", 3, 1)])
def test_checkpoints_go_on_on_other_ranks(form: str, saving: int, loading: int, tmp_path: Path) -> None:
    assert_goes_on_on_other_ranks(FusedLion, {"state_dtype": torch.int8}, tmp_path, form, saving, loading)


# --- quantized weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_quantized_weights(name: str) -> None:
    """The master moves as an FP32 parameter does, and the weight is the master rounded."""
    layer = nn.Linear(128, 64, bias=False)
    plain = nn.Parameter(layer.weight.detach().clone())
    model = nn.Sequential(layer)
    quantize_model_(model, MXFP8BlockScaling())
    with backend(name):
        optimizers = [FusedLion(model.parameters(), lr=1e-2), FusedLion([plain], lr=1e-2)]
        for number in range(3):
            grad = values((64, 128), F32, "cpu", seed=number)
            model[0].weight.grad, plain.grad = grad.clone(), grad.clone()
            for optimizer in optimizers:
                optimizer.step()
    master = optimizers[0].state[model[0].weight]["master_param"]
    torch.testing.assert_close(master, plain.detach(), rtol=0, atol=0.02)  # which began from the weight as it was
    rounded = model[0].weight.dequantize().float()
    assert ((rounded - master).abs() <= master.abs() * 2.0**-3 + 1e-3).all()
