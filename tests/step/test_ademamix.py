"""FusedAdEMAMix: the paper's update and schedules, formats, masters, backends, sharding, quantized weights."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import distributed
from cases import FORMATS, MASTERS, Format, Master, values
from distributed import join_all, part, same_bits
from fused_optim import FusedAdamW
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from fused_optim.rules import exponential_minus_one
from peers import FusedAdEMAMix

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(6, 128), (10,), (3, 5), (33, 256)]
STATES = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
WARMS = {"betas": (0.9, 0.99, 0.999), "alpha": 8.0, "t_alpha": 20, "t_beta3": 30}


@contextmanager
def backend(name: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"FUSED_OPTIM_BACKEND": name}):
        yield


def params(dtype: torch.dtype, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(values(shape, dtype, device, seed=i)) for i, shape in enumerate(SHAPES)]


def set_gradients(optimizer: FusedAdEMAMix, number: int) -> None:
    for i, param in enumerate(optimizer.store.params):
        param.grad = values(tuple(param.shape), param.dtype, param.device.type, seed=100 * number + i)


def steps(optimizer: FusedAdEMAMix, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        set_gradients(optimizer, number)
        optimizer.step()


def contents(optimizer: FusedAdEMAMix) -> list[Tensor]:
    found = []
    for param in optimizer.store.params:
        found += [param.detach(), *optimizer.state[param].values(), optimizer.store.layouts[param].scales]
    return found


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
            set_gradients(optimizer, number)
            for param, paper in zip(optimizer.store.params, papers):
                paper.step(-param.grad if group["maximize"] else param.grad)
            optimizer.step()
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
            steps(optimizer, 5)
            found.append(contents(optimizer))
    assert all(map(same_bits, *found))


def test_each_state_has_a_format_of_its_own() -> None:
    formats = {"exp_avg_dtype": BF16, "exp_avg_slow_dtype": torch.int8, "exp_avg_sq_dtype": torch.float8_e4m3fn}
    optimizer = FusedAdEMAMix(params(BF16), **formats)
    steps(optimizer, 2)
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


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(values((7, 256), BF16, "cpu", seed=1))
        self.narrow = nn.Parameter(values((5, 50), BF16, "cpu", seed=2))
        self.bias = nn.Parameter(values((10,), BF16, "cpu", seed=3))


def build(fmt: torch.dtype) -> tuple[nn.Module, FusedAdEMAMix]:
    model = Layers()
    if dist.is_initialized():
        fully_shard(model, mesh=distributed.mesh())
    return model, FusedAdEMAMix(model.named_parameters(), lr=1e-2, weight_decay=0.1, state_dtype=fmt, **WARMS)


def train(model: nn.Module, optimizer: FusedAdEMAMix, numbers: range) -> None:
    for number in numbers:
        for i, param in enumerate(model.parameters()):
            full = values(tuple(param.shape), BF16, "cpu", seed=50 * number + i)
            param.grad = distributed.shard_like(full, param) if dist.is_initialized() else full
        optimizer.step()


def gathered(model: nn.Module, optimizer: FusedAdEMAMix) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        found[name] = part(param.detach())
        found |= {f"{name}: {key}": part(value) for key, value in optimizer.state[param].items()}
    return found


def train_and_save(folder: Path, form: str) -> dict[str, Any]:
    model, optimizer = build(torch.int8)
    optimizer.checkpoint_format = form
    train(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return gathered(model, optimizer)


def load_and_go_on(folder: Path, form: str) -> dict[str, Any]:
    model, optimizer = build(torch.int8)
    for param in model.parameters():
        nn.init.zeros_(param)
    optimizer.checkpoint_format = form
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert optimizer.param_groups[0]["step"] == 3
    train(model, optimizer, range(3, 5))
    return gathered(model, optimizer)


@pytest.mark.parametrize(("form", "saving", "loading"), [("unscaled", 2, 3), ("native", 3, 1), ("native", 1, 2)])
def test_checkpoints_go_on_on_other_ranks(form: str, saving: int, loading: int, tmp_path: Path) -> None:
    """Neither the sharding nor the checkpoint changes a bit."""
    saved = join_all(distributed.run(saving, train_and_save, tmp_path, form))
    model, optimizer = build(torch.int8)
    train(model, optimizer, range(3))
    whole = join_all([gathered(model, optimizer)])
    assert saved.keys() == whole.keys() and all(same_bits(saved[key], whole[key]) for key in whole)
    train(model, optimizer, range(3, 5))
    whole = join_all([gathered(model, optimizer)])
    found = join_all(distributed.run(loading, load_and_go_on, tmp_path, form))
    assert all(same_bits(found[key], whole[key]) for key in whole)


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
