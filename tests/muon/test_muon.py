"""FusedMuon on plain parameters: torch.optim.Muon, double precision, formats, masters, what the base gives."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from cases import FORMATS, MASTERS, Format, Master, values
from distributed import same_bits
from fused_optim import enable_gradient_release, load_optimizer_checkpoint
from fused_optim.checkpoint import Checkpointer
from fused_optim.quantized import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, quantize_model_
from fused_optim.tools.conversion import convert_checkpoint
from fused_optim.tools.inspector import inspect_checkpoint
from peers import FusedAdam, FusedAdamW, FusedLion, FusedMuon

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(6, 128), (128, 6), (32, 32), (3, 16, 64)]
MATRICES = 3
JORDAN = (3.4445, -4.7750, 2.0315)


@contextmanager
def backend(name: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"FUSED_OPTIM_BACKEND": name}):
        yield


def params(dtype: torch.dtype = F32, shapes: Any = SHAPES, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(values(shape, dtype, device, seed=i)) for i, shape in enumerate(shapes)]


def steps(optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        index = 0
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = values(tuple(param.shape), param.dtype, param.device.type, seed=100 * number + index)
                index += 1
        optimizer.step()


def contents(optimizer: FusedMuon) -> list[Tensor]:
    found = []
    for param in optimizer.store.params:
        found += [param.detach(), *optimizer.state[param].values(), optimizer.store.layouts[param].scales]
    return found


# --- the update -------------------------------------------------------------------------------------------------------


def in_double_precision(x: np.ndarray, eps: float, coefficients: Any = (JORDAN,) * 5) -> np.ndarray:
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s /= max(float(np.sqrt((s**2).sum())), eps)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u @ np.diag(s) @ vt


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False},
    {"momentum": 0.5, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"adjust_lr_fn": "original", "ns_steps": 3},
    {"maximize": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_double_precision(options: dict[str, Any], name: str) -> None:
    """With FP32 products, experts too."""
    given = {"momentum": 0.95, "weight_decay": 0.1, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": None, **options}
    beta, sign = given["momentum"], -1.0 if options.get("maximize") else 1.0
    with backend(name):
        optimizer = FusedMuon(params(), experts=True, lr=0.01, ns_dtype="float32", **options)
        exact = [param.detach().double().numpy().copy() for param in optimizer.store.params]
        buffers = [np.zeros_like(x) for x in exact]
        for number in range(4):
            steps(optimizer, range(number, number + 1))
            for i, param in enumerate(optimizer.store.params):
                grad = sign * param.grad.double().numpy()
                buffers[i] = beta * buffers[i] + (1 - beta) * grad
                update = beta * buffers[i] + (1 - beta) * grad if given["nesterov"] else buffers[i]
                rows, columns = update.shape[-2:]
                scale = max(1.0, rows / columns) ** 0.5
                if given["adjust_lr_fn"] == "match_rms_adamw":
                    scale = 0.2 * max(rows, columns) ** 0.5
                coefficients = (JORDAN,) * given["ns_steps"]
                made = [in_double_precision(m, 1e-7, coefficients) for m in update.reshape(-1, rows, columns)]
                exact[i] = exact[i] * (1 - 0.01 * given["weight_decay"]) - 0.01 * scale * np.stack(made).reshape(
                    update.shape
                )
    for param, expected, buffer in zip(optimizer.store.params, exact, buffers, strict=True):
        np.testing.assert_allclose(param.detach().numpy(), expected, atol=2e-5)
        np.testing.assert_allclose(optimizer.state[param]["momentum_buffer"].numpy(), buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_torchs(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Both make products in BF16, whose sums are off by 2^-9 each. Masters follow the FP32 parameters of torch's."""
    ours = params(dtype, SHAPES[:MATRICES])
    theirs = [nn.Parameter(param.detach().float()) for param in ours]
    optimizer = FusedMuon(ours, experts=True, lr=0.01, **options)
    reference = torch.optim.Muon(theirs, lr=0.01, **options)
    start = [param.detach().clone() for param in theirs]
    for number in range(4):
        steps(optimizer, range(number, number + 1))
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = mine.grad.float()
        reference.step()
    for mine, other, before in zip(ours, theirs, start, strict=True):
        master = optimizer.get_unscaled_state(mine, "master_param") if dtype == BF16 else mine.detach()
        assert (master - other.detach()).norm() < 0.05 * (other.detach() - before).norm()


