"""``swiglu_mlp``: the bits of three layers with SwiGLU between them; and what it leaves to the layers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import distributed
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    Recipe,
    quantize_model_,
    swiglu_mlp,
)
from fused_optim.quantized.compute import casts, swiglu
from fused_optim.quantized.recipes import ProductFormat
from product_cases import BACKENDS, matrix

RECIPES: dict[str, Recipe] = {
    "one scale": Float8CurrentScaling(compute="fp8"),
    "one scale, E4M3 gradients": Float8CurrentScaling(compute="fp8", gradient_format="e4m3"),
    "delayed": Float8DelayedScaling(compute="fp8", activation_scaling="delayed", fast_gradients=True),
    "rows": Float8CurrentScaling(compute="fp8", activation_scaling="row", weight_gradients="fp8"),
    "blocks": Float8BlockScaling(compute="fp8"),
    "blocks, tiles": Float8BlockScaling(compute="fp8", activation_tiles=True),
    "blocks, powers of two": Float8BlockScaling(compute="fp8", power_of_two=True),
    "weights kept": Float8CurrentScaling(compute="fp8", keep_weights=True),
}
NAMES = pytest.mark.parametrize("name", RECIPES)
ROWS, INPUTS, HIDDEN = 256, 128, 384


class SwiGLU(torch.autograd.Function):
    """Rounded once, as the fused layers do."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu.hidden(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return swiglu.hidden_gradients(gradient, *ctx.saved_tensors)


