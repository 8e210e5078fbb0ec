"""Fixtures of the tests of quantized weights."""

from __future__ import annotations

import pytest
import torch

from fused_optim.quantized import Float8CurrentScaling
from fused_optim.quantized.fp8 import products


@pytest.fixture
def fp8_device(device: str) -> str:
    """Where products run in FP8, with one scale as with scales per row and blocks on the GPUs that tests know."""
    format = Float8CurrentScaling(compute="fp8").products
    assert format is not None
    if products.device_unsupported_reason(torch.device(device, 0), format) is not None:
        pytest.skip("no GPU with FP8")
    return device
