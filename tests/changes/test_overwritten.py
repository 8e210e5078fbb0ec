"""Codes and masters that others have written; bits that a step does not read, since nothing has changed yet, where
elements are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from change_cases import RECIPES, Expected, Model, bits, set_gradients
from fused_optim.backends.engine import CachedShard
from fused_optim.memory.by_parameter import Held
from fused_optim.quantized import quantize_model_
from fused_optim.state.changes import WHOLE, ChangeTracker, Shard, StepChanges
from pairwise import pairwise
from peers import FusedAdamW

SPECIAL = [0.0, -0.0, 1e-40, -1e-40, 1e-30, 3e38, -3e38, float("inf"), -float("inf"), float("nan"), 448.0, 1e6]


def quantized(recipe: Any, device: str, **options: Any) -> tuple[nn.Module, Any]:
    """Whole tiles and parts of them, tracked, after steps that settle it."""
    torch.manual_seed(0)
    layers = nn.Linear(128, 256), nn.Linear(160, 130, bias=False), nn.Linear(128, 128)
    model = nn.Sequential(*layers).to(device, torch.bfloat16)
    quantize_model_(model, recipe)
    optimizer = FusedAdamW(model.parameters(), **{"lr": 1e-3, "state_dtype": "int8", **options})
    optimizer.track_changes()
    for seed in range(2):
        set_gradients(model, seed)
        optimizer.step()
    optimizer.take_changes(model)
    return model, optimizer


def check_steps(model: nn.Module, optimizer: Any, seeds: range = range(10, 12)) -> None:
    """Each one against full copies; what was noticed before is taken first."""
    optimizer.take_changes(model)
    expected = Expected(model)
    for seed in seeds:
        set_gradients(model, seed)
        optimizer.step()
        expected.check(optimizer.take_changes(model), some=False)


def weights(model: nn.Module) -> list[Any]:
    return [layer.weight for layer in model]  # type: ignore[union-attr]


def _other_codes(model: nn.Module, optimizer: Any) -> None:
    """All there are, among them NaN, the largest and both zeros."""
    for weight in weights(model):
        codes = weight.components["data"]
        codes.copy_(torch.arange(codes.numel(), device=codes.device).view(codes.shape).to(torch.uint8))


def _other_codes_unnoticed(model: nn.Module, optimizer: Any) -> None:
    for weight in weights(model):
        weight.components["data"].data.fill_(0x7F)
        optimizer.mark_changed(weight)


def _other_scales(model: nn.Module, optimizer: Any) -> None:
    for weight in weights(model):
        if "tensor_scale" in weight.components:
            weight.components["tensor_scale"].mul_(1.3)
        else:
            scale = weight.components["scale"]
            scale.copy_(scale.flip(0))


def _other_masters(model: nn.Module, optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    for weight in weights(model):
        values = torch.randn(weight.shape, generator=generator).to(weight.device)
        optimizer.set_scaled_state(weight, "master_param", values)


def _loaded(model: nn.Module, optimizer: Any) -> None:
    saved = optimizer.state_dict()
    for seed in (20, 21):
        set_gradients(model, seed)
        optimizer.step()
    optimizer.load_state_dict(saved)


def _synchronized(model: nn.Module, optimizer: Any) -> None:
    optimizer.sync_params_from_master()


# Masters of FP32 and of FP16.
MASTERS: list[dict[str, Any]] = [{}, {"master_weight_dtype": torch.float16}]
WRITES = [_other_codes, _other_codes_unnoticed, _other_scales, _other_masters, _loaded, _synchronized]


# Not all recipes x writes x masters: each two of them.
@pytest.mark.parametrize("recipe, write, master", pairwise(RECIPES, WRITES, MASTERS))
def test_codes_that_others_have_written(
    device: str, recipe: Any, write: Callable[[nn.Module, Any], None], master: dict[str, Any]
) -> None:
    model, optimizer = quantized(recipe, device, **master)
    write(model, optimizer)
    check_steps(model, optimizer)


@pytest.mark.parametrize("lr", [1e-6, 1e-2])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_values_that_codes_cannot_hold(device: str, recipe: Any, lr: float) -> None:
    """In masters that steps have settled: saturated ones, both zeros, subnormal ones, and what is not finite."""
    model, optimizer = quantized(recipe, device, lr=lr)
    for weight in weights(model):
        master = optimizer.get_unscaled_state(weight, "master_param").clone()
        flat = master.view(-1)
        at = torch.arange(len(SPECIAL), device=flat.device) * (flat.numel() // len(SPECIAL))
        flat[at] = torch.tensor(SPECIAL, device=flat.device)
        flat[at[:2] + 1] = -flat[at[:2] + 1]
        optimizer.set_scaled_state(weight, "master_param", master)
    check_steps(model, optimizer, range(10, 14))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_values_that_cross_zero_and_stay(device: str, recipe: Any) -> None:
    """Gradients of one sign in one half of each matrix, none in the other, which still has codes at all boundaries."""
    model, optimizer = quantized(recipe, device, lr=1e-2, weight_decay=0.0)
    optimizer.take_changes(model)
    expected = Expected(model)
    for step in range(6):
        for param in model.parameters():
            param.grad = torch.ones_like(param.detach().float()).to(param.dtype if param.dim() == 1 else torch.bfloat16)
            param.grad[: param.shape[0] // 2] = 0.0
            param.grad.mul_(1.0 if step < 3 else -1.0)
        optimizer.step()
        expected.check(optimizer.take_changes(model))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_skipped_steps_of_settled_codes(device: str, recipe: Any) -> None:
    model, optimizer = quantized(recipe, device, skip_nonfinite=True)
    expected = Expected(model)
    for seed, skipped in enumerate([False, True, False, True, True, False]):
        set_gradients(model, seed)
        if skipped:
            weights(model)[0].grad[3, 3] = float("inf")
        optimizer.step()
        expected.look()
        if seed != 3:
            expected.check(optimizer.take_changes(model), some=not skipped)
    assert optimizer.skipped_steps == 3


@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=str)
def test_parameters_that_a_step_leaves_out(device: str, recipe: Any) -> None:
    """After a take their bits are what they were, and count for nothing: neither in the next take nor in later ones."""
    model, optimizer = quantized(recipe, device) if recipe else (Model(torch.bfloat16, device), None)
    if optimizer is None:
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        optimizer.track_changes()
    params = list(model.parameters())
    expected = Expected(model)
    for seed, left_out in enumerate([[], [0], params, [1, 2], [0, 1], []]):
        set_gradients(model, seed)
        for param in left_out if left_out is params else [params[i] for i in left_out]:
            param.grad = None
        optimizer.step()
        expected.look()
        if seed in (0, 1, 3, 5):
            expected.check(optimizer.peek_changes(model))
            expected.now, expected.changed = _again(optimizer, model, expected)
            expected.check(optimizer.take_changes(model))
            assert optimizer.take_changes(model) == {}


def _again(optimizer: Any, model: nn.Module, expected: Expected) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What was expected of the peek, which the take gives, too."""
    changed = {name: torch.zeros_like(flags) for name, flags in expected.changed.items()}
    for name, each in optimizer.peek_changes(model).items():
        changed[name][each.indices.cpu()] = True
    return expected.now, changed