class MLP(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(INPUTS, HIDDEN, bias=bias), nn.Linear(INPUTS, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, INPUTS, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu_mlp(x, self.gate, self.up, self.down)


def layer_by_layer(model: MLP, x: Tensor) -> Tensor:
    return model.down(SwiGLU.apply(model.gate(x), model.up(x)))


def as_written(model: MLP, x: Tensor) -> Tensor:
    return model.down(nn.functional.silu(model.gate(x)) * model.up(x))


def model_of(recipe: Recipe | None, device: str = "cpu", bias: bool = False) -> MLP:
    torch.manual_seed(0)
    model = MLP(bias).bfloat16().to(device)
    return model if recipe is None else quantize_model_(model, recipe)


def results(model: MLP, run: Any, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    x = x.detach().to(device).requires_grad_()
    out = run(x) if run is model else run(model, x)
    out.backward(gradient.to(device))
    assert x.grad is not None
    found = {"output": out.detach(), "input": x.grad}
    found |= {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    found |= dict(model.named_buffers())
    found = {name: value.clone() for name, value in found.items()}
    model.zero_grad()
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each fused forward pass."""
    calls: list[int] = []
    cast_hidden = swiglu.cast_hidden

    def counted(*args: Any) -> Any:
        calls.append(1)
        return cast_hidden(*args)

    monkeypatch.setattr(swiglu, "cast_hidden", counted)
    return calls


# --- values and codes -------------------------------------------------------------------------------------------------


def test_values_are_those_of_swiglu(device: str) -> None:
    gate, up, gradient = (matrix(64, 48, seed).to(device) for seed in (1, 2, 3))
    exact = [each.double().requires_grad_() for each in (gate, up)]
    out = nn.functional.silu(exact[0]) * exact[1]
    out.backward(gradient.double())
    found = swiglu.hidden(gate, up), *swiglu.hidden_gradients(gradient, gate, up)
    for value, reference in zip(found, (out.detach(), exact[0].grad, exact[1].grad), strict=True):
        assert value.dtype == torch.bfloat16
        # Half a place of BF16; near its zero, silu's derivative has the error of a difference in FP32.
        bound = reference.abs() * 2.0**-8 * 1.001 + gradient.double().abs() * up.double().abs() * 2.0**-21
        assert ((value.double() - reference).abs() <= bound).all()


FORMATS: dict[str, ProductFormat] = {name: recipe.products for name, recipe in RECIPES.items() if recipe.products}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (16, 16), (400, 48)])
def test_codes_are_those_of_the_values(name: str, rows: int, columns: int, fp8_device: str) -> None:
    format = FORMATS[name]
    if format.scaling == "block" and (rows % 128 or columns % 128):
        pytest.skip("blocks of 128")
    for special in (None, 0.0, math.inf, math.nan, -100.0):
        check_codes(format, rows, columns, special, fp8_device)


def check_codes(format: ProductFormat, rows: int, columns: int, special: float | None, fp8_device: str) -> None:
    gate, up, gradient = (matrix(rows, columns, seed).to(fp8_device) for seed in (1, 2, 3))
    if special is not None:
        gate[3, 5] = special
    histories = [torch.zeros(17, device=fp8_device) for _ in range(3)] if format.delayed else [None] * 3
    values = swiglu.hidden(gate, up), *swiglu.hidden_gradients(gradient, gate, up)
    tiles = format.activation_tiles, False, False
    for _ in range(2):
        before = [None if each is None else each.clone() for each in histories]
        found = [swiglu.cast_hidden(gate, up, format, histories[0])]
        found += swiglu.cast_hidden_gradients(gradient, gate, up, format, *histories[1:])
        for codes, value, history, dtype, moved, tiled in zip(
            found, values, before, (torch.float8_e4m3fn, *[format.gradients] * 2), histories, tiles, strict=True
        ):
            if history is None:
                expected = casts.cast_both(value, dtype, format.scaling, format.power_of_two, tiles=tiled)
            else:
                data, transposed, scale = casts.cast_delayed(value, history, dtype, True, True)
                expected = casts.Codes(data, scale, "tensor"), casts.Codes(transposed, scale, "tensor")
                assert torch.equal(history, moved)
            for one, other in zip(codes, expected, strict=True):
                assert one.scaling == other.scaling and one.scale.stride() == other.scale.stride()
                assert torch.equal(one.scale.nan_to_num(-1.0), other.scale.nan_to_num(-1.0))
                assert torch.equal(one.data.float().nan_to_num(-1.0), other.data.float().nan_to_num(-1.0))


# --- layers -----------------------------------------------------------------------------------------------------------


@NAMES
def test_results_are_those_of_the_layers(name: str, fp8_device: str, fused: list[int]) -> None:
    """Also with delayed scales, after the first pass, whose scales the layers measure; histories included."""
    model = model_of(RECIPES[name], fp8_device)
    other = copy.deepcopy(model)
    first = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    for each in (model, other):
        results(each, layer_by_layer, *first)
    assert not fused
    for factor in (1.0, 3.0, 0.25):
        pair = first[0] * factor, first[1] * factor
        assert_equal(results(model, model, *pair), results(other, layer_by_layer, *pair))
    assert len(fused) == 3


def test_rows_may_have_more_dims(fused: list[int]) -> None:
    model = model_of(RECIPES["one scale"])
    x, gradient = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    expected = results(model, model, x, gradient)
    found = results(model, model, x.view(2, ROWS // 2, INPUTS), gradient.view(2, ROWS // 2, INPUTS))
    assert found["output"].shape == found["input"].shape == (2, ROWS // 2, INPUTS)
    assert_equal({name: value.reshape(expected[name].shape) for name, value in found.items()}, expected)
    assert len(fused) == 2


def test_input_without_gradient(fused: list[int]) -> None:
    model = model_of(RECIPES["rows"])
    x, gradient = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    expected = results(model, model, x, gradient)
    model(x).backward(gradient)
    assert torch.equal(model.up.weight.grad, expected["up.weight"]) and len(fused) == 2


def frozen(model: MLP) -> None:
    model.up.weight.requires_grad_(False)


def hooked(model: MLP) -> None:
    model.gate.register_forward_hook(lambda *_: None)


def replaced(model: MLP) -> None:
    forward = model.gate.forward
    model.gate.forward = lambda x: forward(x)


def shared(model: MLP) -> None:
    model.up = model.gate


def kept_bf16(model: MLP) -> None:
    model.down = nn.Linear(HIDDEN, INPUTS, bias=False).bfloat16()


@pytest.mark.parametrize("change", [frozen, hooked, replaced, shared, kept_bf16])
def test_other_layers_are_called(change: Any, fused: list[int]) -> None:
    model = model_of(RECIPES["one scale"])
    change(model)
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    assert_equal(results(model, model, *pair), results(model, as_written, *pair))
    assert not fused


def test_hooks_of_all_modules_see_the_layers(fused: list[int]) -> None:
    model, seen = model_of(RECIPES["one scale"]), []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        model(matrix(ROWS, INPUTS))
    assert seen == [model.gate, model.up, model.down, model] and not fused


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_layers_of_which_one_does_not_train_keep_their_histories(name: str, fused: list[int]) -> None:
    """It measures; the other ones have delayed scales, which the first pass begins."""
    model = model_of(RECIPES["delayed"])
    other = copy.deepcopy(model)
    for step in range(3):
        for each in (model, other):
            each.get_submodule(name).train(step == 0)
        pair = matrix(ROWS, INPUTS, 2 * step), matrix(ROWS, INPUTS, 2 * step + 1)
        assert_equal(results(model, model, *pair), results(other, as_written, *pair))
    assert not fused


@pytest.mark.parametrize("former", [(0.01, 1.0), (1.0, 0.01), (0.01, 0.02), (4.0, 1.0)], ids=str)
def test_layers_with_different_histories_share_what_fits_both(
    former: tuple[float, float], fp8_device: str, fused: list[int]
) -> None:
    """``former``: the magnitudes that gate and up have seen. The bits are those of layers that have seen the larger."""
    model = model_of(RECIPES["delayed"], fp8_device)
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    results(model, layer_by_layer, *pair)
    largest = copy.deepcopy(model)
    model.gate.activation_history.mul_(former[0])
    model.up.activation_history.mul_(former[1])
    for layer in (largest.gate, largest.up):
        layer.activation_history.mul_(max(former))
    for _ in range(2):
        assert_equal(results(model, model, *pair), results(largest, layer_by_layer, *pair))
        assert torch.equal(model.gate.activation_history, model.up.activation_history)
    assert len(fused) == 2


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), RECIPES["one scale"]])
def test_layers_with_biases_and_layers_that_decode_are_called(recipe: Recipe | None, fused: list[int]) -> None:
    model = model_of(recipe, bias=recipe is not None and recipe.products == FORMATS["one scale"])
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    assert_equal(results(model, model, *pair), results(model, as_written, *pair))
    assert not fused


def test_without_gradients_layers_are_called(fused: list[int]) -> None:
    model, x = model_of(RECIPES["blocks"]), matrix(ROWS, INPUTS)
    with torch.no_grad():
        assert torch.equal(model(x), as_written(model, x))
    with torch.inference_mode():
        model(x)
    assert not fused


def test_rows_that_do_not_fit_are_left_to_the_layers(fused: list[int]) -> None:
    model = model_of(RECIPES["one scale"])
    pair = matrix(19, INPUTS), matrix(19, INPUTS, 2)
    assert_equal(results(model, model, *pair), results(model, as_written, *pair))
    assert not fused


def test_autocast(fused: list[int]) -> None:
    torch.manual_seed(0)
    model = quantize_model_(MLP(), RECIPES["one scale"])
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(ROWS, INPUTS))
    out.float().square().mean().backward()
    assert out.dtype == torch.bfloat16 and model.gate.weight.grad.dtype == torch.float32 and fused


def test_second_derivatives_raise() -> None:
    model, x = model_of(RECIPES["one scale"]), matrix(ROWS, INPUTS).requires_grad_()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("name", ["one scale", "delayed"])
def test_checkpointing_computes_it_again(name: str, fused: list[int]) -> None:
    model = model_of(RECIPES[name])
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    results(model, model, *pair)
    expected = results(model, model, *pair)
    fused.clear()
    found = results(model, lambda model, x: checkpoint(model, x, use_reentrant=False), *pair)
    for key in ("output", "input", "up.weight"):
        assert torch.equal(found[key], expected[key])
    assert len(fused) == 2


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["one scale", "delayed", "rows", "blocks, tiles"])
def test_compiled(name: str, backend: str, fp8_device: str) -> None:
    """As one graph, with the operators of SwiGLU in it, and the same results in the second pass and later."""
    torch._dynamo.reset()
    model = model_of(RECIPES[name], fp8_device)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    for _ in range(3):
        expected = results(model, model, *pair)
        found = results(other, lambda _, x: compiled(x), *pair)
    for key, value in found.items():
        exact = expected[key].float()
        assert (value.float() - exact).norm() <= 2.0**-6 * exact.norm(), key


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def body_sharded(name: str) -> None:
    device = distributed.device()
    model = model_of(RECIPES[name], device.type)
    expected = copy.deepcopy(model)
    fully_shard(model)
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    for _ in range(2):
        found, wanted = results(model, model, *pair), results(expected, expected, *pair)
    for key, value in found.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, wanted[key]), key


@pytest.mark.parametrize("name", ["one scale", "delayed", "weights kept"])
def test_gathered_weights(name: str) -> None:
    distributed.run(2, body_sharded, name)
