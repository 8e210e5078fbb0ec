"""Dtypes by the names that people give them."""

from __future__ import annotations

import torch

# What people call them, beside torch's own names.
SHORT_NAMES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "8bit": torch.int8,
}


def as_dtype(given: object) -> torch.dtype | None:
    """A dtype, also one that is given by a name: "int8", "torch.int8", "8bit". None for what is none."""
    if isinstance(given, torch.dtype):
        return given
    if not isinstance(given, str):
        return None
    dtype = SHORT_NAMES.get(given) or getattr(torch, given.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None
