"""RMSNorm cast to FP8 where it is computed, alone and as ``rms_norm_linear`` and ``swiglu_mlp`` have it."""

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
    rms_norm_linear,
    swiglu_mlp,
)
from fused_optim.quantized.compute import casts, rms_norm
from fused_optim.quantized.recipes import ProductFormat
from product_cases import BACKENDS, matrix

RECIPES: dict[str, Recipe] = {
    "one scale": Float8CurrentScaling(compute="fp8"),
    "delayed": Float8DelayedScaling(compute="fp8", activation_scaling="delayed", fast_gradients=True),
    "rows": Float8CurrentScaling(compute="fp8", activation_scaling="row", weight_gradients="fp8"),
    "blocks": Float8BlockScaling(compute="fp8"),
    "blocks, tiles": Float8BlockScaling(compute="fp8", activation_tiles=True, power_of_two=True),
    "weights kept": Float8CurrentScaling(compute="fp8", keep_weights=True),
}
NAMES = pytest.mark.parametrize("name", RECIPES)
FORMATS: dict[str, ProductFormat] = {name: recipe.products for name, recipe in RECIPES.items() if recipe.products}
ROWS, INPUTS, HIDDEN = 256, 128, 384
EPS = 1e-5


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each fused forward pass."""
    calls: list[int] = []
    cast_normed = rms_norm.cast_normed

    def counted(*args: Any) -> Any:
        calls.append(1)
        return cast_normed(*args)

    monkeypatch.setattr(rms_norm, "cast_normed", counted)
    return calls


# --- values and codes -------------------------------------------------------------------------------------------------


def operands(rows: int, columns: int, gradients: int, device: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    x, *of_results = (matrix(rows, columns, seed).to(device) for seed in range(1 + gradients))
    return x, 1.0 + 0.25 * matrix(1, columns, 9)[0].to(device), of_results


SIZES = pytest.mark.parametrize(
    ("rows", "columns"), [(256, 384), (16, 16), (400, 48), (1040, 272), (16, 16384), (528, 4096)]
)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("beside", [False, True])
@SIZES
def test_gradients_are_those_of_the_formula(rows: int, columns: int, count: int, beside: bool, device: str) -> None:
    x, weight, incoming = operands(rows, columns, count, device)
    addend = matrix(rows, columns, 8).to(device) if beside else None
    rstd = rms_norm.rstd_of(x, EPS)
    exact, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    nn.functional.rms_norm(exact, (columns,), exact_weight, EPS).backward(sum(each.double() for each in incoming))
    expected = exact.grad if addend is None else exact.grad + addend.double()
    padded = *incoming, *[None] * (rms_norm.MOST_GRADIENTS - count)
    of_x, of_weight = rms_norm.differentiate(x, weight, rstd, *padded, addend)
    assert of_x.dtype == of_weight.dtype == torch.bfloat16
    # Half a place of BF16, and FP32's errors of what is summed up.
    scale = exact.grad.abs().amax() + (0.0 if addend is None else addend.double().abs().amax())
    assert ((of_x.double() - expected).abs() <= expected.abs() * 2.0**-8 * 1.001 + scale * 2.0**-19).all()
    size = sum(each.double() for each in incoming).mul(x.double() * rstd.double()[:, None]).abs().sum(0)
    error = (of_weight.double() - exact_weight.grad).abs()
    assert (error <= exact_weight.grad.abs() * 2.0**-8 * 1.001 + size * 2.0**-19).all()


@pytest.mark.parametrize("name", FORMATS)
@SIZES
def test_codes_are_those_of_the_values(name: str, rows: int, columns: int, fp8_device: str) -> None:
    format = FORMATS[name]
    if format.scaling == "block" and (rows % 128 or columns % 128):
        pytest.skip("blocks of 128")
    is_large = rows * columns > 2**20  # what is special is in one place of it
    for special in (None, math.nan) if is_large else (None, 0.0, math.inf, math.nan, 3e38):
        check_codes(format, rows, columns, special, fp8_device)


def check_codes(format: ProductFormat, rows: int, columns: int, special: float | None, device: str) -> None:
    x, weight, _ = operands(rows, columns, 0, device)
    if special is not None:
        x[3, 5] = special
        x[7] = 0.0
    history = torch.zeros(17, device=device) if format.delayed else None
    for _ in range(2):
        before = None if history is None else history.clone()
        *found, rstd = rms_norm.cast_normed(x, weight, EPS, format, history)
        exact = (x.double().square().mean(1) + EPS).rsqrt()
        if special != 3e38:  # its square overflows FP32
            torch.testing.assert_close(rstd.double(), exact, rtol=1e-6, atol=0.0, equal_nan=True)
        value, dtype = rms_norm.normed(x, rstd, weight), torch.float8_e4m3fn
        if before is None:
            tiles = format.activation_tiles
            expected = casts.cast_both(value, dtype, format.scaling, format.power_of_two, tiles=tiles)
        else:
            data, transposed, scale = casts.cast_delayed(value, before, dtype, True, True)
            expected = casts.Codes(data, scale, "tensor"), casts.Codes(transposed, scale, "tensor")
            assert torch.equal(history, before)
        for one, other in zip(found, expected, strict=True):
            assert one.scaling == other.scaling and one.scale.stride() == other.scale.stride()
            assert torch.equal(one.scale.nan_to_num(-1.0), other.scale.nan_to_num(-1.0))
            assert torch.equal(one.data.float().nan_to_num(-1.0), other.data.float().nan_to_num(-1.0))


# --- layers -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """``fused``: by the functions that are tested; else as one writes it without them."""

    fused = True

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(INPUTS, eps=EPS), nn.RMSNorm(INPUTS)
        self.query, self.key, self.value = (nn.Linear(INPUTS, n, bias=False) for n in (INPUTS, INPUTS, 2 * INPUTS))
        self.gate, self.up = nn.Linear(INPUTS, HIDDEN, bias=False), nn.Linear(INPUTS, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, INPUTS, bias=False)
        for norm in (self.first_norm, self.second_norm):
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def attention(self, x: Tensor) -> Tensor:
        if self.fused:
            x, query, key, value = rms_norm_linear(x, self.first_norm, self.query, self.key, self.value)
        else:
            y = self.first_norm(x)
            query, key, value = self.query(y), self.key(y), self.value(y)
        return x + query * key.sigmoid() + value[..., :INPUTS] * value[..., INPUTS:]

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        if self.fused:
            return swiglu_mlp(x, self.gate, self.up, self.down, norm=self.second_norm, residual=True)
        y = self.second_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def block_of(recipe: Recipe | None, device: str = "cpu", fused: bool = True) -> Block:
    torch.manual_seed(0)
    block = Block().bfloat16().to(device)
    block.fused = fused
    return block if recipe is None else quantize_model_(block, recipe)


def results(block: Block, x: Tensor, gradient: Tensor, run: Any = None) -> dict[str, Tensor]:
    device = block.query.weight.device
    x = x.detach().to(device).requires_grad_()
    out = (block if run is None else run)(x)
    out.backward(gradient.to(device))
    found = {"output": out.detach(), "input": x.grad}
    found |= {name: param.grad for name, param in block.named_parameters() if param.grad is not None}
    found |= dict(block.named_buffers())
    found = {name: value.clone() for name, value in found.items() if value is not None}
    block.zero_grad()
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2.0**-3) -> None:
    """In all: a value that is rounded another way may change a code of E5M2 by a quarter, and what comes after it."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        exact = expected[name].float()
        assert (value.float() - exact).norm() <= tolerance * exact.norm(), name


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@NAMES
def test_results_are_those_of_the_modules(name: str, fp8_device: str, fused: list[int]) -> None:
    """But for roundings; histories included. The first pass begins delayed scales."""
    block, other = block_of(RECIPES[name], fp8_device), block_of(RECIPES[name], fp8_device, fused=False)
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    assert_equal(results(block, *pair), results(other, *pair)) if name == "delayed" else results(other, *pair)
    for factor in (1.0, 3.0, 0.25):
        scaled = pair[0] * factor, pair[1] * factor
        assert_close(results(block, *scaled), results(other, *scaled))
    assert len(fused) == 6


