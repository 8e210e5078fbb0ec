"""``mm`` and ``addmm`` with quantized weights, wherever torch calls them: forward products in FP8, all else decoded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fused_optim.quantized import Float8BlockScaling, Float8CurrentScaling, Float8DelayedScaling, quantize_model_
from fused_optim.quantized.fp8 import casts, products
from fused_optim.quantized.fp8.linear import QuantizedLinear
from product_cases import RECIPES, layer_of, matrix


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["tensor", "delayed", "row"])
def test_forward_products_are_those_of_layers(name: str, bias: bool, fp8_device: str) -> None:
    layer = layer_of(RECIPES[name], fp8_device, bias=bias)
    x = matrix(32, 256).to(fp8_device).requires_grad_()
    out = nn.functional.linear(x, layer.weight, layer.bias)
    assert type(layer) is QuantizedLinear and torch.equal(out, layer(x))
    direct = torch.mm(x, layer.weight.t()) if layer.bias is None else torch.addmm(layer.bias, x, layer.weight.t())
    assert torch.equal(out, direct)
    decoded = nn.functional.linear(x, layer.weight.dequantize(), layer.bias)
    assert not torch.equal(out, decoded)
    gradient = matrix(32, 128, seed=2).to(fp8_device)
    (found,) = torch.autograd.grad(out, x, gradient)
    assert torch.equal(found, gradient @ layer.weight.dequantize())


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


def test_weights_that_are_no_transposed_view_are_decoded(fp8_device: str) -> None:
    """``x @ weight`` is no linear layer's output."""
    weight = layer_of(RECIPES["tensor"], fp8_device).weight
    x = matrix(32, 128).to(fp8_device)
    assert torch.equal(x @ weight, x @ weight.dequantize())


def test_activations_of_another_dtype_than_the_weight_raise(fp8_device: str) -> None:
    layer = layer_of(RECIPES["tensor"], fp8_device)
    wide = quantize_model_(nn.Linear(256, 48, device=fp8_device), Float8CurrentScaling(compute="fp8"))
    for each, x in ((layer, torch.zeros(16, 256)), (wide, torch.zeros(16, 256).bfloat16())):
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(x.to(fp8_device), each.weight.t())
        with pytest.raises(RuntimeError, match="dtype"):
            each(x.to(fp8_device))


def test_products_are_decoded_where_fp8_is_not_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "device_unsupported_reason", lambda *_: "none here")
    products._known_products_in_fp8.cache_clear()
    monkeypatch.setattr(casts, "cast", None)
    x = matrix(32, 256)
    fp8, decoded = (layer_of(recipe, "cpu") for recipe in (RECIPES["tensor"], Float8CurrentScaling()))
    assert torch.equal(fp8(x), decoded(x))
    products._known_products_in_fp8.cache_clear()


@pytest.mark.parametrize("capability, scaling, text", [
    ((8, 6), "tensor", "8.9, this GPU has 8.6"),
    ((8, 9), "tensor", None),
    ((8, 9), "block", "9.x, this GPU has 8.9"),
    ((10, 0), "block", "9.x, this GPU has 10.0"),
    ((9, 0), "block", None),
])  # fmt: skip
def test_what_gpus_lack_is_named(
    capability: tuple[int, int], scaling: str, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_capability", lambda _: capability)
    found = products.device_unsupported_reason(torch.device("cuda", 0), RECIPES[scaling].products)
    assert found is None if text is None else text in found
    assert "mps" in products.device_unsupported_reason(torch.device("mps"), RECIPES[scaling].products)


def test_compute_is_no_part_of_the_format() -> None:
    assert Float8CurrentScaling(compute="fp8") == Float8CurrentScaling()
    assert Float8CurrentScaling(activation_scaling="delayed", fast_gradients=True) == Float8CurrentScaling()
    assert Float8BlockScaling(activation_tiles=True) == Float8BlockScaling()
    assert Float8DelayedScaling(compute="fp8") != Float8DelayedScaling(amax_history_len=3)
    with pytest.raises(ValueError, match="activation_scaling: expected 'tensor' or 'row' or 'delayed', got 'column'"):
        Float8CurrentScaling(activation_scaling="column")
