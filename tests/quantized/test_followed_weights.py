"""Masters follow what was loaded into quantized weights: by values under the scales of the weight, in all recipes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import distributed
from distributed import assert_same, join_all, long, on_each_device, part
from fused_optim.quantized import QuantizedTensor, finish_initialization, quantize_model_
from pairwise import each_once, pairwise
from peers import FusedAdamW, FusedLion, FusedMuon
from quantized_cases import RECIPES, Run, plain_model, values

SHAPE = (256, 128)
EACH = pytest.mark.parametrize("recipe", RECIPES)
BACKENDS = ["torch", "engine"]
EVERY_BACKEND = pytest.mark.parametrize("any_backend", BACKENDS, indirect=True)
MASTERS = [torch.float32, torch.float16]


class Trained:
    """A quantized layer after three steps, and what its masters were then."""

    def __init__(self, recipe: str, device: str, master: torch.dtype = torch.float32, growth: float = 0.0) -> None:
        self.layer = nn.Linear(*SHAPE[::-1], bias=False, device=device)
        self.layer.weight.data.copy_(values(SHAPE, 1))
        quantize_model_(self.layer, RECIPES[recipe])
        self.weight: QuantizedTensor = self.layer.weight
        self.optimizer = FusedAdamW([self.weight], lr=growth or 1e-3, master_weight_dtype=master)
        for seed in range(3):
            outwards = -self.weight.dequantize().sign()
            self.weight.grad = outwards if growth else values(SHAPE, 2, seed).to(device)
            self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.before = self.master()

    def master(self) -> Tensor:
        return self.optimizer.get_unscaled_state(self.weight, "master_param").clone()

    def followed(self) -> Tensor:
        """The masters with which the next step begins; that changes nothing else."""
        finish_initialization(self.layer)
        self.weight.grad = torch.zeros(SHAPE, device=self.weight.device)
        self.optimizer.step()
        return self.master()


# --- an independent reference -------------------------------------------------------------------------------------

E4M3 = np.array([m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)])
LEVELS = {8: E4M3[:127], 4: np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])}


def scales(weight: QuantizedTensor) -> np.ndarray[Any, Any]:
    """What the code of each element is multiplied by."""
    parts = {name: part.cpu() for name, part in weight.components.items()}
    whole = parts["tensor_scale"].double().numpy() if "tensor_scale" in parts else 1.0
    if "scale" not in parts:
        return np.broadcast_to(whole, SHAPE)
    scale = parts["scale"]
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.double() - 127) if "tensor_scale" not in parts else scale.view(torch.float8_e4m3fn)
    rows, columns = (size // blocks for size, blocks in zip(SHAPE, scale.shape, strict=True))
    return np.kron(scale.double().numpy(), np.ones((rows, columns))) * whole


def half_steps(weight: QuantizedTensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Between which magnitudes values are rounded to what the weight has."""
    levels, scale = LEVELS[4 if weight.recipe.name.startswith("NV") else 8], scales(weight)
    codes = np.abs(weight.values().double().cpu().numpy()) / np.where(scale > 0, scale, 1.0)
    edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [levels[-1] * 1.5 - levels[-2] / 2]])
    index = np.searchsorted(edges[1:-1], codes)
    return edges[index] * scale, edges[index + 1] * scale


def check_follows(loaded: QuantizedTensor, master: Tensor, before: Tensor) -> None:
    """Within half a step of the weight: where the old master was, it stayed; elsewhere it is the weight's value."""
    low, high = half_steps(loaded)
    old, new, value = (x.double().cpu().numpy() for x in (before, master, loaded.values()))
    if loaded.recipe == RECIPES["mxfp8"]:  # whose largest elements saturate, up to 512, not only where they are loaded
        largest = high == 464 * scales(loaded)
        others = (np.abs(old) < low) | ((np.abs(old) > high) & ~largest)
        untouched = ~others.reshape(-1, 32).any(1).repeat(32).reshape(SHAPE)
        high = np.where(largest & untouched, 512 * scales(loaded), high)
    slack = 1e-6
    same_sign = (np.signbit(old) == np.signbit(value)) | (low == 0)
    inside = same_sign & (np.abs(old) > low * (1 + slack)) & (np.abs(old) < high * (1 - slack))
    outside = ~same_sign | (np.abs(old) < low * (1 - slack)) | (np.abs(old) > high * (1 + slack))
    assert np.array_equal(new[inside], old[inside])
    assert np.array_equal(new[outside], value[outside])
    assert outside.any()


