"""Ranks whose gradients are placed differently, or are missing on some, raise instead of waiting for each other."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import distributed
from distributed import mesh, shard
from fused_optim import FusedAdamW, FusedMuon, clip_grad_norm_, enable_gradient_release
from fused_optim.state import host_states
from fused_optim.step import agreement
from pairwise import pairwise

ROWS = 7
Optimizer = FusedAdamW | FusedMuon
Call = Callable[[Optimizer], object]


def made(kind: type[Optimizer], **options: object) -> tuple[Optimizer, list[nn.Parameter]]:
    torch.manual_seed(0)
    wholes = [torch.randn(ROWS, 64) for _ in range(3)]
    params = [nn.Parameter(shard(whole, mesh(), [Shard(0)])) for whole in wholes]
    named = [(f"layers.{i}", param) for i, param in enumerate(params)]
    return kind(named, lr=0.1, **options), params


def gradient(param: DTensor, placement: Placement | None) -> DTensor | None:
    """All ones, or none."""
    if placement is None:
        return None
    ones = torch.ones(ROWS, 64)
    if placement.is_partial():
        local = ones if dist.get_rank() == 0 else torch.zeros_like(ones)
        return DTensor.from_local(local, param.device_mesh, [placement], run_check=False)
    return shard(ones, param.device_mesh, [placement])


ROW_WISE = Shard(0)  # as the parameters are


def give(params: list[nn.Parameter], second: Placement | None = ROW_WISE) -> None:
    """The gradients of all; ``second``: where that of the second parameter lies."""
    for i, param in enumerate(params):
        param.grad = gradient(param, second if i == 1 else Shard(0))


def step(optimizer: Optimizer) -> None:
    optimizer.step()


def clip(optimizer: Optimizer) -> None:
    optimizer.clip_grad_norm_(1.0)


def diagnose(optimizer: Optimizer) -> None:
    optimizer.diagnostics()


def raised_by(call: Call, optimizer: Optimizer, params: list[nn.Parameter]) -> str:
    """The error's text. Nothing has been changed where there is one."""
    before = [param.to_local().clone() for param in params]
    try:
        call(optimizer)
    except Exception as error:
        assert all(map(torch.equal, before, [param.to_local() for param in params]))
        return f"{type(error).__name__}: {error}"
    return ""


# --- gradients that are placed otherwise than their parameters ------------------------------------------------------


def differing(call: Call, when: str, usual: Placement, other: Placement | None, options: dict[str, object]) -> str:
    """``usual``: the second gradient's placement, but on the last rank."""
    optimizer, params = made(FusedAdamW, **options)
    if when == "later":
        give(params, usual)
        optimizer.step()
    else:
        optimizer.initialize_state()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    give(params, other if is_last else usual)
    text = raised_by(call, optimizer, params)
    give(params, usual)  # all alike again
    optimizer.step()
    return text


DIFFERENT = "RuntimeError: gradients are placed otherwise than their parameters, and not alike on all ranks"


CALLS: dict[str, tuple[Call, dict[str, object]]] = {
    "step": (step, {}),
    "skip_nonfinite": (step, {"skip_nonfinite": True}),
    "int8": (step, {"state_dtype": "int8"}),
    "clip": (clip, {}),
    "diagnostics": (diagnose, {}),
}


# Not all numbers of ranks x placements x calls x steps: each two of them.
@pytest.mark.parametrize(
    "world_size, other, name, when",
    pairwise([2, 3], [None, Shard(0), Shard(1), Replicate()], list(CALLS), ["first", "later"]),
    ids=str,
)
def test_all_ranks_raise_where_one_has_another_placement(
    world_size: int, other: Placement | None, name: str, when: str
) -> None:
    call, options = CALLS[name]
    texts = distributed.run(world_size, differing, call, when, Partial(), other, options, timeout=20)
    for rank, text in enumerate(texts):
        assert DIFFERENT in text, text
        has_one = rank < world_size - 1 or other in (Shard(1), Replicate())
        assert ("layers.1" in text) == has_one and text.endswith("none") != has_one, text


