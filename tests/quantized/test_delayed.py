"""Delayed scales of activations and gradients, and the other options of FP8 products that trade exactness for time."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fused_optim.quantized import Float8BlockScaling, Float8CurrentScaling, Float8DelayedScaling, quantize_model_
from fused_optim.quantized.fp8 import products
from fused_optim.quantized.fp8.delayed import HISTORY
from product_cases import HALF_STEPS, layer_of, matrix, results

DELAYED = Float8CurrentScaling(compute="fp8", activation_scaling="delayed")
CURRENT = Float8CurrentScaling(compute="fp8")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


def codes_of(x: Tensor, absmax: float, dtype: torch.dtype) -> Tensor:
    """What the codes of a matrix stand for under the scale of ``absmax``, in float64."""
    largest = HALF_STEPS[dtype][2]
    scale = torch.tensor(absmax) / torch.tensor(largest)
    return (x.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype).double() * scale.double()


@pytest.mark.parametrize("recipe", [DELAYED, Float8DelayedScaling(compute="fp8", activation_scaling="delayed")])
def test_the_first_pass_measures(recipe: Float8CurrentScaling, fp8_device: str) -> None:
    x, gradient = matrix(256, 256), matrix(256, 128, seed=2)
    current = layer_of(type(recipe)(compute="fp8"), fp8_device)
    assert_equal(results(layer_of(recipe, fp8_device), x, gradient), results(current, x, gradient))


def test_scales_are_those_of_earlier_passes(fp8_device: str) -> None:
    """What is larger saturates, and counts from the next pass on."""
    layer, x, gradient = layer_of(DELAYED, fp8_device, bias=False), matrix(256, 256), matrix(256, 128, seed=2)
    weight = layer.weight.values().cpu().double()
    seen = 0.0, 0.0
    for factor in (1.0, 4.0, 0.5, 8.0):
        now = x * factor, gradient / factor
        found = results(layer, *now)
        largest = [float(each.abs().max()) for each in now]
        absmaxes = [old or new for old, new in zip(seen, largest, strict=True)]
        a = codes_of(now[0], absmaxes[0], torch.float8_e4m3fn)
        b = codes_of(now[1], absmaxes[1], torch.float8_e5m2)
        exact = {"output": (a, weight.t()), "input": (b, weight), "weight": (b.t(), a)}
        for key, (first, second) in exact.items():
            bound = 2.0**-8 * (first @ second).abs() + 2.0**-10 * (first.abs() @ second.abs())
            assert ((found[key].double() - first @ second).abs() <= bound).all(), (factor, key)
        seen = tuple(max(old, new) for old, new in zip(seen, largest, strict=True))
    assert layer.activation_history[1:5].tolist() == [float(x.abs().max()) * f for f in (8.0, 0.5, 4.0, 1.0)]


def test_an_outlier_is_forgotten_after_as_many_passes_as_a_history_has() -> None:
    layer, x, gradient = layer_of(DELAYED, "cpu"), matrix(32, 256), matrix(32, 128, seed=2)
    results(layer, x * 64, gradient)
    for _ in range(HISTORY):
        results(layer, x, gradient)
    assert_equal(results(layer, x, gradient), results(layer_of(CURRENT, "cpu"), x, gradient))


def test_the_scale_of_zeros_is_one() -> None:
    layer, x, gradient = layer_of(DELAYED, "cpu"), matrix(32, 256), matrix(32, 128, seed=2)
    results(layer, x, torch.zeros_like(gradient))
    found = results(layer, x, gradient)["input"].double()
    exact = gradient.to(torch.float8_e5m2).double() @ layer.weight.values().double()
    assert (found - exact).norm() < 2.0**-8 * exact.norm()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_all_nan_and_is_not_remembered(value: float, fp8_device: str) -> None:
    layer, x, gradient = layer_of(DELAYED, fp8_device, bias=False), matrix(256, 256), matrix(256, 128, seed=2)
    results(layer, x, gradient)
    expected = layer.activation_history.cpu(), layer.gradient_history.cpu()
    bad_x, bad_gradient = x.clone(), gradient.clone()
    bad_x[3, 5] = bad_gradient[7, 9] = value
    found = results(layer, bad_x, bad_gradient)
    assert all(each.isnan().all() for each in found.values())
    for before, after in zip(expected, (layer.activation_history.cpu(), layer.gradient_history.cpu()), strict=True):
        assert after[0] == before[0] and after[1] == after[2] == before[1]


def test_passes_that_do_not_train_measure_and_leave_histories_alone() -> None:
    layer, current, x = layer_of(DELAYED, "cpu"), layer_of(CURRENT, "cpu"), matrix(32, 256)
    results(layer, x, matrix(32, 128, seed=2))
    before = layer.activation_history.clone()
    with torch.no_grad():
        assert torch.equal(layer(x * 9), current(x * 9))
    layer.eval()
    assert torch.equal(layer((x * 9).requires_grad_()), current(x * 9))
    assert torch.equal(layer.activation_history, before)


@pytest.mark.parametrize("restart", ["load", "to_empty"])
def test_histories_are_not_saved_and_begin_again(restart: str) -> None:
    layer, current, x, gradient = (
        layer_of(DELAYED, "cpu"),
        layer_of(CURRENT, "cpu"),
        matrix(32, 256),
        matrix(32, 128, 2),
    )
    assert layer.state_dict().keys() == current.state_dict().keys()
    results(layer, x, gradient)
    if restart == "to_empty":
        layer = layer.to_empty(device="cpu")
    layer.load_state_dict(current.state_dict())
    assert_equal(results(layer, x / 64, gradient / 64), results(current, x / 64, gradient / 64))


def test_copies_and_pickles_have_their_own_histories() -> None:
    layer, x, gradient = layer_of(DELAYED, "cpu"), matrix(32, 256), matrix(32, 128, seed=2)
    results(layer, x, gradient)
    copies = [copy.deepcopy(layer), pickle.load(io.BytesIO(pickle.dumps(layer)))]
    expected = results(layer, x * 4, gradient)
    for each in copies:
        assert each.activation_history[2] == 0
        assert_equal(results(each, x * 4, gradient), expected)


def test_small_gradients_survive_the_first_pass_with_recomputation() -> None:
    layer, x = layer_of(DELAYED, "cpu"), matrix(32, 256).requires_grad_()
    gradient = matrix(32, 128, seed=2) * 1e-9
    expected = results(layer_of(CURRENT, "cpu"), x, gradient)
    checkpoint(layer, x, use_reentrant=False).backward(gradient)
    assert torch.equal(x.grad, expected["input"]) and torch.equal(layer.weight.grad, expected["weight"])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(128, 256)
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def gated() -> nn.Module:
    torch.manual_seed(0)
    return quantize_model_(Gated().bfloat16(), DELAYED, keep_initial=False)


@pytest.mark.long
@pytest.mark.usefixtures("nothing_compiled")
def test_graphs_compute_as_eager_mode_does() -> None:
    """Bit for bit where nothing is fused; also layers that share their activations. One graph more than the first."""
    eager, compiled = gated(), gated()
    counter = CompileCounterWithBackend("aot_eager")
    compiled.compile(backend=counter, fullgraph=True)
    for factor in (1.0, 4.0, 0.25, 2.0):
        x, gradient = matrix(128, 128) * factor, matrix(128, 128, 2) / factor
        assert_equal(results(compiled, x, gradient), results(eager, x, gradient))
    for (name, a), (_, b) in zip(eager.named_buffers(), compiled.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(eager.gate.activation_history, eager.up.activation_history)
    assert counter.frame_count == 2


# --- other options ------------------------------------------------------------------------------------------------


def test_tiles_of_activations_in_weight_gradients(fp8_device: str) -> None:
    recipe = Float8BlockScaling(compute="fp8", activation_tiles=True)
    if products.device_unsupported_reason(torch.device(fp8_device, 0), recipe.products) is not None:
        pytest.skip("not on this GPU")
    layer, blocks = (layer_of(each, fp8_device, 384) for each in (recipe, Float8BlockScaling(compute="fp8")))
    x, gradient = matrix(256, 384), matrix(256, 128, seed=2)
    found, others = results(layer, x, gradient), results(blocks, x, gradient)
    largest = HALF_STEPS[torch.float8_e4m3fn][2]
    of_tiles = x.float().view(2, 128, 3, 128).abs().amax((1, 3)) / torch.tensor(largest)
    scale = of_tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)
    a = (x.float() * (1.0 / scale)).to(torch.float8_e4m3fn).double() * scale.double()
    blocks_of_rows = gradient.float().view(2, 128, 128).abs().amax(1) / torch.tensor(largest)
    scale = blocks_of_rows.repeat_interleave(128, 0)
    b = (gradient.float() * (1.0 / scale)).to(torch.float8_e4m3fn).double() * scale.double()
    bound = 2.0**-8 * (b.t() @ a).abs() + 2.0**-10 * (b.t().abs() @ a.abs())
    assert ((found["weight"].double() - b.t() @ a).abs() <= bound).all()
    exact = gradient.double().t() @ x.double()
    errors = [float((each["weight"].double() - exact).norm() / exact.norm()) for each in (found, others)]
    assert not torch.equal(found.pop("weight"), others.pop("weight"))
    assert errors[0] < 1.1 * errors[1]
    assert_equal(found, others)


@pytest.mark.parametrize("fast", [False, True])
def test_fast_gradients(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What products are told; CPUs add up in FP32."""
    told = []
    product = products.product
    monkeypatch.setattr(
        products, "product", lambda *args, fast=False, **options: told.append(fast) or product(*args, **options)
    )
    layer = layer_of(Float8CurrentScaling(compute="fp8", fast_gradients=fast), "cpu")
    assert_equal(
        results(layer, matrix(32, 256), matrix(32, 128, seed=2)),
        results(layer_of(CURRENT, "cpu"), matrix(32, 256), matrix(32, 128, seed=2)),
    )
    assert told == [True, fast, fast, True, False, False]
