"""What a quantized weight lets be done to it, and what it refuses, on one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_optim import FusedAdam
from fused_optim.quantized import QuantizedTensor, finish_initialization, quantize_model_
from fused_optim.quantized.recipes import RECIPES as RECIPES_BY_NAME
from quantized_cases import (
    RECIPES,
    TILED_SHAPES,
    plain_model,
    quantized_model,
    same_components,
    saved,
    values,
    weight_of,
)
from recipe_checks import check_cuts, check_pickling, check_state_dicts

EACH = pytest.mark.parametrize("recipe", RECIPES)
CPU = torch.device("cpu")
BLOCKS = {  # rows and columns
    **dict.fromkeys(("current", "delayed", "recent"), (1, 1)),
    **{"tiles": (128, 128), "rows": (1, 128), "mxfp8": (1, 32), "mxfp8up": (1, 32), "nvfp4": (1, 16)},
}


# --- casts and operations ---------------------------------------------------------------------------------------


@EACH
def test_casts_raise_and_change_nothing(recipe: str) -> None:
    model = quantized_model(recipe)
    before = copy.deepcopy(model.uneven.weight)
    for cast in (Tensor.float, Tensor.half, Tensor.double, lambda weight: weight.to(torch.float32)):
        with pytest.raises(TypeError, match=r"uneven\.weight: a quantized weight cannot be cast from torch.bfloat16"):
            cast(model.uneven.weight)
    with pytest.raises(TypeError, match="cannot be cast"):
        model.float()
    model.bfloat16().to(CPU, torch.bfloat16)
    assert isinstance(model.uneven.weight, QuantizedTensor) and same_components(model.uneven.weight, before)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_computes_with_the_decoded_weight(recipe: str, dtype: torch.dtype) -> None:
    model, plain = quantized_model(recipe, dtype), plain_model(recipe, dtype)
    x = values((3, 144), 1)
    for name, layer in plain.named_children():
        layer.weight.data = getattr(model, name).weight.dequantize()
    results = []
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            result = each(x)
        result.float().square().sum().backward()
        results.append(result)
    assert results[0].dtype == torch.bfloat16 and torch.equal(*results)
    assert torch.equal(model.uneven.weight.grad, plain.uneven.weight.grad)
    assert model.uneven.weight.grad.dtype == dtype


@pytest.mark.parametrize("change", [
    lambda weight: weight.mul_(2), lambda weight: weight.add_(1), lambda weight: weight.zero_(),
    lambda weight: weight.normal_(), lambda weight: weight.t().mul_(2), lambda weight: weight[:2].fill_(1),
    lambda weight: weight[0].fill_(1), lambda weight: weight.__setitem__(0, 1.0),
    lambda weight: weight.__setitem__((slice(None), 0), 1.0), lambda weight: weight.T.fill_(1),
    lambda weight: torch.add(weight, 1, out=weight), lambda weight: torch.mul(torch.ones(7, 144), 2, out=weight),
])  # fmt: skip
def test_operations_in_place_raise_and_change_nothing(change: Callable[[Tensor], Any]) -> None:
    weight = weight_of("mxfp8").detach()
    before = weight.clone()
    with pytest.raises(RuntimeError, match="quantized weight"):
        change(weight)
    assert same_components(weight, before)


@EACH
def test_operations_see_the_decoded_weight(recipe: str) -> None:
    weight = weight_of(recipe)
    plain, x = weight.dequantize(), values((3, weight.shape[1]), 2).bfloat16()
    assert type(plain) is Tensor and plain.dtype == torch.bfloat16
    assert torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, plain))
    assert torch.equal(x @ weight.t(), x @ plain.t())
    assert torch.equal(weight.norm(), plain.norm()) and torch.equal(weight + 1, plain + 1)
    assert torch.equal(weight.where(plain > 0, 0.0), plain.where(plain > 0, 0.0))
    assert torch.equal(torch.cat([weight, weight]), torch.cat([plain, plain]))
    assert torch.equal(weight.transpose(0, -1), plain.t()) and torch.equal(weight.transpose(-1, 1), plain)
    assert torch.equal(weight.T, plain.t()) and torch.equal(weight.permute(0, -1), plain)
    assert torch.equal(weight[-1], plain[-1]) and torch.equal(weight[:, 1], plain[:, 1])
    for out_of_range in (lambda: weight.transpose(0, 2), lambda: weight.permute(1, 2), lambda: weight[len(plain)]):
        with pytest.raises(IndexError):
            out_of_range()
    assert torch.equal(weight.view(-1, 4), plain.view(-1, 4)) and torch.equal(weight[:, None], plain[:, None])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(weight.dequantize(dtype), weight.dequantize(torch.float32).to(dtype))


@EACH
def test_cuts_are_weights_between_rows_and_blocks_of_columns(recipe: str) -> None:
    check_cuts(recipe, BLOCKS[recipe][1])


FACTORIES: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "zeros_like": lambda weight, *_: torch.zeros_like(weight),
    "ones_like": lambda weight, *_: torch.ones_like(weight),
    "rand_like": lambda weight, *_: torch.rand_like(weight),
    "full_like": lambda weight, *_: torch.full_like(weight, 2.0),
    "empty_like in float32": lambda weight, *_: torch.empty_like(weight, dtype=torch.float32),
    "zeros_like in float32": lambda weight, *_: torch.zeros_like(weight, dtype=torch.float32),
    "new_ones": lambda weight, *shape: weight.new_ones(shape),
    "new_full": lambda weight, *shape: weight.new_full(shape, 2.0),
    "new_zeros of fewer": lambda weight, rows, columns: weight.new_zeros(3, 2),
    "new_empty": lambda weight, *shape: weight.new_empty(shape),
    "new_zeros of more": lambda weight, rows, columns: weight.new_zeros(2 * rows, columns, dtype=torch.float64),
    "new_zeros of another dim": lambda weight, rows, columns: weight.new_zeros(1, rows, columns, dtype=torch.float32),
    "new_empty_strided": lambda weight, rows, columns: weight.new_empty_strided((rows, 2), (1, rows)),
}


@EACH
def test_what_users_make_like_a_weight_is_plain(recipe: str) -> None:
    weight = weight_of(recipe).detach()
    for like in (weight, weight.t(), weight[:, 1]):
        plain = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        for name, make in FACTORIES.items():
            made, expected = make(like, *weight.shape), make(plain, *weight.shape)
            assert type(made) is Tensor, name
            assert (made.shape, made.dtype, made.device) == (expected.shape, expected.dtype, expected.device), name
            assert made.stride() == expected.stride(), name
            if not name.startswith(("empty", "rand", "new_empty")):
                assert torch.equal(made, expected), name


@EACH
def test_parameters_are_replaced_by_empty_weights(recipe: str) -> None:
    """By ``to_empty``, and by functions that ``nn.Module._apply`` is given."""
    for replace in (lambda model: model.to_empty(device="cpu"), lambda model: model._apply(torch.empty_like)):
        model = quantized_model(recipe)
        replace(model)
        assert type(model.uneven.weight) is QuantizedTensor and model.uneven.weight.is_pending
        with pytest.raises(RuntimeError, match="nothing of a quantized weight was written"):
            finish_initialization(model)
        for param in model.parameters():
            nn.init.ones_(param)
        finish_initialization(model)
        assert torch.allclose(model.uneven.weight.values(), torch.ones(()), rtol=2**-4)


@EACH
def test_embedding_decodes_the_rows_it_looks_up(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = TILED_SHAPES["uneven"] if recipe == "tiles" else (50, 144)
    model = nn.Sequential(nn.Embedding(rows, columns, padding_idx=2, dtype=torch.bfloat16))
    plain = copy.deepcopy(model)
    quantize_model_(model, RECIPES[recipe], lambda module, _: isinstance(module, nn.Embedding))
    plain[0].weight.data = model[0].weight.dequantize()
    decoded = []
    decode = type(RECIPES[recipe]).decode
    monkeypatch.setenv("FUSED_OPTIM_BACKEND", "torch")  # where decoding can be counted
    monkeypatch.setattr(
        type(RECIPES[recipe]),
        "decode",
        lambda self, parts, shape: decoded.append(shape[0]) or decode(self, parts, shape),
    )
    indices = torch.tensor([[1, 2, 7], [7, 0, rows - 1]])
    assert torch.equal(model(indices), plain(indices))
    assert decoded == [rows if recipe == "tiles" else 6]
    with pytest.raises(IndexError):
        model(torch.tensor([-1]))
    for each in (model, plain):
        each(indices).float().square().sum().backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


# --- copies -----------------------------------------------------------------------------------------------------


@EACH
def test_copies_between_weights_of_one_recipe_are_of_bytes(recipe: str) -> None:
    source, target = weight_of(recipe), quantized_model(recipe, seed=1, keep_initial=False).uneven.weight.detach()
    source.components["data"][0, :2] = 0x7F  # which no encoder would write here
    target.copy_(source)
    assert same_components(target, source)
    assert target.components["data"].data_ptr() != source.components["data"].data_ptr()


@EACH
def test_copies_from_plain_values_quantize_them(recipe: str) -> None:
    source, target = weight_of(recipe), quantized_model(recipe, seed=1, keep_initial=False).uneven.weight.detach()
    target.copy_(plain_model(recipe).uneven.weight)
    assert same_components(target, source)
    with pytest.raises(RuntimeError, match="expected shape"):
        target.copy_(torch.zeros(1, target.shape[1]))


def test_padding_of_embeddings_is_initialised_with_zeros() -> None:
    model = nn.Sequential(nn.Embedding(50, 64, padding_idx=2))
    quantize_model_(model, RECIPES["nvfp4"], lambda module, _: isinstance(module, nn.Embedding))
    model[0].reset_parameters()
    finish_initialization(model)
    zeros = model[0].weight.values() == 0
    assert zeros[2].all() and not zeros[1].all() and not model[0].weight.initial_values()[2].any()


@EACH
def test_copies_between_recipes_quantize_the_values(recipe: str) -> None:
    source = QuantizedTensor.from_values(plain_model("current").uneven.weight.detach(), RECIPES["current"])
    target = QuantizedTensor.empty(RECIPES[recipe], source.shape, source.dtype, CPU)
    target.copy_(source)
    if recipe != "current":
        expected = QuantizedTensor.from_values(source.dequantize(torch.float32), RECIPES[recipe])
        assert torch.equal(target.values(), expected.values())


@EACH
def test_plain_values_in_a_part_never_change_the_scale_of_the_rest(recipe: str) -> None:
    weight, rows = weight_of(recipe), 128 if recipe == "tiles" else 2
    before = weight.dequantize()
    new = values((rows, weight.shape[1]), 5).bfloat16() * 100
    weight.detach()[rows : 2 * rows].copy_(new)
    if RECIPES[recipe].scales_whole_tensor:
        expected = before.clone()
        expected[rows : 2 * rows] = new
        assert torch.equal(weight.dequantize(), expected)
        with pytest.raises(RuntimeError, match="finish_initialization"):
            pickle.dumps(weight)
        finish_initialization(model_of(weight))
        assert same_components(weight, QuantizedTensor.from_values(expected, RECIPES[recipe]))
        assert not weight.has_initial
    else:
        assert torch.equal(weight.dequantize()[:rows], before[:rows])
        alone = QuantizedTensor.from_values(new, RECIPES[recipe])
        assert torch.equal(weight.dequantize()[rows : 2 * rows], alone.dequantize())


def model_of(weight: Tensor) -> nn.Module:
    model = nn.Module()
    model.weight = weight
    return model


@EACH
def test_deep_copies_are_independent(recipe: str) -> None:
    model = quantized_model(recipe)
    other = copy.deepcopy(model)
    assert isinstance(other.uneven.weight, nn.Parameter) and other.uneven.weight.requires_grad
    assert not other.frozen.weight.requires_grad and other.uneven.weight.has_initial
    with torch.no_grad():
        other.uneven.weight.copy_(torch.zeros(other.uneven.weight.shape))
    assert same_components(model.uneven.weight, weight_of(recipe))


# --- saved and loaded -------------------------------------------------------------------------------------------


@EACH
def test_pickling_keeps_bytes_and_flags(recipe: str) -> None:
    check_pickling(recipe)


@EACH
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_bytes(recipe: str, assign: bool) -> None:
    check_state_dicts(recipe, assign)


@EACH
@pytest.mark.parametrize("assign", [False, True])
def test_plain_state_dicts_are_quantized(recipe: str, assign: bool) -> None:
    model = quantized_model(recipe, seed=1)
    model.load_state_dict(plain_model(recipe).state_dict(), assign=assign)
    assert isinstance(model.uneven.weight, QuantizedTensor)
    assert same_components(model.uneven.weight, weight_of(recipe))


def test_unknown_recipes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    text = pickle.dumps(weight_of("mxfp8"))
    monkeypatch.delitem(RECIPES_BY_NAME, "MXFP8BlockScaling")
    with pytest.raises(ValueError, match="unknown recipe 'MXFP8BlockScaling'"):
        pickle.loads(text)


@EACH
def test_weights_whose_data_was_freed_still_describe_themselves(recipe: str) -> None:
    weight = weight_of(recipe)
    for part in weight.components.values():
        part.untyped_storage().resize_(0)
    assert weight.shape == plain_model(recipe).uneven.weight.shape and weight.dtype == torch.bfloat16
    assert type(RECIPES[recipe]).__name__ in repr(weight) and weight.device == CPU
    for loaded in (pickle.loads(pickle.dumps(weight)), torch.load(saved(weight), weights_only=True)):
        assert loaded.is_meta and loaded.shape == weight.shape and loaded.recipe == weight.recipe
    for use in (weight.dequantize, weight.clone, lambda: weight + 1):
        with pytest.raises(RuntimeError, match="freed"):
            use()


def test_storage_is_where_the_data_is() -> None:
    weight = weight_of("mxfp8")
    assert weight.untyped_storage().device == CPU and weight.to("meta").untyped_storage().device.type == "meta"
    assert weight.to("meta").device.type == "meta"


# --- making models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EACH
def test_masters_start_from_the_values_before_quantization(recipe: str, dtype: torch.dtype) -> None:
    model, plain = quantized_model(recipe, dtype), plain_model(recipe, dtype)
    optimizer = FusedAdam(model.parameters())
    optimizer.initialize_state()
    for name, master in optimizer.master_state_dict(model).items():
        frozen = name == "frozen.weight"  # its initial values are not kept
        expected = model.frozen.weight.values() if frozen else plain.get_parameter(name)
        assert torch.equal(master, expected.detach().float()), name
    assert not any(param.has_initial for param in model.parameters() if isinstance(param, QuantizedTensor))


def test_discarded_initial_values_seed_no_masters() -> None:
    model = quantized_model("mxfp8", keep_initial=False)
    assert not model.even.weight.has_initial
    optimizer = FusedAdam(model.parameters())
    optimizer.initialize_state()
    assert torch.equal(optimizer.state[model.even.weight]["master_param"], model.even.weight.dequantize(torch.float32))


def test_initialising_again_needs_finishing() -> None:
    model = quantized_model("current")
    nn.init.normal_(model.even.weight)
    initial = model.even.weight.initial_values()
    for unfinished in (FusedAdam(model.parameters()).initialize_state, lambda: pickle.dumps(model.even.weight)):
        with pytest.raises(RuntimeError, match=r"even\.weight: .*finish_initialization"):
            unfinished()
    assert torch.equal(model.even.weight.values(), initial)
    finish_initialization(model)
    assert torch.equal(model.even.weight.initial_values(), initial)
    assert same_components(model.even.weight, QuantizedTensor.from_values(initial.bfloat16(), RECIPES["current"]))


def test_weights_that_cannot_be_quantized_are_named() -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    with pytest.raises(ValueError, match=r"0\.weight, shape \(4, 5\): NVFP4BlockScaling needs an even number"):
        quantize_model_(model, RECIPES["nvfp4"])
    assert type(model[0].weight) is nn.Parameter
    quantize_model_(model, RECIPES["mxfp8"])
    with pytest.raises(ValueError, match=r"0\.weight is quantized already: MXFP8"):
        quantize_model_(model, RECIPES["mxfp8"])


def test_data_is_replaced_by_a_weight_of_its_kind_only() -> None:
    recipe = RECIPES["mxfp8"]
    weight = nn.Parameter(QuantizedTensor.from_values(values((4, 64), 0), recipe))
    other = QuantizedTensor.from_values(values((4, 64), 1), recipe)
    weight.data = other
    assert torch.equal(weight.values(), other.values())
    assert weight.data.components["data"].data_ptr() == other.components["data"].data_ptr()
    wrong = [values((4, 64), 1), QuantizedTensor.from_values(values((2, 64), 1), recipe), other.t()]
    for value in [*wrong, QuantizedTensor.from_values(values((4, 64), 1), RECIPES["nvfp4"])]:
        with pytest.raises(TypeError, match="copy_"):
            weight.data = value
    assert torch.equal(weight.values(), other.values())
