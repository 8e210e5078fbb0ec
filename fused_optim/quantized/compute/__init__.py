"""Products with quantized weights, in FP8 where the recipe wants it."""

from fused_optim.quantized.compute import mm as _mm  # noqa: F401  registers matrix products
from fused_optim.quantized.compute.grouped import GroupedLinear, grouped_linear
from fused_optim.quantized.compute.kept import KeptWeight
from fused_optim.quantized.compute.mlp import swiglu_mlp
from fused_optim.quantized.compute.norm_linear import rms_norm_linear

__all__ = [
    "GroupedLinear",
    "KeptWeight",
    "grouped_linear",
    "rms_norm_linear",
    "swiglu_mlp",
]
