"""FP8 products of linear layers, forward and backward: what they compute, of what, and when they are left alone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_optim import FusedAdam
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Recipe,
    quantize_model_,
)
from fused_optim.quantized.fp8 import casts, products
from fused_optim.quantized.fp8.linear import QuantizedLinear
from product_cases import RECIPES, Reference, code_error, decoded_recipe, layer_of, matrix, results, rounded, sums

EACH = pytest.mark.parametrize("name", RECIPES)
DECODED = Float8CurrentScaling(compute="decode")
SCALINGS = pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])


@pytest.fixture
def recipe(name: str, fp8_device: str) -> Recipe:
    """The one of that name, if the device has its products."""
    recipe = RECIPES[name]
    if products.device_unsupported_reason(torch.device(fp8_device, 0), recipe.products) is not None:
        pytest.skip("not on this GPU")
    return recipe


# --- casts ------------------------------------------------------------------------------------------------------


@SCALINGS
@DTYPES
def test_codes_follow_from_the_formats(scaling: str, dtype: torch.dtype, device: str) -> None:
    x = matrix(64, 256)
    x[3] = 0.0
    x[5] *= 1e-30
    x[7] = torch.where(torch.arange(256) < 100, x[7] * 1e30, x[7]) if scaling != "tensor" else x[7]
    for power_of_two in (False, scaling == "block"):
        codes = casts.cast(x.to(device), dtype, scaling, power_of_two)
        values = codes.values().cpu().double()
        assert codes.data.dtype == dtype and codes.data.is_contiguous()
        assert torch.equal(values.float(), rounded(x, dtype, scaling, power_of_two).float())
        assert ((values - x.double()).abs() <= code_error(x, dtype, scaling, power_of_two)).all()
        assert codes.data.float().abs().max() == casts.LARGEST[dtype] or power_of_two


@SCALINGS
@DTYPES
def test_both_casts_are_those_of_the_matrix_and_of_its_transpose(scaling: str, dtype: torch.dtype, device: str) -> None:
    x = matrix(128, 384).to(device)
    rows, columns = casts.cast_both(x, dtype, scaling, False)
    for found, expected in ((rows, casts.cast(x, dtype, scaling, False)), (columns, x.t().contiguous())):
        wanted = casts.cast(expected, dtype, scaling, False) if isinstance(expected, Tensor) else expected
        assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert torch.equal(found.scale, wanted.scale) and found.scale.stride() == wanted.scale.stride()
    assert casts.cast_both(x, dtype, scaling, False, rows=False)[0] is None
    assert casts.cast_both(x, dtype, scaling, False, columns=False)[1] is None


def test_casts_are_those_of_weights(device: str) -> None:
    x = matrix(128, 256).to(device)
    for scaling, recipe in (("tensor", Float8CurrentScaling()), ("block", Float8BlockScaling((1, 128)))):
        weight = QuantizedTensor.from_values(x, recipe)
        codes = casts.cast(x, torch.float8_e4m3fn, scaling, False)
        assert torch.equal(codes.data.view(torch.uint8), weight.components["data"])
        assert torch.equal(codes.values(), weight.values())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@SCALINGS
@DTYPES
def test_what_is_not_finite_makes_all_nan_that_shares_its_scale(
    scaling: str, dtype: torch.dtype, value: float, device: str
) -> None:
    x = matrix(32, 256)
    x[4, 9] = value
    affected = torch.zeros(32, 256, dtype=torch.bool)
    affected[{"tensor": slice(None), "row": 4, "block": (4, slice(128))}[scaling]] = True
    for power_of_two in (False, True):
        found = casts.cast(x.to(device), dtype, scaling, power_of_two).values().cpu()
        assert torch.equal(found.isnan(), affected)
        assert found[~affected].isfinite().all()


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=["tensor", "tile"])
def test_transposes_of_weights_are_exact(recipe: Recipe, device: str) -> None:
    """Bit for bit: with one scale, or with one per 128 x 128 elements, a transpose needs no rounding."""
    weight = QuantizedTensor.from_values(matrix(384, 512).to(device), recipe)
    codes = casts.transposed(products.weight_codes(weight))
    assert codes.data.shape == (512, 384) and codes.data.is_contiguous()
    assert torch.equal(codes.data.t().contiguous().view(torch.uint8), weight.components["data"])
    assert torch.equal(codes.values(), weight.values().t())


def test_transposes_that_would_round_are_refused() -> None:
    for scaling in ("row", "block"):
        with pytest.raises(ValueError, match=f"scales per {scaling}"):
            casts.transposed(casts.cast(matrix(128, 128), torch.float8_e4m3fn, scaling, False))


# --- products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@EACH
def test_products_of_codes_and_of_values(name: str, recipe: Recipe, bias: bool, fp8_device: str) -> None:
    """The output and both gradients: those of the codes but for adding up and rounding; those of the values within what
    follows from the formats."""
    layer = layer_of(recipe, fp8_device, bias=bias)
    x, gradient = matrix(256, 256), matrix(256, 128, seed=2)
    found = results(layer, x, gradient)
    reference = Reference(layer, recipe, x, gradient)
    of_codes, of_values, bounds, magnitudes = (
        reference.of_codes(),
        reference.of_values(),
        reference.bounds(),
        sums(reference),
    )
    adding_up = 2.0**-10 if fp8_device == "cuda" else 2.0**-20  # FP8 products may be added up with 14 bits
    for key, exact in of_codes.items():
        if recipe.products.no_input_gradients and key == "input":
            adding_up = 2.0**-8  # decoded weights are rounded to BF16
        assert found[key].dtype == torch.bfloat16
        arithmetic = 2.0**-8 * exact.abs() + adding_up * magnitudes[key]
        assert ((found[key].double() - exact).abs() <= arithmetic).all(), key
        assert ((found[key].double() - of_values[key]).abs() <= bounds[key] + arithmetic).all(), key
    if bias:
        assert torch.equal(found["bias"], gradient.sum(0))


@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 3, 4, 256), (16, 256)])
@pytest.mark.parametrize("name", ["tensor", "row"])
def test_shapes_of_activations(name: str, recipe: Recipe, shape: tuple[int, ...], fp8_device: str) -> None:
    layer = layer_of(recipe, fp8_device)
    x = matrix(max(1, torch.Size(shape).numel() // 256), 256)
    flat = results(layer, x, torch.ones(x.shape[0], 128).bfloat16())
    found = results(layer, x.view(shape), torch.ones(*shape[:-1], 128).bfloat16())
    assert found["output"].shape == (*shape[:-1], 128) and found["input"].shape == shape
    for key, value in flat.items():
        assert torch.equal(found[key].view(value.shape), value)


def test_activations_that_are_not_contiguous(fp8_device: str) -> None:
    layer = layer_of(RECIPES["tensor"], fp8_device)
    x, gradient = matrix(256, 256), matrix(128, 256)
    expected = results(layer, x.t().contiguous(), gradient.t().contiguous())
    for key, value in results(layer, x.t(), gradient.t()).items():
        assert torch.equal(value, expected[key])


@pytest.mark.parametrize("name, sizes, expected", [
    ("tensor", (32, 64, 48), (True, True, True)),
    ("tensor", (7, 64, 48), (True, True, False)),
    ("tensor", (32, 63, 48), (False, False, False)),
    ("row, FP8 weight gradients", (8, 64, 48), (True, True, False)),
    ("block", (128, 128, 256), (True, True, True)),
    ("block", (64, 128, 256), (True, True, False)),
    ("block", (128, 128, 272), (True, False, True)),
    ("block", (128, 144, 256), (False, True, True)),
    ("block", (64, 144, 256), (False, True, False)),
    ("block", (2, 128, 256), (False, False, False)),
    ("mxfp8", (32, 64, 96), (True, True, True)),
    ("mxfp8", (16, 64, 48), (True, False, False)),
    ("mxfp8", (32, 80, 64), (False, True, True)),
    ("nvfp4", (7, 64, 48), (True, False, False)),
    ("nvfp4", (32, 48, 64), (False, False, False)),
])  # fmt: skip
def test_sizes_that_fp8_refuses_are_decoded(
    name: str, recipe: Recipe, sizes: tuple[int, int, int], expected: tuple[bool, ...], fp8_device: str
) -> None:
    """Product by product."""
    rows, inputs, outputs = sizes
    assert products.products_in_fp8(recipe, torch.device(fp8_device, 0), rows, (outputs, inputs)) == expected
    for product, runs in zip(products.PRODUCTS, expected, strict=True):
        assert (products.unsupported_reason(product, recipe, rows, (outputs, inputs)) is None) == runs
    fp8, decoded = (layer_of(each, fp8_device, inputs, outputs) for each in (recipe, decoded_recipe(name)))
    x, gradient = matrix(rows, inputs), matrix(rows, outputs, seed=2)
    found, others = results(fp8, x, gradient), results(decoded, x, gradient)
    for key, in_fp8 in zip(("output", "input", "weight"), expected, strict=True):
        assert torch.equal(found[key], others[key]) != in_fp8, key
    with torch.no_grad():
        assert torch.equal(fp8(x.to(fp8_device)).cpu(), found["output"])


def test_unsupported_reasons_are_named() -> None:
    recipe = RECIPES["block"]
    assert products.unsupported_reason("output", recipe, 128, (256, 144)) == "in_features = 144 is no multiple of 128"
    assert products.unsupported_reason("weight gradient", recipe, 100, (256, 256)) == "rows = 100 is no multiple of 128"
    assert "BF16" in products.unsupported_reason("weight gradient", RECIPES["row"], 128, (256, 256))
    assert "transposed" in products.unsupported_reason("input gradient", RECIPES["block (1, 128)"], 128, (256, 256))
    assert "FP4" in products.unsupported_reason("input gradient", RECIPES["nvfp4"], 128, (256, 256))
    assert products.unsupported_reason("output", DECODED, 128, (256, 256)) == "the recipe decodes"


@pytest.mark.parametrize("name, dtype", [("tensor", torch.float32), ("mxfp8", torch.float16)])
def test_other_dtypes_are_decoded(name: str, dtype: torch.dtype, device: str) -> None:
    found = []
    for recipe in (RECIPES[name], decoded_recipe(name)):
        torch.manual_seed(0)
        layer = quantize_model_(nn.Linear(64, 48, dtype=dtype).to(device), recipe)
        found.append(results(layer, torch.randn(32, 64).to(dtype), torch.ones(32, 48, dtype=dtype)))
    assert all(torch.equal(found[0][key], value) for key, value in found[1].items())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@EACH
def test_gradients_that_are_not_finite_are_not_hidden(name: str, recipe: Recipe, value: float, fp8_device: str) -> None:
    """A loss scaler looks for them in the gradients."""
    x, gradient = matrix(256, 256), matrix(256, 128, seed=2)
    gradient[5, 7] = value
    found = results(layer_of(recipe, fp8_device), x, gradient)
    assert not found["input"][5].isfinite().any() and not found["weight"][7].isfinite().any()


# --- around them --------------------------------------------------------------------------------------------------


def saved_bytes(layer: nn.Module, x: Tensor) -> dict[torch.dtype, int]:
    """What autograd keeps of a forward pass, but for quantized weights."""
    kept: dict[torch.dtype, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, QuantizedTensor):
            kept[tensor.dtype] = kept.get(tensor.dtype, 0) + tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return kept


@EACH
def test_what_is_saved_for_backward_is_fp8(name: str, recipe: Recipe, fp8_device: str) -> None:
    layer, x = layer_of(recipe, fp8_device), matrix(256, 256).to(fp8_device)
    if name in ("row", "nvfp4"):
        assert saved_bytes(layer, x) == {torch.bfloat16: 2 * x.numel()}
        return
    if name == "mxfp8":
        assert saved_bytes(layer, x) == {torch.uint8: x.numel() + x.numel() // 32}
        return
    scale = 4 * {"tensor": 1, "delayed": 1, "row": 256, "block": 2 * 256}[name.split(",")[0].split(" ")[0]]
    assert saved_bytes(layer, x) == {torch.float8_e4m3fn: x.numel(), torch.float32: scale}
    assert saved_bytes(layer.requires_grad_(False), x.requires_grad_()) == {}


WRITES: dict[str, Callable[[Tensor], object]] = {  # into what layers are given; most move no version counter
    "in place": lambda x: x.mul_(2),
    "data": lambda x: x.data.mul_(2),
    "a view of data": lambda x: x.data.view(-1)[:100].fill_(3.0),
    "other memory": lambda x: setattr(x, "data", x.data * 2),
    "a kernel": lambda x: memoryview(x.detach().view(torch.int16).numpy())[:1].__setitem__((0, 0), 0x4040),
}


@pytest.mark.parametrize("name", ["tensor", "delayed", "row", "block"])
@pytest.mark.parametrize("how", WRITES)
def test_every_layer_sees_its_input_as_it_is(name: str, recipe: Recipe, how: str) -> None:
    """Layers that take the same activations, however these were written into between them."""
    first, second, alone = (layer_of(recipe, "cpu") for _ in range(3))
    x = 2 * matrix(128, 256).requires_grad_()
    first(x)
    with torch.no_grad():
        WRITES[how](x)
    expected = results(alone, x.detach().clone(), matrix(128, 128, seed=2))
    out = second(x)
    out.backward(matrix(128, 128, seed=2))
    assert torch.equal(out, expected["output"]) and torch.equal(second.weight.grad, expected["weight"])


class Perceptron(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(128, 256, dtype=torch.bfloat16, device=device)
        self.down = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def wrapped(model: nn.Module, run: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module that computes ``run`` and has the model's parameters."""
    result = nn.Module()
    result.model, result.forward = model, run
    return result


