"""What ranks plan anew later on, or not at all: frozen parameters that are trained, and param groups that come."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import distributed
from distributed import mesh, shard
from fused_optim import FusedAdamW, FusedMuon
from fused_optim.step import agreement

SHORT = timedelta(seconds=2)


def parameter(shape: tuple[int, ...], on: DeviceMesh, seed: int = 0, trained: bool = True) -> nn.Parameter:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return nn.Parameter(shard(whole, on, [Shard(0)] * on.ndim), requires_grad=trained)


def give(params: list[nn.Parameter], step: int, but: Tensor | None = None) -> None:
    """Gradients to all that are trained."""
    for i, param in enumerate(params):
        assert isinstance(param, DTensor)
        whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + i))
        has = param.requires_grad and param is not but
        param.grad = shard(whole, param.device_mesh, param.placements) if has else None


def unfrozen(rows: int, has_gradient: bool, replanned: bool = False) -> list[distributed.Part]:
    """The second of three after two steps. ``has_gradient``: where a rank has elements of it; later also elsewhere."""
    params = [parameter((shape, 64), mesh(), i, i != 1) for i, shape in enumerate((8, rows, 8))]
    optimizer = FusedMuon([(f"layers.{i}", param) for i, param in enumerate(params)], lr=0.1, ns_dtype="float32")
    with mock.patch.object(agreement, "LIMIT", SHORT):
        for step in range(5):
            if step == 2:
                params[1].requires_grad_(True)
            if step == 3 and replanned and dist.get_rank() == 1:
                optimizer.state[params[0]] = dict(optimizer.state[params[0]])
            without = step < 4 and not (has_gradient and params[1].to_local().numel())
            give(params, step, params[1] if without else None)
            optimizer.step()
    return [distributed.part(param) for param in params]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_matrix_is_trained_later_where_some_ranks_have_nothing_of_it(world_size: int, rows: int) -> None:
    """They have no gradient that would tell them so."""
    found, alone = (distributed.run(ranks, unfrozen, rows, True, timeout=20) for ranks in (world_size, 1))
    for own, expected in zip(zip(*found, strict=True), zip(*alone, strict=True), strict=True):
        assert torch.equal(distributed.join(own), distributed.join(expected))


@pytest.mark.parametrize("rows", [1, 8])
def test_a_matrix_without_gradients_is_planned_by_all_ranks_at_once(rows: int) -> None:
    """Also where one makes a new plan for itself before there are gradients."""
    found, usual = (distributed.run(2, unfrozen, rows, False, replanned, timeout=20) for replanned in (True, False))
    for own, expected in zip(zip(*found, strict=True), zip(*usual, strict=True), strict=True):
        assert torch.equal(distributed.join(own), distributed.join(expected))


def all_reduces_of(optimizer: FusedAdamW | FusedMuon) -> int:
    """In a step."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        optimizer.step()
    return reduced.call_count


def frozen_on_all() -> list[int]:
    """All-reduces of three steps. Some ranks have matrices of a mesh of their own, others train vectors alone."""
    both = mesh(2, 2, names=("stage", "data"))
    params = [parameter((1, 64), both, trained=False), parameter((64,), both["data"], 1)]
    groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
    if both.get_local_rank("stage") == 0:
        params.append(parameter((8, 64), both["data"], 2))
        groups[0]["params"] = [params[0], params[2]]
    optimizer = FusedMuon(groups, lr=0.1)
    counts = []
    for step in range(3):
        give(params, step)
        counts.append(all_reduces_of(optimizer))
    return counts


def test_frozen_matrices_are_not_asked_for() -> None:
    """A rank whose matrices are all frozen would not answer those that train some on another mesh."""
    for _, *later in distributed.run(4, frozen_on_all, timeout=20):
        assert later == [0, 0]


def with_later_groups(kind: type[FusedAdamW]) -> list[int]:
    """All-reduces of four steps; in the third, ranks 2 and 3 have a group more, on a mesh of their own."""
    both = mesh(2, 2, names=("stage", "data"))
    params = [parameter((8, 64), both), parameter((8, 8), both["data"], 1)]
    optimizer = kind(list(params), lr=0.1)
    counts = []
    with mock.patch.object(agreement, "LIMIT", SHORT):
        for step in range(4):
            if step == 2 and both.get_local_rank("stage") == 1:
                params.append(parameter((4, 8), both["data"], 2))
                optimizer.add_param_group({"params": params[2:]})
            give(params, step)
            if step == 3:
                assert len(optimizer.diagnostics()["groups"]) == len(optimizer.param_groups)
            counts.append(all_reduces_of(optimizer))
    return counts


@pytest.mark.parametrize("kind", [FusedAdamW, FusedMuon])
def test_groups_may_come_on_some_ranks_of_a_mesh_if_it_has_nothing_of_them(kind: type[FusedAdamW]) -> None:
    """Such as experts that some ranks have: nothing that is sent depends on the number of groups any more."""
    for rank, (_, second, third, fourth) in enumerate(distributed.run(4, with_later_groups, kind, timeout=20)):
        assert (second, fourth) == (0, 0)
        assert third == 0 if rank < 2 or kind is FusedAdamW else third > 0