def refused_by_one(is_first: bool) -> str:
    optimizer, params = made(FusedAdamW)
    if not is_first:
        give(params, Partial())
        optimizer.step()
    give(params, Partial())
    if dist.get_rank() == 1:
        params[0].grad.to_local().untyped_storage().resize_(0)
    text = raised_by(step, optimizer, params)
    give(params, Partial())
    optimizer.step()
    return text


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_refuses_a_gradient_lets_the_others_raise(world_size: int, is_first: bool) -> None:
    for rank, text in enumerate(distributed.run(world_size, refused_by_one, is_first, timeout=20)):
        assert ("gradient has no memory" if rank == 1 else "another rank refused") in text, text


def hyperparameter_refused_by_one(key: str, value: object, options: dict[str, object]) -> str:
    """In the first step, in which ranks ask each other. ``value``: None removes it."""
    optimizer, params = made(FusedAdamW, **options)
    give(params)
    group = optimizer.param_groups[0]
    usual = group[key]
    if dist.get_rank() == 1 and value is None:
        del group[key]
    elif dist.get_rank() == 1:
        group[key] = value
    text = raised_by(step, optimizer, params)
    group[key] = usual
    optimizer.step()
    assert group["step"] == 1
    return text


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}], ids=str)
@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("lr", None, "ValueError: param group 0 has no 'lr' any more"),
        ("lr", "much", "TypeError: param group 0: lr: expected a number, got str"),
        ("lr", torch.ones(2), "ValueError: param group 0: lr: expected a tensor of one element, got shape (2,)"),
        ("step", None, "ValueError: param group 0 has no 'step' any more"),
        ("step", "many", "TypeError: param group 0: step: expected a whole number, got 'many'"),
        ("eps", -1.0, "ValueError: param group 0: eps: expected a finite number >= 0, got -1.0"),
    ],
    ids=str,
)
def test_a_rank_that_refuses_a_hyperparameter_lets_the_others_raise(
    key: str, value: object, expected: str, options: dict[str, object]
) -> None:
    told, text = distributed.run(2, hyperparameter_refused_by_one, key, value, options, timeout=20)
    assert text.startswith(expected), text
    assert "another rank refused" in told


def trained(placements: list[Placement | None]) -> list[distributed.Part]:
    optimizer, params = made(FusedAdamW)
    for placement in placements:
        give(params, placement)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return [distributed.part(param) for param in params]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Partial(), Partial(), Shard(0)],
        [Partial(), Shard(1), Replicate(), Partial()],
        [Shard(0), Replicate(), Shard(0), Shard(1)],
    ],
    ids=str,
)
def test_what_all_ranks_change_alike_is_the_same_training(world_size: int, placements: list[Placement | None]) -> None:
    here = distributed.run(world_size, trained, placements, timeout=20)
    usual = distributed.run(world_size, trained, [Shard(0)] * 4)
    for own, expected in zip(zip(*here, strict=True), zip(*usual, strict=True), strict=True):
        torch.testing.assert_close(distributed.join(own), distributed.join(expected))


def lone(call: Call, limit: float) -> None:
    optimizer, params = made(FusedAdamW)
    give(params)
    optimizer.step()
    give(params, Partial() if dist.get_rank() == 1 else Shard(0))
    with mock.patch.object(agreement, "LIMIT", timedelta(seconds=limit)):
        if dist.get_rank() == 1:
            call(optimizer)
            return
        if call is step:
            optimizer.step()  # nothing holds it up
    raise RuntimeError("went on")


def clip_all(optimizer: Optimizer) -> None:
    clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], 1.0)


@pytest.mark.parametrize("call", [step, clip, clip_all], ids=["step", "clip", "clip_grad_norm_"])
def test_what_one_rank_alone_changes_later_raises_there(call: Call) -> None:
    with pytest.raises(distributed.RemoteError) as raised:  # the processes are not used again
        distributed.run(2, lone, call, 1.0, timeout=20)
    text = str(raised.value)
    assert "rank 0 raised" in text and "went on" in text
    assert "have not said the same within 1 s" in text and "[Partial(sum)]" in text


