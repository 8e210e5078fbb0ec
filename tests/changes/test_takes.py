"""What has changed is known, element by element, whatever has written it: against full copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from change_cases import RECIPES, Expected, Model, set_gradients
from fused_optim.backends import changed_bits
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from pairwise import pairwise
from peers import FusedAdamW, FusedLion, FusedMuon


@pytest.fixture(params=["device", "host"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(model: nn.Module, optimizer: Any, where: str = "device", takes: tuple[int, ...] = (1, 2, 3)) -> None:
    """Steps, and a take after so many of them, each time compared."""
    optimizer.track_changes(where=where)
    expected = Expected(model)
    seed = 0
    for steps in takes:
        for _ in range(steps):
            set_gradients(model, seed)
            optimizer.step()
            seed += 1
        expected.check(optimizer.take_changes(model), some=False)
    expected.check(optimizer.take_changes(model), some=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [1e-6, 1e-2])
def test_dtypes(device: str, where: str, dtype: torch.dtype, lr: float) -> None:
    model = Model(dtype, device)
    run(model, FusedAdamW(model.parameters(), lr=lr), where)


# Units of the comparing kernel have 8,192 elements: whole ones, parts, and one that begins where no vector does.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_elements(device: str, where: str, dtype: torch.dtype) -> None:
    model = Model(dtype, device, {"whole": (32, 1024), "part": (11, 1000), "odd": (9001,), "one": ()})
    model.unaligned = nn.Parameter(torch.randn(20_001, device=device).to(dtype)[1:])
    run(model, FusedAdamW(model.parameters(), lr=1e-5), where, takes=(1, 2))


def test_pieces_are_put_together(device: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_bits, "_COMPARED", 256)
    model = Model(torch.bfloat16, device)
    run(model, FusedAdamW(model.parameters(), lr=1e-4), where)


@pytest.mark.parametrize("rule, recipe", pairwise([FusedAdamW, FusedLion, FusedMuon], RECIPES), ids=str)
def test_quantized_weights(device: str, where: str, rule: Any, recipe: Any) -> None:
    """Codes and scales, whichever pass writes them."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 128, bias=False)).to(device, torch.bfloat16)
    quantize_model_(model, recipe)
    run(model, rule(model.parameters(), lr=1e-3, state_dtype="int8"), where)


def test_mixed_dtypes(device: str, where: str) -> None:
    model = nn.ModuleList([Model(torch.bfloat16, device), Model(torch.float32, device), Model(torch.float16, device)])
    run(model, FusedAdamW(model.parameters(), lr=1e-4, state_dtype="int8"), where)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.complex64])
def test_frozen_parameters_of_other_dtypes(device: str, where: str, dtype: torch.dtype) -> None:
    model = Model(torch.bfloat16, device)
    model.frozen = nn.Parameter(torch.ones(40, device=device).to(dtype), requires_grad=False)
    optimizer = FusedAdamW(model.parameters(), lr=1e-4)
    optimizer.track_changes(where=where)
    model.frozen.data[3::7] = 0
    taken = optimizer.take_changes(model)["frozen"]
    assert taken.indices.tolist() == [3, 10, 17, 24, 31, 38] and torch.equal(taken.values, model.frozen.data[3::7])
    assert optimizer.take_changes(model) == {}


def test_values_are_compared_by_their_bits(device: str, where: str) -> None:
    model = Model(torch.float32, device, {"weight": (4,)})
    with torch.no_grad():
        model.weight.copy_(torch.tensor([0.0, float("nan"), 1.0, 2.0]))
    optimizer = FusedAdamW(model.parameters())
    optimizer.track_changes(where=where)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([-0.0, float("nan"), 1.0, 3.0]))
    assert optimizer.take_changes(model)["weight"].indices.tolist() == [0, 3]


def test_values_that_came_back_count_for_nothing(device: str, where: str) -> None:
    """Between two takes nobody has seen them; where a peek has, they count, with what they are now."""
    model = Model(torch.bfloat16, device, {"weight": (4,)})
    optimizer = FusedAdamW(model.parameters())
    optimizer.track_changes(where=where)
    before = model.weight.detach().clone()
    model.weight.data.add_(1)
    model.weight.data.copy_(before)
    assert optimizer.take_changes(model) == {}
    model.weight.data[1] += 1
    assert optimizer.peek_changes(model)["weight"].indices.tolist() == [1]
    model.weight.data.copy_(before)
    taken = optimizer.take_changes(model)["weight"]
    assert taken.indices.tolist() == [1] and torch.equal(taken.values, before[1:2])


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


