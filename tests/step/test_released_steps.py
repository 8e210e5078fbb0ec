"""Where a step is that gradient release makes, what is allowed there, and what leads back: never lost, never half."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cases import FORMATS, MASTER
from fused_optim import enable_gradient_release, export_optimizer_checkpoint, save_master_safetensors
from pairwise import pairwise
from peers import FusedAdamW
from release_cases import Layers, Pair, everything, gradients, loss_of, make, train

STEPS = 4
BUCKETS = pytest.mark.parametrize("bucket_bytes", [0, 3000, None], ids=["each", "some", "default"])


# --- between backward() and step() ------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Any, FusedAdamW], Any]] = {
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "state_dict": lambda _, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda _, optimizer: optimizer.load_state_dict({}),
    "add_param_group": lambda _, optimizer: optimizer.add_param_group({"params": [("z", nn.Parameter(torch.ones(3)))]}),
    "replace_parameters": lambda model, optimizer: optimizer.replace_parameters(
        {model.first.weight: nn.Parameter(model.first.weight.detach().clone())}
    ),
    "clip_grad_norm_": lambda _, optimizer: optimizer.clip_grad_norm_(1.0),
    "diagnostics": lambda _, optimizer: optimizer.diagnostics(),
    "deepcopy": lambda _, optimizer: copy.deepcopy(optimizer),
    "pickle": lambda _, optimizer: pickle.dumps(optimizer),
    "enable": lambda model, optimizer: enable_gradient_release(model, optimizer),
    "initialize_state": lambda _, optimizer: optimizer.initialize_state(),
    "get_unscaled_state": lambda model, optimizer: optimizer.get_unscaled_state(model.first.weight, "exp_avg"),
    "set_scaled_state": lambda model, optimizer: optimizer.set_scaled_state(
        model.first.weight, "exp_avg", torch.zeros(96, 128)
    ),
    "master_state_dict": lambda model, optimizer: optimizer.master_state_dict(model),
    "export": lambda model, optimizer: export_optimizer_checkpoint(model, optimizer, "/nowhere/optimizer.pt"),
    "save_masters": lambda model, optimizer: save_master_safetensors(model, optimizer, "/nowhere"),
    "sync_params_from_master": lambda _, optimizer: optimizer.sync_params_from_master(),
    "sync_masters_from_params": lambda _, optimizer: optimizer.sync_masters_from_params(),
    "track_changes": lambda _, optimizer: optimizer.track_changes(),
    "mark_changed": lambda _, optimizer: optimizer.mark_changed(),
    "take_changes": lambda model, optimizer: optimizer.take_changes(model),
    "peek_changes": lambda model, optimizer: optimizer.peek_changes(model),
    **{
        name: lambda _, optimizer, name=name, value=value: setattr(optimizer, name, value)
        for name, value in {
            **{"skip_nonfinite": True, "capturable": True, "use_decoupled_grad": True, "seed": 7},
            **{"stochastic_rounding": False, "master_weights": False, "checkpoint_format": "native"},
            **{"offload_states": True, "skip_nonfinite_group": None},
        }.items()
    },
}
HARMLESS = {"check_option", "state_bytes", "summary", "step"}  # read what no step changes; end the step


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
def test_what_is_called_between_backward_and_step(name: str, inside: bool) -> None:
    """Refused before it does anything: the step ends as if it had not been called."""
    pair = Pair()
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    pair.train(range(1))
    refused = []

    def call(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"call step\(\) first|needs all gradients at once|enabled .* already"):
            CALLS[name](pair.model, pair.released)
        refused.append(name)

    handle = pair.model.second.weight.register_hook(call) if inside else None
    loss_of(pair.model, 1).backward()
    if handle is None:
        call(torch.ones(()))
    else:
        handle.remove()
    assert refused == [name]
    pair.released.step()
    train(pair.models[1], pair.usual, range(1, 2))
    pair.train(range(2, STEPS))
    pair.assert_same()


def test_every_public_name_is_asked_about() -> None:
    """What is added to the optimizer has to be in one of the two lists."""
    own = {name for each in FusedAdamW.__mro__ if each.__module__.startswith("fused_optim") for name in vars(each)}
    methods = {name for name in own if not name.startswith("_") and callable(getattr(FusedAdamW, name))}
    assert methods <= {*CALLS, *HARMLESS}


@pytest.mark.parametrize("option", ["skip_nonfinite", "capturable", "use_decoupled_grad"])
def test_options_that_need_all_gradients_are_refused_between_steps_too(option: str) -> None:
    pair = Pair()
    release = enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    with pytest.raises(RuntimeError, match=f"{option}=True"):
        setattr(pair.released, option, True)
    assert getattr(pair.released, option) is False
    pair.train(range(2))
    pair.assert_same()
    release.disable()
    setattr(pair.released, option, True)


def test_a_step_inside_of_the_backward_pass_is_refused() -> None:
    pair = Pair()
    release = enable_gradient_release(pair.model, pair.released, bucket_bytes=0)

    def call(_: Tensor) -> None:
        for what in (pair.released.step, release.disable):
            with pytest.raises(RuntimeError, match="during the backward pass"):
                what()

    handle = pair.model.second.weight.register_hook(call)
    loss_of(pair.model, 0).backward()
    handle.remove()
    pair.released.step()
    train(pair.models[1], pair.usual, range(1))
    pair.assert_same()


def test_gradients_that_nothing_has_used_may_be_dropped() -> None:
    pair = Pair()
    enable_gradient_release(pair.model, pair.released, bucket_bytes=1 << 30)  # the unused layer holds it up
    loss_of(pair.model, 7).backward()
    pair.released.zero_grad()
    pair.train(range(STEPS))
    pair.assert_same()


def test_gradients_that_do_not_fit_change_nothing() -> None:
    """Of a step without a backward pass: the next one finds everything as it was."""
    pair = Pair()
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    pair.train(range(1))
    before = [tensor.clone() for tensor in everything(pair.released)]
    for param in pair.model.parameters():
        param.grad = torch.ones_like(param)
    pair.model.first.bias.grad = torch.ones(96).to_sparse()
    with pytest.raises((RuntimeError, TypeError), match="sparse"):
        pair.released.step()
    assert all(map(torch.equal, before, everything(pair.released)))
    pair.released.state_dict()
    pair.released.zero_grad()
    pair.train(range(1, STEPS))
    pair.assert_same()


def test_closures() -> None:
    pair = Pair()
    enable_gradient_release(pair.model, pair.released, bucket_bytes=3000)
    for step in range(STEPS):
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):

            def closure(model: Any = model, optimizer: FusedAdamW = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)
    pair.assert_same()


# --- hyperparameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, value",
    {"lr": 0.5, "weight_decay": 0.7, "betas": (0.5, 0.6), "eps": 1.0, "step": 17, "maximize": True}.items(),
    ids=str,
)
@BUCKETS
def test_hyperparameters_of_a_step_are_those_of_its_backward_pass(
    key: str, value: Any, bucket_bytes: int | None
) -> None:
    """A change in between is refused by its name; set before ``backward()`` it is that of whole steps."""
    pair = Pair()
    enable_gradient_release(pair.model, pair.released, bucket_bytes=bucket_bytes)
    pair.train(range(1))
    loss_of(pair.model, 1).backward()
    group = pair.released.param_groups[1]
    before, group[key] = group[key], value
    state = [tensor.clone() for tensor in everything(pair.released)[1:]]
    with pytest.raises(RuntimeError, match=rf"param group 1: '{key}' was changed between backward\(\) and step\(\)"):
        pair.released.step()
    assert all(map(torch.equal, state, everything(pair.released)[1:]))
    group[key] = before
    pair.released.step()
    train(pair.models[1], pair.usual, range(1, 2))
    for number in (0, 1):
        pair.each(lambda _, optimizer, number=number: optimizer.param_groups[number].update({key: value}))
        pair.train(range(2 + number, 3 + number))
    pair.assert_same()


def test_learning_rates_that_are_tensors() -> None:
    model = Layers()
    rate = torch.tensor(0.1)
    optimizer = FusedAdamW(model.parameters(), lr=rate)
    enable_gradient_release(model, optimizer, bucket_bytes=0)
    train(model, optimizer, range(1))
    rate.fill_(0.2)
    loss_of(model, 1).backward()
    rate.fill_(0.3)
    with pytest.raises(RuntimeError, match="'lr' was changed"):
        optimizer.step()
    rate.fill_(0.2)
    optimizer.step()


# --- passes that fail -------------------------------------------------------------------------------------------------


def fail_at(model: Any, name: str, step: int) -> None:
    handle = model.get_parameter(name).register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, step).backward()
    handle.remove()


@pytest.mark.parametrize(  # not the product: each two
    "name, then, bucket_bytes",
    pairwise(
        ["norm.weight", "third.weight", "first.bias", "first.weight"],
        ["zero_grad", "state_dict", "disable", "add_param_group"],
        [0, 3000, None],
    ),
)
def test_a_failed_pass_ends_its_step(name: str, then: str, bucket_bytes: int | None) -> None:
    """What it has updated counts as one step of these parameters; everything goes on from there."""
    pair = Pair()
    release = enable_gradient_release(pair.model, pair.released, bucket_bytes=bucket_bytes)
    pair.train(range(1))
    before = {name: param.detach().clone() for name, param in pair.model.named_parameters()}
    fail_at(pair.model, name, 1)
    updated = {name for name, param in pair.model.named_parameters() if not torch.equal(before[name], param)}
    if then == "state_dict":
        pair.released.load_state_dict(pair.released.state_dict())
    elif then == "disable":
        release.disable()
    elif then == "add_param_group":
        pair.each(lambda _, optimizer: optimizer.add_param_group({"params": [("z", nn.Parameter(torch.ones(3)))]}))
    pair.released.zero_grad()
    if updated:
        loss_of(pair.models[1], 1).backward()
        for own, param in pair.models[1].named_parameters():
            param.grad = param.grad if own in updated else None
        pair.usual.step()
        pair.usual.zero_grad()
    assert bucket_bytes != 0 or bool(updated) == (name != "norm.weight")
    pair.train(range(2, STEPS))
    pair.assert_same()


def test_a_second_pass_leaves_the_first_as_it_was() -> None:
    pair = Pair()
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    loss_of(pair.model, 0).backward()
    for step in range(2):
        with pytest.raises(RuntimeError, match="second gradient"):
            loss_of(pair.model, 5 + step).backward()
    with pytest.raises(RuntimeError, match=r"call step\(\) first"):
        pair.released.state_dict()
    pair.released.step()
    train(pair.models[1], pair.usual, range(1))
    pair.train(range(1, STEPS))
    pair.assert_same()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(reentrant: bool) -> None:
    """Reentrant ones run backward passes inside of the backward pass."""
    pair = Pair()
    for model in pair.models:
        inner = model.second
        model.second = nn.Sequential(inner)  # the same parameters, called in a checkpoint
        model.second.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
    enable_gradient_release(pair.model, pair.released, bucket_bytes=3000)
    pair.train(range(STEPS))
    pair.assert_same()


# --- GradScaler -------------------------------------------------------------------------------------------------------


def test_a_step_with_a_scaler_is_refused() -> None:
    model = Layers()
    optimizer = make(model, FORMATS[0], MASTER["float32"])
    enable_gradient_release(model, optimizer, bucket_bytes=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, 0)).backward()
    for step in (scaler.step, lambda optimizer: optimizer.step(grad_scaler=scaler)):
        with pytest.raises((RuntimeError, AssertionError), match=r"GradScaler looks for overflows|No inf checks"):
            step(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="GradScaler looks for overflows"):
        optimizer.step()


# --- enabling and disabling -------------------------------------------------------------------------------------------


def test_enabling_twice_is_refused() -> None:
    pair = Pair()
    release = enable_gradient_release(pair.model, pair.released, bucket_bytes=3000)
    with pytest.raises(RuntimeError, match="enabled for this optimizer already"):
        enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    pair.train(range(2))
    for _ in range(2):
        release.disable()
    again = enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    release.disable()  # of what has ended
    loss_of(pair.model, 2).backward()
    assert not gradients(pair.model)
    again.disable()
    train(pair.models[1], pair.usual, range(2, 3))
    pair.train(range(3, STEPS))
    pair.assert_same()


def test_clipping_of_the_next_step_is_not_lost() -> None:
    pair = Pair()
    pair.each(lambda model, optimizer: (loss_of(model, 0).backward(), optimizer.clip_grad_norm_(1e-3)))
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) was called for the next step"):
        enable_gradient_release(pair.model, pair.released)
    pair.each(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.assert_same()


@pytest.mark.parametrize("changed", [False, True])
@BUCKETS
def test_disabling_between_backward_and_step_makes_the_step(bucket_bytes: int | None, changed: bool) -> None:
    """With the hyperparameters of the backward pass, if they are others now; ``step()`` has nothing left to do."""
    pair = Pair()
    release = enable_gradient_release(pair.model, pair.released, bucket_bytes=bucket_bytes)
    loss_of(pair.model, 0).backward()
    if changed:
        pair.released.param_groups[0]["lr"] = 0.5
    release.disable()
    pair.released.step()
    train(pair.models[1], pair.usual, range(1))
    if changed:
        pair.usual.param_groups[0]["lr"] = 0.5
    pair.train(range(1, STEPS))
    pair.assert_same()
