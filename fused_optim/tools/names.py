"""What can be asked of the tools, by name. Nothing here needs torch, so that ``--help`` is there at once."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

# Of plans.
STATES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
# By name: the constructor's options.
MASTERS: dict[str, dict[str, Any]] = {
    "float32": {"store_param_remainders": False},
    "remainder16": {"store_param_remainders": True},
    "remainder8": {"store_param_remainders": True, "param_remainder_bits": 8},
    "float16": {"master_weight_dtype": "float16"},
    "none": {"master_weights": False},
}
ALIASES = {"32": "float32", "24": "remainder8", "16": "float16"}  # bits of the masters

# Of conversions.
Layout = Literal["unscaled", "native", "torch", "safetensors", "masters"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
STORED_MASTERS = ("float32", "float16", "remainder16", "remainder8")


@cache
def machines() -> dict[str, Any]:
    """Whose measurements there are, by name."""
    found: dict[str, Any] = json.loads(files("fused_optim.tools").joinpath("measured.json").read_text())
    return found
