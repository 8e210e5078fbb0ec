"""Names for the tools' options. Imports no torch, so that ``--help`` appears at once."""

from __future__ import annotations

from typing import Literal, get_args

# Of plans: formats of the states, bits of the masters.
STATES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
MASTER_BITS = (32, 24, 0)
ALGORITHMS = ("adamw", "muon")

# Of conversions.
Layout = Literal["unscaled", "native", "torch", "safetensors", "masters"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
STORED_MASTERS = ("float32", "float16", "remainder16", "remainder8")
