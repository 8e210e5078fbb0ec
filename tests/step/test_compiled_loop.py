"""Training steps under ``torch.compile``: the optimizer's part runs between graphs, as it is."""

from __future__ import annotations

import copy
import warnings
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


def closure_step(model: nn.Module, optimizer: FusedAdamW, x: Tensor, clips: bool) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if clips:
            optimizer.clip_grad_norm_(0.01)
        return loss

    return optimizer.step(closure)


@pytest.mark.long
@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
def test_a_closure_is_compiled_as_the_loop_is(clips: bool, hooked: bool) -> None:
    """And hooks are called before and after it, as by torch's optimizers."""
    torch._dynamo.reset()
    calls: list[int] = []
    hook = (lambda *_: calls.append(1)) if hooked else None
    model = model_of(1)
    expected = train(train_step, copy.deepcopy(model), clips, None)
    graphs = CompileCounter()
    found = train(torch.compile(closure_step, backend=graphs), model, clips, hook)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert graphs.frame_count == 1 and graphs.op_count > 3 and len(calls) == (STEPS if hooked else 0)


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


def test_methods_are_not_traced() -> None:
    """Traced, a load alone is a hundred frames."""
    torch._dynamo.reset()
    model = model_of(5)
    optimizer = FusedAdamW(model.parameters(), exp_avg_dtype="int8", exp_avg_sq_dtype="int8")
    optimizer.initialize_state()
    saved = optimizer.state_dict()
    extra = nn.Parameter(torch.ones(3))
    graphs = CompileCounter()

    @torch.compile(backend=graphs)
    def call_all() -> tuple[int, str]:
        optimizer.load_state_dict(saved)
        optimizer.add_param_group({"params": [extra]})
        optimizer.initialize_state()
        optimizer.sync_params_from_master()
        optimizer.sync_masters_from_params()
        return optimizer.state_bytes(), str(optimizer.summary()) + str(optimizer.diagnostics())

    size, shown = call_all()
    assert graphs.frame_count == 0 and size == optimizer.state_bytes() and "int8" in shown


@pytest.mark.parametrize("form", ["unscaled", "native"])
def test_a_rate_written_in_compiled_code_leaves_no_keys(form: str) -> None:
    """torch.compile gives such groups ``capturable=True``, which checkpoints of other runs do not have."""

    def train(step: Callable[..., Tensor]) -> FusedAdamW:
        model = model_of(6)
        optimizer = FusedAdamW(model.parameters(), lr=1e-2, checkpoint_format=form)  # type: ignore[arg-type]
        for _ in range(2):
            step(model, optimizer, torch.ones(2, 16))
        return optimizer

    def slower_step(model: nn.Module, optimizer: FusedAdamW, x: Tensor) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return train_step(model, optimizer, x, clips=False)

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "param group")
        eager, compiled = train(slower_step), train(torch.compile(slower_step, backend="eager"))
    assert eager.state_dict()["param_groups"] == compiled.state_dict()["param_groups"]
    for optimizer in (eager, compiled):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert eager.state_dict()["param_groups"] == compiled.state_dict()["param_groups"]
    compiled.checkpoint_format = "torch"
    assert compiled.state_dict()["param_groups"][0]["capturable"] is False
