"""Files of quantized weights for inference servers."""

from fused_optim.quantized.files.export import save_quantized_safetensors
from fused_optim.quantized.files.load import load_quantized_safetensors

__all__ = [
    "load_quantized_safetensors",
    "save_quantized_safetensors",
]