@NAMES
def test_input_gradients_are_summed_where_the_norm_s_is_computed(name: str, fp8_device: str, fused: list[int]) -> None:
    """Bit for bit: each layer is given its own copy of the norm, whose gradients meet in its formula."""
    block = block_of(RECIPES[name], fp8_device)
    layers = block.query, block.key, block.value
    x = matrix(ROWS, INPUTS).to(fp8_device)
    if name == "delayed":
        results(block, x, x)
    other = copy.deepcopy(block)
    incoming = [matrix(ROWS, layer.out_features, seed).to(fp8_device) for seed, layer in enumerate(layers)]
    addend, weight = matrix(ROWS, INPUTS, 7).to(fp8_device), block.first_norm.weight
    leaf = x.clone().requires_grad_()
    kept, *outputs = rms_norm_linear(leaf, block.first_norm, *layers)
    torch.autograd.backward((kept, *outputs), (addend, *incoming))

    *_, rstd = rms_norm.cast_normed(x, weight.detach(), EPS, FORMATS["one scale"], None)
    copies = [rms_norm.normed(x, rstd, weight.detach()).requires_grad_() for _ in layers]
    for layer, y, out, gradient in zip((other.query, other.key, other.value), copies, outputs, incoming, strict=True):
        expected = layer(y)
        assert torch.equal(out, expected)
        expected.backward(gradient)
    of_x, of_weight = rms_norm.differentiate(x, weight.detach(), rstd, *(y.grad for y in copies), addend)
    assert torch.equal(leaf.grad, of_x) and torch.equal(weight.grad, of_weight) and torch.equal(kept, x)
    for layer, copied in zip(layers, (other.query, other.key, other.value), strict=True):
        assert torch.equal(layer.weight.grad, copied.weight.grad)
    assert_equal(dict(block.named_buffers()), dict(other.named_buffers()))
    assert len(fused) == (3 if name == "delayed" else 2) - (name == "delayed")