def on_two_meshes() -> str:
    """A parameter on either dim of a mesh. The first rank alone has partial sums, on the first one."""
    both = mesh(2, 2, names=("a", "b"))
    params = [nn.Parameter(shard(torch.ones(4, 64), both[name], [Shard(0)])) for name in ("a", "b")]
    optimizer = FusedAdamW(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    if dist.get_rank() == 0:
        params[0].grad = DTensor.from_local(torch.ones(4, 64), both["a"], [Partial()], run_check=False)
    return raised_by(step, optimizer, params)


def test_ranks_of_other_meshes_raise_too() -> None:
    first, told, second, told_too = distributed.run(4, on_two_meshes, timeout=20)
    assert DIFFERENT in first and DIFFERENT in second
    for text in (told, told_too):
        assert "another rank refused its own, or has found that ranks have different ones" in text


def refused_in_one_mesh(placement: Placement) -> tuple[str, list[int], int]:
    """As of pipelines' stages. The first step is refused by the first one alone, and then all make one."""
    both = mesh(2, 2, names=("stages", "shards"))
    param = nn.Parameter(shard(torch.ones(4, 64), both["shards"], [Shard(0)]))
    optimizer = FusedAdamW([param], lr=0.1, skip_nonfinite=True)
    param.grad = torch.ones_like(param)
    if dist.get_rank() == 0 and placement.is_partial():
        param.grad = DTensor.from_local(torch.ones(4, 64), both["shards"], [placement], run_check=False)
    elif dist.get_rank() == 0:
        param.grad.to_local().untyped_storage().resize_(0)
    text = raised_by(step, optimizer, [param])
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return text, [group["step"] for group in optimizer.param_groups], optimizer.skipped_steps


@pytest.mark.parametrize("placement", [Shard(0), Partial()], ids=str)
def test_a_first_step_that_one_mesh_refuses_is_skipped_by_others(placement: Placement) -> None:
    found = distributed.run(4, refused_in_one_mesh, placement, timeout=20)
    assert [bool(text) for text, _, _ in found] == [True, True, False, False]
    assert [skipped for _, _, skipped in found] == [0, 0, 1, 1]
    assert all(steps == [2] for _, steps, _ in found)


def with_part_offloaded(fraction: list[float]) -> list[distributed.Part]:
    """Ranks have other states in host memory, hence go through their parameters in other orders."""
    options = {"offload_states": True, "offload_fraction": fraction[dist.get_rank()]}
    with mock.patch.object(host_states, "OFFLOADED_FROM", ("cuda", "cpu")):
        optimizer, params = made(FusedAdamW, **options)
        for seed in range(3):
            for i, param in enumerate(params):
                param.grad = gradient(param, Partial()) * (1.0 + i * (-1) ** seed)
            optimizer.step()
    return [distributed.part(param) for param in params]


def test_gradients_are_sent_in_one_order() -> None:
    mixed = distributed.run(2, with_part_offloaded, [0.3, 0.6], timeout=20)
    plain = distributed.run(2, with_part_offloaded, [0.0, 0.0], timeout=20)
    for own, expected in zip(zip(*mixed, strict=True), zip(*plain, strict=True), strict=True):
        assert torch.equal(distributed.join(own), distributed.join(expected))


# --- matrices -------------------------------------------------------------------------------------------------------


def without_some(when: str, call: Call) -> str:
    optimizer, params = made(FusedMuon)
    give(params, None if when == "later on all" else Shard(0))
    if when == "first":
        optimizer.initialize_state()
    else:
        optimizer.step()
    others = {"later on all": Shard(0)}.get(when)
    give(params, others if dist.get_rank() == 1 else Shard(0))
    return raised_by(call, optimizer, params)


@pytest.mark.parametrize("call", [step, diagnose])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_matrix_without_a_gradient_on_one_rank_raises_on_all(world_size: int, call: Call) -> None:
    texts = distributed.run(world_size, without_some, "first", call, timeout=20)
    for rank, text in enumerate(texts):
        assert "1 parameters that are updated as whole matrices have gradients on some ranks only" in text, text
        assert f"({int(rank == 1)} of them" in text


@pytest.mark.parametrize("call", [step, diagnose])
def test_matrices_that_come_later_on_all_ranks(call: Call) -> None:
    assert distributed.run(2, without_some, "later on all", call, timeout=20) == ["", ""]


def with_empty_shards(later: str) -> list[str]:
    """Of matrices of one row, without gradients where there is none, as FSDP may leave them. The last comes later."""
    torch.manual_seed(0)
    params = [nn.Parameter(shard(torch.randn(rows, 64), mesh(), [Shard(0)])) for rows in (1, 8, 1)]
    optimizer = FusedMuon(params, lr=0.1)
    texts = []
    for count in (2, 2, 3, 2):
        for i, param in enumerate(params):
            has_one = i < count and param.to_local().numel() > 0
            param.grad = torch.ones_like(param) if has_one else None
        if count == 3 and later == "refused" and dist.get_rank() == 0:
            params[1].grad.to_local().untyped_storage().resize_(0)
        elif count == 3 and later == "missing" and dist.get_rank() == 0:
            params[1].grad = None
        with mock.patch.object(agreement, "LIMIT", timedelta(seconds=1)):
            texts.append(raised_by(step, optimizer, params))
    return texts


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("later", "expected"), [("all", ""), ("missing", "on some ranks only"), ("refused", "another rank refused")]
)
def test_ranks_without_elements_of_a_matrix_are_asked_in_each_step(world_size: int, later: str, expected: str) -> None:
    for rank, texts in enumerate(distributed.run(world_size, with_empty_shards, later, timeout=20)):
        assert [texts[i] for i in (0, 1, 3)] == ["", "", ""]
        own = "gradient has no memory" if later == "refused" and rank == 0 else expected
        assert own in texts[2] and bool(texts[2]) == bool(expected)