def test_marks_by_hand_and_writes_after_a_take(device: str) -> None:
    """Of one parameter, while the others' bits count for nothing."""
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    optimizer.track_changes()
    for write in (lambda: optimizer.mark_changed(model.wide), lambda: nn.init.zeros_(model.wide)):
        set_gradients(model, 0)
        optimizer.step()
        assert {"weight", "wide", "odd", "bias"} <= set(optimizer.take_changes(model))
        write()
        taken = optimizer.take_changes(model)
        assert set(taken) == {"wide"} and taken["wide"].indices.numel() == model.wide.numel()
    check_steps(model, optimizer)


# --- how a step is told -------------------------------------------------------------------------------------------


def _step_of_two() -> tuple[ChangeTracker, list[Tensor], StepChanges]:
    params: list[Tensor] = [nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)) for _ in range(2)]
    tracker = ChangeTracker()
    tracker.start(params)
    cached = [CachedShard(Held((param,)), None, None, None, None, {}) for param in params]
    shards = [Shard(tracker[param], {WHOLE}, always=True, by_pass=True) for param in params]
    return tracker, params, StepChanges(params[0].device, cached, shards, can_overwrite=True)


def test_bits_are_overwritten_where_none_of_them_counts() -> None:
    tracker, params, step = _step_of_two()
    memory = tracker[params[0]].memory
    assert memory is tracker[params[1]].memory
    stale = torch.full_like(memory.bits, 1)

    def begin(stepped: list[int], may_be_skipped: bool = False, is_stale: bool = True) -> bool:
        memory.bits.copy_(stale)
        memory.is_stale = is_stale
        found = step.begin(stepped, may_be_skipped)
        step.finish(None)
        assert not memory.is_stale
        assert found or not is_stale or not memory.bits.any()
        return found

    assert begin([0, 1])
    assert not begin([0, 1], is_stale=False) and torch.equal(memory.bits, stale)
    assert not begin([0, 1], may_be_skipped=True)
    assert not begin([1])
    params[1].data = params[1].data.clone()  # noticed, and marked as a whole
    memory.is_stale = True
    assert not step.begin([0, 1]) and tracker[params[1]].bits[WHOLE][0] == 0xFF


