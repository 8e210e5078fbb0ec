"""``QuantizedTensor``, and torch's operations, collectives and FSDP2 with it."""

from fused_optim.quantized.tensor import collectives as _collectives  # noqa: F401  registers broadcasts and scatters
from fused_optim.quantized.tensor import operations as _operations  # noqa: F401  registers all other operations
from fused_optim.quantized.tensor.dispatch import Args, Kwargs, decoded
from fused_optim.quantized.tensor.quantized_tensor import (
    Initials,
    QuantizedTensor,
    as_initial,
    implements,
    local_weight,
    rebuild,
)
from fused_optim.quantized.tensor.weight import INITIAL, Shared

__all__ = [
    "INITIAL",
    "Args",
    "Initials",
    "Kwargs",
    "QuantizedTensor",
    "Shared",
    "as_initial",
    "decoded",
    "implements",
    "local_weight",
    "rebuild",
]
