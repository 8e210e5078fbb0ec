"""Training steps under ``torch.compile``: the optimizer's part runs between graphs, as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from fused_optim import FusedAdamW, enable_gradient_release

STEPS = 4


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def train_step(model: nn.Module, optimizer: FusedAdamW, x: Tensor, clips: bool) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    if clips:
        optimizer.clip_grad_norm_(0.01)
    optimizer.step()
    return loss


def train(step: Callable[..., Tensor], model: nn.Module, clips: bool, hook: Callable[..., None] | None) -> list[Tensor]:
    optimizer = FusedAdamW(model.parameters(), lr=1e-2, exp_avg_dtype="int8", exp_avg_sq_dtype="int8")
    if hook is not None:
        optimizer.register_step_post_hook(hook)
    generator = torch.Generator().manual_seed(3)
    losses = [step(model, optimizer, torch.randn(8, 16, generator=generator), clips) for _ in range(STEPS)]
    return [*losses, *model.parameters()]


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
def test_a_compiled_step_is_the_eager_one_and_traces_the_model_alone(clips: bool, hooked: bool) -> None:
    torch._dynamo.reset()
    calls: list[int] = []
    hook = (lambda *_: calls.append(1)) if hooked else None
    model = model_of(1)
    expected = train(train_step, copy.deepcopy(model), clips, None)
    graphs = CompileCounter()
    found = train(torch.compile(train_step, backend=graphs), model, clips, hook)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert graphs.frame_count == 1 and len(calls) == (STEPS if hooked else 0)


def test_gradient_release_is_not_traced() -> None:
    torch._dynamo.reset()
    models = [model_of(2), model_of(2)]
    losses = []
    for model, is_compiled in zip(models, (False, True), strict=True):
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        enable_gradient_release(model, optimizer, bucket_bytes=0)
        graphs = CompileCounter()
        step = torch.compile(train_step, backend=graphs) if is_compiled else train_step
        losses.append([step(model, optimizer, torch.ones(8, 16), False).item() for _ in range(STEPS)])
        assert graphs.frame_count == int(is_compiled)
    assert losses[0] == losses[1] and losses[0][0] > losses[0][-1]
