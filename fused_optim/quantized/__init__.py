"""Weights that are quantized themselves: tensors, recipes, and models made of them."""

import sys
from typing import NoReturn

from fused_optim.quantized.files import (
    load_quantized_safetensors,
    save_pretrained_as,
    save_quantized_safetensors,
    write_plain_weights,
)
from fused_optim.quantized.fp8 import (
    GroupedLinear,
    KeptWeight,
    grouped,
    grouped_linear,
    linear,
)
from fused_optim.quantized.model import (
    UsualLayers,
    dequantize_model_,
    discard_high_precision_init,
    finish_initialization,
    gains,
    init,
    plain_state_dict,
    quantize_model_,
    quantized_model_init,
    selection,
)
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
    "GroupedLinear",
    "KeptWeight",
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
    "plain_state_dict",
    "quantize_model_",
    "quantized_model_init",
    "save_pretrained_as",
    "save_quantized_safetensors",
    "write_plain_weights",
]

# Where pickled models and filters of earlier versions look for what these modules define.
sys.modules.update({f"{__name__}.{of.__name__.rpartition('.')[2]}": of for of in (grouped, init, linear, selection)})

_REMOVED = {
    "rms_norm_linear": "y = norm(x), then layer(y) for each layer",
    "swiglu_mlp": "x + down(silu(gate(y)) * up(y)) with y = norm(x), without norm or x where it had none",
}


def __getattr__(name: str) -> NoReturn:
    if name in _REMOVED:  # an AttributeError would not be shown by "from fused_optim.quantized import ..."
        raise ImportError(f"fused_optim.quantized.{name} was removed: write {_REMOVED[name]}; products stay in FP8")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
