"""Weights that are quantized themselves: tensors, recipes, and models made of them."""

from fused_optim.quantized import compute as _compute  # noqa: F401  registers matrix products
from fused_optim.quantized import operations as _operations  # noqa: F401  and all other operations
from fused_optim.quantized.init import finish_initialization, quantize_model_, quantized_model_init
from fused_optim.quantized.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fused_optim.quantized.tensor import QuantizedTensor

__all__ = [
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8DelayedScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QuantizedTensor",
    "Recipe",
    "finish_initialization",
    "quantize_model_",
    "quantized_model_init",
]