def test_outputs_that_nobody_reads(fused: list[int]) -> None:
    block, x = block_of(RECIPES["one scale"]), matrix(ROWS, INPUTS)
    for read in ([1], [1, 3], [0, 2], [0]):
        leaf = x.clone().requires_grad_()
        found = rms_norm_linear(leaf, block.first_norm, block.query, block.key, block.value)
        torch.autograd.backward([found[i] for i in read], [torch.ones_like(found[i]) for i in read])
        weights = [layer.weight.grad is not None for layer in (block.query, block.key, block.value)]
        assert weights == [i in read for i in (1, 2, 3)]
        assert leaf.grad is not None and (block.first_norm.weight.grad is None) == (read == [0])
        block.zero_grad()
    assert len(fused) == 4


def test_input_without_gradient(fused: list[int]) -> None:
    block = block_of(RECIPES["rows"])
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    expected = results(block, *pair)
    block(pair[0]).backward(pair[1])
    assert torch.equal(block.first_norm.weight.grad, expected["first_norm.weight"]) and len(fused) == 4


def test_rows_may_have_more_dims(fused: list[int]) -> None:
    block = block_of(RECIPES["one scale"])
    x, gradient = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    expected = results(block, x, gradient)
    found = results(block, x.view(2, -1, INPUTS), gradient.view(2, -1, INPUTS))
    assert found["output"].shape == found["input"].shape == (2, ROWS // 2, INPUTS)
    assert_equal({name: value.reshape(expected[name].shape) for name, value in found.items()}, expected)
    assert len(fused) == 4


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_mlp_alone(residual: bool, normed: bool, fused: list[int]) -> None:
    block, x = block_of(RECIPES["one scale"]), matrix(ROWS, INPUTS)

    def run(x: Tensor) -> Tensor:
        norm = block.second_norm if normed else None
        return swiglu_mlp(x, block.gate, block.up, block.down, norm=norm, residual=residual)

    def as_written(x: Tensor) -> Tensor:
        y = block.second_norm(x) if normed else x
        out = block.down(nn.functional.silu(block.gate(y)) * block.up(y))
        return x + out if residual else out

    pair = x, matrix(ROWS, INPUTS, 2)
    assert_close(results(block, *pair, run), results(block, *pair, as_written))
    assert len(fused) == normed


def test_residual_connections_keep_their_dtype_under_autocast() -> None:
    torch.manual_seed(0)
    block = quantize_model_(Block(), RECIPES["one scale"])
    x = torch.randn(ROWS, INPUTS).requires_grad_()
    for norm in (None, block.second_norm):
        with torch.autocast("cpu", torch.bfloat16):
            out = swiglu_mlp(x, block.gate, block.up, block.down, norm=norm, residual=True)
        assert out.dtype == torch.float32
        out.sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.float32


def test_activations_and_gradients_may_lie_anywhere(fp8_device: str) -> None:
    """Parts of larger buffers, at addresses that engines do not take."""
    block = block_of(RECIPES["one scale"], fp8_device)
    x, *gradients = (matrix(ROWS, INPUTS, seed).to(fp8_device) for seed in range(3))

    def moved(values: Tensor) -> Tensor:
        return values.new_empty(values.numel() + 1)[1:].view(values.shape).copy_(values)

    def run(place_x: Any, place: Any) -> dict[str, Tensor]:
        leaf = place_x(x).requires_grad_()
        outputs = rms_norm_linear(leaf, block.first_norm, block.query)
        inputs = leaf, block.first_norm.weight, block.query.weight
        found = torch.autograd.grad(outputs, inputs, [place(each) for each in gradients])
        return {str(i): each for i, each in enumerate((*outputs, *found))}

    expected = run(Tensor.clone, Tensor.clone)
    for places in ((moved, Tensor.clone), (Tensor.clone, moved), (moved, moved)):
        assert_close(run(*places), expected)


# --- what is left to the modules --------------------------------------------------------------------------------------


def frozen_norm(block: Block) -> None:
    for norm in (block.first_norm, block.second_norm):
        norm.weight.requires_grad_(False)


def hooked_norm(block: Block) -> None:
    for norm in (block.first_norm, block.second_norm):
        norm.register_forward_hook(lambda *_: None)


def layer_norm(block: Block) -> None:
    block.first_norm, block.second_norm = nn.LayerNorm(INPUTS).bfloat16(), nn.LayerNorm(INPUTS).bfloat16()


def norm_without_weight(block: Block) -> None:
    block.first_norm = block.second_norm = nn.RMSNorm(INPUTS, elementwise_affine=False)


def frozen_layers(block: Block) -> None:
    block.key.weight.requires_grad_(False)
    block.up.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [frozen_norm, hooked_norm, layer_norm, norm_without_weight, frozen_layers])