# --- bytes --------------------------------------------------------------------------------------------------------

# What is loaded in place of masters; all have smaller largest elements, of each block or of the weight.
SMALLER: dict[str, Callable[[Tensor], Tensor]] = {
    "4.9%": lambda x: x * 0.951,
    "30 times": lambda x: x / 30,
    "clamped": lambda x: x.clamp(-0.3, 0.3),
    "the largest": lambda x: torch.where(x.abs() == x.abs().max(), x * 0.5, x),
    "largest of blocks": lambda x: torch.where(
        x.abs() >= x.abs().view(-1, 16).amax(1, keepdim=True).expand(-1, 16).reshape(x.shape), x / 30, x
    ),
}


def copied(trained: Trained, new: Tensor) -> None:
    with torch.no_grad():
        trained.weight.copy_(QuantizedTensor.from_values(new, trained.weight.recipe))


def assigned(trained: Trained, new: Tensor) -> None:
    trained.weight.data = QuantizedTensor.from_values(new, trained.weight.recipe)


@pytest.mark.parametrize(
    "recipe, any_backend, smaller, load",
    pairwise([*RECIPES], BACKENDS, [*SMALLER], [copied, assigned]),
    indirect=["any_backend"],
)
def test_masters_follow_smaller_codes(recipe: str, any_backend: str, smaller: str, load: Any) -> None:
    trained = Trained(recipe, any_backend)
    load(trained, SMALLER[smaller](trained.before))
    loaded = trained.weight.detach().clone()
    check_follows(loaded, trained.followed(), trained.before)


# Not all recipes x backends x masters x growths: each two of them.
@pytest.mark.parametrize(
    "recipe, any_backend, master, growth",
    pairwise([*RECIPES], BACKENDS, MASTERS, [0.0, 0.5]),
    indirect=["any_backend"],
    ids=str,
)
def test_the_same_codes_leave_masters(recipe: str, any_backend: str, master: torch.dtype, growth: float) -> None:
    """Also those that have saturated: weights that grow faster than delayed scales, and the specification's MXFP8."""
    trained = Trained(recipe, any_backend, master, growth)
    if recipe in ("delayed", "mxfp8") and growth:
        assert np.count_nonzero(np.abs(trained.before.cpu().numpy()) > half_steps(trained.weight)[1]) > 0
    with torch.no_grad():
        trained.weight.copy_(trained.weight.detach().clone())
    assert torch.equal(trained.followed(), trained.before)


@EVERY_BACKEND
def test_elements_whose_scale_is_zero_keep_masters(any_backend: str) -> None:
    """NVFP4 has no scale for blocks that are a million times smaller than the largest one."""
    trained = Trained("nvfp4", any_backend)
    with torch.no_grad():
        trained.weight.copy_(
            trained.before * torch.where(torch.arange(SHAPE[0], device=trained.before.device) < 8, 1e-7, 1.0)[:, None]
        )
    trained.before = trained.followed()
    assert not trained.weight.values()[:8].any() and trained.before[:8].all()
    with torch.no_grad():
        trained.weight.copy_(trained.weight.detach().clone())
    assert torch.equal(trained.followed(), trained.before)


# --- plain values -------------------------------------------------------------------------------------------------


# Not all recipes x backends x values: each two of them.
@pytest.mark.parametrize(
    "recipe, any_backend, smaller",
    pairwise([*RECIPES], BACKENDS, [*SMALLER, "close", "BF16"]),
    indirect=["any_backend"],
)
def test_masters_are_the_values_that_were_loaded(recipe: str, any_backend: str, smaller: str) -> None:
    """Also where these are closer to the old masters than codes are to each other."""
    trained = Trained(recipe, any_backend)
    ways = {**SMALLER, "close": lambda x: x * 0.999, "BF16": lambda x: (x * 0.97).bfloat16()}
    new = ways[smaller](trained.before).float()
    unchanged = new == trained.weight.values()
    trained.layer.load_state_dict({"weight": new})
    assert torch.equal(trained.followed(), torch.where(unchanged, trained.before, new))


PARTS: dict[str, tuple[Any, ...]] = {
    "rows": (slice(2, 140),),
    "columns": (slice(None), slice(0, 64)),
}


