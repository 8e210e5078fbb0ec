"""Products with quantized weights, in FP8 where the recipe wants it."""

from fused_optim.quantized.fp8 import mm as _mm  # noqa: F401  registers matrix products
from fused_optim.quantized.fp8.grouped import GroupedLinear, grouped_linear
from fused_optim.quantized.fp8.kept import KeptWeight

__all__ = [
    "GroupedLinear",
    "KeptWeight",
    "grouped_linear",
]
