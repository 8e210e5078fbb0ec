"""Weights that were filled in part, or never, raise. And initialisers of parts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from fused_optim import FusedAdam
from fused_optim.quantized import QuantizedTensor, finish_initialization
from pairwise import each_once, pairwise
from quantized_cases import RECIPES, has_tiles, same_components, saved, values
from weight_cases import EXPERTS, Weight, pair, quantized

EACH = pytest.mark.parametrize("recipe", RECIPES)
SHAPE = (256, 256)
Part = Callable[[Tensor], Tensor]

PARTS: dict[str, tuple[tuple[int, ...], Part]] = {
    "rows": (SHAPE, lambda w: w[128:]),
    "columns": (SHAPE, lambda w: w[:, :128]),
    "block": (SHAPE, lambda w: w[:128, 128:]),
    "narrowed": (SHAPE, lambda w: w.narrow(0, 0, 128)),
    "within a block": (SHAPE, lambda w: w[3:7, 5:9]),
    "expert": (EXPERTS, lambda w: w[2]),
    "experts": (EXPERTS, lambda w: w[1:3]),
}


def set_data(weight: Tensor, part: Part, source: Tensor) -> None:
    part(weight.data)[...] = source


WAYS: dict[str, Callable[[Tensor, Part, Tensor], object]] = {
    "copy_": lambda weight, part, source: part(weight.detach()).copy_(source),
    "data": set_data,
    "state dict": lambda weight, part, source: part(holder(weight).state_dict()["weight"]).copy_(source),
    "foreach": lambda weight, part, source: torch._foreach_copy_([part(weight.detach())], [source]),
}


def holder(weight: Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = weight
    return module


def poison() -> None:
    """Leaves memory behind that is no zeros, for the next tensors of these sizes."""
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        _garbage = [torch.full((256, size), 123, dtype=dtype) for size in (256, 128, 16, 8, 2, 1) for _ in range(4)]


def from_meta(recipe: str, shape: tuple[int, ...]) -> Weight:
    model = quantized(Weight(shape).to("meta"), recipe)
    poison()
    return model.to_empty(device="cpu")


def without_initial(recipe: str, shape: tuple[int, ...]) -> Weight:
    """As files have it, which was on the meta device."""
    model, _ = pair(recipe, shape, keep_initial=False)
    model = torch.load(saved(model), map_location="meta", weights_only=False)
    assert model.weight.is_meta and not model.weight.has_initial
    poison()
    return model.to_empty(device="cpu")


MADE = {"meta": from_meta, "file": without_initial}


def check_raises(model: Weight, written: str) -> None:
    x = torch.ones(model.weight.shape[-1])
    optimizer = FusedAdam(model.parameters())
    for read in (
        lambda: model.weight.values(),
        lambda: model.weight.dequantize(),
        lambda: model.weight @ x,
        lambda: model.weight[..., 3] + 1,
        lambda: model.weight.initial_values(),
        lambda: finish_initialization(model),
        lambda: pickle.dumps(model.weight),
        optimizer.initialize_state,
    ):
        with pytest.raises(RuntimeError, match=f"{written} of a quantized weight was written since it was made"):
            read()


@EACH
@pytest.mark.parametrize("made", MADE)
def test_weights_that_were_never_filled_raise(recipe: str, made: str) -> None:
    model = MADE[made](recipe, SHAPE)
    check_raises(model, "nothing")
    check_raises(copy.deepcopy(model), "nothing")
    with torch.no_grad():
        model.weight.copy_(torch.ones(SHAPE))
    finish_initialization(model)
    assert torch.allclose(model.weight.values(), torch.ones(()), rtol=2**-4)


# Not all recipes x ways to be made x parts: each two of them.
@pytest.mark.parametrize("recipe, made, part", each_once(pairwise([*RECIPES], [*MADE], [*PARTS])))
def test_weights_that_were_filled_in_part_raise(recipe: str, made: str, part: str) -> None:
    shape, of = PARTS[part]
    if has_tiles(recipe) and shape == EXPERTS:
        pytest.skip("tiles are of matrices")
    full, _ = pair(recipe, shape, keep_initial=False)
    for fill in WAYS.values():
        for source in (of(full.weight.detach()), of(full.weight.values())):
            model = MADE[made](recipe, shape)
            fill(model.weight, of, source)
            check_raises(model, "(only a part|nothing)")


def assert_near(found: Tensor, expected: Tensor, recipe: str, way: str) -> None:
    """Zeros where these are wanted; values, which may have got another scale, within a step of their format."""
    assert not found[expected == 0].abs().gt(expected.abs().max() * 2**-9).any(), way
    step = 2**-2 if recipe == "nvfp4" else 2**-4
    assert ((found - expected).abs() <= step * expected.abs() + 2**-9 * expected.abs().max()).all(), way


# --- initialisers of parts ----------------------------------------------------------------------------------------

INITIALISERS: dict[str, Callable[[Tensor], object]] = {
    "orthogonal_ with gain": lambda w: nn.init.orthogonal_(w, 1.5),
    **{
        name: getattr(nn.init, name)
        for name in dir(nn.init)
        if name.endswith("_") and not name.startswith("_") and name not in ("constant_", "sparse_", "dirac_", "eye_")
    },
    "constant_": lambda w: nn.init.constant_(w, 3.0),
}
PLACES: dict[str, tuple[tuple[int, ...], Part]] = {
    "whole": (SHAPE, lambda w: w),
    "rows": (SHAPE, lambda w: w[:128]),
    "expert": (EXPERTS, lambda w: w[1]),
    "expert of data": (EXPERTS, lambda w: w.data[1]),
}
captured = nn.init.orthogonal_  # as transformers keeps it, under another name


@pytest.mark.parametrize("recipe, place", each_once(product(RECIPES, PLACES)))
def test_initialisers_of_parts_work_or_change_nothing(recipe: str, place: str) -> None:
    shape, of = PLACES[place]
    if has_tiles(recipe) and shape == EXPERTS:
        pytest.skip("tiles are of matrices")
    for name, initialise in {**INITIALISERS, "captured": captured}.items():
        model, plain = pair(recipe, shape)
        for weight in (model.weight, plain):
            torch.manual_seed(3)
            initialise(of(weight))
        assert torch.equal(model.weight.values() if model.weight.is_pending else model.weight.initial_values(), plain)
        finish_initialization(model)
        assert same_components(model.weight, QuantizedTensor.from_values(plain, RECIPES[recipe])), name

        if "orthogonal" in name or "trunc_normal" in name or name == "captured":  # which copy what they have made
            continue
        model, _ = pair(recipe, shape, keep_initial=False)
        before = copy.deepcopy(model.weight)
        with pytest.raises(RuntimeError, match=r"^weight: .* in place: its initial values are not kept .* copy_"):
            initialise(of(model.weight))
        assert same_components(model.weight, before) and not model.weight.is_pending, name
        assert not model.weight.has_initial, name


# --- bytes beside others ------------------------------------------------------------------------------------------

HALVES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "rows": lambda w, i: w[128 * i : 128 * (i + 1)],
    "columns": lambda w, i: w[:, 128 * i : 128 * (i + 1)],
}


@EACH
@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("keep_initial", [False, True])
def test_bytes_in_a_part_leave_the_values_of_the_rest(recipe: str, halves: str, keep_initial: bool) -> None:
    """Though they come with the scale of the whole; once all of it is loaded it has those bytes."""
    cut = HALVES[halves]
    model, _ = pair(recipe, SHAPE, keep_initial=keep_initial)
    other = QuantizedTensor.from_values(8 * values(SHAPE, 11), RECIPES[recipe])
    expected = model.weight.dequantize()
    cut(model.weight.detach(), 0).copy_(cut(other, 0))
    cut(expected, 0).copy_(cut(other, 0).dequantize())
    if RECIPES[recipe].scales_whole_tensor:
        assert model.weight.is_pending
        again = copy.deepcopy(model)
        finish_initialization(again)
        assert_near(cut(again.weight.values(), 0), cut(expected, 0), recipe, halves)
    if not keep_initial:
        assert torch.equal(model.weight.values(), expected)
    cut(model.weight.detach(), 1).copy_(cut(other, 1))
    assert not model.weight.is_pending and same_components(model.weight, other)
    assert keep_initial == model.weight.has_initial
