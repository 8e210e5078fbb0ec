"""A first step with zero gradients and learning rates creates the states and changes nothing else; others are real."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import distributed
from cases import normal
from distributed import assert_same, join_all, part, shard, shard_like
from pairwise import pairwise
from peers import FusedAdam

SHAPES = [(7, 64), (2, 128), (1, 32), (10,)]  # uneven, and fewer rows than ranks
INT8 = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
MASTERS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"store_param_remainders": True}),
    (torch.bfloat16, {"master_weights": False}),
]


def build(dtype: torch.dtype, **options: Any) -> FusedAdam:
    placed = [shard(normal(shape, i).to(dtype), distributed.mesh(), [Shard(0)]) for i, shape in enumerate(SHAPES)]
    return FusedAdam(
        [nn.Parameter(param) for param in placed],
        **{"weight_decay": 0.1, "decoupled_weight_decay": True, **INT8, **options},
    )


def params_of(optimizer: FusedAdam) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def step_with(optimizer: FusedAdam, gradient: Callable[[int, nn.Parameter], Tensor]) -> None:
    attribute = "decoupled_grad" if optimizer.use_decoupled_grad else "grad"
    for index, param in enumerate(params_of(optimizer)):
        setattr(param, attribute, gradient(index, param))
    optimizer.step()
    optimizer.zero_grad()


def step_for_real(optimizer: FusedAdam) -> None:
    step_with(optimizer, lambda i, param: shard_like(normal(SHAPES[i], 9 + i).to(param.dtype), param))


def step_by_hand(optimizer: FusedAdam) -> None:
    """As Megatron-FSDP's, which gives the learning rate back afterwards."""
    group = optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], 0.0
    step_with_zeros(optimizer)
    group["lr"] = lr


def step_with_zeros(optimizer: FusedAdam) -> None:
    step_with(optimizer, lambda _, param: torch.zeros_like(param))


def step_without_gradients(optimizer: FusedAdam) -> None:
    optimizer.step()


def local_state(optimizer: FusedAdam) -> dict[str, Tensor]:
    found = {}
    for index, param in enumerate(params_of(optimizer)):
        found[f"{index} parameter"] = param._local_tensor.clone()
        found |= {f"{index} {key}": value._local_tensor.clone() for key, value in optimizer.state[param].items()}
    return found


def variants(decoupled: bool) -> Iterator[dict[str, Any]]:
    for (dtype, options), adam_w_mode, tensor_lr in itertools.product(MASTERS, [True, False], [True, False]):
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        yield {
            "dtype": dtype,
            "lr": lr,
            "decoupled_weight_decay": adam_w_mode,
            "use_decoupled_grad": decoupled,
            **options,
        }


def check_synthetic_step(step: Callable[[FusedAdam], None], decoupled: bool) -> None:
    for options in variants(decoupled):
        optimizer, expected = build(**options), build(**options)
        step(optimizer)
        expected.initialize_state()
        group = optimizer.param_groups[0]
        assert group["lr"] is options["lr"] and float(group["lr"]) == pytest.approx(0.1)
        assert (group["step"], group["weight_decay"]) == (0, 0.1)
        assert all(param.grad is None for param in params_of(optimizer))
        assert_same(local_state(optimizer), local_state(expected))
        for index, (param, master) in enumerate(zip(params_of(optimizer), masters(optimizer), strict=True)):
            initial = shard_like(normal(SHAPES[index], index).to(param.dtype), param)._local_tensor
            assert torch.equal(param._local_tensor, initial) and torch.equal(master, initial.float())
            assert not optimizer.get_unscaled_state(param, "exp_avg").any()
            assert not optimizer.get_unscaled_state(param, "exp_avg_sq").any()
        step_for_real(optimizer)
        step_for_real(expected)
        assert optimizer.param_groups[0]["step"] == 1
        assert_same(local_state(optimizer), local_state(expected))


def masters(optimizer: FusedAdam) -> list[Tensor]:
    """Local FP32 masters, as a user exports them."""
    model = nn.ParameterList(params_of(optimizer))
    return [master._local_tensor for master in optimizer.master_state_dict(model).values()]


# Not all numbers of ranks x steps x attributes: each two of them.
@pytest.mark.parametrize(
    "world_size, step, decoupled",
    pairwise([1, 2, 3], [_init_optim_state, step_by_hand, step_without_gradients], [False, True]),
)
def test_first_step_with_zero_gradients_only_creates_states(
    world_size: int, step: Callable[[FusedAdam], None], decoupled: bool
) -> None:
    distributed.run(world_size, check_synthetic_step, step, decoupled)


# --- real steps -------------------------------------------------------------------------------------------------


