"""FusedMuon on several ranks: the bits of one rank, whatever the placements; checkpoints, FSDP2, empty shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard

import distributed
from cases import values
from distributed import Part, join_all, part, same_bits
from fused_optim import FusedAdamW, FusedMuon, muon_param_groups
from fused_optim.checkpoint import Checkpointer
from fused_optim.matrices import shards
from fused_optim.optimizer import ShardedOptimizer
from pairwise import each_once, pairwise

F32, BF16 = torch.float32, torch.bfloat16
# Uneven and empty shards, one row, experts, tall and wide ones, a vector.
SHAPES = {
    "wide": (64, 256),
    "tall": (272, 256),
    "uneven": (7, 256),
    "row": (1, 256),
    "experts": (6, 32, 256),
    "split": (48, 256),
    "vector": (256,),
}
Place = Callable[[tuple[int, ...]], list[Placement]]


def rows(shape: tuple[int, ...]) -> list[Placement]:
    return [Shard(0)]


def columns(shape: tuple[int, ...]) -> list[Placement]:
    return [Shard(len(shape) - 1)]


PLACES: dict[str, tuple[int, Place]] = {  # dims of the mesh
    "rows": (1, rows),
    "columns": (1, columns),
    "inner rows": (1, lambda shape: [Shard(max(len(shape) - 2, 0))]),
    "replicated": (1, lambda shape: [Replicate()]),
    "hsdp": (2, lambda shape: [Replicate(), Shard(0)]),
    "fsdp and tp": (2, lambda shape: [Shard(0), Shard(1)] if len(shape) > 1 else [Shard(0), Replicate()]),
}


def build(how: str, dtype: torch.dtype, **options: Any) -> tuple[nn.ParameterDict, FusedMuon]:
    placed = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        placed[name] = nn.Parameter(place(values(shape, dtype, "cpu", seed=i) * 0.1, how))
    model = nn.ParameterDict(placed)
    matrices = [(name, param) for name, param in model.items() if name not in ("vector", "split")]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": [("split", model["split"])], "splits": (16, 24, 8), "ns_dtype": "float16"},  # sent by itself
        {"params": [("vector", model["vector"])], "algorithm": "adamw"},
    ]
    return model, FusedMuon(groups, lr=0.02, experts=True, **options)


def place(full: Tensor, how: str) -> Tensor:
    if how == "plain":
        return full
    dims, placements = PLACES[how]
    world = dist.get_world_size()
    mesh = distributed.mesh() if dims == 1 else distributed.mesh(2, world // 2, names=("outer", "inner"))
    return distributed.shard(full, mesh, placements(tuple(full.shape)))


def train(model: nn.ParameterDict, optimizer: torch.optim.Optimizer, how: str, numbers: range, but: str = "") -> None:
    for number in numbers:
        for i, (name, param) in enumerate(model.items()):
            grad = place(values(tuple(param.shape), param.dtype, "cpu", seed=100 * number + i), how)
            # As FSDP may leave them: without gradients where there is nothing of a parameter.
            is_empty = name == but and param._local_tensor.numel() == 0
            param.grad = None if is_empty else grad
        optimizer.step()


def parts(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Part]:
    found = {}
    for name, param in model.named_parameters():
        found[name] = part(param.detach())
        for key in optimizer.store.layouts[param].names:
            if key in optimizer.state[param]:
                found[f"{name}.{key}"] = part(optimizer.store[param].unscaled(key, None))
    return found


def trained(how: str, dtype: torch.dtype, options: dict[str, Any], but: str = "") -> dict[str, Part]:
    model, optimizer = build(how, dtype, **options)
    train(model, optimizer, how, range(3), but)
    return parts(model, optimizer)


OPTIONS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (F32, {}),
    (BF16, {"state_dtype": "bfloat16"}),
    (BF16, {"state_dtype": "int8", "ns_dtype": "float32"}),
    (BF16, {"master_bits": 24, "momentum_dtype": "float8_e4m3fn", "ns_coefficients": "polar_express"}),
]


@functools.cache  # the same for all placements
def of_one_process(number: int) -> dict[str, Tensor]:
    return join_all(distributed.run(1, trained, "plain", *OPTIONS[number]))


ON_RANKS = [
    *((ranks, "rows") for ranks in (1, 2, 3, 4)),
    *((2, "replicated"), (2, "columns"), (3, "inner rows"), (4, "hsdp"), (4, "fsdp and tp")),
]


@pytest.mark.parametrize(("on_ranks", "number"), each_once(product(ON_RANKS, range(len(OPTIONS)))), ids=str)
def test_bits_do_not_depend_on_the_sharding(on_ranks: tuple[int, str], number: int) -> None:
    """Half of 256 columns are blocks of 128 still."""
    ranks, how = on_ranks
    found = join_all(distributed.run(ranks, trained, how, *OPTIONS[number]))
    distributed.assert_same(found, of_one_process(number))


def trained_in_buckets(how: str) -> dict[str, Part]:
    with mock.patch.object(shards, "BUCKET_BYTES", 100_000):
        return trained(how, BF16, {"momentum_dtype": "int8"})


@pytest.mark.parametrize(("ranks", "how"), [(1, "plain"), (3, "rows"), (4, "hsdp")])
def test_buckets_change_nothing(ranks: int, how: str) -> None:
    expected = join_all(distributed.run(1, trained, "plain", BF16, {"momentum_dtype": "int8"}))
    distributed.assert_same(join_all(distributed.run(ranks, trained_in_buckets, how)), expected)


@pytest.mark.parametrize("but", ["row", "uneven"])
def test_ranks_without_gradients_of_empty_shards(but: str) -> None:
    expected = join_all(distributed.run(1, trained, "plain", F32, {}))
    distributed.assert_same(join_all(distributed.run(4, trained, "rows", F32, {}, but)), expected)


def diagnosed(how: str) -> dict[str, Any]:
    model, optimizer = build(how, BF16, momentum_dtype="int8", ns_dtype="float32")
    train(model, optimizer, how, range(2))
    for i, (name, param) in enumerate(model.items()):
        is_empty = name == "row" and how == "rows" and param._local_tensor.numel() == 0
        param.grad = None if is_empty else place(values(tuple(param.shape), param.dtype, "cpu", seed=i), how)
    found = optimizer.diagnostics()
    return {name: numbers.get("sigma_error") for name, numbers in found["parameters"].items()}


@functools.cache
def diagnosed_alone() -> dict[str, Any]:
    return distributed.run(1, diagnosed, "plain")[0]


@pytest.mark.parametrize(("ranks", "how"), [(3, "rows"), (4, "hsdp"), (4, "fsdp and tp"), (2, "replicated")])
def test_diagnostics_are_those_of_one_rank(ranks: int, how: str) -> None:
    expected = diagnosed_alone()
    for found in distributed.run(ranks, diagnosed, how):
        assert found.keys() == expected.keys()
        for name, error in expected.items():
            assert (found[name] is None) == (error is None)
            assert error is None or abs(found[name] - error) < 1e-5


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save(how: str, form: str, folder: str) -> dict[str, Part]:
    model, optimizer = build(how, BF16, state_dtype="int8", checkpoint_format=form)
    train(model, optimizer, how, range(2))
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optim}, checkpoint_id=f"{folder}/dcp")
    with Checkpointer(model, optimizer, f"{folder}/own") as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
    train(model, optimizer, how, range(2, 4))
    return parts(model, optimizer)


def resume(how: str, form: str, folder: str, by: str) -> dict[str, Part]:
    model, optimizer = build(how, BF16, state_dtype="int8", checkpoint_format=form)
    with torch.no_grad():
        for param in model.values():
            param.zero_()
    if by == "dcp":
        state, optim = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": optim}, checkpoint_id=f"{folder}/dcp")
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim)
    else:
        with Checkpointer(model, optimizer, f"{folder}/own") as checkpointer:
            assert checkpointer.load_latest() == 1
    train(model, optimizer, how, range(2, 4))
    return parts(model, optimizer)


# What is saved, and where it is loaded.
MOVES = [((1, "rows"), (3, "rows")), ((4, "hsdp"), (2, "rows"))]


# Not all moves x ways x forms: each two of them.
@pytest.mark.parametrize("move, by, form", pairwise(MOVES, ["dcp", "checkpointer"], ["unscaled", "native"]), ids=str)
def test_checkpoints_go_on_on_other_ranks(move: tuple[Any, Any], by: str, form: str, tmp_path: Path) -> None:
    (ranks, how), (others, there) = move
    expected = join_all(distributed.run(ranks, save, how, form, str(tmp_path)))
    distributed.assert_same(join_all(distributed.run(others, resume, there, form, str(tmp_path), by)), expected)


# --- other update rules -----------------------------------------------------------------------------------------------

HIDDEN = ("wide", "experts", "uneven")


def groups_of(model: nn.ParameterDict, algorithm: str) -> list[dict[str, Any]]:
    hidden = [(name, param) for name, param in model.items() if name in HIDDEN]
    others = [(name, param) for name, param in model.items() if name not in HIDDEN]
    return [{"params": hidden, "algorithm": algorithm}, {"params": others, "algorithm": "adamw"}]


def save_adamw(folder: str, form: str) -> dict[str, Part]:
    model, _ = build("rows", BF16)
    groups = [{"params": group["params"]} for group in groups_of(model, "adamw")]
    optimizer = FusedAdamW(groups, lr=0.003, state_dtype="int8", checkpoint_format=form)
    train(model, optimizer, "rows", range(2))
    with Checkpointer(model, optimizer, folder) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
    return parts(model, optimizer)


def go_on_with_muon(folder: str) -> tuple[dict[str, Part], tuple[str, ...]]:
    model, _ = build("rows", BF16)
    optimizer = FusedMuon(groups_of(model, "muon"), experts=True, lr=0.02, state_dtype="int8")
    with Checkpointer(model, optimizer, folder) as checkpointer:
        with pytest.raises(ValueError, match="adam"):
            checkpointer.load(1)
        checkpointer.load(1, strict=False)
        report = checkpointer.report
        assert report is not None
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.003]
    assert [group["step"] for group in optimizer.param_groups] == [0, 2]
    assert f"{len(HIDDEN)} restarted (" in str(report)
    return parts(model, optimizer), report.restarted


@pytest.mark.parametrize("form", ["unscaled", "native"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_adamws_run_goes_on_with_muon(ranks: int, form: str, tmp_path: Path) -> None:
    """Its masters, and AdamW's states of what stays with AdamW, as they were; momenta are zeros."""
    saved = join_all(distributed.run(2, save_adamw, str(tmp_path), form))
    results = distributed.run(ranks, go_on_with_muon, str(tmp_path))
    found = join_all([parts for parts, _ in results])
    assert all(set(restarted) == set(HIDDEN) for _, restarted in results)
    for name, value in found.items():
        if name.endswith("momentum_buffer"):
            assert not value.any()
        else:
            assert same_bits(value, saved[name]), name
    assert {name.partition(".")[0] for name in found if name.endswith("momentum_buffer")} == set(HIDDEN)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(13, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32)) for _ in range(2)
        )
        self.lm_head = nn.Linear(32, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x)


def trained_model(sharded: bool) -> dict[str, Part]:
    """On the same data on all ranks, so that sums over ranks change nothing: one or two are exact."""
    torch.manual_seed(0)
    model = Model()
    if sharded:
        for layer in model.layers:
            fully_shard(layer, mesh=distributed.mesh())
        fully_shard(model, mesh=distributed.mesh())
    optimizer = FusedMuon(muon_param_groups(model), lr=0.01, ns_dtype="float32")
    for number in range(3):
        tokens = torch.arange(40).view(4, 10) % (5 + number)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: part(param.detach()) for name, param in model.named_parameters()}


def test_fsdp2_trains_as_one_process() -> None:
    """The norm that gradients are clipped by is summed in another order, so bits may differ."""
    expected = join_all(distributed.run(1, trained_model, False))
    found = join_all(distributed.run(2, trained_model, True))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=2e-4), name
