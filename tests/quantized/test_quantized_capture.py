"""CUDA graphs of steps over quantized weights: replays equal eager steps, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fused_optim import FusedAdamW
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    quantize_model_,
)

STEPS = 10
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
EACH = pytest.mark.parametrize(
    "recipe",
    [
        Float8CurrentScaling(),
        Float8DelayedScaling(amax_history_len=3),
        Float8BlockScaling(),
        Float8BlockScaling(block=(1, 128)),
        MXFP8BlockScaling(),
        NVFP4BlockScaling(),
    ],
    ids=str,
)


def build(recipe: Recipe, master_weights: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, FusedAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 200), nn.Linear(200, 96)).to("cuda", dtype)
    quantize_model_(model, recipe)
    states = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
    return model, FusedAdamW(model.parameters(), capturable=True, master_bits=32 if master_weights else 0, **states)


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(param.shape, generator=generator).to("cuda", param.dtype) for param in model.parameters()]


def snapshot(model: nn.Module, optimizer: FusedAdamW) -> list[Tensor]:
    found = [state for param in model.parameters() for state in optimizer.state[param].values()]
    for param in model.parameters():
        found += list(param.components.values()) if hasattr(param, "components") else [param.detach()]
    return [tensor.clone() for tensor in found]


@EACH
@pytest.mark.parametrize("master_weights", [True, False])
def test_replays_equal_eager_steps(recipe: Recipe, master_weights: bool) -> None:
    eager, eager_optimizer = build(recipe, master_weights)
    for step in range(STEPS + 1):
        for param, grad in zip(eager.parameters(), gradients(eager, step), strict=True):
            param.grad = grad
        eager_optimizer.step()

    model, optimizer = build(recipe, master_weights)
    optimizer.initialize_state()
    for param, grad in zip(model.parameters(), gradients(model, 0), strict=True):
        param.grad = grad
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, STEPS + 1):
        for param, grad in zip(model.parameters(), gradients(model, step), strict=True):
            param.grad.copy_(grad)
        graph.replay()
    for actual, expected in zip(snapshot(model, optimizer), snapshot(eager, eager_optimizer), strict=True):
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@EACH
def test_skipped_steps_leave_scales_and_codes(recipe: Recipe) -> None:
    """GradScaler's overflow stays on the GPU. It knows no BF16 gradients."""
    model, optimizer = build(recipe, master_weights=True, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for param, grad in zip(model.parameters(), gradients(model, 0), strict=True):
        param.grad = grad
    scaler.scale(torch.ones((), device="cuda"))
    scaler.step(optimizer)
    scaler.update()
    before = snapshot(model, optimizer)
    for param, grad in zip(model.parameters(), gradients(model, 1), strict=True):
        grad.view(-1)[0] = float("inf")
        param.grad = grad
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for actual, expected in zip(snapshot(model, optimizer), before, strict=True):
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
