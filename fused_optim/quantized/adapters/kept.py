"""What the optimizer's summary tells of weights that it updates as plain ones, and layers multiply with in FP8."""

from fused_optim.quantized.compute.usage import unsupported_reasons_of_kept as products

__all__ = ["products"]
