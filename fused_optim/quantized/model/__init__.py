"""Quantizes the weights of models, and makes them plain again."""

from fused_optim.quantized.model.building import quantized_model_init
from fused_optim.quantized.model.dequantize import decoded_state_dict, dequantize_model_, plain_state_dict
from fused_optim.quantized.model.init import (
    discard_high_precision_init,
    finish_initialization,
    quantize_model_,
)
from fused_optim.quantized.model.selection import UsualLayers, gains

__all__ = [
    "UsualLayers",
    "decoded_state_dict",
    "dequantize_model_",
    "discard_high_precision_init",
    "finish_initialization",
    "gains",
    "plain_state_dict",
    "quantize_model_",
    "quantized_model_init",
]