@pytest.mark.parametrize(
    "recipe, any_backend, at, factor",
    pairwise([*RECIPES], BACKENDS, [*PARTS], [0.0, 0.03, 30.0]),
    indirect=["any_backend"],
)
def test_masters_of_what_was_not_written_stay(recipe: str, any_backend: str, at: str, factor: float) -> None:
    """Though the scales of their blocks, or of all of the weight, change."""
    trained = Trained(recipe, any_backend)
    read, new = trained.weight.values(), trained.before.clone()
    new[PARTS[at]] *= factor
    trained.weight.detach()[PARTS[at]].copy_(new[PARTS[at]])
    assert torch.equal(trained.followed(), torch.where(read == new, trained.before, new))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoded_values_that_come_back_leave_masters(recipe: str, dtype: torch.dtype) -> None:
    """Others were loaded meanwhile, as averages are for an evaluation."""
    trained = Trained(recipe, "cpu")
    kept = trained.weight.dequantize(dtype)
    if dtype != trained.weight.dtype:
        trained = TrainedIn16Bits(recipe)
        kept = trained.weight.dequantize()
    trained.layer.load_state_dict({"weight": values(SHAPE, 9) / 50})
    finish_initialization(trained.layer)
    trained.layer.load_state_dict({"weight": kept})
    assert torch.equal(trained.followed(), trained.before)


class TrainedIn16Bits(Trained):
    def __init__(self, recipe: str) -> None:
        self.layer = nn.Linear(*SHAPE[::-1], bias=False, dtype=torch.bfloat16)
        quantize_model_(self.layer, RECIPES[recipe])
        self.weight = self.layer.weight
        self.optimizer = FusedAdamW([self.weight], lr=1e-3)
        self.weight.grad = values(SHAPE, 2).bfloat16()
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.before = self.master()

    def followed(self) -> Tensor:
        finish_initialization(self.layer)
        self.weight.grad = torch.zeros(SHAPE, dtype=torch.bfloat16)
        self.optimizer.step()
        return self.master()


# --- several ranks ------------------------------------------------------------------------------------------------