@pytest.mark.parametrize("name", ["original", "polar_express", "deepseek_v4"])
def test_updates_have_singular_values_of_one(name: str) -> None:
    count = {"original": 5, "polar_express": 8, "deepseek_v4": 10}[name]
    weight = nn.Parameter(torch.zeros(32, 64))
    optimizer = FusedMuon([weight], lr=1.0, weight_decay=0.0, ns_coefficients=name, ns_steps=count, ns_dtype="float32")
    weight.grad = values((32, 64), F32, "cpu", seed=1)
    optimizer.step()
    found = torch.linalg.svdvals(weight.detach())
    assert found.min() > 0.6 and found.max() < 1.3
    if name != "original":
        assert (found - 1.0).abs().max() < 0.03


def test_splits_are_orthogonalized_apart() -> None:
    joined = nn.Parameter(values((48, 32), F32, "cpu", seed=0))
    parts = [nn.Parameter(part.clone()) for part in joined.detach().split([16, 24, 8])]
    one = FusedMuon([{"params": [joined], "splits": (16, 24, 8)}], lr=0.1)
    several = FusedMuon(parts, lr=0.1)
    for number in range(3):
        grad = values((48, 32), F32, "cpu", seed=number + 1)
        joined.grad = grad
        for part, own in zip(parts, grad.split([16, 24, 8]), strict=True):
            part.grad = own.clone()
        one.step()
        several.step()
    assert torch.equal(joined, torch.cat([*parts]))


# --- formats, masters, backends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_the_engine_is_the_reference(fmt: Format, master: Master, device: str) -> None:
    """On GPUs, too: elements are divided by nothing, and both make the same products, if these are FP32."""
    found = []
    products = "bfloat16" if device == "cpu" else "float32"
    for name in ("torch", device):
        with backend(name):
            optimizer = FusedMuon(
                params(master.param_dtype, device=device),
                lr=0.01,
                experts=True,
                momentum_dtype=fmt.dtype,
                ns_dtype=products,
                **master.options,
            )
            steps(optimizer, range(4))
            found.append([tensor.cpu() for tensor in contents(optimizer)])
    assert all(map(same_bits, *found))


def test_gradients_too_small_for_fp16_products() -> None:
    grads = [values((16, 32), F32, "cpu", seed=1) * scale for scale in (1.0, 2.0**-40)]
    found = []
    for grad in grads:
        weight = nn.Parameter(torch.zeros(16, 32))
        optimizer = FusedMuon([weight], lr=1.0, ns_dtype="float16", eps=1e-20)
        weight.grad = grad
        optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()], ids=str)
def test_quantized_weights(recipe: Any) -> None:
    """Updated and encoded by the same pass: the values of masters, quantized as the recipe quantizes them."""
    model, plain = (nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 256, bias=False)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    quantize_model_(model, recipe)
    optimizer, reference = (FusedMuon(each.parameters(), lr=0.01) for each in (model, plain))
    for number in range(3):
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            mine.grad = other.grad = values(tuple(other.shape), F32, "cpu", seed=number)
        optimizer.step()
        reference.step()
    masters = optimizer.master_state_dict(model)
    for name, other in plain.named_parameters():
        quantized = dict(model.named_parameters())[name]
        scale = float(other.detach().abs().max())
        assert torch.equal(masters[name], other)
        assert (quantized.dequantize() - masters[name]).abs().max() < 2.0**-3 * scale


# --- both algorithms --------------------------------------------------------------------------------------------------


def test_adamw_beside_it_is_fused_adamw() -> None:
    hidden, vectors = params(BF16), params(BF16, [(7,), (64, 8)])
    alone = params(BF16, [(7,), (64, 8)])
    optimizer = FusedMuon(
        [{"params": hidden}, {"params": vectors, "algorithm": "adamw", "lr": 0.003, "betas": (0.8, 0.9)}],
        weight_decay=0.2,
        state_dtype="bfloat16",
        experts=True,
    )
    reference = FusedAdamW(alone, lr=0.003, betas=(0.8, 0.9), weight_decay=0.2, state_dtype="bfloat16")
    reference.store.rounding_numbers = lambda: [4, 5]  # as the fifth and sixth parameter
    for number in range(3):
        steps(optimizer, range(number, number + 1))
        for mine, other in zip(vectors, alone, strict=True):
            other.grad = mine.grad.clone()
        reference.step()
    for mine, other in zip(vectors, alone, strict=True):
        assert same_bits(mine.detach(), other.detach())
        for name, state in reference.state[other].items():
            assert same_bits(optimizer.state[mine][name], state)
    assert [*optimizer.state[hidden[0]]] == ["momentum_buffer", "master_param"]


