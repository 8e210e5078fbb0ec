"""Recipes that are added as docs/contributing/adding.md says, in Python alone, hold what those of the package hold.

They are this file's own, so every process that is handed one has added it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from torch import Tensor

from distributed import long, on_each_device
from fused_optim.quantized import Recipe
from fused_optim.quantized.recipes import RECIPES, Component, elements
from quantized_cases import encoded, matrices
from recipe_checks import (
    WAYS,
    check_checkpoints,
    check_cuts,
    check_gathered,
    check_masters,
    check_not_finite,
    check_pickling,
    check_ranks,
    check_skipped_steps,
    check_slices_share_memory,
    check_state_dicts,
    check_steps_without_masters,
    check_training,
    check_weights_are_masters,
    check_zeros,
)

LARGEST, NAN = 127, -128


def scale_for(absmax: Tensor) -> Tensor:
    """A power of two, so that decoded values are encoded as they were."""
    return elements.next_power_of_two(elements.scale_for(absmax, LARGEST))


def round_to_int8(x: Tensor, fractions: Tensor | None) -> Tensor:
    if fractions is None:
        codes = x.round()
    else:
        codes = (x.double() + elements.shaped(fractions, x.shape) * 2.0**-32).floor()
    return torch.where(x.isfinite(), codes.clamp(-LARGEST, LARGEST), NAN)


def int8_values(codes: Tensor) -> Tensor:
    return torch.where(codes == NAN, math.nan, codes.float())


@dataclass(frozen=True)
class Int8BlockScaling(Recipe):
    """int8 with one FP32 scale per 16 elements of a row."""

    components: ClassVar[tuple[Component, ...]] = (
        Component("data", torch.int8, (1, 1)),
        Component("scale", torch.float32, (1, 16)),
    )

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        data, scale = components["data"], components["scale"]
        x = x.reshape(data.shape)
        scale.copy_(scale_for(elements.tile_absmax(x, (1, 16))))
        data.copy_(round_to_int8(x / elements.expand_scales(scale, (1, 16), data.shape), fractions))

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        data = components["data"]
        return (int8_values(data) * elements.expand_scales(components["scale"], (1, 16), data.shape)).view(shape)


@dataclass(frozen=True)
class Int8TensorScaling(Recipe):
    """int8 with one FP32 scale per weight."""

    components: ClassVar[tuple[Component, ...]] = (
        Component("data", torch.int8, (1, 1)),
        Component("tensor_scale", torch.float32, None),
    )
    scales_whole_tensor: ClassVar[bool] = True

    def rescale(
        self, components: Mapping[str, Tensor], absmax: Tensor | None, applies: Tensor | None, advance: bool
    ) -> None:
        scale, new = components["tensor_scale"], scale_for(absmax)
        scale.copy_(new if applies is None else torch.where(applies, new, scale))

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        data = components["data"]
        data.copy_(round_to_int8(x.reshape(data.shape) / components["tensor_scale"], fractions))

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return (int8_values(components["data"]) * components["tensor_scale"]).view(shape)


ADDED = [Int8BlockScaling(), Int8TensorScaling()]
RECIPES.update({recipe.name: type(recipe) for recipe in ADDED})
EACH = pytest.mark.parametrize("recipe", ADDED, ids=str)


# --- values -----------------------------------------------------------------------------------------------------


@EACH
@given(x=matrices())
def test_encoding_decoded_values_changes_none(recipe: Recipe, x: Tensor) -> None:
    once = encoded(x, recipe).values()
    assert torch.equal(encoded(once, recipe).values(), once)
    assert ((once - x).abs() <= x.abs().amax() / LARGEST + 2.0**-120).all()  # half of a scale


@EACH
def test_zeros_and_what_is_not_finite(recipe: Recipe) -> None:
    check_zeros(recipe)
    for bad in (math.nan, math.inf, -math.inf):
        check_not_finite(recipe, bad)


# --- the tensor -------------------------------------------------------------------------------------------------


@EACH
def test_cuts(recipe: Recipe) -> None:
    check_cuts(recipe, 16 if recipe == ADDED[0] else 1)
    check_slices_share_memory(recipe)


@EACH
def test_files(recipe: Recipe) -> None:
    check_pickling(recipe)
    check_state_dicts(recipe, assign=False)
    check_state_dicts(recipe, assign=True)


@pytest.mark.parametrize("ranks, on", on_each_device(long(1), long(2), (3,)))
def test_fsdp2(ranks: int, on: str) -> None:
    check_gathered(ADDED, ranks, "fsdp", on)
    check_training([(recipe, way) for recipe in ADDED for way in WAYS], ranks, "fsdp", on)


# --- the optimizer ----------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_of_masters(recipe: Recipe, dtype: torch.dtype) -> None:
    check_masters(recipe, dtype)
    check_weights_are_masters(recipe)


@EACH
def test_steps_without_masters(recipe: Recipe) -> None:
    check_steps_without_masters(recipe)


@pytest.mark.parametrize("ranks, how, on", on_each_device((2, "fsdp"), (3, "fsdp"), (4, "tp")))
def test_ranks_do_not_change_a_bit(ranks: int, how: str, on: str) -> None:
    check_ranks(ADDED, ranks, how, True, on)
    check_ranks(ADDED, ranks, how, False, on)


@pytest.mark.parametrize("ranks, how, on", on_each_device((1, "plain"), (3, "fsdp")))
def test_skipped_steps(ranks: int, how: str, on: str) -> None:
    check_skipped_steps(ADDED, ranks, how, on)


@pytest.mark.parametrize("ranks, on", on_each_device(((2, 1, 3),), nccl=[((2, 1),)]))
def test_checkpoints(ranks: tuple[int, ...], on: str, tmp_path: Path) -> None:
    check_checkpoints(ADDED, ranks, on, str(tmp_path))
