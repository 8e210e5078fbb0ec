"""Tracked steps of so many elements that a thread block of a GPU takes 8 or 16 tiles of 1,024 at once.

With fewer it takes fewer, so that all multiprocessors have work: then their marks go another way. Parameters are
compared with those of untracked steps, marks with full copies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_optim.quantized import Float8DelayedScaling, MXFP8BlockScaling, Recipe, quantize_model_
from fused_optim.sharding.dtensor import local_tensor
from peers import FusedAdamW

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

ELEMENTS = 16 * 1024 * 8 * 7 * 160  # eight chunks for each of seven thread blocks of 160 multiprocessors
COLUMNS = {"blocks of 128": 2816, "blocks of 64": 2880, "blocks of 32": 2848}
# Dtypes of parameter and gradient; what is quantized; options.
CASES: dict[str, tuple[torch.dtype, torch.dtype, Recipe | None, dict[str, Any]]] = {
    "remainders": (torch.bfloat16, torch.bfloat16, None, {}),
    "8-bit remainders": (torch.bfloat16, torch.bfloat16, None, {"master_bits": 24}),
    "no master": (torch.bfloat16, torch.bfloat16, None, {"master_bits": 0}),
    "FP32 master": (torch.bfloat16, torch.bfloat16, None, {"store_param_remainders": False}),
    "FP16": (torch.float16, torch.float16, None, {}),
    "FP32": (torch.float32, torch.float32, None, {}),
    "FP32, BF16 gradients": (torch.float32, torch.bfloat16, None, {}),
    "BF16, FP32 gradients": (torch.bfloat16, torch.float32, None, {}),
    "MXFP8": (torch.bfloat16, torch.bfloat16, MXFP8BlockScaling(), {}),
    "FP8": (torch.bfloat16, torch.bfloat16, Float8DelayedScaling(), {}),
    "FP16 master": (torch.bfloat16, torch.bfloat16, Float8DelayedScaling(), {"master_weight_dtype": torch.float16}),
}


def stored(param: Tensor) -> Tensor:
    """The bits of what is stored, as integers: 0 and -0 differ."""
    local = local_tensor(param).detach()
    data = getattr(local, "components", {"data": local})["data"]
    return data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[data.element_size()])


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("state", ["int8", "fp8"])
@pytest.mark.parametrize("case", CASES)
def test_whole_chunks(case: str, state: str, columns: str) -> None:
    dtype, of_gradient, recipe, options = CASES[case]
    device, width = torch.device("cuda"), COLUMNS[columns]
    models: list[nn.Linear] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Linear(width, -(-ELEMENTS // width), bias=False, device=device, dtype=dtype))
        if recipe is not None:
            quantize_model_(nn.Sequential(models[-1]), recipe)
    plain, tracked = (FusedAdamW(model.parameters(), lr=1e-5, state_dtype=state, **options) for model in models)
    tracked.track_changes()
    weights = [model.weight for model in models]
    for weight in weights:
        weight.grad_dtype = of_gradient
    changed = torch.zeros(weights[1].shape, dtype=torch.bool, device=device)
    for step in range(4):
        gradient = torch.randn(weights[0].shape, device=device, dtype=of_gradient)
        before = stored(weights[1]).clone()
        for weight, optimizer in zip(weights, (plain, tracked), strict=True):
            weight.grad = gradient
            optimizer.step()
        changed |= before != stored(weights[1])
        assert torch.equal(stored(weights[0]), stored(weights[1])), step
        if step != 1:  # the first step after a take stores marks, others add to them
            taken = tracked.take_changes(models[1])["weight"]
            assert torch.equal(taken.indices, changed.view(-1).nonzero().view(-1)), step
            changed.zero_()
