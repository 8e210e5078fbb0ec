"""What steps change is known, element by element: every format, master and backend, against full copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from change_cases import MASTERS, RECIPES, STATES, Expected, Model, set_gradients
from fused_optim import enable_gradient_release, muon_param_groups
from fused_optim.backends.compiled import CompiledShards
from fused_optim.backends.engine import CachedShard
from fused_optim.memory.by_parameter import Held
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from fused_optim.state import changes
from fused_optim.state.changes import WHOLE, ChangeTracker, Shard, StepChanges
from pairwise import pairwise
from peers import FusedAdam, FusedAdamW, FusedLion, FusedMuon

RATES = [1e-6, 1e-4, 1e-2]


def run(model: nn.Module, optimizer: Any, takes: tuple[int, ...] = (1, 2, 3), scale: float = 1.0) -> None:
    """Steps, and a take after so many of them, each time compared."""
    optimizer.track_changes()
    expected = Expected(model)
    seed = 0
    for steps in takes:
        for _ in range(steps):
            set_gradients(model, seed, scale)
            optimizer.step()
            expected.look()
            seed += 1
        expected.check(optimizer.take_changes(model), some=False)
    expected.check(optimizer.take_changes(model), some=False)


# Not all masters x states x rates: each two of them.
@pytest.mark.parametrize("master, state, lr", pairwise(list(MASTERS), list(STATES), RATES))
def test_all_formats(device: str, master: str, state: str, lr: float) -> None:
    dtype, options = MASTERS[master]
    model = Model(dtype, device)
    run(model, FusedAdamW(model.parameters(), lr=lr, state_dtype=state, **options))


MANY = {"chunks": (32, 1024), "part": (11, 1000), "odd": (9001,)}  # tiles of 1,024 elements, whole and in part


@pytest.mark.parametrize("master, state, lr", pairwise(list(MASTERS), list(STATES), RATES))
def test_many_elements(device: str, master: str, state: str, lr: float) -> None:
    dtype, options = MASTERS[master]
    model = Model(dtype, device, MANY)
    run(model, FusedAdamW(model.parameters(), lr=lr, state_dtype=state, **options), takes=(1, 2))


@pytest.mark.parametrize(
    "recipe, state, master",
    pairwise(RECIPES, ["fp32", "int8"], [{}, {"master_weight_dtype": torch.float16}]),
    ids=str,
)
def test_quantized_weights(device: str, recipe: Any, state: str, master: dict[str, Any]) -> None:
    """Codes and scales, whichever pass writes them."""
    model = nn.Sequential(nn.Linear(256, 256, bias=True), nn.Linear(256, 128, bias=False)).to(device, torch.bfloat16)
    quantize_model_(model, recipe)
    run(model, FusedAdamW(model.parameters(), lr=1e-3, state_dtype=state, **master))


MASTERS_OF_QUANTIZED = [{}, {"master_weight_dtype": torch.float16}, {"master_bits": 0}]


@pytest.mark.parametrize(
    "rule, recipe, state, master",
    pairwise([FusedLion, FusedMuon], RECIPES, ["fp32", "int8"], MASTERS_OF_QUANTIZED),
    ids=str,
)
def test_quantized_weights_of_other_rules(
    device: str, rule: Any, recipe: Any, state: str, master: dict[str, Any]
) -> None:
    """Whose passes write codes without marking them, or do not write them."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 128, bias=False)).to(device, torch.bfloat16)
    quantize_model_(model, recipe)
    run(model, rule(model.parameters(), lr=1e-3, state_dtype=state, **master))


@pytest.mark.parametrize("rule, recipe", pairwise([FusedAdamW, FusedLion], RECIPES), ids=str)
def test_a_pass_that_writes_codes_and_does_not_mark_them(
    rule: Any, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lion's on GPUs."""
    monkeypatch.setattr(CompiledShards, "marks", lambda _, work: work.target is None)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128, bias=False)).bfloat16()
    quantize_model_(model, recipe)
    run(model, rule(model.parameters(), lr=1e-3, state_dtype="int8"))