WAYS = ["checkpoint", "reentrant checkpoint", "selective checkpoint", "in host memory"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_ways_to_keep_activations(name: str, recipe: Recipe, way: str, fp8_device: str) -> None:
    """With the same bits."""
    model = quantize_model_(Perceptron(fp8_device), recipe)
    x, gradient = matrix(128, 128), matrix(128, 128, seed=2)

    def policy(_: object, op: object, *args: object, **kwargs: object) -> bool:
        return op in (torch.ops.aten._scaled_mm.default, torch.ops.aten.mm.default)

    def selective() -> object:
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)

    def run(x: Tensor) -> Tensor:
        if way == "in host memory":
            with torch.autograd.graph.save_on_cpu():
                return model(x)
        options = {"context_fn": selective} if way == "selective checkpoint" else {}
        return checkpoint(model, x, use_reentrant=way == "reentrant checkpoint", **options)

    expected = results(model, x, gradient)
    for key, value in results(wrapped(model, run), x, gradient).items():
        assert torch.equal(value, expected[key.removeprefix("model.")])


@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_gradients_accumulate(name: str, recipe: Recipe, fp8_device: str) -> None:
    layer = layer_of(recipe, fp8_device)
    batches = [(matrix(128, 256, seed), matrix(128, 128, seed + 10)) for seed in (1, 2)]
    expected = [results(layer, *batch) for batch in batches]
    for x, gradient in batches:
        layer(x.to(fp8_device)).backward(gradient.to(fp8_device))
    for key, param in layer.named_parameters():
        assert torch.equal(param.grad.cpu(), expected[0][key] + expected[1][key])


