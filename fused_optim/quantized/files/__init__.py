"""Files of quantized weights for inference servers."""

from fused_optim.quantized.files.export import save_quantized_safetensors
from fused_optim.quantized.files.hugging_face import save_pretrained_as, write_plain_weights
from fused_optim.quantized.files.load import load_quantized_safetensors

__all__ = [
    "load_quantized_safetensors",
    "save_pretrained_as",
    "save_quantized_safetensors",
    "write_plain_weights",
]
