"""Quantized weights in inference mode, under autocast, in torch.func's transforms, and in second derivatives."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from fused_optim.quantized import (
    GroupedLinear,
    dequantize_model_,
    grouped_linear,
    quantize_model_,
)
from fused_optim.quantized.fp8.linear import QuantizedLinear
from pairwise import pairwise
from product_cases import RECIPES as PRODUCTS
from product_cases import matrix
from quantized_cases import RECIPES, values

ALL = {name: RECIPES[name] for name in ("current", "tiles", "mxfp8", "nvfp4")}
ALL |= {f"{name}, products": recipe for name, recipe in PRODUCTS.items()}


def in_fp8(recipe: str) -> bool:
    """Whether products on CPUs are."""
    return ALL[recipe].products is not None and not ALL[recipe].products.measured


EACH = pytest.mark.parametrize("recipe", ALL)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Subclass(nn.Linear):
    pass


def network(recipe: str, dtype: torch.dtype = torch.bfloat16, kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(kind(128, 256), nn.Tanh(), kind(256, 128, bias=False)).to(dtype)
    return quantize_model_(model, ALL[recipe])


def decoded(model: nn.Module) -> nn.Module:
    """The same model with plain weights of its decoded values."""
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        if hasattr(layer, "weight"):
            layer.weight.discard_high_precision_init()
    dequantize_model_(plain)
    assert all(type(param) is nn.Parameter for param in plain.parameters())
    return plain


# --- inference mode and autocast ----------------------------------------------------------------------------------


# Not all recipes x dtypes x kinds of layers x casts: each two of them.
@pytest.mark.parametrize(
    "recipe, dtype, kind, cast",
    pairwise([*ALL], [torch.float32, torch.bfloat16], [nn.Linear, Subclass], [None, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_inference_mode_computes_what_no_grad_does(
    recipe: str, dtype: torch.dtype, kind: type[nn.Linear], cast: torch.dtype | None
) -> None:
    model = network(recipe, dtype, kind)
    inputs = [matrix(32, 128).to(dtype), matrix(32, 128).to(dtype).view(2, 16, 128)]
    found: dict[Any, list[Tensor]] = {}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), torch.autocast("cpu", cast) if cast else contextlib.nullcontext():
            found[mode] = [model(x) for x in inputs]
            found[mode] += [nn.functional.linear(x, model[0].weight, model[0].bias) for x in inputs]
            found[mode] += [inputs[0] @ model[0].weight.t(), model[0].weight[:128].flatten(), model[0].weight * 2]
    for a, b in zip(*found.values(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    assert found[torch.no_grad][0].dtype == (cast or dtype)
    if not in_fp8(recipe) and not (dtype == torch.bfloat16 and cast == torch.float16):  # rounded twice
        with torch.no_grad(), torch.autocast("cpu", cast) if cast else contextlib.nullcontext():
            assert torch.equal(found[torch.inference_mode][0], decoded(model)(inputs[0]))


@pytest.mark.parametrize("recipe", ["mxfp8", "current", "tensor, products"])
def test_an_ordinary_evaluation_loop(recipe: str) -> None:
    """A training step under autocast, evaluation in inference mode, and another step."""
    model, x = network(recipe, torch.float32), values((32, 128), 2)
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().mean().backward()
        model.eval()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            evaluated = model(x)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model.train()(x), evaluated), step


def grouped(recipe: str | None, dtype: torch.dtype) -> GroupedLinear:
    torch.manual_seed(0)
    layer = GroupedLinear(3, 64, 96, dtype=dtype)
    return layer if recipe is None else quantize_model_(layer, ALL[recipe], lambda module, _: module is layer)


@pytest.mark.parametrize("recipe", [None, "current", "mxfp8", "nvfp4", "row, products", "tensor, products"])
@DTYPES
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_experts_follow_autocast(recipe: str | None, dtype: torch.dtype, given: torch.dtype) -> None:
    """As linear layers do: activations and weights of any dtype, gradients in theirs."""
    layer, offsets = grouped(recipe, dtype), torch.tensor([16, 16, 48], dtype=torch.int32)
    x, gradient = matrix(48, 64).to(given).requires_grad_(), matrix(48, 96, 2)
    like_it = copy.deepcopy(layer)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, offsets)
    out.backward(gradient)
    assert out.dtype == torch.bfloat16 and x.grad.dtype == given and layer.weight.grad.dtype == dtype
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x, offsets), out)
    # the same by casts that are written down
    cast = grouped(None, torch.bfloat16)
    cast.weight.data.copy_(layer.weight.detach() + 0)
    if recipe is None or not in_fp8(recipe):
        again = x.detach().bfloat16().requires_grad_()
        expected = cast(again, offsets)
        expected.backward(gradient)
        assert torch.equal(out, expected) and torch.equal(x.grad, again.grad.to(given))
        assert torch.equal(layer.weight.grad, cast.weight.grad.to(dtype))
    else:
        exact = cast(x.detach().bfloat16(), offsets).float()
        assert (out.float() - exact).norm() < 0.06 * exact.norm() and not torch.equal(out, exact.bfloat16())
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        plain = x.detach().to(dtype)
        assert grouped_linear(plain, like_it.weight, offsets).dtype == dtype


# --- torch.func ---------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (functional_call(model, params, (x,)) - y).float().square().mean()


@EACH
def test_per_sample_gradients_are_those_of_the_decoded_weights(recipe: str) -> None:
    model = network(recipe)
    plain = decoded(model)
    x, y = matrix(5, 128), matrix(5, 128, 3)
    found = []
    for each in (model, plain):
        params = {name: param.detach() for name, param in each.named_parameters()}
        of_each = vmap(
            grad(lambda given, a, b, each=each: loss_of(each, given, a[None], b[None])), in_dims=(None, 0, 0)
        )
        found.append(of_each(params, x, y))
    for name, expected in found[1].items():
        assert found[0][name].shape == (5, *plain.get_parameter(name).shape)
        assert_close(found[0][name], expected)


TRANSFORMED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "vmap": lambda model, x: vmap(model)(x),
    "vmap of rows": lambda model, x: vmap(lambda row: model(row[None])[0])(x),
    "grad of inputs": lambda model, x: grad(lambda a: model(a).float().square().sum())(x),
    "jacrev": lambda model, x: jacrev(lambda a: model(a).float().sum(0)[:3])(x),
    "second derivative": lambda model, x: grad(
        lambda a: grad(lambda b: model(b).float().square().sum())(a).float().square().sum()
    )(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,))[1],
}


@pytest.mark.parametrize("recipe, transform, train", pairwise([*ALL], [*TRANSFORMED], [True, False]))
def test_transforms_see_the_decoded_weights(recipe: str, transform: str, train: bool) -> None:
    model, x = network(recipe), matrix(32, 128)
    model.requires_grad_(train)
    with torch.set_grad_enabled(train):
        found, expected = (TRANSFORMED[transform](each, x) for each in (model, decoded(model)))
    assert_close(found, expected)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Products of the same values in BF16, which batches add up in another order."""
    assert type(found) is Tensor and found.shape == expected.shape and found.dtype == expected.dtype
    assert expected.float().norm() > 0
    assert (found.float() - expected.float()).norm() <= 2**-7 * expected.float().norm()