@EACH
def test_without_gradients(name: str, recipe: Recipe, fp8_device: str) -> None:
    layer, x = layer_of(recipe, fp8_device), matrix(256, 256).to(fp8_device)
    expected = layer(x)
    assert expected.grad_fn is not None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = layer(x)
            assert torch.equal(out, expected) and not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(layer(x.clone()), expected)


@pytest.mark.parametrize("frozen", ["weight", "input", "weight and bias", "input and weight"])
@pytest.mark.parametrize("name", ["tensor", "block"])
def test_what_needs_no_gradient_gets_none(name: str, recipe: Recipe, frozen: str, fp8_device: str) -> None:
    layer, x, gradient = layer_of(recipe, fp8_device), matrix(128, 256), matrix(128, 128, seed=2)
    expected = results(layer, x, gradient)
    for key, param in layer.named_parameters():
        param.requires_grad_(key not in frozen)
    x = x.to(fp8_device).requires_grad_("input" not in frozen)
    layer(x).backward(gradient.to(fp8_device))
    found = {"input": x.grad, **{key: param.grad for key, param in layer.named_parameters()}}
    assert {key for key, value in found.items() if value is None} == set(frozen.split(" and "))
    assert all(value is None or torch.equal(value.cpu(), expected[key]) for key, value in found.items())