def check_one_element(decoupled: bool) -> None:
    """A single non-zero gradient element, on one rank, in each row of the first parameter in turn."""
    for row, adam_w_mode in itertools.product(range(7), [True, False]):
        gradient = torch.zeros(SHAPES[0])
        gradient[row, 3] = 1e-30
        optimizer = build(torch.float32, lr=0.0, decoupled_weight_decay=adam_w_mode, use_decoupled_grad=decoupled)
        step_with(optimizer, lambda i, p, g=gradient: shard_like(g, p) if i == 0 else torch.zeros_like(p))
        assert optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_rank_with_a_gradient_makes_the_step_real_on_all(world_size: int, decoupled: bool) -> None:
    distributed.run(world_size, check_one_element, decoupled)


def step_on_two_mesh_dims(dims: list[str], rank: int) -> int:
    """Parameters on the given dims of a 2 x 2 mesh, a gradient on one rank. Returns the step counter."""
    mesh = distributed.mesh(2, 2, names=("a", "b"))
    placed = [shard(normal((8, 32), 0), mesh[tuple(d)], [Shard(0)] * len(d)) for d in dims]
    optimizer = FusedAdam([nn.Parameter(param) for param in placed], lr=0.0)
    for param in params_of(optimizer):
        param.grad = torch.zeros_like(param)
    if torch.distributed.get_rank() == rank:
        params_of(optimizer)[0].grad._local_tensor.fill_(1)
    optimizer.step()
    return optimizer.param_groups[0]["step"]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("dims", [["ab"], ["a", "b"], ["b", "ab"]], ids=str)
def test_ranks_agree_across_mesh_dims(dims: list[str], rank: int) -> None:
    assert distributed.run(4, step_on_two_mesh_dims, dims, rank) == [1, 1, 1, 1]


def step_one_row(others: list[Placement]) -> int:
    """A parameter of one row, hence on one rank only, beside others. Returns the step counter."""
    placed = [shard(normal((1, 32), 0), distributed.mesh(), [Shard(0)])]
    placed += [shard(normal((3, 32), 1), distributed.mesh(), [placement]) for placement in others]
    optimizer = FusedAdam([nn.Parameter(param) for param in placed], lr=0.0, **INT8)
    first, *rest = params_of(optimizer)
    first.grad = shard_like(torch.ones(1, 32), first)
    for param in rest:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return optimizer.param_groups[0]["step"]


@pytest.mark.parametrize("others", [[], [Shard(0)], [Replicate()]], ids=str)
def test_ranks_without_elements_count_the_step(others: list[Placement]) -> None:
    assert distributed.run(3, step_one_row, others) == [1, 1, 1]


def take_zero_steps(first: str) -> tuple[int, bool]:
    """A step with zero gradients after another start; returns the step counter and whether parameters decayed."""
    optimizer = build(torch.float32, lr=0.1)
    starts = {"synthetic": step_by_hand, "real": step_for_real, "initialized": FusedAdam.initialize_state}
    starts.get(first, lambda _: None)(optimizer)
    before = [param.detach().clone() for param in params_of(optimizer)]
    step_with_zeros(optimizer)
    decayed = all(
        (param._local_tensor != old._local_tensor).any() or not old._local_tensor.numel()
        for param, old in zip(params_of(optimizer), before, strict=True)
    )
    return optimizer.param_groups[0]["step"], decayed


@pytest.mark.parametrize("first, steps", [("none", 1), ("synthetic", 1), ("initialized", 1), ("real", 2)])
def test_other_steps_with_zero_gradients_are_real(first: str, steps: int) -> None:
    assert distributed.run(2, take_zero_steps, first) == [(steps, True)] * 2


def step_without_lr() -> dict[str, Any]:
    optimizer = build(torch.float32, lr=0.0)
    step_for_real(optimizer)
    assert optimizer.param_groups[0]["step"] == 1
    param = params_of(optimizer)[0]
    assert isinstance(param, DTensor)
    return {"parameter": part(param), "exp_avg": part(optimizer.state_dict()["state"][0]["exp_avg"])}


def test_first_step_with_zero_lr_and_real_gradients_is_real() -> None:
    final = join_all(distributed.run(2, step_without_lr))
    assert torch.equal(final["parameter"], normal(SHAPES[0], 0))
    assert final["exp_avg"].ne(0).float().mean() > 0.9


@pytest.mark.parametrize(("lr", "step"), [(0.1, 2), (0.0, 0)])
def test_optimizer_without_parameters_counts_steps(lr: float, step: int) -> None:
    """A rank of Megatron-LM's that owns no part of any parameter; torch's synthetic step has lr = 0."""
    optimizer = FusedAdam([{"params": []}, {"params": []}], lr=lr)
    optimizer.step()
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [step, step]
    fresh = FusedAdam([{"params": []}, {"params": []}], lr=lr)
    fresh.load_state_dict(optimizer.state_dict())
    assert [group["step"] for group in fresh.param_groups] == [step, step]
