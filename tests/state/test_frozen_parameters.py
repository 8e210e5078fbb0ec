"""Frozen parameters have no states until they get a gradient, whoever asks for states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import distributed
from distributed import assert_same, join_all, part
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from peers import FusedAdam, FusedAdamW

INT8 = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
MASTERS: list[dict[str, Any]] = [
    {},
    {"store_param_remainders": True},
    {"master_weight_dtype": torch.float16},
    {"master_weights": False},
]


def build(dtype: torch.dtype = torch.bfloat16, quantized: bool = False) -> nn.Module:
    """A frozen base of three layers with trained adapters around it, as in LoRA."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).to(dtype)
    base = nn.Sequential(*list(model)[1:])
    base.requires_grad_(False)
    if quantized:
        quantize_model_(base, MXFP8BlockScaling())
    return model


def gradient(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(model: nn.Module, optimizer: FusedAdam, steps: range) -> None:
    for step in steps:
        model(torch.ones(8, 64, dtype=torch.bfloat16) * (step + 1)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_they_take_no_memory(master: dict[str, Any], quantized: bool) -> None:
    if quantized and not master.get("master_weights", True):
        master = {}
    model = build(quantized=quantized)
    trained = model[0].weight
    optimizer, alone = FusedAdamW(model.parameters(), **master, **INT8), FusedAdamW([trained], **master, **INT8)
    optimizer.initialize_state()
    alone.initialize_state()
    assert [*optimizer.state] == [trained] and optimizer.state_bytes() == alone.state_bytes() > 0
    train(model, optimizer, range(2))
    assert [*optimizer.state] == [trained]
    assert [*optimizer.state_dict()["state"]] == [0]
    assert optimizer.param_groups[0]["step"] == 2


def test_the_others_are_updated_as_without_them() -> None:
    first, second = build(), build()
    with_frozen = FusedAdamW(first.parameters(), lr=0.01, **INT8)
    without = FusedAdamW([second[0].weight], lr=0.01, **INT8)
    train(first, with_frozen, range(5))
    train(second, without, range(5))
    assert_same(dict(first.state_dict()), dict(second.state_dict()))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("own_group", [False, True])
def test_one_that_is_unfrozen_starts_then(backend: str, own_group: bool, use_backend: Any) -> None:
    """In a group of its own its first update is torch's; the group's step was not counted before."""
    use_backend(backend)
    early, late = (nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    late.requires_grad_(False)
    groups = [{"params": [early]}, {"params": [late]}] if own_group else [{"params": [early, late]}]
    optimizer = FusedAdamW(groups, lr=0.1, weight_decay=0.0)
    for step in range(50):
        early.grad = gradient(step, torch.float32)
        optimizer.step()
    assert late not in optimizer.state and optimizer.param_groups[-1]["step"] == (0 if own_group else 50)
    late.requires_grad_(True)
    early.grad, late.grad = None, gradient(99, torch.float32)
    expected = late.detach().clone().requires_grad_()
    expected.grad = late.grad.clone()
    optimizer.step()
    reference = torch.optim.AdamW([expected], lr=0.1, weight_decay=0.0)
    reference.step()
    assert optimizer.param_groups[-1]["step"] == (1 if own_group else 51)
    if own_group:
        torch.testing.assert_close(late, expected, rtol=1e-6, atol=1e-7)
    late.requires_grad_(False)
    optimizer.zero_grad()
    assert set(optimizer.state_dict()["state"]) == {0, 1}  # what it has learned stays


# --- saved and loaded -----------------------------------------------------------------------------------------------


def resume(form: str) -> dict[str, Any]:
    """FSDP2 with a frozen base: saved, loaded into fresh objects, trained on, compared with a run that went on."""

    def make() -> tuple[nn.Module, FusedAdamW]:
        model = build()
        for layer in model:
            fully_shard(layer, mesh=distributed.mesh())
        fully_shard(model, mesh=distributed.mesh())
        return model, FusedAdamW(model.parameters(), lr=0.01, checkpoint_format=form, **INT8)

    model, optimizer = make()
    train(model, optimizer, range(3))
    saved, weights = get_optimizer_state_dict(model, optimizer), model.state_dict()
    assert not any("1.weight" in key for key in saved["state"])
    fresh, other = make()
    fresh.load_state_dict(weights)
    get_optimizer_state_dict(fresh, other)
    set_optimizer_state_dict(fresh, other, saved)
    train(model, optimizer, range(3, 6))
    train(fresh, other, range(3, 6))
    assert other.param_groups[0]["step"] == 6 and len(other.state) == 1
    assert_same({"w": fresh[0].weight.to_local()}, {"w": model[0].weight.to_local()})
    return {"weight": part(model[0].weight)}


@pytest.mark.parametrize("form", ["unscaled", "native"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_checkpoints_leave_them_out(ranks: int, form: str) -> None:
    join_all(distributed.run(ranks, resume, form))


def test_masters_of_a_model_include_them() -> None:
    model = build()
    optimizer = FusedAdamW(model.parameters())
    masters = optimizer.master_state_dict(model)
    assert [*masters] == [f"{i}.weight" for i in range(4)] and not optimizer.state
    assert all(torch.equal(masters[name], param.float()) for name, param in model.named_parameters())