def test_other_modules_are_called(change: Any, fused: list[int]) -> None:
    block, other = block_of(RECIPES["one scale"]), block_of(RECIPES["one scale"], fused=False)
    change(block), change(other)
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    assert_close(results(block, *pair), results(other, *pair))
    assert not fused


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), Float8CurrentScaling(compute="fp8")])
@pytest.mark.parametrize("rows", [ROWS, 19])
def test_layers_that_do_not_multiply_in_fp8_are_called(recipe: Recipe | None, rows: int, fused: list[int]) -> None:
    block, other = block_of(recipe), block_of(recipe, fused=False)
    pair = matrix(rows, INPUTS), matrix(rows, INPUTS, 2)
    if recipe is not None and recipe.products is not None and rows == ROWS:
        pytest.skip("these do")
    expected = results(other, *pair)
    assert_close(results(block, *pair), expected)
    with torch.no_grad():
        assert torch.equal(block(pair[0]), expected["output"])
    assert not fused


def test_four_layers_are_called(fused: list[int]) -> None:
    block, x = block_of(RECIPES["one scale"]), matrix(ROWS, INPUTS)
    found = rms_norm_linear(x, block.first_norm, block.query, block.key, block.value, block.gate)
    y = block.first_norm(x)
    for out, layer in zip(found[1:], (block.query, block.key, block.value, block.gate), strict=True):
        assert torch.equal(out, layer(y))
    assert not fused


def test_without_gradients_modules_are_called(fused: list[int]) -> None:
    block, other, x = (
        block_of(RECIPES["blocks"]),
        block_of(RECIPES["blocks"], fused=False),
        matrix(ROWS, INPUTS),
    )
    with torch.no_grad():
        assert torch.equal(block(x), other(x))
    with torch.inference_mode():
        block(x)
    assert not fused


