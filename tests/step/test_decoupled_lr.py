"""decoupled_lr: weight decay follows the schedule of the learning rate, not its size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cases import values
from distributed import same_bits
from fused_optim import FusedAdam, FusedAdamW, FusedAdEMAMix, FusedLion, FusedMuon

KINDS = [FusedAdamW, FusedLion, FusedAdEMAMix, FusedMuon]


def param() -> nn.Parameter:
    return nn.Parameter(values((8, 128), torch.float32, "cpu", seed=0))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_gradient_shrink_by_the_share_of_the_schedule(kind: Any) -> None:
    """With gradients of 0 the decay is all that moves."""
    optimizer = kind([param()], lr=4e-3, weight_decay=0.02, decoupled_lr=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.25, 1.0, 0.5][min(step, 2)])
    (weight,) = optimizer.param_groups[0]["params"]
    expected = weight.detach().double()
    for share in (0.25, 1.0, 0.5, 0.5):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        schedule.step()
        expected = expected * (1 - 0.02 * share)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-6, atol=1e-7)


def test_it_is_the_usual_decay_of_another_strength() -> None:
    """And goes on after a load, into an optimizer with another first learning rate."""
    ours = FusedAdamW([param()], lr=2e-2, weight_decay=0.01, decoupled_lr=True)
    usual = FusedAdamW([param()], lr=2e-2, weight_decay=0.01 / 2e-2)
    for number in range(6):
        if number == 3:
            saved = copy.deepcopy(ours.state_dict())
            (weight,) = ours.param_groups[0]["params"]
            ours = FusedAdamW([weight], lr=7.0, weight_decay=0.01, decoupled_lr=True)
            ours.load_state_dict(saved)
        for optimizer in (ours, usual):
            optimizer.param_groups[0]["lr"] = 2e-2 / (number + 1)
            (weight,) = optimizer.param_groups[0]["params"]
            weight.grad = values((8, 128), torch.float32, "cpu", seed=number + 1)
            optimizer.step()
    assert same_bits(*(optimizer.param_groups[0]["params"][0].detach() for optimizer in (ours, usual)))


def test_it_can_be_switched_off_between_steps() -> None:
    """The param groups stay as they are, so nothing in them tells the next step."""
    ours, usual = param(), param()
    switched = FusedAdamW([ours], lr=2e-2, weight_decay=0.01, decoupled_lr=True)
    for optimizer, weight in ((switched, ours), (FusedAdamW([usual], lr=2e-2, weight_decay=0.5), usual)):
        for decay in (0.5, 0.01):
            weight.grad = torch.ones_like(weight)
            if optimizer is not switched:
                optimizer.param_groups[0]["weight_decay"] = decay
            elif decay == 0.01:
                switched.decoupled_lr = False
            optimizer.step()
    assert same_bits(ours.detach(), usual.detach())


def test_groups_have_rates_of_their_own() -> None:
    first, second = param(), param()
    optimizer = FusedAdamW([{"params": [first]}, {"params": [second], "lr": 1e-4}], lr=1e-2, decoupled_lr=True)
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-2, 1e-4]
    assert "initial_lr" not in FusedAdamW([param()]).param_groups[0]


def test_a_load_keeps_a_first_rate_that_the_checkpoint_has_not() -> None:
    optimizer = FusedAdamW([param()], lr=1e-2, weight_decay=0.1, decoupled_lr=True)
    optimizer.load_state_dict(FusedAdamW([param()], lr=3e-3, weight_decay=0.1).state_dict())
    (weight,) = optimizer.param_groups[0]["params"]
    before, weight.grad = weight.detach().clone(), torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before * 0.97, rtol=1e-6, atol=1e-7)


def step_with_first_rate(rate: float) -> None:
    optimizer = FusedAdamW([param()], decoupled_lr=True)
    optimizer.param_groups[0]["initial_lr"] = rate
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FusedAdam([param()], weight_decay=0.1, decoupled_weight_decay=False, decoupled_lr=True), "decoupled"),
        (lambda: FusedAdamW([param()], lr=0.0, decoupled_lr=True), "first learning rate above 0, got initial_lr=0.0"),
        (lambda: setattr(FusedAdamW([param()]), "decoupled_lr", True), "say it to the constructor"),
        (lambda: step_with_first_rate(0.0), "param group 0: .* above 0, got initial_lr=0.0"),
    ],
    ids=["L2", "no rate", "later", "loaded"],
)
def test_where_it_means_nothing(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
