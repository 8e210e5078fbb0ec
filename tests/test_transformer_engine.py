"""Weights of TransformerEngine's own modules under FSDP2, updated by FusedAdamW. Runs where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import distributed
from fused_optim import FusedAdamW
from fused_optim.dtensor import local_tensor
from fused_optim.quantized import protocol

missing = importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(missing, reason="no TransformerEngine or no GPU")]

RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
WIDTH, STEPS = 256, 5


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe

    return getattr(recipe, name)()


def build(name: str) -> nn.Module:
    """Built on the meta device, sharded, then initialised: as TransformerEngine documents it."""
    import transformer_engine.pytorch as te

    context = te.quantized_model_init(enabled=True, recipe=recipe_of(name), preserve_high_precision_init_val=True)
    with context:
        layers = [te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device="meta") for _ in range(2)]
    model = nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer, mesh=distributed.mesh())
    fully_shard(model, mesh=distributed.mesh())
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def seed(value: int) -> None:
    torch.manual_seed(value)
    torch.cuda.manual_seed_all(value)


def train(name: str, model: nn.Module, optimizer: FusedAdamW, first: int, last: int) -> list[dict[str, Tensor]]:
    """The local gradients of each step."""
    import transformer_engine.pytorch as te

    seen = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, WIDTH, generator=generator).to(distributed.device(), torch.bfloat16)
        with te.autocast(enabled=True, recipe=recipe_of(name)):
            out = model(x)
        (out.float() - x.float()).square().mean().backward()
        seen.append({key: local_tensor(p.grad).float().clone() for key, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return seen


def masters(model: nn.Module, optimizer: FusedAdamW) -> dict[str, Tensor]:
    return {key: local_tensor(optimizer.state[p]["master_param"]).clone() for key, p in model.named_parameters()}


def decoded(model: nn.Module) -> dict[str, Tensor]:
    locals_ = {key: local_tensor(param.detach()) for key, param in model.named_parameters()}
    return {key: local.dequantize() if hasattr(local, "quantize_") else local for key, local in locals_.items()}


def train_and_resume(name: str, path: str) -> None:
    seed(0)
    model = build(name)
    initial = {
        key: local_tensor(p).get_high_precision_init_val().float().to(distributed.device())
        for key, p in model.named_parameters()
        if hasattr(local_tensor(p), "get_high_precision_init_val")
    }
    assert len(initial) == 2
    optimizer = FusedAdamW(model.parameters(), lr=0.01, exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.int8)
    optimizer.initialize_state()
    for key, value in initial.items():
        assert torch.equal(masters(model, optimizer)[key], value)
    exact = FusedAdamW(model.parameters(), lr=0.01)  # FP32 states, for the comparison with torch
    exact.initialize_state()
    expected = {key: nn.Parameter(value) for key, value in masters(model, exact).items()}
    reference = torch.optim.AdamW(expected.values(), lr=0.01)
    for grads in train(name, model, exact, 0, STEPS):
        for key, grad in grads.items():
            expected[key].grad = grad
        reference.step()
    for key, value in masters(model, exact).items():
        torch.testing.assert_close(value, expected[key].data, rtol=1e-5, atol=1e-6)
    written = decoded(model)
    for key, param in model.named_parameters():
        if key in initial:
            assert protocol.adapter_of(param) is not None
            error = (written[key].float() - expected[key]).norm() / expected[key].norm()
            assert error < 0.05, (key, float(error))

    dcp.save(checkpoint_of(model, exact), checkpoint_id=path)
    seed(1)
    other = build(name)
    loaded = FusedAdamW(other.parameters(), lr=0.01)
    states = checkpoint_of(other, loaded)
    dcp.load(states, checkpoint_id=path)
    options = StateDictOptions(strict=False)
    set_state_dict(
        other, loaded, model_state_dict=states["model"], optim_state_dict=states["optimizer"], options=options
    )
    compare(masters(other, loaded), masters(model, exact))
    if name != "DelayedScaling":  # whose scale is the module's, not the tensor's alone
        compare(decoded(other), decoded(model))
    train(name, model, exact, STEPS, STEPS + 1)
    train(name, other, loaded, STEPS, STEPS + 1)
    assert all(value.isfinite().all() for value in masters(other, loaded).values())


def checkpoint_of(model: nn.Module, optimizer: FusedAdamW) -> dict[str, Any]:
    """Without the modules' own extra states, whose size changes with the first forward."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    of_model = {key: value for key, value in of_model.items() if not key.endswith("_extra_state")}
    return {"model": of_model, "optimizer": of_optimizer}


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@pytest.mark.parametrize("name", RECIPES)
def test_train_and_resume_under_fsdp2(name: str, tmp_path: Path) -> None:
    ranks = min(torch.cuda.device_count(), 2)
    distributed.run(ranks, train_and_resume, name, str(tmp_path), on="cuda")