def _by_load(param: nn.Parameter) -> None:
    module = nn.Module()
    module.weight = param
    module.load_state_dict({"weight": torch.randn(param.shape)})


def _by_clamp(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.clamp_(-0.5, 0.5)


def _by_new_memory(param: nn.Parameter) -> None:
    param.data = torch.randn_like(param)


def _through_data(param: nn.Parameter) -> None:
    param.data[3, 5:] *= 2


def _other_strides(param: nn.Parameter) -> None:
    param.data = param.data.t().contiguous().t()
    param.data[0, 1] += 1


WRITES = [_by_load, nn.init.ones_, _by_clamp, _by_new_memory, _through_data, _other_strides]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("before", ["take", "step"])
def test_what_others_write_is_found(device: str, where: str, write: Any, before: str) -> None:
    """Those elements that differ, whether or not anything else could have noticed."""
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    run(model, optimizer, where)
    expected = Expected(model)
    write(model.weight)
    if before == "step":
        set_gradients(model, 20)
        optimizer.step()
    expected.check(optimizer.take_changes(model))
    set_gradients(model, 21)
    optimizer.step()
    expected.check(optimizer.take_changes(model))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_codes_and_scales_that_others_write(device: str, where: str, recipe: Any) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(160, 130, bias=False)).to(device, torch.bfloat16)
    quantize_model_(model, recipe)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    run(model, optimizer, where)
    expected = Expected(model)
    for layer in model:
        codes, *scales = (layer.weight.components[name] for name in layer.weight.components if "history" not in name)
        codes.view(torch.uint8).view(-1)[7:20].add_(1)
        for scale in scales:
            scale.view(torch.uint8).view(-1)[:1].add_(1)
    expected.check(optimizer.take_changes(model))


def test_loads_and_marks_by_hand(device: str, where: str) -> None:
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    run(model, optimizer, where)
    expected = Expected(model)
    other = Model(torch.bfloat16, device)
    saved = FusedAdamW(other.parameters(), lr=1e-3)
    set_gradients(other, 5)
    saved.step()
    optimizer.load_state_dict(saved.state_dict())
    expected.check(optimizer.take_changes(model))
    optimizer.mark_changed(model.weight)
    taken = optimizer.take_changes(model)
    assert set(taken) == {"weight"} and torch.equal(taken["weight"].values, model.weight.detach().view(-1))
    optimizer.mark_changed()
    taken = optimizer.take_changes(model)
    assert set(taken) == {"weight", "wide", "odd", "bias", "one"}
    assert all(each.indices.tolist() == list(range(each.values.numel())) for each in taken.values())
    with pytest.raises(KeyError, match="does not hold"):
        optimizer.mark_changed(nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("error", ["before", "after"])
def test_a_take_that_fails_takes_nothing(device: str, where: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    optimizer.track_changes(where=where)
    expected = Expected(model)
    set_gradients(model, 0)
    optimizer.step()

    def fail(*_: object) -> list[tuple[Tensor, Tensor]]:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("fused_optim.state.published." + ("published" if error == "before" else "collect"), fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.take_changes(model)
    expected.check(optimizer.take_changes(model))


def test_where_and_dtypes_are_checked(device: str) -> None:
    model = Model(torch.bfloat16, device)
    optimizer = FusedAdamW(model.parameters())
    with pytest.raises(ValueError, match="where: expected 'device' or 'host', got 'disk'"):
        optimizer.track_changes(where="disk")
    model.frozen = nn.Parameter(torch.zeros(3, dtype=torch.complex128, device=device), requires_grad=False)
    with pytest.raises(TypeError, match="complex128 cannot be taken"):
        FusedAdamW(model.parameters()).track_changes()
    optimizer.track_changes()
    optimizer.track_changes(False)
    with pytest.raises(RuntimeError, match="not tracked"):
        optimizer.mark_changed()


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