@pytest.mark.parametrize("lr", RATES)
def test_other_rules(device: str, lr: float) -> None:
    model = Model(torch.bfloat16, device)
    run(model, FusedLion(model.parameters(), lr=lr, state_dtype="int8"))
    model = Model(torch.bfloat16, device, {"weight": (64, 96), "bias": (37,)})
    run(model, FusedMuon([{"params": [model.weight]}, {"params": [model.bias], "algorithm": "adamw"}], lr=lr))


def test_mixed_dtypes(device: str) -> None:
    """A step of several combinations of formats."""
    model = nn.ModuleList([Model(torch.bfloat16, device), Model(torch.float32, device), Model(torch.float16, device)])
    run(model, FusedAdamW(model.parameters(), lr=1e-4, state_dtype="int8"))


def test_offloaded_states(device: str) -> None:
    model = Model(torch.bfloat16, device)
    run(model, FusedAdamW(model.parameters(), lr=1e-4, state_dtype="int8", offload_states=True))


def test_gradient_release(device: str) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).to(device, torch.bfloat16)
    optimizer = FusedAdamW(model.parameters(), lr=1e-4)
    enable_gradient_release(model, optimizer)
    optimizer.track_changes()
    expected = Expected(model)
    for seed in range(3):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)
        model(x).square().sum().backward()
        optimizer.step()
        expected.check(optimizer.take_changes(model))


def test_skipped_steps_change_nothing(device: str) -> None:
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2, skip_nonfinite=True)
    run(model, optimizer)
    set_gradients(model, 9)
    model.bias.grad[3] = float("inf")
    optimizer.step()
    assert optimizer.skipped_steps == 1 and optimizer.take_changes(model) == {}
    model = Model(torch.float32, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    run(model, optimizer)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    set_gradients(model, 10)
    model.bias.grad[3] = float("nan")
    scaler.scale(torch.ones((), device=device))  # which creates the scale
    scaler.step(optimizer)
    assert optimizer.take_changes(model) == {}


@pytest.mark.parametrize("master", MASTERS)
def test_takes_among_skipped_steps(device: str, master: str) -> None:
    """The first one, of which nobody knows yet what parameters were, and later ones; several to a take."""
    dtype, options = MASTERS[master]
    model = Model(dtype, device)
    with torch.no_grad():
        model.odd[:2] = float("nan")  # which a step may store in other bits
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, skip_nonfinite=True, **options)
    optimizer.initialize_state()
    optimizer.track_changes()
    expected = Expected(model)
    for seed, skipped in enumerate([True, True, False, True, False, False, True]):
        set_gradients(model, seed)
        if skipped:
            model.bias.grad[3] = float("inf")
        optimizer.step()
        expected.look()
        if seed != 4:
            expected.check(optimizer.take_changes(model), some=not skipped)
    assert optimizer.skipped_steps == 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_replays_of_a_graph() -> None:
    """In which nothing of Python runs."""
    model = Model(torch.bfloat16, "cuda")
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, capturable=True, state_dtype="int8")
    run(model, optimizer)
    set_gradients(model, 30)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    optimizer.take_changes(model)
    expected = Expected(model)
    for _ in range(3):
        graph.replay()
        expected.check(optimizer.take_changes(model))


def test_refused_steps_change_nothing(device: str) -> None:
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    run(model, optimizer)
    set_gradients(model, 9)
    model.bias.grad = torch.randn(37, device=device).to(torch.bfloat16).to_sparse()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert optimizer.take_changes(model) == {}


def test_scaled_and_clipped_gradients(device: str) -> None:
    model = Model(torch.float32, device)
    optimizer = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.1, decoupled_weight_decay=False)
    optimizer.track_changes()
    expected = Expected(model)
    for seed in range(3):
        set_gradients(model, seed)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        expected.check(optimizer.take_changes(model))


def test_parameters_without_gradients_or_frozen(device: str) -> None:
    model = Model(torch.bfloat16, device)
    model.wide.requires_grad_(False)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    optimizer.track_changes()
    set_gradients(model, 0)
    model.wide.grad = model.odd.grad = None
    optimizer.step()
    taken = optimizer.take_changes(model)
    assert "weight" in taken and not {"wide", "odd"} & set(taken)