def test_a_step_that_does_not_have_all_elements_overwrites_nothing() -> None:
    tracker, params, _ = _step_of_two()
    cached = [CachedShard(Held((params[0],)), None, None, None, None, {})]
    own = Shard(tracker[params[0]], {WHOLE}, always=True, by_pass=True)
    tracker[params[0]].memory.is_stale = True
    assert not StepChanges(params[0].device, cached, [own], can_overwrite=True).begin([0])


# --- what else is found out once ----------------------------------------------------------------------------------


def test_takes_find_what_has_moved(device: str) -> None:
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    optimizer.track_changes()
    check_steps(model, optimizer)
    model.weight.data = model.weight.detach().clone()
    taken = optimizer.take_changes(model)
    assert set(taken) == {"weight"} and torch.equal(taken["weight"].values, model.weight.detach().view(-1))
    check_steps(model, optimizer)
    model.odd.data = model.odd.detach().clone().view(33, 7)
    assert optimizer.take_changes(model)["odd"].shape == (33, 7)
    optimizer.track_changes()
    assert optimizer.take_changes(model) == {}


def test_takes_find_other_strides_at_the_same_address(device: str) -> None:
    model = nn.Linear(8, 8, bias=False, device=device)
    optimizer = FusedAdamW(model.parameters())
    optimizer.track_changes()
    optimizer.mark_changed()
    optimizer.take_changes(model)
    model.weight.data = model.weight.data.t()
    optimizer.mark_changed()
    assert torch.equal(optimizer.take_changes(model)["weight"].values.view(8, 8), model.weight)


def test_addresses_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(torch.bfloat16)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    optimizer.track_changes()
    check_steps(model, optimizer)
    monkeypatch.setattr("fused_optim.state.published.parts_of", None)
    set_gradients(model, 3)
    optimizer.step()
    assert {"weight", "wide", "odd", "bias"} <= set(optimizer.take_changes(model))


def test_creating_states_leaves_nan_as_it_is(device: str) -> None:
    """BF16 has many, of which a master that is split again would leave one."""
    model = Model(torch.bfloat16, device)
    nan = torch.tensor([0x7FC1, 0xFF81 - 0x10000, 0x7F81], dtype=torch.int16).view(torch.bfloat16)
    with torch.no_grad():
        model.weight.view(-1)[:3] = nan.to(device)
    before = bits(model.weight)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    optimizer.track_changes()
    optimizer.initialize_state()
    assert "master_param" in optimizer.state[model.weight]
    assert torch.equal(bits(model.weight), before) and optimizer.take_changes(model) == {}
    check_steps(model, optimizer)
