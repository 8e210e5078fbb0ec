"""The optimizer's updates of quantized weights: the same on any number of ranks, from FP32 masters or without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distributed
from distributed import Part, assert_same, join_all, long, on_each_device, shard_like
from fused_optim import FusedAdam
from fused_optim.quantized import Float8DelayedScaling, quantize_model_
from fused_optim.quantized.adapters.update import needs_collective
from fused_optim.sharding.dtensor import full_tensor, local_tensor
from quantized_cases import RECIPES, WHOLE, Run, gradient, parameter_parts, perceptron, plain_model, values
from recipe_checks import (
    check_masters,
    check_ranks,
    check_skipped_steps,
    check_steps_without_masters,
)

EACH = pytest.mark.parametrize("recipe", RECIPES)

ON_GPUS = [(1, "fsdp"), (2, "fsdp"), (2, "hsdp"), (2, "tp")]


@pytest.mark.parametrize(
    "ranks, how, on",
    on_each_device(long(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), long(4, "fsdp"), (4, "hsdp"), (4, "tp"), nccl=ON_GPUS),
)
def test_ranks_do_not_change_a_bit(ranks: int, how: str, on: str) -> None:
    check_ranks(list(RECIPES), ranks, how, True, on)


@pytest.mark.parametrize("ranks, how, on", on_each_device((3, "fsdp"), (4, "hsdp"), (4, "tp"), nccl=ON_GPUS))
def test_ranks_do_not_change_a_bit_without_masters(ranks: int, how: str, on: str) -> None:
    check_ranks(list(RECIPES), ranks, how, False, on)


# --- masters ----------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masters_follow_adamw_of_plain_weights(recipe: str, dtype: torch.dtype) -> None:
    check_masters(recipe, dtype)


@EACH
def test_writing_weights_again_from_masters_changes_nothing(recipe: str) -> None:
    run = Run(recipe, "plain")
    run.train(0, 3)
    before = join_all([run.snapshot()])
    run.optimizer.sync_params_from_master()
    assert_same(join_all([run.snapshot()]), before)
    run.model.uneven.weight.components["data"].zero_()
    run.optimizer.sync_params_from_master()
    assert_same(join_all([run.snapshot()]), before)


@EACH
def test_weights_without_masters_move_as_far_as_they_should(recipe: str) -> None:
    check_steps_without_masters(recipe)


# --- steps that change nothing, or little -----------------------------------------------------------------------


@pytest.mark.parametrize("ranks, how, on", on_each_device((1, "plain"), (3, "fsdp"), nccl=[(1, "plain"), (2, "fsdp")]))
def test_skipped_steps_leave_data_scales_and_histories(ranks: int, how: str, on: str) -> None:
    check_skipped_steps(list(RECIPES), ranks, how, on)


@EACH
def test_weights_without_gradient_keep_their_bytes(recipe: str) -> None:
    run = Run(recipe, "plain")
    start = join_all([parameter_parts(run.model)])
    run.train(0, 4)
    end = join_all([parameter_parts(run.model)])
    for name in start:
        if name.startswith(("never", "frozen")):
            assert torch.equal(end[name], start[name]), name
        elif name.endswith("data"):
            assert not torch.equal(end[name], start[name]), name


def test_frozen_weights_may_be_in_the_optimizer() -> None:
    model = quantize_model_(plain_model("current"), RECIPES["current"])
    optimizer = FusedAdam(model.parameters())
    start = join_all([parameter_parts(model)])
    model.even.weight.grad = gradient(model.even.weight.shape, 0, 0).bfloat16()
    optimizer.step()
    changed = {
        name for name, value in join_all([parameter_parts(model)]).items() if not torch.equal(value, start[name])
    }
    assert changed == {"even.weight: data", "even.weight: tensor_scale"}


# --- delayed scaling --------------------------------------------------------------------------------------------


def follow_delayed(recipe: Float8DelayedScaling, how: str) -> list[list[Tensor]]:
    """The absmax of a weight that grows and shrinks, its scale and its history after each step."""
    model = nn.Sequential(nn.Linear(16, 6, bias=False))
    start = values((6, 16), 3)
    model[0].weight.data = start.clone()
    quantize_model_(model, recipe)
    if how == "fsdp":
        fully_shard(model, mesh=distributed.mesh())
    optimizer = FusedAdam(model.parameters(), lr=0.5, betas=(0.0, 0.9))
    optimizer.initialize_state()
    weight, found = model[0].weight, []
    for step in range(6):
        if step:
            weight.grad = shard_like(-start.sign() if step < 4 else start.sign(), weight)
            optimizer.step()
        components = local_tensor(weight.detach()).components
        absmax = full_tensor(optimizer.master_state_dict(model)["0.weight"]).abs().max()
        found.append([absmax.cpu(), *(components[name].clone().cpu() for name in ("tensor_scale", "amax_history"))])
        optimizer.sync_params_from_master()
        assert torch.equal(components["amax_history"].cpu(), found[-1][2])
    return found


@pytest.mark.parametrize(
    "algorithm, margin, length", [("max", 0, 3), ("most_recent", 0, 3), ("max", 2, 2), ("max", 0, 1)]
)
@pytest.mark.parametrize("ranks, how, on", on_each_device((1, "plain"), (4, "fsdp"), nccl=[(1, "plain"), (2, "fsdp")]))
def test_delayed_scales_come_from_the_history(
    ranks: int, how: str, on: str, algorithm: str, margin: int, length: int
) -> None:
    recipe = Float8DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=margin)
    for found in distributed.run(ranks, follow_delayed, recipe, how, on=on):
        absmaxes = [float(absmax) for absmax, *_ in found]
        assert absmaxes[3] > absmaxes[0] + 1 and absmaxes[5] < absmaxes[3]
        for step, (_, scale, history) in enumerate(found):
            latest = [*reversed(absmaxes[: step + 1]), *[0.0] * length][:length]
            assert history.tolist() == latest
            earlier = [*reversed(absmaxes[:step]), *[0.0] * length][:length] if step else latest
            basis = max(earlier) if algorithm == "max" else earlier[0]
            expected = torch.tensor(basis) / torch.tensor(448.0) * 2.0**margin
            assert scale.item() == expected.item(), step


# --- collectives and captures -----------------------------------------------------------------------------------


def which_need_collectives(how: str) -> dict[str, Any]:
    found = {}
    for recipe in RECIPES:
        run = Run(recipe, how, build=perceptron)
        found[recipe] = [needs_collective(param) for param in run.model.parameters()]
        try:
            run.optimizer.stepper._check_no_collective()
        except RuntimeError as error:
            found[recipe].append(str(error))
    return found


@pytest.mark.parametrize(
    "ranks, how, needed, on",
    on_each_device((1, "plain", False), (1, "fsdp", False), (2, "fsdp", True), (2, "tp", True), (4, "tp", True)),
)
def test_captures_are_refused_where_ranks_must_agree_on_a_scale(ranks: int, how: str, needed: bool, on: str) -> None:
    for result in distributed.run(ranks, which_need_collectives, how, on=on):
        for recipe, (first, second, *error) in result.items():
            cut = recipe == "tiles"
            assert first == ((needed and recipe in WHOLE) or (cut and (ranks, how) == (4, "tp")))
            assert second == ((needed and recipe in WHOLE) or (cut and (ranks, how) in [(2, "fsdp"), (4, "tp")]))
            assert len(error) == int(second)
            for text in error:
                assert (
                    text.startswith(f"CUDA graph capture: parameter {int(not first)}")
                    and "within rows can be captured" in text
                )


def train_amp(how: str) -> list[dict[str, Part]]:
    """torch.amp.GradScaler with an overflow on one rank only."""
    run = Run("current", how, torch.float32)  # torch checks gradients of this dtype on every device
    scaler = torch.amp.GradScaler(distributed.device().type, init_scale=4.0)
    scaler.scale(torch.zeros(1, device=distributed.device()))
    found = [run.snapshot()]
    for step in range(2):
        run.set_gradients(1)
        if step == 0 and dist.get_rank() == 0:
            local_tensor(run.params["even.weight"].grad).fill_(torch.inf)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        found.append(run.snapshot())
    return found


@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_overflows_found_by_a_grad_scaler_skip_the_step(ranks: int, on: str) -> None:
    results = distributed.run(ranks, train_amp, "fsdp", on=on)
    skipped, stepped = (join_all([result[at] for result in results]) for at in (1, 2))
    start = join_all([parameter_parts(Run("current", "plain", torch.float32).model)])
    assert_same({name: skipped[name] for name in start}, start)
    assert not torch.equal(stepped["even.weight: data"], start["even.weight: data"])