def test_not_contiguous_and_gradients_of_other_dtypes(device: str) -> None:
    model = Model(torch.float32, device)
    model.weight = nn.Parameter(torch.randn(128, 6).to(device).t())
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    optimizer.track_changes()
    expected = Expected(model)
    for seed in range(3):
        set_gradients(model, seed)
        for param in model.parameters():
            param.grad_dtype = None
            param.grad = param.grad.to(torch.bfloat16)
        optimizer.step()
        expected.check(optimizer.take_changes(model))


def test_peek_keeps_what_take_clears(device: str) -> None:
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    with pytest.raises(RuntimeError, match="track_changes"):
        optimizer.take_changes(model)
    optimizer.track_changes()
    set_gradients(model, 0)
    optimizer.step()
    peeked, taken = optimizer.peek_changes(model), optimizer.take_changes(model)
    assert peeked.keys() == taken.keys() and "weight" in taken
    assert all(torch.equal(peeked[name].indices, taken[name].indices) for name in taken)
    assert optimizer.peek_changes(model) == {} == optimizer.take_changes(model)
    set_gradients(model, 1)
    optimizer.step()
    optimizer.track_changes()
    assert optimizer.take_changes(model) == {}
    optimizer.track_changes(False)
    optimizer.step()
    with pytest.raises(RuntimeError, match="track_changes"):
        optimizer.take_changes(model)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_take_of_one_model_keeps_what_changed_in_another(device: str, first: int, quantized: bool) -> None:
    """As of an actor and a critic that share an optimizer."""
    models = [nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 64)).to(device, torch.bfloat16) for _ in range(2)]
    if quantized:
        for model in models:
            quantize_model_(model, MXFP8BlockScaling())
    optimizer = FusedAdamW([param for model in models for param in model.parameters()], lr=1e-3)
    optimizer.track_changes()
    expected = [Expected(model) for model in models]
    for step in range(4):
        for model in models:
            set_gradients(model, step)
        optimizer.step()
        for each in expected:
            each.look()
        expected[first].check(optimizer.take_changes(models[first]))
        if step % 2:
            expected[1 - first].check(optimizer.take_changes(models[1 - first]))
            assert all(optimizer.take_changes(model) == {} for model in models)


def test_tracking_changes_no_bit_of_a_step(device: str) -> None:
    models = [Model(torch.bfloat16, device) for _ in range(2)]
    optimizers = [FusedAdamW(model.parameters(), lr=1e-2, state_dtype="int8") for model in models]
    optimizers[0].track_changes()
    for seed in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            set_gradients(model, seed)
            optimizer.step()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, other)
        for name, state in optimizers[0].state[mine].items():
            assert torch.equal(state, optimizers[1].state[other][name])


def test_bits_are_in_no_copy_and_no_state_dict(device: str) -> None:
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    run(model, optimizer)
    without = FusedAdamW(Model(torch.bfloat16, device).parameters(), lr=1e-2)
    set_gradients(model, 0)
    for param, other in zip(model.parameters(), without.param_groups[0]["params"], strict=True):
        other.grad = param.grad
    optimizer.step(), without.step()
    assert repr(optimizer.state_dict().keys()) == repr(without.state_dict().keys())
    first = [set(state) for state in optimizer.state_dict()["state"].values()]
    assert first == [set(state) for state in without.state_dict()["state"].values()]
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        with pytest.raises(RuntimeError, match="track_changes"):
            copied.take_changes(model)


def test_groups_of_muon_and_adam(device: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device, torch.bfloat16)
    run(model, FusedMuon(muon_param_groups(model), lr=1e-4))


def _by_load(param: nn.Parameter) -> None:
    module = nn.Module()
    module.weight = param
    module.load_state_dict({"weight": torch.randn(param.shape)})