def test_second_derivatives_raise() -> None:
    block, x = block_of(RECIPES["one scale"]), matrix(ROWS, INPUTS).requires_grad_()
    _, out = rms_norm_linear(x, block.first_norm, block.query)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_the_input_cannot_be_changed_in_place() -> None:
    block, x = block_of(RECIPES["one scale"]), matrix(ROWS, INPUTS)
    same, out = rms_norm_linear(x, block.first_norm, block.query)
    with pytest.raises(RuntimeError, match="modified inplace"):
        same += out


# --- around it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one scale", "delayed"])
def test_checkpointing_computes_it_again(name: str, fused: list[int]) -> None:
    block = block_of(RECIPES[name])
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    results(block, *pair)
    expected = results(block, *pair)
    fused.clear()
    found = results(block, *pair, lambda x: checkpoint(block, x, use_reentrant=False))
    for key in ("output", "input", "up.weight", "first_norm.weight"):
        assert torch.equal(found[key], expected[key])
    assert len(fused) == 4


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["one scale", "delayed", "rows", "blocks, tiles"])
def test_compiled(name: str, backend: str, fp8_device: str) -> None:
    """As one graph, with the same results in the second pass and later."""
    torch._dynamo.reset()
    block = block_of(RECIPES[name], fp8_device)
    other = copy.deepcopy(block)
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    for _ in range(3):
        expected, found = results(block, *pair), results(other, *pair, compiled)
    assert_close(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_for_any_number_of_rows(backend: str) -> None:
    """Also where a graph's result is its own input, and without gradients."""
    torch._dynamo.reset()
    block = block_of(RECIPES["one scale"])
    other = copy.deepcopy(block)
    norm, options = other.first_norm, {"fullgraph": True, "dynamic": True, "backend": backend}
    compiled = torch.compile(lambda x: rms_norm_linear(x, norm, other.query), **options)
    for rows in (256, 128):
        incoming, leaves = [matrix(rows, INPUTS, seed) for seed in (2, 3)], []
        for run in (lambda x: rms_norm_linear(x, block.first_norm, block.query), compiled):
            leaves.append(matrix(rows, INPUTS).requires_grad_())
            torch.autograd.backward(run(leaves[-1]), incoming)
        assert_close({"input": leaves[1].grad}, {"input": leaves[0].grad})
        assert_close(*({name: param.grad for name, param in each.named_parameters() if param.grad is not None}
                       for each in (other, block)))  # fmt: skip
    with torch.no_grad():
        assert len(compiled(leaves[0])) == 2


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_under_autocast(dtype: torch.dtype, fused: list[int]) -> None:
    """As one graph, of weights and activations in either dtype."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = quantize_model_(Block().to(dtype), RECIPES["one scale"])
    other = copy.deepcopy(block)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")

    def run(forward: Any) -> Any:
        def under_autocast(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return forward(x)

        return under_autocast

    pair = matrix(ROWS, INPUTS).to(dtype), matrix(ROWS, INPUTS, 2).to(dtype)
    assert_close(results(other, *pair, run(compiled)), results(block, *pair, run(block)))
    assert bool(fused) == (dtype == torch.bfloat16)


@pytest.mark.long
def test_blocks_share_what_is_compiled() -> None:
    torch._dynamo.reset()
    first, second = (block_of(RECIPES["one scale"]) for _ in range(2))
    for block in (first, second):
        block.compile(fullgraph=True, backend="aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=block is second):
            results(block, matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2))


def body_sharded(name: str) -> None:
    device = distributed.device()
    block = block_of(RECIPES[name], device.type)
    expected = copy.deepcopy(block)
    fully_shard(block)
    pair = matrix(ROWS, INPUTS), matrix(ROWS, INPUTS, 2)
    for _ in range(2):
        device_pair = tuple(each.to(device) for each in pair)
        x = device_pair[0].clone().requires_grad_()
        block.zero_grad()
        out = block(x)
        out.backward(device_pair[1])
        wanted = results(expected, *pair)
    assert torch.equal(out, wanted["output"]) and torch.equal(x.grad, wanted["input"])
    for key, param in block.named_parameters():
        assert torch.equal(param.grad.full_tensor(), wanted[key]), key


@pytest.mark.parametrize("name", ["one scale", "delayed", "weights kept"])
def test_gathered_weights(name: str) -> None:
    distributed.run(2, body_sharded, name)