def test_groups_have_their_own_keys() -> None:
    optimizer = FusedMuon(
        [{"params": params(), "experts": True}, {"params": params(F32, [(4,)]), "algorithm": "adamw"}]
    )
    muon, adamw = (set(group) for group in optimizer.param_groups)
    assert {"momentum", "ns_steps", "momentum_dtype", "splits"} <= muon and not {"betas", "exp_avg_dtype"} & muon
    assert {"betas", "exp_avg_dtype", "exp_avg_sq_dtype"} <= adamw and not {"momentum", "ns_steps", "splits"} & adamw
    assert [group["eps"] for group in optimizer.param_groups] == [1e-7, 1e-8]
    assert "momentum=0.95" in repr(optimizer) and "momentum_buffer" in str(optimizer.summary())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (), (2, 3, 4, 5)], ids=str)
def test_parameters_that_are_no_matrices(shape: tuple[int, ...]) -> None:
    wrong = nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"parameter 1 \('b', shape .*two dims") as caught:
        FusedMuon([("a", params()[0]), ("b", wrong)])
    assert str(shape) in str(caught.value)
    optimizer = FusedMuon(params(), experts=True)
    with pytest.raises(ValueError, match="two dims"):
        optimizer.add_param_group({"params": [wrong]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"ns_steps": 100},
        {"ns_steps": -1},
        {"ns_steps": 2.5},
        {"ns_coefficients": "fast"},
        {"adjust_lr_fn": "none"},
        {"ns_dtype": "int8"},
        {"lr": -1.0},
        {"weight_decay": -0.1},
        {"momentum_dtype": "int4"},
        {"checkpoint_format": "torch"},
        {"momentums": 0.9},
    ],
    ids=str,
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        FusedMuon(params(), experts=True, **options)


def test_groups_that_cannot_be() -> None:
    for wrong, match in (
        ({"algorithm": "sgd"}, "algorithm"),
        ({"splits": (3, 4)}, "splits"),
        ({"splits": (3, 0, 3)}, "splits"),
    ):
        optimizer = FusedMuon(params(), experts=True)
        with pytest.raises((TypeError, ValueError), match=match):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(6, 8))], **wrong})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("first", "then", "missing"), [("muon", "adamw", "betas"), ("adamw", "muon", "momentum")])
def test_an_algorithm_written_into_a_running_group(first: str, then: str, missing: str) -> None:
    optimizer = FusedMuon([{"params": params(), "algorithm": first}], experts=True)
    steps(optimizer, range(1))
    before = [tensor.clone() for tensor in contents(optimizer)]
    optimizer.param_groups[0]["algorithm"] = then
    with pytest.raises(ValueError, match=f"param group 0 has no '{missing}' any more; it keeps"):
        steps(optimizer, range(1, 2))
    optimizer.param_groups[0]["algorithm"] = first
    assert all(map(same_bits, before, contents(optimizer)))
    steps(optimizer, range(1, 2))


CYCLING: dict[str, Any] = {
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=8),
    "CyclicLR": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.001, 0.005, step_size_up=3),
}


@pytest.mark.parametrize("kind", CYCLING)
def test_schedulers_cycle_momentum_as_with_torchs(kind: str) -> None:
    shapes = [(6, 128), (128, 6)]
    runs = [
        (optimizer, CYCLING[kind](optimizer))
        for optimizer in (torch.optim.Muon(params(shapes=shapes), lr=0.1), FusedMuon(params(shapes=shapes), lr=0.1))
    ]
    seen = []
    for step in range(6):
        for optimizer, scheduler in runs:
            steps(optimizer, range(step, step + 1))
            scheduler.step()
        expected, found = (optimizer.param_groups[0] for optimizer, _ in runs)
        assert found["lr"] == expected["lr"] and found["momentum"] == expected["momentum"]
        seen.append(found["momentum"])
    assert len(set(seen)) > 3
    for mine, reference in zip(runs[1][0].param_groups[0]["params"], runs[0][0].param_groups[0]["params"], strict=True):
        torch.testing.assert_close(mine, reference, rtol=0.0, atol=2e-3)


def test_gradient_release_is_refused() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = FusedMuon(model.parameters())
    with pytest.raises(RuntimeError, match="gradient release"):
        enable_gradient_release(model, optimizer)


