"""Weights that are quantized themselves: tensors, recipes, and models made of them."""

from fused_optim.quantized import averages as _averages  # noqa: F401  refuses what averages weights
from fused_optim.quantized import collectives as _collectives  # noqa: F401  registers broadcasts and scatters
from fused_optim.quantized import compute as _compute  # noqa: F401  matrix products
from fused_optim.quantized import factories as _factories  # noqa: F401
from fused_optim.quantized import full_tensors as _full_tensors  # noqa: F401
from fused_optim.quantized import in_place as _in_place  # noqa: F401
from fused_optim.quantized import operations as _operations  # noqa: F401  and all other operations
from fused_optim.quantized.dequantize import dequantize_model_
from fused_optim.quantized.export import save_quantized_safetensors
from fused_optim.quantized.grouped import GroupedLinear, grouped_linear
from fused_optim.quantized.init import (
    discard_high_precision_init,
    finish_initialization,
    quantize_model_,
    quantized_model_init,
)
from fused_optim.quantized.load import load_quantized_safetensors
from fused_optim.quantized.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fused_optim.quantized.selection import UsualLayers, gains
from fused_optim.quantized.tensor import QuantizedTensor

__all__ = [
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8DelayedScaling",
    "GroupedLinear",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QuantizedTensor",
    "Recipe",
    "UsualLayers",
    "dequantize_model_",
    "discard_high_precision_init",
    "finish_initialization",
    "gains",
    "grouped_linear",
    "load_quantized_safetensors",
    "quantize_model_",
    "quantized_model_init",
    "save_quantized_safetensors",
]
