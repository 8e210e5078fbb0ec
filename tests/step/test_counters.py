"""Step counters agree over ranks, whatever gradients the ranks have, and no step waits for a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard

import distributed
from distributed import shard
from fused_optim import FusedAdamW

INT8 = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))


def fsdp1_counters() -> tuple[list[int], float]:
    """Half of the flat parameter gets zero gradients at first: a rank's shard is all zero."""
    model = FullyShardedDataParallel(two_layers(), use_orig_params=True, device_id=torch.device("cpu"))
    reference = two_layers()
    ours = FusedAdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.0)
    for step in range(4):
        x = torch.ones(4, 32) * (step + 1)
        for net, optimizer in ((model, ours), (reference, theirs)):
            loss = net(x).square().mean() if step else (net(x) * 0.0).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        names = dict(reference.named_parameters())
        worst = max(
            float((param - names[name.replace("_fsdp_wrapped_module.", "")]).abs().max())
            for name, param in model.named_parameters()
        )
    return [group["step"] for group in ours.param_groups], worst


def test_fsdp1_counts_as_torch_does() -> None:
    results = distributed.run(2, fsdp1_counters)
    assert [steps for steps, _ in results] == [[4], [4]]
    assert all(worst < 1e-5 for _, worst in results)


def zero_counters() -> int:
    """ZeroRedundancyOptimizer: each rank owns whole parameters; those of one have zero gradients at first."""
    model = two_layers()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, lr=0.1)
    for step in range(3):
        for index, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, float(index > 0 or step > 0))
        optimizer.step()
    return optimizer.optim.param_groups[0]["step"]


def test_zero_redundancy_counts_as_torch_does() -> None:
    assert distributed.run(2, zero_counters) == [3, 3]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("shape", [(0,), (0, 32), (4, 0)])
def test_parameters_without_elements_count(shape: tuple[int, ...], backend: str, use_backend: Any) -> None:
    use_backend(backend)
    param = nn.Parameter(torch.ones(shape))
    optimizer = FusedAdamW([param], lr=0.1)
    for _ in range(3):
        param.grad = torch.ones(shape)
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 3


@pytest.mark.parametrize("counted_on_device", [False, True])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_groups_count_their_own_steps(backend: str, counted_on_device: bool, use_backend: Any, device: str) -> None:
    """Also where a device counts because ``found_inf`` was given."""
    if device == "cuda" and backend == "cpu":
        backend = "cuda"
    use_backend(backend)
    params = [nn.Parameter(torch.ones(4, 32, device=device)) for _ in range(3)]
    optimizer = FusedAdamW([{"params": [param]} for param in params], lr=0.1)
    for step in range(6):
        for index, param in enumerate(params):
            param.grad = torch.ones_like(param) if step % (index + 1) == 0 else None
        if counted_on_device:
            optimizer.found_inf = torch.tensor(float(step == 4), device=device)
        optimizer.step()
    skipped = [1, 1, 0] if counted_on_device else [0, 0, 0]
    steps = [6 - skipped[0], 3 - skipped[1], 2 - skipped[2]]
    assert [int(group["step"]) for group in optimizer.state_dict()["param_groups"]] == steps


# --- ranks without elements -------------------------------------------------------------------------------------------


def without_elements(how: str, frozen: bool) -> list[int]:
    """Two rows on four ranks, beside a group of which all have some; ranks without rows get no gradients."""
    mesh = distributed.mesh()
    full = nn.Parameter(shard(torch.ones(8, 32), mesh, [Shard(0)]))
    few = nn.Parameter(shard(torch.ones(2, 32), mesh, [Shard(0)]))
    if how == "plain":  # as FSDP1 hands them over
        full, few = (nn.Parameter(each.detach()._local_tensor.clone()) for each in (full, few))
    optimizer = FusedAdamW([{"params": [full]}, {"params": [few]}], lr=0.1, skip_nonfinite=how == "skipping")
    few.requires_grad_(not frozen)
    for step in range(4):
        for param in (full, few):
            has_grad = (param._local_tensor if isinstance(param, DTensor) else param).numel() > 0
            param.grad = torch.ones_like(param) if has_grad and param.requires_grad else None
        if how == "skipping" and step == 2 and dist.get_rank() == 0:
            full.grad._local_tensor[0, 0] = float("nan")
        optimizer.step()
    return [int(group["step"]) for group in optimizer.state_dict()["param_groups"]]


@pytest.mark.parametrize("how", ["sharded", "plain", "skipping"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_ranks_without_elements_count_as_the_others(how: str, frozen: bool) -> None:
    steps = 3 if how == "skipping" else 4
    assert distributed.run(4, without_elements, how, frozen) == [[steps, 0 if frozen else steps]] * 4


# --- no step waits ------------------------------------------------------------------------------------------------


def look_first(look: str, rank: int) -> list[int]:
    """One rank has looked at states before the first step. All of them step, and count alike."""
    mesh = distributed.mesh()
    model = two_layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = FusedAdamW(model.parameters(), lr=0.1, **INT8)
    if dist.get_rank() == rank:
        if look == "initialize_state":
            optimizer.initialize_state()
        elif look == "master_state_dict":
            optimizer.master_state_dict(model)
        else:
            optimizer.state_dict()
    for _ in range(2):
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [group["step"] for group in optimizer.param_groups]


@pytest.mark.parametrize("look", ["initialize_state", "master_state_dict", "state_dict"])
@pytest.mark.parametrize("rank", [0, 1])
def test_looking_at_states_on_one_rank_makes_nobody_wait(look: str, rank: int) -> None:
    assert distributed.run(2, look_first, look, rank) == [[2]] * 2


def warm_up(rank: int) -> int:
    """The first learning rate is 0, the gradients of a rank's shard are, too, and one rank has states already."""
    param = nn.Parameter(shard(torch.ones(4, 32), distributed.mesh(), [Shard(0)]))
    optimizer = FusedAdamW([param], lr=0.0)
    if dist.get_rank() == rank:
        optimizer.initialize_state()
    for step in range(3):
        grad = torch.zeros(4, 32)
        grad[0] = 1.0
        param.grad = shard(grad, distributed.mesh(), [Shard(0)])
        optimizer.param_groups[0]["lr"] = 0.1 * step
        optimizer.step()
    return optimizer.param_groups[0]["step"]


@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_warm_up_from_zero_counts_on_all_ranks(rank: int) -> None:
    assert distributed.run(2, warm_up, rank) == [3, 3]
