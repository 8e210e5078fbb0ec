"""Changes of sharded parameters: global indices, whatever cuts them, and together what whole copies say."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import distributed
from change_cases import INTEGERS, RECIPES
from distributed import on_each_device, shard
from fused_optim import FusedAdamW, FusedMuon, enable_gradient_release
from fused_optim.quantized import (
    quantize_model_,
)
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.wire import Changes
from pairwise import pairwise

# Shape, mesh (empty: all ranks in one dim), placements.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((12, 64), (), (Shard(0),)),
    "uneven rows": ((7, 33), (), (Shard(0),)),
    "fewer rows than ranks": ((2, 50), (), (Shard(0),)),
    "columns": ((6, 22), (), (Shard(1),)),
    "inner dim of three": ((3, 6, 5), (), (Shard(1),)),
    "replicated": ((5, 9), (), (Replicate(),)),
    "HSDP": ((8, 16), (2, 2), (Replicate(), Shard(0))),
    "rows and columns": ((7, 10), (2, 2), (Shard(0), Shard(1))),
    "two inner dims": ((3, 6, 10), (2, 2), (Shard(1), Shard(2))),
    "strided rows": ((8, 10), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
}


def _differing(before: Tensor, after: Tensor) -> Tensor:
    kind = INTEGERS[before.element_size()]
    return (before.contiguous().view(-1).view(kind) != after.contiguous().view(-1).view(kind)).nonzero().view(-1).cpu()


def _one_layout(layout: str, backend: str | None, state: str) -> list[tuple[list[int], list[int]]]:
    if backend:
        os.environ["FUSED_OPTIM_BACKEND"] = backend
    try:
        shape, mesh, placements = LAYOUTS[layout]
        full = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        module = nn.Module()
        module.weight = nn.Parameter(shard(full, distributed.mesh(*mesh), placements))
        optimizer = FusedAdamW(module.parameters(), lr=1e-3, state_dtype=state)
        optimizer.track_changes()
        before, found = module.weight.full_tensor().clone(), []
        for seed in range(3):
            grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)).to(torch.bfloat16)
            module.weight.grad = shard(grad, distributed.mesh(*mesh), placements)
            optimizer.step()
            after = module.weight.full_tensor().clone()
            expected = _differing(before, after)
            own = optimizer.peek_changes(module)
            everyone = optimizer.take_changes(module, gather=True)["weight"]
            assert torch.equal(everyone.indices, expected) and everyone.shape == shape
            assert torch.equal(everyone.values, after.view(-1).cpu()[expected])
            found.append((expected.tolist(), own["weight"].indices.tolist() if own else []))
            before = after
        return found
    finally:
        if backend:
            del os.environ["FUSED_OPTIM_BACKEND"]


ON_FOUR = [name for name, (_, mesh, _) in LAYOUTS.items() if mesh]
ON_ANY = [name for name in LAYOUTS if name not in ON_FOUR]
# Not all ranks x layouts x backends: each two of them.
CASES = [*pairwise([1, 2, 3, 4], ON_ANY, [None, "torch"]), *product([4], ON_FOUR, [None, "torch"])]


@pytest.mark.parametrize(
    ("ranks", "layout", "backend", "device"), on_each_device(*CASES, nccl=[(2, layout, None) for layout in ON_ANY])
)
def test_what_ranks_hold_is_all_together(ranks: int, layout: str, backend: str | None, device: str) -> None:
    of_ranks = distributed.run(ranks, _one_layout, layout, backend, "int8", on=device)
    for step, (expected, _) in enumerate(of_ranks[0]):
        own = [element for rank in of_ranks for element in rank[step][1]]
        assert sorted(own) == expected, "each element is given by one rank"


def _raising_on_one_rank(what: str) -> None:
    """Nobody waits for a rank that cannot give its changes, and nothing is taken."""
    model = nn.Linear(8, 8)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    enable_gradient_release(model, optimizer)
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    if what != "not tracked" or not last:
        optimizer.track_changes()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    asked: nn.Module = model
    if what == "in a step" and last:
        nn.functional.linear(torch.ones(2, 8), model.weight).sum().backward()
    if what == "another model" and last:
        asked = nn.Linear(8, 8)
    expected = {"not tracked": "not tracked", "in a step": "step", "another model": "not one of the model"}[what]
    for ask in (optimizer.peek_changes, optimizer.take_changes):
        with pytest.raises((RuntimeError, KeyError), match=expected):
            ask(asked, gather=True)
    if what == "in a step" and last:
        optimizer.step()
    if what != "not tracked":
        assert set(optimizer.take_changes(model, gather=True)) == {"weight", "bias"}


@pytest.mark.parametrize("what", ["not tracked", "in a step", "another model"])
def test_what_raises_on_one_rank_raises_on_all(what: str) -> None:
    distributed.run(2, _raising_on_one_rank, what)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=True)
        self.down = nn.Linear(256, 64, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def _fsdp(kind: str) -> None:
    """A model under FSDP2, HSDP or FSDP2 with tensor parallelism, with real gradients, and steps that are skipped."""
    torch.manual_seed(0)
    model = _Block().to(distributed.device(), torch.bfloat16)
    world = torch.distributed.get_world_size()
    if kind == "TP":
        mesh = distributed.mesh(world // 2, 2, names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["dp"]
    elif kind == "HSDP":
        mesh = distributed.mesh(2, world // 2, names=("replicate", "shard"))
    else:
        mesh = distributed.mesh()
    fully_shard(model, mesh=mesh)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, state_dtype="int8", skip_nonfinite=True)
    _train(model, optimizer, 0)  # FSDP2 finds its memory in the first forward
    optimizer.track_changes()
    before = _copies(model)
    for seed, is_skipped in enumerate([True, False, True, False, False], start=1):
        _train(model, optimizer, seed, is_skipped)
        after = _copies(model)
        taken = optimizer.take_changes(model, gather=True)
        assert bool(taken) != is_skipped
        _check(taken, before, after)
        before = after
    assert optimizer.take_changes(model, gather=True) == {}


def _train(model: nn.Module, optimizer: FusedAdamW, seed: int, is_skipped: bool = False) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(distributed.device(), torch.bfloat16)
    model(x).square().mean().backward()
    if is_skipped and torch.distributed.get_rank() == 0:
        local_tensor(model.norm.weight.grad).view(-1)[:1] = float("inf")
    optimizer.step()
    optimizer.zero_grad()


def _copies(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        found[name] = whole.detach().clone()
    return found


def _check(taken: dict[str, Changes], before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for name, value in after.items():
        expected = _differing(before[name], value)
        if not expected.numel():
            assert name not in taken
            continue
        assert torch.equal(taken[name].indices, expected), name
        assert torch.equal(taken[name].values, value.view(-1).cpu()[expected]), name


@pytest.mark.parametrize(("ranks", "kind"), [(1, "FSDP2"), (2, "FSDP2"), (3, "FSDP2"), (4, "HSDP"), (4, "TP")])
def test_models_of_several_ranks(ranks: int, kind: str) -> None:
    distributed.run(ranks, _fsdp, kind)


def _quantized_shards(recipe: Any) -> None:
    """A replica that starts from a full copy of codes and scales, and gets what is taken, stays equal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384, bias=False), nn.Linear(384, 256, bias=False)).to(torch.bfloat16)
    quantize_model_(model, recipe)
    fully_shard(model, mesh=distributed.mesh())
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    optimizer.track_changes()
    optimizer.mark_changed()
    replica: dict[str, Tensor] = {}
    for seed in range(4):
        taken = optimizer.take_changes(model, gather=True)
        for name, (indices, values, shape) in taken.items():
            if seed == 0:
                assert indices.numel() == torch.Size(shape).numel(), name
                replica[name] = torch.empty(shape, dtype=values.dtype)
            replica[name].view(-1)[indices] = values
        _check_decoded(model, replica, recipe)
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(seed + len(name))
            grad = torch.randn(param.shape, generator=generator).to(torch.bfloat16)
            param.grad = shard(grad, param.device_mesh, param.placements)
        optimizer.step()