def _by_clamp(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.clamp_(-0.5, 0.5)


def _by_new_memory(param: nn.Parameter) -> None:
    param.data = torch.randn_like(param)


WRITES: list[Callable[[nn.Parameter], None]] = [_by_load, nn.init.ones_, _by_clamp, _by_new_memory]


# Not all masters x writes x what comes before: each two of them.
@pytest.mark.parametrize("master, write, before", pairwise(list(MASTERS), WRITES, ["take", "step"]))
def test_what_others_write_is_marked_whole(device: str, master: str, write: Any, before: str) -> None:
    dtype, options = MASTERS[master]
    model = Model(dtype, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, **options)
    run(model, optimizer)
    write(model.weight)
    if before == "step":
        set_gradients(model, 20)
        optimizer.step()
    taken = optimizer.take_changes(model)
    assert torch.equal(taken["weight"].indices.cpu(), torch.arange(model.weight.numel()))
    assert torch.equal(taken["weight"].values, model.weight.detach().view(-1))
    expected = Expected(model)
    set_gradients(model, 21)
    optimizer.step()
    expected.check(optimizer.take_changes(model), some=False)


@pytest.mark.parametrize("master", MASTERS)
def test_a_master_from_outside_counts_once_it_is_in_the_parameter(device: str, master: str) -> None:
    dtype, options = MASTERS[master]
    model = Model(dtype, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-5, **options)
    run(model, optimizer)
    expected = Expected(model)
    if "master_param" in optimizer.state[model.weight] and "remainder" not in master:
        optimizer.set_scaled_state(model.weight, "master_param", torch.randn(model.weight.shape, device=device))
        expected.check(optimizer.take_changes(model), some=False)
        set_gradients(model, 20)
        optimizer.step()
        expected.check(optimizer.take_changes(model))
    optimizer.sync_params_from_master()
    assert "weight" in optimizer.take_changes(model) or optimizer.state[model.weight].get("master_param") is None


def test_loaded_states_are_marked_and_marks_by_hand(device: str) -> None:
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    run(model, optimizer)
    other = Model(torch.bfloat16, device)
    saved = FusedAdamW(other.parameters(), lr=1e-3)
    set_gradients(other, 5)
    saved.step()
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.take_changes(model)["weight"].indices.numel() == model.weight.numel()
    model.weight.data.copy_(torch.randn_like(model.weight))
    assert optimizer.take_changes(model) == {}  # which nothing notices
    optimizer.mark_changed(model.weight)
    taken = optimizer.take_changes(model)
    assert set(taken) == {"weight"} and torch.equal(taken["weight"].values, model.weight.detach().view(-1))
    optimizer.mark_changed()
    assert set(optimizer.take_changes(model)) == {"weight", "wide", "odd", "bias", "one"}
    with pytest.raises(KeyError, match="does not hold"):
        optimizer.mark_changed(nn.Parameter(torch.ones(2)))


def test_new_groups_and_replaced_parameters_are_marked(device: str) -> None:
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW([model.weight], lr=1e-3)
    optimizer.track_changes()
    optimizer.add_param_group({"params": [model.bias]})
    assert set(optimizer.take_changes(model)) == {"bias"}
    old = model.weight
    model.weight = nn.Parameter(old.detach().clone())
    optimizer.replace_parameters({old: model.weight})
    assert set(optimizer.take_changes(model)) == {"weight"}


def test_tied_parameters_have_one_name(device: str) -> None:
    model = Model(torch.bfloat16, device)
    model.again = model.weight
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    optimizer.track_changes()
    set_gradients(model, 0)
    optimizer.step()
    names = set(optimizer.take_changes(model))
    assert "weight" in names and "again" not in names


@pytest.mark.parametrize("found_inf", [None, 0.0])
def test_a_captured_step_settles_nothing(found_inf: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not been made: without a replay, the next one cannot tell from masters what parameters were."""
    param = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    tracker, skipped = ChangeTracker(), None if found_inf is None else torch.tensor(found_inf)
    tracker.start([param])
    cached = [CachedShard(Held((param,)), None, None, None, None, {})]
    step = StepChanges(param.device, cached, [Shard(tracker[param], {WHOLE}, always=False)])
    with monkeypatch.context() as patched:
        patched.setattr(changes, "is_capturing", lambda: True)
        step.begin([0])
        step.finish(skipped)
    assert not tracker[param].is_settled
    step.begin([0])
    step.finish(skipped)
    assert tracker[param].is_settled