# --- cost -----------------------------------------------------------------------------------------------------------


def collectives_of_a_step(kind: type[Optimizer], second: Placement | None) -> list[int]:
    """Of three steps with clipping."""
    optimizer, params = made(kind)
    counts = []
    for _ in range(3):
        give(params, second)
        optimizer.clip_grad_norm_(1.0)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            optimizer.step()
        counts.append(reduced.call_count)
    return counts


@pytest.mark.parametrize("second", [Shard(0), None], ids=str)
@pytest.mark.parametrize("kind", [FusedAdamW, FusedMuon])
def test_usual_steps_ask_nobody(kind: type[Optimizer], second: Placement | None) -> None:
    for first, *later in distributed.run(2, collectives_of_a_step, kind, second):
        assert first > 0 and later == [0, 0]


def test_steps_with_partial_sums_ask_once() -> None:
    for _, *later in distributed.run(2, collectives_of_a_step, FusedAdamW, Partial()):
        assert later == [1, 1]


# --- gradient release -------------------------------------------------------------------------------------------------


class Parallel(nn.Module):
    """Tensor-parallel: each rank has some rows of the input, and so a part of the gradients' sums."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(shard(torch.randn(64, 64), mesh(), [Replicate()])) for _ in "123")

    def forward(self, step: int, reduced: bool) -> Tensor:
        """``reduced``: the second weight's gradient is placed as the weight is."""
        rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(step))
        x = shard(rows, mesh(), [Shard(0)])
        first, second, third = self.weights
        x = torch.tanh(x @ first)
        y = x.redistribute(placements=[Replicate()]) @ second if reduced else x @ second
        return (torch.tanh(y.redistribute(placements=[Shard(0)])) @ third).square().sum().full_tensor()


def released(release: bool, bucket_bytes: int, reduced: list[bool]) -> tuple[list[distributed.Part], list[list[int]]]:
    """The weights, and the numbers of those that have gradients after each backward pass."""
    model = Parallel()
    optimizer = FusedAdamW(model.parameters(), lr=0.1)
    left = []
    if release:
        enable_gradient_release(model, optimizer, bucket_bytes=bucket_bytes)
    for step, each in enumerate(reduced):
        model(step, each).backward()
        left.append([i for i, weight in enumerate(model.weights) if weight.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return [distributed.part(weight) for weight in model.weights], left


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_release_leaves_partial_sums_to_the_step(world_size: int, bucket_bytes: int) -> None:
    """It asks all ranks before they send. The next passes update the others without them."""
    reduced = [True, True, False, True]
    here = distributed.run(world_size, released, True, bucket_bytes, reduced)
    usual = distributed.run(world_size, released, False, bucket_bytes, reduced)
    both = [zip(*(weights for weights, _ in ranks), strict=True) for ranks in (here, usual)]
    assert all(torch.equal(distributed.join(own), distributed.join(whole)) for own, whole in zip(*both, strict=True))
    first = [0, 2] if bucket_bytes == 0 else [0, 1, 2]
    assert all(left == [first, [0, 2], [0, 1, 2], [0, 1, 2]] for _, left in here)