def _check_decoded(model: nn.Module, replica: dict[str, Tensor], recipe: Any) -> None:
    for name, param in model.named_parameters():
        parts = {"data": replica[name]}
        parts |= {part: replica[f"{name}_{part}"] for part in ("scale", "tensor_scale") if f"{name}_{part}" in replica}
        if recipe.name == "Float8DelayedScaling":
            parts["amax_history"] = torch.zeros(recipe.amax_history_len)
        decoded = recipe.decode(parts, tuple(param.shape))
        assert torch.equal(decoded.to(param.dtype), param.full_tensor().to(param.dtype)), name


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_quantized_weights_of_several_ranks(ranks: int, recipe: Any) -> None:
    distributed.run(ranks, _quantized_shards, recipe)


def on_two_meshes(kinds: list[type[FusedAdamW | FusedMuon]], rounds: int) -> list[list[Tensor]]:
    """The first and the last rank have one of them each."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    return [all_that_ranks_ask_together(kind, meshes, rounds) for kind in kinds]


def all_that_ranks_ask_together(
    kind: type[FusedAdamW | FusedMuon], meshes: list[DeviceMesh], rounds: int
) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])) for mesh in meshes)
    here = [i for i, mesh in enumerate(meshes) if mesh.get_coordinate() is not None]
    optimizer = kind(model.parameters(), lr=0.1, skip_nonfinite=True)
    optimizer.track_changes()
    for number in range(rounds):
        for i in here:
            model[i].grad = distribute_tensor(torch.randn(8, 16, generator=seeded(number)), meshes[i], [Shard(0)])
        if optimizer.state:
            assert len(optimizer.diagnostics()["parameters"]) == len(here)
        optimizer.step()
    taken = optimizer.take_changes(model)
    assert set(taken) == {str(i) for i in here}
    assert set(optimizer.take_changes(model, gather=True)) == set()
    return [param._local_tensor.detach().clone() for param in model]


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_meshes_that_ranks_are_not_part_of() -> None:
    """Each mesh has its parameter updated as if it had been alone; diagnostics, skips and changes ask nobody else."""
    kinds = [FusedAdamW, FusedMuon]
    of_ranks = distributed.run(3, on_two_meshes, kinds, 2)
    for kind, *found in zip(kinds, *of_ranks, strict=True):
        torch.manual_seed(0)
        for i, ranks in enumerate([(0, 1), (1, 2)]):
            whole = nn.Parameter(torch.randn(8, 16))
            alone = kind([whole], lr=0.1)
            for number in range(2):
                whole.grad = torch.randn(8, 16, generator=seeded(number))
                alone.step()
            torch.testing.assert_close(torch.cat([found[rank][i] for rank in ranks]), whole.detach())
            assert all(found[rank][i].numel() == 0 for rank in range(3) if rank not in ranks)
