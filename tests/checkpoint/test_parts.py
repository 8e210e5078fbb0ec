"""Plain tensors that are only parts of parameters: FSDP1's flat shards, ZeRO's share, parts that share a name.

Exporters must not take them for the whole: they are refused on every rank, or put together right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import distributed
from cases import values
from fused_optim import FusedAdamW, export_optimizer_checkpoint, load_optimizer_checkpoint, save_master_safetensors
from pairwise import pairwise

FULL = StateDictOptions(full_state_dict=True)  # with cpu_offload, FSDP1 mixes up the moments of CPU models, torch's too
REFUSED = r"parameter 0 \('.*0\.weight', .*: .* got a flat shard of FullyShardedDataParallel \(FSDP1\); use fully_shard"


def build(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Sizes of which no rank's flat shard is a whole tensor."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).to(dtype)


def fsdp1(model: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> FullyShardedDataParallel:
    options = {"use_orig_params": True, "sharding_strategy": ShardingStrategy[strategy], **options}
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, steps: int = 2) -> None:
    """All ranks see the same data, so that they do what one rank does."""
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        model(values((3, 6), dtype, "cpu", seed=step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


EXPORTS: dict[str, Callable[[nn.Module, FusedAdamW, str], Any]] = {
    "folder": lambda model, optimizer, path: export_optimizer_checkpoint(model, optimizer, f"{path}/folder"),
    "file": lambda model, optimizer, path: export_optimizer_checkpoint(model, optimizer, f"{path}/file.pt"),
    "masters": lambda model, optimizer, path: save_master_safetensors(model, optimizer, f"{path}/masters"),
    "master_state_dict": lambda model, optimizer, path: optimizer.master_state_dict(model),
    "load": lambda model, optimizer, path: load_optimizer_checkpoint(model, optimizer, f"{path}/given.pt"),
}


# --- FSDP1 ------------------------------------------------------------------------------------------------------


def refuse_flat_shards(strategy: str, dtype: torch.dtype, use_orig_params: bool, path: str) -> None:
    model = fsdp1(build(dtype), strategy, use_orig_params=use_orig_params)
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    before = [{name: state.clone() for name, state in states.items()} for states in optimizer.state.values()]
    text = REFUSED if use_orig_params else REFUSED.replace(r"0\.weight", "_flat_param")
    for export in EXPORTS.values():
        with pytest.raises(TypeError, match=text):
            export(model, optimizer, path)
    for states, kept in zip(optimizer.state.values(), before, strict=True):
        assert all(torch.equal(state, kept[name]) for name, state in states.items())
    if use_orig_params:  # the module inside has no mark of its wrapper, the parameters do
        with pytest.raises(TypeError, match=REFUSED):
            optimizer.master_state_dict(model.module)


# Not all strategies x dtypes x ways to keep parameters: each two of them.
@pytest.mark.parametrize(
    "strategy, dtype, use_orig_params",
    pairwise(["FULL_SHARD", "SHARD_GRAD_OP"], [torch.float32, torch.bfloat16], [True, False]),
    ids=str,
)
def test_flat_shards_are_refused(strategy: str, dtype: torch.dtype, use_orig_params: bool, tmp_path: Path) -> None:
    torch.save({"state": {}, "param_groups": []}, tmp_path / "given.pt")
    distributed.run(2, refuse_flat_shards, strategy, dtype, use_orig_params, str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["given.pt"]


def export_unsharded(strategy: str, path: str) -> None:
    model = fsdp1(build(), strategy)
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    for name in ("file", "folder", "masters"):
        EXPORTS[name](model, optimizer, path)


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "NO_SHARD"), (1, "FULL_SHARD")])
def test_what_fsdp1_keeps_whole_is_exported(ranks: int, strategy: str, tmp_path: Path) -> None:
    distributed.run(ranks, export_unsharded, strategy, str(tmp_path))
    assert_exported(tmp_path)


def assert_exported(path: Path) -> None:
    """What two steps of one rank give, in a file or a folder that loads, and as masters."""
    model = build()
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    masters = {
        name: value for file in (path / "masters").glob("*.safetensors") for name, value in load_file(file).items()
    }
    torch.testing.assert_close(masters, {name: value.detach() for name, value in model.named_parameters()})
    for source in (path / "file.pt", path / "folder"):
        if not source.exists():
            continue
        other = build(seed=1)
        fresh = FusedAdamW(other.parameters(), lr=0.5)
        load_optimizer_checkpoint(other, fresh, source)
        other.load_state_dict(model.state_dict())
        for (_, mine), (_, theirs) in zip(optimizer.state.items(), fresh.state.items(), strict=True):
            torch.testing.assert_close({**theirs}, {**mine})
        assert fresh.param_groups[0]["step"] == 2
        assert fresh.param_groups[0]["lr"] == 0.01


def go_through_full_states(dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """The way that the error names."""
    options: dict[str, Any] = {"exp_avg_dtype": torch.bfloat16}
    model = fsdp1(build(dtype))
    optimizer = FusedAdamW(model.parameters(), lr=0.01, **options)
    train(model, optimizer)
    full = get_optimizer_state_dict(model, optimizer, options=FULL)
    other = fsdp1(build(dtype, seed=1))
    fresh = FusedAdamW(other.parameters(), lr=0.5, **options)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.data.copy_(mine)
    set_optimizer_state_dict(other, fresh, full, options=FULL)
    assert fresh.param_groups[0]["step"] == 2
    for _ in range(2):
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            for name, value in optimizer.state[mine].items():
                assert not value.numel() or torch.equal(fresh.state[theirs][name], value)
            assert torch.equal(mine, theirs)
        for each, own in ((model, optimizer), (other, fresh)):
            train(each, own, first=2, steps=1)
    return full["state"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_way_that_the_error_names(dtype: torch.dtype) -> None:
    whole, _ = distributed.run(2, go_through_full_states, dtype)
    model = build(dtype)
    optimizer = FusedAdamW(model.parameters(), lr=0.01, exp_avg_dtype=torch.bfloat16)
    train(model, optimizer)
    alone = optimizer.state_dict()["state"]
    for index, (name, _) in enumerate(model.named_parameters()):
        assert whole[name].keys() == alone[index].keys()
        for state, value in whole[name].items():
            torch.testing.assert_close(value, alone[index][state], rtol=2e-2, atol=1e-4)  # sums in another order


# --- ZeRO: every rank has some of the parameters, whole -------------------------------------------------------------


def export_shares(path: str) -> list[int]:
    model = DistributedDataParallel(build())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=FusedAdamW, lr=0.01)
    train(model, optimizer)
    own = optimizer.optim
    with pytest.raises((ValueError, RuntimeError), match=r"this rank lacks .* export to a folder"):
        EXPORTS["file"](model, own, path)
    EXPORTS["folder"](model, own, path)
    EXPORTS["masters"](model, own, path)
    other = DistributedDataParallel(build(seed=1))
    fresh = ZeroRedundancyOptimizer(other.parameters(), optimizer_class=FusedAdamW, lr=0.5)
    load_optimizer_checkpoint(other, fresh.optim, f"{path}/folder")
    for param, states in fresh.optim.state.items():
        name = next(name for name, candidate in other.named_parameters() if candidate is param)
        for key, value in own.state[model.get_parameter(name)].items():
            assert torch.equal(states[key], value), name
    return [len(group["params"]) for group in own.param_groups]


@pytest.mark.parametrize("ranks", [3])
def test_shares_of_parameters_are_put_together(ranks: int, tmp_path: Path) -> None:
    counts = distributed.run(ranks, export_shares, str(tmp_path))
    assert sum(count for (count,) in counts) == 4
    assert max(count for (count,) in counts) < 4
    assert_exported(tmp_path)


# --- others -----------------------------------------------------------------------------------------------------


def refuse_parts(dtype: torch.dtype, zero_gradients: bool, path: str) -> None:
    """As tensor and expert parallelism without DTensors have them: other values under the same names."""
    model = build(dtype, seed=0 if zero_gradients else dist.get_rank())
    if zero_gradients:  # and other shapes
        model[0] = nn.Linear(6, 8 - dist.get_rank(), dtype=dtype)
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if zero_gradients else param.detach().clone()
    optimizer.step()
    for name in ("folder", "file", "masters"):
        with pytest.raises(ValueError, match=r"ranks 0 and 1 have different plain tensors for 0\.(weight|bias)"):
            EXPORTS[name](model, optimizer, path)


@pytest.mark.parametrize("dtype, zero_gradients", [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_different_tensors_under_one_name_are_refused(dtype: torch.dtype, zero_gradients: bool, tmp_path: Path) -> None:
    distributed.run(2, refuse_parts, dtype, zero_gradients, str(tmp_path))
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def export_replicas(path: str) -> None:
    model = DistributedDataParallel(build())
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    for name in ("file", "folder", "masters"):
        EXPORTS[name](model, optimizer, path)


def test_replicas_are_exported_once(tmp_path: Path) -> None:
    distributed.run(2, export_replicas, str(tmp_path))
    assert_exported(tmp_path)


def test_slices_that_are_no_parameters_of_the_model_are_refused(tmp_path: Path) -> None:
    """As Megatron-LM's distributed optimizer makes them: masters of a model without any would be none, silently."""
    model = build()
    slices = [param.detach().view(-1)[: param.numel() // 2] for param in model.parameters()]
    optimizer = FusedAdamW(slices, lr=0.01)
    for name in ("folder", "masters", "master_state_dict"):
        with pytest.raises(KeyError, match=r"parameter 0 \(shape \(24,\).* is not one of the model's parameters"):
            EXPORTS[name](model, optimizer, str(tmp_path))


def test_masters_of_one_of_two_models() -> None:
    one, two = build(), build(seed=1)
    optimizer = FusedAdamW([*one.parameters(), *two.parameters()], lr=0.01)
    for model in (one, two):
        assert optimizer.master_state_dict(model).keys() == dict(model.named_parameters()).keys()
