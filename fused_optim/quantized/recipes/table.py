"""Recipes by the names that files know them by, and what is taken for one."""

from fused_optim.quantized.recipes.block_scaling import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from fused_optim.quantized.recipes.recipe import Recipe
from fused_optim.quantized.recipes.tensor_scaling import Float8CurrentScaling, Float8DelayedScaling

RECIPES: dict[str, type[Recipe]] = {
    recipe.__name__: recipe
    for recipe in (Float8CurrentScaling, Float8DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
}


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
