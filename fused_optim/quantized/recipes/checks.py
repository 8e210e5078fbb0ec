"""Checks before anything is quantized: recipes, and the shapes and dtypes that they take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fused_optim.formats.elements import ELEMENT_TYPES
from fused_optim.quantized.recipes.recipe import Recipe
from fused_optim.quantized.recipes.table import RECIPES


def check_recipe(recipe: object) -> None:
    """Raise TypeError for what is no recipe."""
    if isinstance(recipe, Recipe):
        return
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise TypeError(f"recipe: expected an instance, got the class {recipe.__name__}: write {recipe.__name__}()")
    got = repr(recipe) if isinstance(recipe, str) else f"a {type(recipe).__name__} of {type(recipe).__module__}"
    known = ", ".join(f"{name}()" for name in RECIPES)
    raise TypeError(
        f"recipe: expected a recipe such as MXFP8BlockScaling(), got {got}; fused_optim.quantized has {known}"
    )


def check_shape(recipe: Recipe, shape: Sequence[int]) -> None:
    """Raise ValueError for a shape that the recipe cannot quantize."""
    problem = recipe.problem(tuple(shape))
    if problem is not None:
        raise ValueError(problem)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError for values that quantized weights do not decode to."""
    if dtype not in ELEMENT_TYPES:
        raise TypeError(f"quantized weights are float32, bfloat16 or float16, got {dtype}; convert it first")