@pytest.mark.parametrize("name", ["tensor", "block"])
def test_autocast(name: str, recipe: Recipe, fp8_device: str) -> None:
    """FP32 weights compute as BF16 ones do, and get FP32 gradients."""
    torch.manual_seed(0)
    layer = quantize_model_(nn.Linear(256, 128).to(fp8_device), recipe)
    x, gradient = matrix(128, 256), matrix(128, 128, seed=2)

    def run(x: Tensor) -> Tensor:
        with torch.autocast(fp8_device, torch.bfloat16):
            return layer(x)

    found = results(wrapped(layer, run), x, gradient)
    assert found["model.weight"].dtype == torch.float32 and found["output"].dtype == torch.bfloat16
    same = layer_of(recipe, fp8_device)
    same.weight.data = QuantizedTensor(layer.weight.components, recipe, (128, 256), torch.bfloat16)
    same.bias.data = layer.bias.data.bfloat16()
    for key, value in results(same, x, gradient).items():
        assert torch.equal(found[key if key in found else f"model.{key}"].bfloat16(), value)


@EACH
def test_activations_and_gradients_may_lie_anywhere(name: str, recipe: Recipe, fp8_device: str) -> None:
    """Parts of larger buffers, at addresses that engines do not take."""
    layer = layer_of(recipe, fp8_device)
    x, gradient = matrix(128, 256).to(fp8_device), matrix(128, 128, seed=2).to(fp8_device)

    def run(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = place(x).requires_grad_()
        out = layer(leaf)
        return [out, *torch.autograd.grad(out, [leaf, *layer.parameters()], place(gradient))]

    def moved(values: Tensor) -> Tensor:
        buffer = values.new_empty(values.numel() + 1)
        return buffer[1:].view(values.shape).copy_(values)

    for found, expected in zip(run(moved), run(Tensor.clone), strict=True):  # on GPUs BF16 sums may have another order
        assert (found - expected).float().norm() <= 2.0**-7 * expected.float().norm()


def test_training_updates_the_weights_that_are_multiplied(fp8_device: str) -> None:
    model = quantize_model_(Perceptron(fp8_device), RECIPES["tensor"])
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    x, target = (matrix(128, 128, seed).to(fp8_device) for seed in (1, 2))
    losses = []
    for _ in range(8):
        loss = (model(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# --- modules ----------------------------------------------------------------------------------------------------


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def test_modules_become_quantized_linear_layers() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Own(32, 32), nn.Linear(32, 32)).bfloat16()
    kept = copy.deepcopy(model)
    quantize_model_(model, RECIPES["tensor"], lambda module, name: isinstance(module, nn.Linear) and name != "2")
    assert [type(module) for module in model] == [QuantizedLinear, Own, nn.Linear]
    assert list(model.state_dict()) == list(kept.state_dict())
    decoding = quantize_model_(
        copy.deepcopy(kept), DECODED, lambda module, name: isinstance(module, nn.Linear) and name != "2"
    )
    assert [type(module) for module in decoding] == [QuantizedLinear, Own, nn.Linear]
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    x = matrix(16, 32)
    assert type(copied[0]) is type(unpickled[0]) is QuantizedLinear
    assert torch.equal(copied(x), model(x)) and torch.equal(unpickled(x), model(x))


def test_layers_take_other_weights() -> None:
    layer = layer_of(RECIPES["tensor"], "cpu")
    x = matrix(32, 256)
    plain = layer.weight.dequantize()
    layer.weight = nn.Parameter(plain)
    assert torch.equal(layer(x), nn.functional.linear(x, plain, layer.bias))


def test_plain_values_that_are_not_quantized_yet_are_multiplied_as_they_are() -> None:
    layer, x = layer_of(RECIPES["tensor"], "cpu"), matrix(32, 256)
    nn.init.constant_(layer.weight, 0.3)
    expected = nn.functional.linear(x, torch.full((128, 256), 0.3).bfloat16(), layer.bias)
    assert torch.equal(layer(x), expected)


def test_freed_weights_raise() -> None:
    layer, x = layer_of(RECIPES["tensor"], "cpu"), matrix(32, 256)
    out = layer(x.requires_grad_())
    layer.weight.components["data"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="freed"):
        out.sum().backward()


def test_recipes_with_other_products_are_equal_and_saved_with_them() -> None:
    assert all(recipe == decoded_recipe(name) for name, recipe in RECIPES.items())
    buffer = io.BytesIO()
    layer = layer_of(RECIPES["row, FP8 weight gradients"], "cpu")
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["weight"]
    assert repr(loaded.recipe) == repr(layer.weight.recipe)


@pytest.mark.parametrize("options, message", [
    ({"compute": "int8"}, "compute: expected 'auto' or 'fp8' or 'decode', got 'int8'"),
    ({"gradient_format": "e3m4"}, "gradient_format: expected 'e4m3' or 'e5m2', got 'e3m4'"),
    ({"weight_gradients": "fp32"}, "weight_gradients: expected 'fp8' or 'bf16', got 'fp32'"),
])  # fmt: skip
def test_options_are_checked(options: dict[str, str], message: str) -> None:
    for kind in (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling):
        with pytest.raises(ValueError, match=message):
            kind(**options)
    with pytest.raises(ValueError, match="compute: expected 'decode' or 'fp4', got 'fp8'"):
        NVFP4BlockScaling(compute="fp8")


def test_gradients_of_blocks_are_e4m3() -> None:
    assert Float8BlockScaling(compute="fp8", gradient_format="e4m3").products.gradients == torch.float8_e4m3fn
    for kind in (Float8BlockScaling, MXFP8BlockScaling):
        with pytest.raises(ValueError, match="products of blocks take 'e4m3' alone, got 'e5m2'"):
            kind(compute="fp8", gradient_format="e5m2")