def test_diagnostics() -> None:
    """Of four matrices' singular values; of AdamW's parameters as usual. Nothing is changed."""
    matrices = [nn.Parameter(values((24, 40 + i), F32, "cpu", seed=i)) for i in range(9)]
    vector = nn.Parameter(values((40,), F32, "cpu", seed=20))
    named = [(f"m{i}", matrix) for i, matrix in enumerate(matrices)]
    groups = [{"params": named}, {"params": [("v", vector)], "algorithm": "adamw"}]
    optimizer = FusedMuon(groups, lr=1.0, weight_decay=0.0, ns_dtype="float32", momentum_dtype="bfloat16")
    with pytest.raises(RuntimeError, match="states"):
        optimizer.diagnostics()
    steps(optimizer, range(1))
    for i, param in enumerate(optimizer.store.params):
        param.grad = values(tuple(param.shape), F32, "cpu", seed=50 + i)
    before = [tensor.clone() for tensor in contents(optimizer)]
    found = optimizer.diagnostics()
    assert all(map(same_bits, before, contents(optimizer)))
    assert set(found["parameters"]) == {"m0", "m2", "m4", "m6", "v"}
    assert found["parameters"]["v"]["update_rms"] > 0.0
    olds = [matrix.detach().clone() for matrix in matrices]
    optimizer.step()
    errors = []
    for i in (0, 2, 4, 6):
        sigma = torch.linalg.svdvals((olds[i] - matrices[i]).detach().double())
        errors.append(float((sigma - 1.0).abs().mean()))
        assert abs(found["parameters"][f"m{i}"]["sigma_error"] - errors[-1]) < 1e-3
    assert abs(found["groups"][0]["sigma_error"] - sum(errors) / 4) < 1e-3
    assert "optimizer/group0/sigma_error" in found.scalars()


# --- what the base gives ----------------------------------------------------------------------------------------------


def mixed(dtype: torch.dtype, **options: Any) -> FusedMuon:
    return FusedMuon(
        [{"params": params(dtype), "experts": True}, {"params": params(dtype, [(9,), (8, 64)]), "algorithm": "adamw"}],
        **options,
    )


