"""Quantized weights in files: ``torch.load(weights_only=True)`` imports the code for them when it meets one."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def _rebuild_quantized(*description: Any) -> torch.Tensor:
    rebuilt: torch.Tensor = importlib.import_module("fused_optim.quantized.tensor").rebuild(*description)
    return rebuilt


# Under the name that files hold. Nothing else may be registered under it: torch would take one of the two to read a
# file and refuse it in the middle, if the name comes to mean the other meanwhile.
torch.serialization.add_safe_globals([(_rebuild_quantized, "fused_optim.quantized.tensor.rebuild")])
