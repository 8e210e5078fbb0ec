"""Matrix products with quantized weights in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_optim.quantized import Float8CurrentScaling, Float8DelayedScaling, compute, elements, quantize_model_

BOTH = pytest.mark.parametrize("scaling", ["tensor", "row"])


@pytest.fixture
def fp8_device(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each device that torch._scaled_mm runs on. CPUs are slow at it, so they do not use it but here."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no GPU with FP8")
    if device == "cpu":
        monkeypatch.setattr(compute, "_has_fp8", lambda _: True)
    return device


def activations(*shape: int) -> Tensor:
    """Rows of very different sizes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x * torch.logspace(2, -2, shape[-2])[:, None].bfloat16()


def quantized(x: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of FP32 values, an element at a time as the recipes do it for weights."""
    absmax = x.float().abs().amax((1,) if scaling == "row" else (0, 1), keepdim=True)
    scale = (absmax / torch.tensor(448.0)).clamp_min(torch.finfo(torch.float32).tiny)
    return elements.float8_encode(x.float() / scale, None), scale


def linear(recipe: Float8CurrentScaling, device: str, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return quantize_model_(nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16).to(device), recipe)


def results(recipe: Float8CurrentScaling, x: Tensor, device: str, **options: Any) -> list[Tensor]:
    """The output, and the gradients of input, weight and bias."""
    layer = linear(recipe, device, **options)
    x = x.detach().to(device).requires_grad_()
    out = layer(x)
    out.backward(torch.ones_like(out))
    return [out.detach(), x.grad, *(param.grad for param in layer.parameters())]


@BOTH
def test_activations_are_quantized_as_weights_are(scaling: str, device: str) -> None:
    x = activations(40, 96)
    x[3] = 0.0
    x[5] *= 1e-38
    x[7] *= 1e34 if scaling == "row" else 1
    codes, scale = compute.quantize_activations(x.to(device), scaling)
    expected, expected_scale = quantized(x, scaling)
    assert torch.equal(scale.cpu(), expected_scale) and torch.equal(codes.view(torch.uint8).cpu(), expected)
    assert codes.float().abs().max() == 448


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(32, 64), (1, 64), (2, 16, 64)])
@BOTH
@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8DelayedScaling])
def test_products_in_fp8(
    kind: type[Float8CurrentScaling], scaling: str, shape: tuple[int, ...], bias: bool, fp8_device: str
) -> None:
    """Those of the quantized activations, and not of the activations; backward is that of decoded weights."""
    x = activations(*shape)
    fp8 = results(kind(compute="fp8", activation_scaling=scaling), x, fp8_device, bias=bias)
    plain = results(kind(), x, fp8_device, bias=bias)
    layer = linear(kind(), "cpu", bias=bias)
    codes, scale = quantized(x.flatten(0, -2), scaling)
    exact = (elements.float8_decode(codes) * scale).double() @ layer.weight.values().double().t()
    exact = exact + layer.bias.detach().double() if bias else exact
    largest = exact.abs().amax(1, keepdim=True)
    found, decoded = ((each[0].cpu().flatten(0, -2) - exact) / largest for each in (fp8, plain))
    assert found.abs().max() < 2**-8 + 2**-10  # BF16's rounding, and FP8 products may be added up with 14 bits
    assert found.norm() < 0.2 * decoded.norm()
    assert len(fp8) == 3 + bias
    for gradient, expected in zip(fp8[1:], plain[1:], strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@BOTH
def test_activations_that_are_not_finite_give_nan(scaling: str, value: float, fp8_device: str) -> None:
    layer = linear(Float8CurrentScaling(compute="fp8", activation_scaling=scaling), fp8_device)
    x = activations(32, 64).to(fp8_device)
    expected = layer(x)
    x[4, 9] = value
    found = layer(x)
    assert found[4].isnan().all()
    if scaling == "row":
        others = torch.arange(32) != 4
        assert torch.equal(found[others], expected[others])
    else:
        assert found.isnan().all()


@pytest.mark.parametrize("x", [
    torch.randn(7, 64), torch.randn(0, 64).bfloat16(), torch.randn(7, 64).bfloat16()[:, :40]
], ids=["FP32", "none", "columns"])  # fmt: skip
def test_products_that_fp8_cannot_do_are_decoded(x: Tensor, fp8_device: str) -> None:
    found = []
    for recipe in (Float8CurrentScaling(compute="fp8"), Float8CurrentScaling()):
        torch.manual_seed(0)
        layer = quantize_model_(nn.Linear(x.shape[1], 48, dtype=x.dtype), recipe).to(fp8_device)
        found.append(layer(x.to(fp8_device)))
    assert torch.equal(*found)


def test_activations_of_another_dtype_than_the_weight_raise(fp8_device: str) -> None:
    layer = linear(Float8CurrentScaling(compute="fp8"), fp8_device)
    wide = quantize_model_(nn.Linear(64, 48, device=fp8_device), Float8CurrentScaling(compute="fp8"))
    for each, x in ((layer, torch.zeros(16, 64)), (wide, torch.zeros(16, 64).bfloat16())):
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(x.to(fp8_device), each.weight.t())


def test_products_are_decoded_where_fp8_is_not_at_hand() -> None:
    x = torch.randn(7, 64).bfloat16()
    for actual, expected in zip(
        results(Float8CurrentScaling(compute="fp8"), x, "cpu"), results(Float8CurrentScaling(), x, "cpu"), strict=True
    ):
        assert torch.equal(actual, expected)


def test_compute_is_no_part_of_the_format() -> None:
    assert Float8CurrentScaling(compute="fp8") == Float8CurrentScaling()
    assert Float8DelayedScaling(compute="fp8") != Float8DelayedScaling(amax_history_len=3)
    with pytest.raises(ValueError, match="compute: expected 'dequantize' or 'fp8', got 'int8'"):
        Float8DelayedScaling(compute="int8")
    with pytest.raises(ValueError, match="activation_scaling: expected 'tensor' or 'row', got 'column'"):
        Float8CurrentScaling(activation_scaling="column")