@pytest.mark.parametrize("form", ["unscaled", "native"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_state_dicts(form: str, fmt: Format) -> None:
    optimizer = mixed(BF16, state_dtype=fmt.dtype, checkpoint_format=form)
    steps(optimizer, range(3))
    fresh = mixed(BF16, state_dtype=fmt.dtype)
    with torch.no_grad():
        for mine, other in zip(fresh.store.params, optimizer.store.params, strict=True):
            mine.copy_(other)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(optimizer, range(3, 5))
    steps(fresh, range(3, 5))
    assert all(map(same_bits, contents(optimizer), contents(fresh)))


def test_state_dicts_of_others() -> None:
    state_dict = FusedMuon(params(), experts=True, lr=0.5).state_dict()
    for other in (FusedAdam(params()), FusedLion(params())):
        with pytest.raises(ValueError, match="muon"):
            other.load_state_dict(copy.deepcopy(state_dict))
        with pytest.raises(ValueError, match="muon"):
            FusedMuon(params(), experts=True).load_state_dict(other.state_dict())
    theirs = params(F32, SHAPES[:MATRICES])
    reference = torch.optim.Muon(theirs, lr=0.01)
    steps(reference, range(2))
    optimizer = FusedMuon(params(F32, SHAPES[:MATRICES]))
    optimizer.load_state_dict(reference.state_dict())
    for mine, other in zip(optimizer.store.params, theirs, strict=True):
        assert torch.equal(optimizer.state[mine]["momentum_buffer"], reference.state[other]["momentum_buffer"])
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("saved_by", ["torch.save", "dcp"])
def test_torchs_checkpoints(saved_by: str, tmp_path: Path) -> None:
    """Both ways, and on from there as torch would."""
    model, theirs = (nn.ParameterDict(zip("abc", params(F32, SHAPES[:MATRICES]), strict=True)) for _ in range(2))
    reference = torch.optim.Muon(theirs.parameters(), lr=0.02, momentum=0.9)
    steps(reference, range(2))
    if saved_by == "dcp":
        state, optim = get_state_dict(theirs, reference)
        dcp.save({"model": state, "optimizer": optim}, checkpoint_id=tmp_path / "saved")
    else:
        torch.save({"model": theirs.state_dict(), "optimizer": reference.state_dict()}, tmp_path / "saved")
    model.load_state_dict(theirs.state_dict())
    optimizer = FusedMuon(model.parameters(), lr=0.5)
    report = load_optimizer_checkpoint(model, optimizer, tmp_path / "saved")
    assert report.parameters == MATRICES
    assert [optimizer.param_groups[0][key] for key in ("lr", "momentum")] == [0.02, 0.9]
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["momentum_buffer"], reference.state[other]["momentum_buffer"])
    back = torch.optim.Muon(params(F32, SHAPES[:MATRICES]))
    back.load_state_dict(optimizer.state_dict())
    for mine, other in zip(back.param_groups[0]["params"], theirs.parameters(), strict=True):
        assert torch.equal(back.state[mine]["momentum_buffer"], reference.state[other]["momentum_buffer"])
    steps(back, range(2, 3))


@pytest.mark.parametrize("layout", ["unscaled", "native", "safetensors"])
def test_converted_checkpoints(layout: Any, tmp_path: Path) -> None:
    """Of both algorithms; what is written again in the formats of the source is loaded bit for bit."""
    shapes = [*SHAPES, (9,), (8, 64)]
    names = "abcdef"
    model, fresh = (nn.ParameterDict(zip(names, params(BF16, shapes), strict=True)) for _ in range(2))

    def optimizer_of(model: nn.ParameterDict) -> FusedMuon:
        named = [*model.named_parameters()]
        return FusedMuon(
            [{"params": named[:4], "experts": True}, {"params": named[4:], "algorithm": "adamw"}], state_dtype="int8"
        )

    optimizer = optimizer_of(model)
    steps(optimizer, range(2))
    with Checkpointer(model, optimizer, tmp_path / "own") as checkpointer:
        checkpointer.save(2)
        checkpointer.wait()
        saved = checkpointer.path(2)
    report = inspect_checkpoint(saved)
    assert report["parameters"]["a"]["momentum_buffer"]["format"] == "int8"
    convert_checkpoint(saved, tmp_path / "converted", layout)
    fresh.load_state_dict(model.state_dict())
    loaded = optimizer_of(fresh)
    load_optimizer_checkpoint(fresh, loaded, tmp_path / "converted")
    if layout == "native":
        assert all(map(same_bits, contents(loaded), contents(optimizer)))
    for mine, other in zip(loaded.store.params, optimizer.store.params, strict=True):
        for name in optimizer.store.layouts[other].names:
            if name in optimizer.state[other]:
                assert same_bits(loaded.get_unscaled_state(mine, name), optimizer.get_unscaled_state(other, name))
    with pytest.raises(ValueError, match=r"torch\.optim\.Muon takes parameters with two dims only"):
        convert_checkpoint(saved, tmp_path / "torch", "torch")
    assert not (tmp_path / "torch").exists()


def test_clipping_and_scaled_gradients() -> None:
    """Both are in the first pass: the direction is the same, since its length is divided out."""
    plain, clipped, scaled = (
        FusedMuon(params(), experts=True, lr=0.01, momentum=0.0, ns_dtype="float32") for _ in range(3)
    )
    steps(plain, range(1))
    for i, param in enumerate(clipped.store.params):
        param.grad = values(tuple(param.shape), F32, "cpu", seed=i)
    clipped.clip_grad_norm_(1.0)
    clipped.step()
    assert all(torch.allclose(mine, other, atol=1e-5) for mine, other in zip(clipped.store.params, plain.store.params))
    buffers = [optimizer.state[optimizer.store.params[0]]["momentum_buffer"] for optimizer in (clipped, plain)]
    assert 0 < buffers[0].norm() < 0.1 * buffers[1].norm()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    for i, param in enumerate(scaled.store.params):
        param.grad = values(tuple(param.shape), F32, "cpu", seed=i) * 2.0**10
    scaler.step(scaled)
    scaler.update()
    assert all(map(same_bits, contents(scaled), contents(plain)))


def test_skipped_steps_change_nothing() -> None:
    optimizer = mixed(BF16, skip_nonfinite=True, momentum_dtype="int8")
    steps(optimizer, range(2))
    before = [tensor.clone() for tensor in contents(optimizer)]
    for param in optimizer.store.params:
        param.grad = torch.full_like(param, float("inf"))
    optimizer.step()
    assert all(map(same_bits, contents(optimizer), before)) and optimizer.skipped_steps == 1
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
