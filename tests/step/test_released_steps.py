"""Where a step is that gradient release makes, what is allowed there, and what leads back: never lost, never half."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import distributed
from cases import FORMATS, MASTER, MASTERS, Format, Master
from distributed import Part, assert_same, join_all, mesh, part, same_bits
from fused_optim import FusedAdamW, enable_gradient_release
from pairwise import pairwise
from release_cases import Layers, everything, loss_of, make, train

STEPS = 4
BUCKETS = pytest.mark.parametrize("bucket_bytes", [0, 3000, None], ids=["each", "some", "default"])


class Pair:
    """A model with gradient release and the same without it."""

    def __init__(self, fmt: Format = FORMATS[-1], master: Master = MASTER["float32"], device: str = "cpu") -> None:
        self.models = [Layers(master.param_dtype).to(device) for _ in range(2)]
        self.optimizers = [make(model, fmt, master) for model in self.models]
        self.released, self.usual = self.optimizers
        self.model = self.models[0]

    def train(self, steps: Iterable[int]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            train(model, optimizer, steps)

    def each(self, change: Callable[[Any, FusedAdamW], Any]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            change(model, optimizer)

    def assert_same(self) -> None:
        assert all(map(same_bits, everything(self.released), everything(self.usual)))
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            assert {id(p) for p in model.parameters()} <= {id(p) for p in optimizer.store.params}
        assert all(map(same_bits, self.models[0].parameters(), self.models[1].parameters()))


def gradients(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.grad is not None}


# --- parameters come and go -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["first.weight", "second.weight", "norm.bias", "third.bias"])
@BUCKETS
def test_unfrozen_and_frozen_parameters(name: str, bucket_bytes: int | None, device: str) -> None:
    pair = Pair(device=device)
    pair.each(lambda model, _: model.get_parameter(name).requires_grad_(False))
    enable_gradient_release(pair.model, pair.released, bucket_bytes=bucket_bytes)
    pair.train(range(2))
    pair.each(lambda model, _: model.get_parameter(name).requires_grad_(True))
    before = pair.model.get_parameter(name).detach().clone()
    pair.train(range(2, STEPS))
    pair.assert_same()
    assert not torch.equal(before, pair.model.get_parameter(name))
    loss_of(pair.model, STEPS).backward()
    if bucket_bytes == 0:
        assert not gradients(pair.model)
    pair.released.step()
    loss_of(pair.models[1], STEPS).backward()
    pair.usual.step()
    pair.usual.zero_grad()
    pair.each(lambda model, _: model.get_parameter(name).requires_grad_(False))
    pair.train(range(STEPS + 1, STEPS + 3))
    pair.assert_same()


def test_unfrozen_between_backward_and_step() -> None:
    """From the next step on, as in whole steps."""
    pair = Pair()
    pair.each(lambda model, _: model.first.weight.requires_grad_(False))
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    for step in range(STEPS):
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            loss_of(model, step).backward()
            model.first.weight.requires_grad_(True)
            optimizer.step()
            optimizer.zero_grad()
    pair.assert_same()


def test_frozen_parameters_hold_no_bucket_up() -> None:
    model = Layers()
    optimizer = make(model, FORMATS[0], MASTER["float32"])
    enable_gradient_release(model, optimizer, bucket_bytes=1 << 30)
    model.unused.requires_grad_(False)
    loss_of(model, 0).backward()
    assert not gradients(model)


@pytest.mark.parametrize("master, fmt", pairwise(MASTERS, FORMATS), ids=str)
def test_parameters_are_added_and_replaced(master: Master, fmt: Format) -> None:
    """Between two steps; gradients of new ones are released, too."""
    pair = Pair(fmt, master)
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    pair.train(range(1))

    def add(model: Any, optimizer: FusedAdamW) -> None:
        model.register_parameter("scale", nn.Parameter(torch.ones(128, dtype=master.param_dtype)))
        model.register_forward_hook(lambda module, _, output: output * module.scale)
        optimizer.add_param_group({"params": [("scale", model.scale)], "lr": 0.05})

    def replace(model: Any, optimizer: FusedAdamW) -> None:
        new = nn.Parameter(model.first.weight.detach().clone())
        optimizer.replace_parameters({model.first.weight: new})
        model.first.weight = new

    pair.each(add)
    pair.train(range(1, 2))
    pair.each(replace)
    pair.train(range(2, STEPS))
    pair.assert_same()
    loss_of(pair.model, STEPS).backward()
    assert not gradients(pair.model)


def test_replaced_parameters_are_freed() -> None:
    model = Layers()
    optimizer = make(model, FORMATS[-1], MASTER["float32"])
    enable_gradient_release(model, optimizer, bucket_bytes=0)
    train(model, optimizer, range(1))
    old = weakref.ref(model.first.weight)
    new = nn.Parameter(model.first.weight.detach().clone())
    optimizer.replace_parameters({model.first.weight: new})
    model.first.weight = new
    train(model, optimizer, range(1, 2))
    gc.collect()
    assert old() is None


def test_states_that_are_cleared_begin_with_the_first_step() -> None:
    pair = Pair()
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    pair.train(range(2))
    pair.each(lambda _, optimizer: optimizer.state.clear())
    pair.train(range(2, STEPS))
    pair.assert_same()
    assert [group["step"] for group in pair.released.param_groups] == [STEPS - 2] * 2


# --- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", ["bfloat16+rem16", "bfloat16+rem8"])
@BUCKETS
def test_native_remainders_are_loaded_before_the_model(master: str, bucket_bytes: int | None) -> None:
    pair = Pair(FORMATS[-1], MASTER[master])
    pair.each(lambda _, optimizer: setattr(optimizer, "checkpoint_format", "native"))
    train(pair.models[1], pair.usual, range(2))
    saved = copy.deepcopy((pair.usual.state_dict(), pair.models[1].state_dict()))
    enable_gradient_release(pair.model, pair.released, bucket_bytes=bucket_bytes)
    train(pair.model, pair.released, range(1))
    pair.released.load_state_dict(saved[0])
    pair.model.load_state_dict(saved[1])
    pair.train(range(2, STEPS))
    pair.assert_same()


def test_remainders_of_another_model_are_refused_before_anything_changes() -> None:
    pair = Pair(FORMATS[-1], MASTER["bfloat16+rem16"])
    pair.each(lambda _, optimizer: setattr(optimizer, "checkpoint_format", "native"))
    train(pair.models[1], pair.usual, range(2))
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    pair.released.load_state_dict(pair.usual.state_dict())
    before = [param.detach().clone() for param in pair.model.parameters()]
    with pytest.raises(ValueError, match="the low bits of its master"):
        loss_of(pair.model, 2).backward()
    assert all(map(torch.equal, before, pair.model.parameters()))
    pair.model.load_state_dict(pair.models[1].state_dict())
    pair.released.zero_grad()
    pair.train(range(2, STEPS))
    pair.assert_same()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_copies_make_whole_steps(way: str) -> None:
    """Between two steps; the original goes on releasing."""
    pair = Pair()
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    pair.train(range(2))
    if way == "state_dict":
        model = copy.deepcopy(pair.model)
        optimizer = make(model, FORMATS[-1], MASTER["float32"])
        optimizer.load_state_dict(pair.released.state_dict())
    else:
        both = (pair.model, pair.released)
        model, optimizer = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    train(model, optimizer, range(2, STEPS))
    pair.train(range(2, STEPS))
    pair.assert_same()
    assert all(map(same_bits, everything(optimizer), everything(pair.usual)))


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
    "sync_params_from_master": lambda _, optimizer: optimizer.sync_params_from_master(),
    "sync_masters_from_params": lambda _, optimizer: optimizer.sync_masters_from_params(),
    **{
        name: lambda _, optimizer, name=name, value=value: setattr(optimizer, name, value)
        for name, value in {
            **{"skip_nonfinite": True, "capturable": True, "use_decoupled_grad": True, "seed": 7},
            **{"stochastic_rounding": False, "master_weights": False, "checkpoint_format": "native"},
            **{"adam_w_mode": False, "offload_states": True, "skip_nonfinite_group": None},
        }.items()
    },
}
HARMLESS = {"state_bytes", "summary", "step"}  # read what no step changes; end the step


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


def test_entries_of_others_may_change_at_any_time() -> None:
    pair = Pair()
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    loss_of(pair.model, 0).backward()
    pair.released.param_groups[0]["tokens"] = 1000
    pair.released.step()


# --- passes that fail -------------------------------------------------------------------------------------------------


def fail_at(model: Any, name: str, step: int) -> None:
    handle = model.get_parameter(name).register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, step).backward()
    handle.remove()


@pytest.mark.parametrize("name", ["norm.weight", "third.weight", "first.bias", "first.weight"])
@pytest.mark.parametrize("then", ["zero_grad", "state_dict", "disable", "add_param_group"])
@BUCKETS
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


def test_gradients_of_a_failed_pass_stay() -> None:
    """As torch leaves them: who does not drop them has them in the next step."""
    model = Layers()
    optimizer = make(model, FORMATS[0], MASTER["float32"])
    enable_gradient_release(model, optimizer, bucket_bytes=1 << 30)
    fail_at(model, "first.weight", 0)
    left = gradients(model)
    assert {"norm.weight", "third.weight", "second.weight"} <= left
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.step()
    assert {name for name, param in model.named_parameters() if not torch.equal(before[name], param)} == left


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


@BUCKETS
def test_scaled_losses_are_refused_before_anything_changes(bucket_bytes: int | None) -> None:
    pair = Pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = scaler.scale(loss_of(Layers(), 0))  # of another model
    enable_gradient_release(pair.model, pair.released, bucket_bytes=bucket_bytes)
    pair.train(range(1))
    before = [tensor.clone() for tensor in everything(pair.released)]
    for losses in (lambda x: scaler.scale(x), lambda x: scaler.scale([x])[0]):
        with pytest.raises(RuntimeError, match="GradScaler looks for overflows in all gradients"):
            losses(loss_of(pair.model, 1)).backward()
        pair.released.zero_grad()
    assert all(map(torch.equal, before, everything(pair.released)))
    loss.backward()
    scaler.scale(loss_of(Layers(), 0)).backward()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_of(pair.model, 1)).backward()
    off.step(pair.released)
    train(pair.models[1], pair.usual, range(1, 2))
    pair.train(range(2, STEPS))
    pair.assert_same()


def test_a_step_with_a_scaler_is_refused() -> None:
    model = Layers()
    optimizer = make(model, FORMATS[0], MASTER["float32"])
    enable_gradient_release(model, optimizer, bucket_bytes=0)
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


def test_disabling_leads_back_whatever_the_last_gradients_are() -> None:
    pair = Pair()
    release = enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    loss_of(pair.model, 0).backward()
    pair.model.unused.weight.grad = torch.ones(5, 7).to_sparse()
    with pytest.raises((RuntimeError, TypeError), match="sparse"):
        release.disable()
    pair.released.zero_grad()
    pair.released.state_dict()
    train(pair.models[1], pair.usual, range(1))
    pair.train(range(1, STEPS))
    pair.assert_same()


# --- on several ranks -------------------------------------------------------------------------------------------------


def ddp(release: bool, ways: bool) -> tuple[dict[str, Part], list[str]]:
    """Enabled, disabled and enabled again; or refused, after which steps are whole."""
    model, errors = Layers(), []
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02, find_unused_parameters=True)
    optimizer = FusedAdamW(list(model.named_parameters()), lr=0.01, state_dtype="int8")
    if ways and release:
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        try:
            enable_gradient_release(wrapped, optimizer)
        except RuntimeError as error:
            errors.append(str(error))
    for step in range(STEPS):
        handle = enable_gradient_release(wrapped, optimizer, bucket_bytes=0) if release and not ways else None
        loss_of(wrapped, step, dist.get_rank()).backward()
        if handle is not None and step % 2:
            handle.disable()
        if ways:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            handle.disable()
    return {name: part(param) for name, param in model.named_parameters()}, errors


@pytest.mark.parametrize("refused", [False, True])
def test_ddp_is_enabled_again_and_refused_as_a_whole(refused: bool) -> None:
    found = distributed.run(2, ddp, True, refused)
    expected = distributed.run(2, ddp, False, refused)
    assert_same(join_all([parts for parts, _ in found]), join_all([parts for parts, _ in expected]))
    assert all(len(errors) == refused and all("communication hook already" in e for e in errors) for _, errors in found)


def sharded(release: bool, quantity: str) -> dict[str, Part]:
    """FSDP2: a layer that is unfrozen, native remainders before the model, a pass that fails on all ranks."""
    model = Layers(torch.bfloat16)
    model.first.requires_grad_(quantity != "unfrozen")
    for module in (model.first, model.second, model.third):
        fully_shard(module, mesh=mesh())
    fully_shard(model, mesh=mesh())
    options = {"lr": 0.01, "state_dtype": "int8", "checkpoint_format": "native"}
    optimizer = FusedAdamW(list(model.named_parameters()), **options)
    handle = enable_gradient_release(model, optimizer, bucket_bytes=0) if release else None
    for step in range(STEPS):
        if step == 2 and quantity == "unfrozen":
            model.first.requires_grad_(True)
        if step == 2 and quantity == "loaded":
            saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.5)
            optimizer.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
        if step == 2 and quantity == "failed" and handle is not None:
            hook = model.second.register_full_backward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, step, dist.get_rank()).backward()
            hook.remove()
            handle.disable()
            optimizer.zero_grad()
            assert optimizer.state_dict()
            return {}
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: part(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fsdp2(ranks: int) -> None:
    for quantity in ("unfrozen", "loaded"):
        expected = join_all(distributed.run(ranks, sharded, False, quantity))
        assert_same(join_all(distributed.run(ranks, sharded, True, quantity)), expected)
    distributed.run(ranks, sharded, True, "failed")


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.cuda(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")(test))


def wide(release: bool, bucket_bytes: int | None = 8 << 20) -> tuple[nn.Module, FusedAdamW]:
    """Gradients of 64 MB, and hardly an activation."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).cuda()
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, state_dtype="int8")
    if release:
        enable_gradient_release(model, optimizer, bucket_bytes=bucket_bytes)
    return model, optimizer


