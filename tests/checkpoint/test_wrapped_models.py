"""Compiled and wrapped models: parameters have the names of the model inside, as in torch.distributed.checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distributed
from cases import values
from distributed import assert_same, part
from fused_optim import (
    FusedAdamW,
    export_optimizer_checkpoint,
    load_optimizer_checkpoint,
    save_master_safetensors,
)
from fused_optim.sharding.model_files import INDEX

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4)).bfloat16()


def compiled_parts(model: nn.Sequential) -> nn.Module:
    """As torchtitan does: activation checkpointing within, compiled blocks."""
    for i in range(2):
        model[i] = torch.compile(checkpoint_wrapper(model[i]))
    return model


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "checkpointed": checkpoint_wrapper,
    "compiled parts": compiled_parts,
    "both": lambda model: torch.compile(compiled_parts(model)),
}
EVERY_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS)


def trained(wrapper: Callable[[nn.Sequential], nn.Module], named: bool = False) -> tuple[nn.Module, FusedAdamW]:
    model = wrapper(plain())
    params = model.named_parameters() if named else model.parameters()
    optimizer = FusedAdamW(params, lr=0.1, exp_avg_dtype=torch.int8)
    for i, param in enumerate(model.parameters()):
        param.grad = distributed.shard_like(values(tuple(param.shape), param.dtype, "cpu", seed=i), param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def states(optimizer: FusedAdamW) -> dict[str, Tensor]:
    found = optimizer.state_dict()["state"]
    return {f"{NAMES[i]}: {key}": value.clone() for i, s in found.items() for key, value in s.items()}


@EVERY_WRAPPER
def test_masters_have_the_names_of_distributed_checkpoints(wrapper: str) -> None:
    model, optimizer = trained(WRAPPERS[wrapper])
    assert list(optimizer.master_state_dict(model)) == NAMES
    assert list(get_optimizer_state_dict(model, optimizer)["state"]) == NAMES


@EVERY_WRAPPER
@pytest.mark.parametrize("named", [False, True])
def test_exports_load_into_plain_models_and_back(wrapper: str, named: bool, tmp_path: Path) -> None:
    model, optimizer = trained(WRAPPERS[wrapper], named)
    for path in (tmp_path / "optimizer.pt", tmp_path / "folder"):
        export_optimizer_checkpoint(model, optimizer, path)
        for target in (WRAPPERS["plain"], WRAPPERS[wrapper]):
            other = target(plain(seed=1))
            fresh = FusedAdamW(other.parameters(), exp_avg_dtype=torch.int8)
            load_optimizer_checkpoint(other, fresh, path)
            moments = {key: value for key, value in states(fresh).items() if "exp_avg" in key}
            assert_same(moments, {key: value for key, value in states(optimizer).items() if "exp_avg" in key})


@EVERY_WRAPPER
def test_safetensors_have_these_names(wrapper: str, tmp_path: Path) -> None:
    model, optimizer = trained(WRAPPERS[wrapper])
    save_master_safetensors(model, optimizer, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert sorted(index) == sorted(NAMES)
    found = load_file(tmp_path / next(iter(index.values())))
    assert_same({name: found[name] for name in NAMES}, dict(optimizer.master_state_dict(model)))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module."])
@pytest.mark.parametrize("flat", [False, True])
def test_checkpoints_under_the_wrappers_names_load(prefix: str, flat: bool, tmp_path: Path) -> None:
    """As someone writes them by the names of ``model.named_parameters()``."""
    _, optimizer = trained(WRAPPERS["plain"])
    saved = optimizer.state_dict()
    names = [prefix + name for name in NAMES]
    names[2] = names[2].replace("1.", "1._checkpoint_wrapped_module.")
    state: dict[str, Any] = {names[i]: value for i, value in saved["state"].items()}
    group = {**saved["param_groups"][0], "params": names}
    content: dict[str, Any] = {"state": state, "param_groups": [group]}
    if flat:
        settings = {key: value for key, value in group.items() if key != "params"}
        content = {f"state.{name}.{key}": value for name, s in state.items() for key, value in s.items()}
        content |= {f"param_groups.{name}.{key}": value for name in names for key, value in settings.items()}
    torch.save(content, tmp_path / "optimizer.pt")
    other = plain(seed=1)
    fresh = FusedAdamW(other.parameters(), exp_avg_dtype=torch.int8)
    load_optimizer_checkpoint(other, fresh, tmp_path / "optimizer.pt")
    assert_same(states(fresh), states(optimizer))


def on_ranks(how: str, folder: str) -> list[str]:
    def wrapped(model: nn.Sequential) -> nn.Module:
        if how == "ddp":
            return torch.compile(DistributedDataParallel(torch.compile(model)))
        compiled = compiled_parts(model)
        fully_shard(compiled, mesh=distributed.mesh())
        return torch.compile(compiled)

    model, optimizer = trained(wrapped)
    export_optimizer_checkpoint(model, optimizer, folder)
    other = wrapped(plain(seed=1))
    fresh = FusedAdamW(other.parameters(), exp_avg_dtype=torch.int8)
    load_optimizer_checkpoint(other, fresh, folder)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            values_of = [part(o.store.read(p, key))[2] for o, p in ((fresh, ours), (optimizer, theirs))]
            assert torch.equal(*values_of)
    assert list(get_optimizer_state_dict(model, optimizer)["state"]) == NAMES
    return list(optimizer.master_state_dict(model))


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_wrapped_models_on_ranks(how: str, ranks: int, tmp_path: Path) -> None:
    assert not dist.is_initialized()
    assert distributed.run(ranks, on_ranks, how, str(tmp_path / "folder")) == [NAMES] * ranks
