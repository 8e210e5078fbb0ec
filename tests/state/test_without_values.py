"""Tensors that are only shapes, on the meta device and of FakeTensorMode: planning a run without its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import cases
import distributed
from fused_optim import clip_grad_norm_
from fused_optim.sharding.dtensor import local_tensor
from pairwise import each_once, pairwise
from peers import FusedAdamW

EVERY_MASTER = pytest.mark.parametrize("master", cases.MASTERS, ids=str)
# Not all masters x formats x forms: each two of them.
COMBINATIONS = pairwise(cases.MASTERS, cases.FORMATS, ["unscaled", "native"])


def model_of(dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    return nn.Sequential(nn.Linear(128, 64, **made), nn.Linear(64, 6, bias=False, **made))


def kinds(tree: Any) -> Any:
    """Shapes and dtypes of a state dict."""
    if isinstance(tree, dict):
        return {key: kinds(value) for key, value in tree.items()}
    return (tree.shape, tree.dtype) if isinstance(tree, torch.Tensor) else tree


def optimizer_of(model: nn.Module, master: cases.Master, fmt: torch.dtype, form: str = "unscaled") -> FusedAdamW:
    return FusedAdamW(
        model.parameters(), exp_avg_dtype=fmt, exp_avg_sq_dtype=fmt, checkpoint_format=form, **master.options
    )


@pytest.mark.parametrize("master, fmt, form", each_once(COMBINATIONS), ids=str)
def test_state_dicts_of_meta_models(master: cases.Master, fmt: cases.Format, form: str) -> None:
    """What torch.distributed.checkpoint makes of a model on the meta device has the shapes of a real one's."""
    found = {}
    for device in ("meta", "cpu"):
        model = model_of(master.param_dtype, device)
        optimizer = optimizer_of(model, master, fmt.dtype, form)
        state = get_optimizer_state_dict(model, optimizer)
        found[device] = kinds(state)
        assert optimizer.param_groups[0]["step"] == 0
        assert all(value.device.type == device for s in optimizer.state.values() for value in s.values())
        set_optimizer_state_dict(model, optimizer, state)
        assert kinds(get_optimizer_state_dict(model, optimizer)) == found[device]
    assert found["meta"] == found["cpu"]


@EVERY_MASTER
def test_steps_of_meta_models(master: cases.Master) -> None:
    model = model_of(master.param_dtype, "meta")
    optimizer = optimizer_of(model, master, torch.int8)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state_bytes() > 0


def state_of_sharded_meta() -> list[tuple[int, ...]]:
    model = model_of(torch.bfloat16, "meta")
    fully_shard(model, mesh=distributed.mesh())
    optimizer = FusedAdamW(model.parameters(), exp_avg_dtype=torch.int8)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert all(local_tensor(s).is_meta for states in optimizer.state.values() for s in states.values())
    return [tuple(value.shape) for key, value in flat.items() if key.endswith("exp_avg")]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sharded_meta_models(ranks: int) -> None:
    assert distributed.run(ranks, state_of_sharded_meta) == [[(64, 128), (64,), (6, 64)]] * ranks


def fake_run(kind: type[torch.optim.Optimizer], dtype: torch.dtype, **options: Any) -> tuple[nn.Module, Any]:
    """Forward, backward, clipping, steps, a schedule, a round trip of the state dict."""
    model = model_of(dtype)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    for _ in range(2):
        model(torch.ones(3, 128, dtype=dtype)).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        if kind is FusedAdamW:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return model, optimizer


@pytest.mark.parametrize("master, fmt, form", each_once(COMBINATIONS), ids=str)
def test_fake_training(master: cases.Master, fmt: cases.Format, form: str) -> None:
    """As torch.optim.AdamW's (below): nothing is read or written, and the states have the shapes of a real run's."""
    options = {"exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype, "checkpoint_format": form, **master.options}
    with FakeTensorMode():
        model, optimizer = fake_run(FusedAdamW, master.param_dtype, **options)
        fake = kinds(optimizer.state_dict())
        tensors = [*model.parameters(), *(value for states in optimizer.state.values() for value in states.values())]
        assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
    _, optimizer = fake_run(FusedAdamW, master.param_dtype, **options)
    assert fake == kinds(optimizer.state_dict())
    assert optimizer.param_groups[0]["step"] == 2


@pytest.mark.parametrize("dtype", sorted({master.param_dtype for master in cases.MASTERS}, key=str), ids=str)
def test_fake_training_of_adamw(dtype: torch.dtype) -> None:
    """What is asked of ours can be asked of torch's."""
    with FakeTensorMode():
        fake_run(torch.optim.AdamW, dtype)
