"""Recipes by the names that files know them by."""

from fused_optim.quantized.recipes.block_scaling import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from fused_optim.quantized.recipes.recipe import Recipe
from fused_optim.quantized.recipes.tensor_scaling import Float8CurrentScaling, Float8DelayedScaling

RECIPES: dict[str, type[Recipe]] = {
    recipe.__name__: recipe
    for recipe in (Float8CurrentScaling, Float8DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
}