def load_smaller(recipes: list[str], how: str) -> dict[str, dict[str, Any]]:
    found = {}
    for recipe in recipes:
        run = Run(recipe, "fsdp" if torch.distributed.get_world_size() > 1 else "plain")
        run.train(0, 3)
        source = plain_model(recipe)
        for index, param in enumerate(source.parameters()):
            with torch.no_grad():
                param.copy_(values(param.shape, 5, index) / 30)
        if how == "bytes":
            other = Run(recipe, "fsdp" if torch.distributed.get_world_size() > 1 else "plain", fresh=True)
            set_model_state_dict(other.model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
            finish_initialization(other.model)
            set_model_state_dict(run.model, get_model_state_dict(other.model))
        else:
            set_model_state_dict(run.model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
            finish_initialization(run.model)
        run.train(3, 5)
        found[recipe] = run.snapshot()
        masters = run.optimizer.master_state_dict(run.model)
        found[recipe] |= {f"{name}: FP32": part(value) for name, value in masters.items()}
    return found


def stepped(recipe: str, rule: Any) -> tuple[nn.Sequential, Any]:
    """A quantized layer after a step, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128, bias=False)).bfloat16()
    quantize_model_(model, RECIPES[recipe])
    optimizer = rule(model.parameters(), lr=1e-3)
    model[0].weight.grad = torch.randn(128, 128).bfloat16()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("rule", [FusedAdamW, FusedLion, FusedMuon])
@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_have_the_masters_that_followed(recipe: str, rule: Any) -> None:
    """They are no writes: masters of what was not written stay as they are."""
    model, optimizer = stepped(recipe, rule)
    with torch.no_grad():
        written = model[0].weight.dequantize()
        written[:, 5] *= 1.5
        model[0].weight.copy_(written)
    expected = optimizer.master_state_dict(model)["0.weight"]
    for copied, its_own in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        assert torch.equal(its_own.master_state_dict(copied)["0.weight"], expected)


def copies(weight: QuantizedTensor, column: int) -> Tensor:
    edited = weight.dequantize()
    edited[:, column] *= 1.5
    weight.copy_(edited)
    return edited[:, column]


def copies_fp32(weight: QuantizedTensor, column: int) -> Tensor:
    edited = weight.dequantize(torch.float32)
    edited[:, column] *= 1.5
    weight.copy_(edited)
    return edited[:, column]


def copies_rows(weight: QuantizedTensor, column: int) -> Tensor:
    """Into views, which are quantized later: 64 rows, 3 columns."""
    for view, at in (
        (weight[:64], column),
        (weight[64:, :5], None),
        (weight[64:, 5:8], column - 5),
        (weight[64:, 8:], None),
    ):
        edited = view.dequantize()
        if at is not None:
            edited[:, at] *= 1.5
        view.copy_(edited)
    result = weight.dequantize()[:, column]
    finish_initialization(nn.ParameterList([weight]))
    return result


def loads(weight: QuantizedTensor, column: int) -> Tensor:
    edited = weight.dequantize()
    edited[:, column] *= 1.5
    nn.ParameterDict({"weight": weight}).load_state_dict({"weight": edited})
    return edited[:, column]


BETWEEN = ["nothing", "sync_masters_from_params", "master_state_dict", "state_dict"]


# Not all recipes x edits x what is between x rules: each two of them.
@pytest.mark.parametrize(
    "recipe, edit, between, rule",
    pairwise([*RECIPES], [copies, copies_fp32, copies_rows, loads], BETWEEN, [FusedAdamW, FusedMuon]),
)
def test_masters_of_what_is_never_edited_stay(recipe: str, edit: Any, between: str, rule: Any) -> None:
    """However often decoded weights are edited before the next step, and whether masters follow each edit or not."""
    model, optimizer = stepped(recipe, rule)
    expected = optimizer.master_state_dict(model)["0.weight"].clone()
    for column in (5, 6, 7):
        with torch.no_grad():
            edited = edit(model[0].weight, column).float()
        expected[edited != 0, column] = edited[edited != 0]
        if between == "sync_masters_from_params":
            optimizer.sync_masters_from_params()
        elif between != "nothing":
            getattr(optimizer, between)(*([model] if between == "master_state_dict" else []))
    found = optimizer.master_state_dict(model)["0.weight"]
    assert torch.equal(found[:, 8:], expected[:, 8:]) and torch.equal(found[:, :5], expected[:, :5])
    # Edited ones are what was written, or rounded to that.
    torch.testing.assert_close(found[:, 5:8], expected[:, 5:8], rtol=0.3, atol=1e-2)


def edit_first_columns(recipes: list[str]) -> dict[str, dict[str, Any]]:
    """Of every weight, with nothing between that follows: the masters before and after."""
    found, full = {}, StateDictOptions(full_state_dict=True)
    for recipe in recipes:
        run = Run(recipe, "fsdp" if torch.distributed.get_world_size() > 1 else "plain")
        run.train(0, 2)
        masters = {"before": {name: x.clone() for name, x in run.optimizer.master_state_dict(run.model).items()}}
        for factor in (1.5, 3.0, 0.1):
            state = {}
            for name, value in get_model_state_dict(run.model, options=full).items():
                state[name] = value.dequantize() if isinstance(value, QuantizedTensor) else value
                if value.dim() == 2:
                    state[name][:, 0] *= factor
            set_model_state_dict(run.model, state, options=full)
            finish_initialization(run.model)
        masters["after"] = run.optimizer.master_state_dict(run.model)
        found[recipe] = {f"{when}: {name}": part(x) for when, all_ in masters.items() for name, x in all_.items()}
    return found


@pytest.mark.parametrize("ranks, on", on_each_device(long(2), (3,), long(4), nccl=[(2,)]))
def test_masters_of_what_is_never_edited_stay_on_shards(ranks: int, on: str) -> None:
    results = distributed.run(ranks, edit_first_columns, list(RECIPES), on=on)
    (whole,) = distributed.run(1, edit_first_columns, list(RECIPES), on=on)
    for recipe in RECIPES:
        found = join_all([result[recipe] for result in results])
        assert_same(found, join_all([whole[recipe]]))
        names = [name.partition(": ")[2] for name in found if name.startswith("after") and "weight" in name]
        assert names
        for name in names:
            assert torch.equal(found[f"after: {name}"][:, 1:], found[f"before: {name}"][:, 1:])


@pytest.mark.parametrize(
    "ranks, how, on",
    on_each_device(*each_once(product([2, 3], ["bytes", "plain"])), nccl=[(2, "bytes"), (2, "plain")]),
)
def test_shards_follow_as_whole_weights_do(ranks: int, how: str, on: str) -> None:
    results = distributed.run(ranks, load_smaller, list(RECIPES), how, on=on)
    (whole,) = distributed.run(1, load_smaller, list(RECIPES), how, on=on)
    for recipe in RECIPES:
        found = join_all([result[recipe] for result in results])
        assert_same(found, join_all([whole[recipe]]))
        largest = max(float(found[name].abs().max()) for name in found if name.endswith("weight: FP32"))
        assert largest < 1.0 / 4  # what was loaded has 0.15, what was there 4 and more
