"""Layers in FP16: their products in FP8 have FP16 results, where torch has such products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fused_optim.quantized import (
    GroupedLinear,
    QuantizedTensor,
    Recipe,
    quantize_model_,
)
from fused_optim.quantized.fp8 import casts, products
from fused_optim.quantized.fp8.usage import unsupported_reasons
from product_cases import RECIPES, Reference, matrix, results, sums

HALF = torch.float16
NAMES = [name for name in RECIPES if name not in ("mxfp8", "nvfp4")]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def recipe(name: str, device: str) -> Recipe:
    """The one of that name, if the device has its products, in FP16 too."""
    recipe, on = RECIPES[name], torch.device(device, 0)
    if products.device_unsupported_reason(on, recipe.products) is not None:
        pytest.skip("not on this GPU")
    if products.dtype_unsupported_reason(HALF, on, recipe.products) is not None:
        pytest.skip("not in FP16 on this GPU")
    return recipe


def layer_of(recipe: Recipe, device: str, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return quantize_model_(nn.Linear(256, 128, bias, dtype=HALF).to(device), recipe)


def operands() -> tuple[Tensor, Tensor]:
    return matrix(256, 256).half(), matrix(256, 128, seed=2).half()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_products_of_codes_and_of_values(name: str, recipe: Recipe, bias: bool, device: str) -> None:
    """Rounded to FP16's eleven bits, not to BF16's eight."""
    layer, (x, gradient) = layer_of(recipe, device, bias), operands()
    found, reference = results(layer, x, gradient), Reference(layer, recipe, x, gradient)
    of_values, bounds, magnitudes = reference.of_values(), reference.bounds(), sums(reference)
    adding_up = 2.0**-10 if device == "cuda" else 2.0**-20  # FP8 products may be added up with 14 bits
    for key, exact in reference.of_codes().items():
        rounds = name == "block (1, 128)" and key == "input"  # decoded weights are rounded to FP16
        arithmetic = 2.0**-11 * exact.abs() + max(adding_up, 2.0**-11 * rounds) * magnitudes[key] + 2.0**-25
        assert found[key].dtype == HALF
        assert ((found[key].double() - exact).abs() <= arithmetic).all(), key
        assert ((found[key].double() - of_values[key]).abs() <= bounds[key] + arithmetic).all(), key
    if bias:
        assert torch.equal(found["bias"], gradient.sum(0))


@pytest.mark.parametrize("name", ["tensor", "delayed", "row", "block"])
def test_autocast(name: str, recipe: Recipe, device: str) -> None:
    """FP32 weights compute as FP16 ones do, and get FP32 gradients."""
    torch.manual_seed(0)
    layer = quantize_model_(nn.Linear(256, 128).to(device), recipe)
    x, gradient = (each.to(device) for each in operands())
    leaf = x.float().requires_grad_()
    with torch.autocast(device, HALF):
        out = layer(leaf)
        assert not any(why and "float16" in why for why in unsupported_reasons(layer.weight).values())
    out.backward(gradient)
    assert out.dtype == HALF and layer.weight.grad.dtype == leaf.grad.dtype == torch.float32
    same = layer_of(recipe, device)
    same.weight.data = QuantizedTensor(layer.weight.components, recipe, (128, 256), HALF)
    same.bias.data = layer.bias.data.half()
    expected = results(same, x, gradient)
    found = {"output": out, "input": leaf.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    for key, value in found.items():
        assert torch.equal(value.detach().half().cpu(), expected[key]), key


def test_gradients_that_overflow_are_not_hidden(device: str) -> None:
    """A loss scaler looks for them."""
    if products.device_unsupported_reason(torch.device(device, 0), RECIPES["tensor"].products) is not None:
        pytest.skip("no GPU with FP8")
    layer, (x, gradient) = layer_of(RECIPES["tensor"], device), operands()
    gradient[3] = 6e4
    found = results(layer, x * 100, gradient)
    assert found["weight"].isinf().any() and not found["output"].isinf().any()


def reasons() -> Iterator[tuple[str, Recipe, torch.dtype, torch.device, str | None]]:
    tensor, row = RECIPES["tensor"], RECIPES["row"]
    yield "BF16", row, torch.bfloat16, CUDA, None
    yield "one scale", tensor, HALF, CUDA, None
    yield "blocks", RECIPES["block"], HALF, CUDA, None
    yield "rows", row, HALF, CUDA, "scales per row for compute capability 9.x and CUDA 12.9"
    yield "rows on CPUs", row, HALF, torch.device("cpu"), None
    yield "MXFP8", RECIPES["mxfp8"], HALF, CUDA, "products in MXFP8 have outputs in bfloat16 alone"
    yield "FP32", tensor, torch.float32, CUDA, "mixed precision to bfloat16 or float16"


@pytest.mark.parametrize(("recipe", "dtype", "on", "expected"), [pytest.param(*row, id=id) for id, *row in reasons()])
def test_reasons_are_named(
    recipe: Recipe, dtype: torch.dtype, on: torch.device, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_capability", lambda device: (8, 9))
    products._has_half_of_rows.cache_clear()
    try:
        why = products.dtype_unsupported_reason(dtype, on, recipe.products)
    finally:
        products._has_half_of_rows.cache_clear()
    assert why is None if expected is None else expected in why


@pytest.mark.parametrize(("capability", "cuda", "runs"), [
    ((9, 0), "13.0", True), ((9, 0), "12.9", True), ((9, 0), "12.6", False), ((10, 0), "13.0", False),
])  # fmt: skip
def test_scales_per_row_in_half_are_those_of_cublas(
    capability: tuple[int, int], cuda: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert products._has_half_of_rows.__wrapped__(CUDA) == runs


def test_experts_are_decoded(device: str) -> None:
    torch.manual_seed(0)
    layer = quantize_model_(GroupedLinear(2, 128, 128, device, HALF), RECIPES["tensor"], lambda *_: True)
    assert "grouped products in FP8 have outputs in bfloat16 alone" in str(unsupported_reasons(layer.weight)["output"])


def test_casts_of_other_dtypes_are_those_of_pytorch() -> None:
    """FP32 goes to no engine."""
    x = matrix(32, 64).float()
    assert casts.engine_for(x, *casts.VALUES) is None
    codes = casts.cast(x, torch.float8_e4m3fn, "tensor", False)
    assert torch.equal(codes.data.float(), casts._cast_tensor(x, None, torch.float8_e4m3fn)[0].float())
