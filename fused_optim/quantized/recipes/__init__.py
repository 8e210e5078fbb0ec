"""Formats of quantized weights, and their codecs: in PyTorch, and by the compiled engines."""

from fused_optim.quantized.recipes.block_scaling import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from fused_optim.quantized.recipes.checks import check_dtype, check_recipe, check_shape
from fused_optim.quantized.recipes.codec import Encoding
from fused_optim.quantized.recipes.recipe import (
    Component,
    Components,
    ProductFormat,
    Recipe,
    Scaling,
    as_matrix,
    cut_component,
    matrix_range,
)
from fused_optim.quantized.recipes.table import RECIPES
from fused_optim.quantized.recipes.tensor_scaling import Float8CurrentScaling, Float8DelayedScaling, Float8TensorScaling
from fused_optim.quantized.recipes.tiles import WHOLE, Position, shares_blocks

__all__ = [
    "RECIPES",
    "WHOLE",
    "Component",
    "Components",
    "Encoding",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8DelayedScaling",
    "Float8TensorScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Position",
    "ProductFormat",
    "Recipe",
    "Scaling",
    "as_matrix",
    "check_dtype",
    "check_recipe",
    "check_shape",
    "cut_component",
    "matrix_range",
    "shares_blocks",
]
