"""Linear layers that decode: what torch's do with the decoded weight, to the last bit, in fewer calls of the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Recipe,
    quantize_model_,
)
from product_cases import matrix

RECIPES: dict[str, Recipe] = {
    "one scale": Float8CurrentScaling(compute="decode"),
    "delayed": Float8DelayedScaling(),  # whose default decodes on CPUs
    "rows": Float8CurrentScaling(compute="decode", activation_scaling="row"),
    "blocks": Float8BlockScaling(compute="decode"),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(compute="decode"),
}
INPUTS, OUTPUTS = 256, 128


def layers_of(recipe: Recipe, device: str, dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> list[nn.Linear]:
    """A quantized layer, and a plain one with its decoded weight."""
    torch.manual_seed(0)
    plain = nn.Linear(INPUTS, OUTPUTS, bias, device=device, dtype=dtype)
    layer = quantize_model_(copy.deepcopy(plain), recipe, lambda *_: True, keep_initial=False)
    plain.weight = nn.Parameter(layer.weight.dequantize())
    return [layer, plain]


def activations(kind: str, device: str, dtype: torch.dtype) -> Tensor:
    x = matrix(24, INPUTS).to(device, dtype)
    made = {
        "row": x[0],
        "matrix": x,
        "batch": x.view(2, 3, 4, INPUTS),
        "transposed": x.t().contiguous().t(),
        "every other": torch.stack([x, x], 1)[:, 0],
        "permuted": x.view(4, 6, INPUTS).transpose(0, 1),
        "one row": x[:1],
        "none": x[:0],
    }
    return made[kind].detach().requires_grad_()


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    out = layer(x)
    trained = [param for param in (x, *layer.parameters()) if param.requires_grad]
    gradient = matrix(max(x.numel() // INPUTS, 1), OUTPUTS, seed=3).to(out)[: out.numel() // OUTPUTS].view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, trained, gradient)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["BF16", "FP32"])
@pytest.mark.parametrize("kind", ["row", "matrix", "batch", "transposed", "every other", "one row", "none"])
@pytest.mark.parametrize("name", RECIPES)
def test_results_are_those_of_the_decoded_weight(name: str, kind: str, dtype: torch.dtype, device: str) -> None:
    for bias in (True, False):
        layer, plain = layers_of(RECIPES[name], device, dtype, bias)
        x = activations(kind, device, dtype)
        found, expected = results(layer, x), results(plain, x)
        assert len(found) == len(expected) == 3 + bias
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape
        with torch.no_grad():
            assert torch.equal(layer(x), plain(x))
        with torch.inference_mode():
            assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)], ids=["BF16", "FP32"])
def test_batches_that_are_not_contiguous(dtype: torch.dtype, bound: float, device: str) -> None:
    """torch adds up in another order where gradients of these are wanted."""
    layer, plain = layers_of(RECIPES["one scale"], device, dtype)
    x = activations("permuted", device, dtype)
    for a, b in zip(results(layer, x), results(plain, x), strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * float(b.abs().max()))


@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "weight and input"])
def test_frozen_operands_have_no_gradients(frozen: str, device: str) -> None:
    layer, plain = layers_of(RECIPES["blocks"], device)
    x = activations("batch", device, torch.bfloat16)
    for each in (layer, plain):
        each.weight.requires_grad_("weight" not in frozen)
        each.bias.requires_grad_(frozen != "bias")
    x.requires_grad_("input" not in frozen)
    found, expected = results(layer, x), results(plain, x)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("frozen", ["none", "weight", "input"])
def test_only_what_gradients_need_is_kept(frozen: str, device: str) -> None:
    """Of a frozen weight, as beside LoRA's adapters, no activations; and never decoded values."""
    layer, _ = layers_of(RECIPES["one scale"], device, bias=False)
    layer.weight.requires_grad_(frozen != "weight")
    x = activations("matrix", device, torch.bfloat16).requires_grad_(frozen != "input")
    kept: list[str] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(type(t).__name__) or t, lambda t: t):
        layer(x)
    wanted = {"none": ["QuantizedTensor", "Tensor"], "weight": ["QuantizedTensor"], "input": ["Tensor"]}
    assert sorted("QuantizedTensor" if "Quantized" in name else "Tensor" for name in kept) == wanted[frozen]


class Operations(TorchDispatchMode):
    """Counts torch's operations, and those that get quantized tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.of_quantized = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all += 1
        self.of_quantized += any(isinstance(arg, QuantizedTensor) for arg in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", RECIPES)
def test_the_host_calls_no_operation_of_quantized_tensors(name: str, device: str) -> None:
    """Each of them takes longer than the decoding, and than a small layer on a GPU."""
    layer, _ = layers_of(RECIPES[name], device)
    x, gradient = activations("matrix", device, torch.bfloat16), matrix(24, OUTPUTS).to(device)
    with Operations() as of_training:
        layer(x).backward(gradient)
    with Operations() as of_evaluation, torch.no_grad():
        layer(x)
    assert of_training.all > of_evaluation.all > 0
    assert of_training.of_quantized <= 2 and of_evaluation.of_quantized == 0  # detached, to be kept or given a gradient


def test_outputs_may_be_changed_in_place(device: str) -> None:
    found = []
    for layer in layers_of(RECIPES["blocks"], device):
        x = activations("batch", device, torch.bfloat16)
        layer(x).relu_().sum().backward()
        found.append([x.grad, layer.weight.grad, layer.bias.grad])
    assert all(map(torch.equal, *found))


def test_a_weight_that_changes_before_the_backward_pass_raises(device: str) -> None:
    layer, _ = layers_of(RECIPES["one scale"], device)
    out = layer(activations("matrix", device, torch.bfloat16))
    with torch.no_grad():
        layer.weight.copy_(torch.ones_like(layer.weight.dequantize()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