def test_delayed_scales_know_nothing_of_transforms() -> None:
    model = network("delayed, products")
    layer = quantize_model_(nn.Linear(128, 256).bfloat16(), type(ALL["tensor, products"])(
        compute="fp8", activation_scaling="delayed"))  # fmt: skip
    assert isinstance(layer, QuantizedLinear) and isinstance(model[0], QuantizedLinear)
    vmap(layer)(matrix(32, 128))
    assert layer.is_first_pass and not layer.activation_history.any()


# --- second derivatives -------------------------------------------------------------------------------------------


def penalty(model: nn.Module, x: Tensor, of: str) -> Tensor:
    out = model(x).float()
    wanted = {"input": [x], "weight": [model[0].weight], "both": [x, model[2].weight]}[of]
    first = torch.autograd.grad(out.sum() if of == "weight" else out.square().sum(), wanted, create_graph=True)
    return out.square().mean() + sum(each.float().square().sum() for each in first)


@EACH
@pytest.mark.parametrize("of", ["input", "weight", "both"])
def test_gradients_of_gradients_are_right_or_raise(recipe: str, of: str) -> None:
    """They raise where a layer's own gradients are products of codes: nothing is left out without a word."""
    model = network(recipe)
    plain = decoded(model)
    found = {}
    for name, each in (("quantized", model), ("plain", plain)):
        x = (matrix(32, 128) / 16).requires_grad_()
        if name == "quantized" and in_fp8(recipe):
            with pytest.raises(RuntimeError, match=r"FP8 .* differentiated again.* dequantize_model_\(model\)"):
                penalty(each, x, of)
            return
        loss = penalty(each, x, of)
        loss.backward()
        found[name] = [x.grad, *(param.grad for param in each.parameters())]
    for a, b in zip(*found.values(), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("recipe", [name for name in ALL if name.endswith("products")])
def test_functions_of_weights_have_second_derivatives(recipe: str) -> None:
    """Products that are no layer's have gradients of decoded weights, of any order."""
    model = network(recipe, kind=Subclass)
    with torch.no_grad():
        x = matrix(32, 128) / 16
    found = []
    for each in (model, decoded(model)):
        a = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(each[0](a).float().sum(), each[0].weight, create_graph=True)
        first.float().square().sum().backward()
        found.append(a.grad)
    assert_close(*found)


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jvp": lambda run, x: torch.autograd.functional.jvp(run, x, x)[1],
    "hessian": lambda run, x: torch.autograd.functional.hessian(lambda a: run(a).square().sum(), x[:1]),
    "hvp": lambda run, x: torch.autograd.functional.hvp(lambda a: run(a).square().sum(), x, x)[1],
    "jacobian": lambda run, x: torch.autograd.functional.jacobian(lambda a: run(a).sum(0)[:3], x, vectorize=True),
    "forward mode": lambda run, x: torch.autograd.functional.jacobian(
        lambda a: run(a).sum(0)[:3], x[:1, :4], vectorize=True, strategy="forward-mode"
    ),
    "linearize": lambda run, x: torch.func.linearize(run, x)[1](x),
}


@pytest.mark.parametrize("how", DERIVATIVES)
@pytest.mark.parametrize("recipe", ["mxfp8", "tensor, products", "row, products"])
def test_torchs_ways_to_more_derivatives_are_right_or_raise(recipe: str, how: str) -> None:
    """What is asked of autograd by other names: no derivative is taken for zero."""
    model, x = network(recipe), matrix(32, 128) / 16
    plain = decoded(model)

    def run_by(each: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda a: each(nn.functional.pad(a, (0, 128 - a.shape[1]))).float()

    expected = DERIVATIVES[how](run_by(plain), x)
    forward = how in ("forward mode", "linearize")
    if in_fp8(recipe) and not forward:
        with pytest.raises(RuntimeError, match=r"gradients of FP8 products .* dequantize_model_\(model\)"):
            DERIVATIVES[how](run_by(model), x)
    else:
        assert_close(DERIVATIVES[how](run_by(model), x), expected)


def test_experts_have_first_derivatives_alone() -> None:
    layer, offsets = grouped("row, products", torch.bfloat16), torch.tensor([16, 16, 48], dtype=torch.int32)
    x = matrix(48, 64).requires_grad_()
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.autograd.grad(layer(x, offsets).float().sum(), layer.weight, create_graph=True)