@a_gpu
def test_updates_beside_the_backward_pass_have_the_same_bits() -> None:
    """Many steps without a synchronisation; parameters are read right after the backward pass, too."""
    found = []
    for release in (True, False):
        model, optimizer = wide(release)
        inputs, sums = torch.ones(256, 1024, device="cuda"), []
        for _ in range(50):
            model(inputs).square().mean().backward()
            if release:
                sums.append(torch.stack([param.detach().double().sum() for param in model.parameters()]))
            optimizer.step()
            if not release:
                sums.append(torch.stack([param.detach().double().sum() for param in model.parameters()]))
            optimizer.zero_grad()
        found.append([*sums, *model.parameters()])
    assert all(map(same_bits, *found))


@a_gpu
@pytest.mark.parametrize("busy", [False, True], ids=["host waits", "host is ahead"])
def test_memory_is_given_back_however_far_the_host_is_ahead(busy: bool) -> None:
    """Without a wait for the GPU: what ``record_stream`` holds back would count here."""
    peaks = []
    for release in (True, False):
        model, optimizer = wide(release)
        inputs = torch.ones(8, 1024, device="cuda")
        for _ in range(3):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if busy:
            torch.cuda._sleep(1 << 30)
        model(inputs).square().mean().backward()
        optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        torch.cuda.synchronize()
    total = 16 * (1024 * 1024 + 1024) * 4
    assert peaks[1] >= total and peaks[0] <= total / 2
