"""The way out of quantized weights: plain parameters that go on as if they had been plain all along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distributed
from distributed import assert_same, join_all, on_each_device, shard_like
from fused_optim.quantized import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    QuantizedTensor,
    Recipe,
    dequantize_model_,
    quantize_model_,
)
from fused_optim.sharding.dtensor import local_tensor
from pairwise import pairwise
from peers import FusedAdam
from quantized_cases import (
    RECIPES,
    Layers,
    Run,
    gradient,
    perceptron,
    plain_model,
    quantized_model,
    recipe_of,
    values,
)
from recipe_checks import WAYS, dtype_of, sharded, train

EACH = pytest.mark.parametrize("recipe", RECIPES)
FEW = ["current", "tiles", "nvfp4"]
HALF, END = 2, 5
# Options of FusedAdam; the masters of all of them follow the same steps whatever the parameter is.
OPTIONS: dict[str, dict[str, Any]] = {
    "FP32": {},
    "int8": {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8},
    "FP16 masters": {"master_weight_dtype": torch.float16, "exp_avg_dtype": torch.float16},
    "remainders": {"store_param_remainders": True},
}


class PlainRun(Run):
    """The same training of weights that never were quantized."""

    def __init__(self, recipe: str, dtype: torch.dtype = torch.bfloat16, build: Any = None, **options: Any) -> None:
        self.model = (build or plain_model)(recipe, dtype)
        self.params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        options = {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "seed": 3, **options}
        self.optimizer = FusedAdam(self.params.values(), **options)


def is_quantized(param: Tensor) -> bool:
    return isinstance(local_tensor(param), QuantizedTensor)


def go_on_plain(recipes: list[str], how: str, options: dict[str, Any], dtype: torch.dtype) -> dict[str, list[Any]]:
    """Half of the training with quantized weights, the rest with plain ones: what there is at both points."""
    found = {}
    for recipe in recipes:
        run = Run(recipe, how, dtype, build=perceptron if how == "tp" else None, **options)
        run.train(0, HALF)
        if how != "tp":
            run.model(values((2, 144), dist.get_rank()).to(dtype)).sum().backward()  # FSDP2 keeps what it gathered into
            run.optimizer.zero_grad()
        run.set_gradients(HALF)
        grads = {name: param.grad for name, param in run.params.items()}
        assert dequantize_model_(run.model, run.optimizer) is run.model
        run.params = {name: param for name, param in run.model.named_parameters() if param.requires_grad}
        assert not any(map(is_quantized, run.model.parameters()))
        assert all(param.grad is grads[name] for name, param in run.params.items())
        assert run.optimizer.param_groups[0]["params"] == list(run.params.values())
        half = run.snapshot()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.train(HALF + 1, END)
        found[recipe] = [half, run.snapshot()]
    return found


@pytest.mark.parametrize(
    "ranks, how, options, on",
    on_each_device(
        *(
            (ranks, how, "FP32")
            for ranks, how in [(1, "plain"), (1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "hsdp"), (4, "tp")]
        ),
        *((2, "fsdp", options) for options in OPTIONS if options != "FP32"),
        nccl=[(1, "plain", "FP32"), (2, "fsdp", "FP32")],  # whose codes may differ from those of CPUs
    ),
)
def test_training_goes_on_as_if_weights_had_been_plain(ranks: int, how: str, options: str, on: str) -> None:
    """Masters and moments do not depend on what weights were rounded to, so every bit is that of plain training."""
    recipes = list(RECIPES) if options == "FP32" else FEW
    dtype = torch.bfloat16
    results = distributed.run(ranks, go_on_plain, recipes, how, OPTIONS[options], dtype, on=on, timeout=120)
    for recipe in recipes:
        plain = PlainRun(recipe, dtype, perceptron if how == "tp" else None, **OPTIONS[options])
        for at, (first, last) in enumerate([(0, HALF), (HALF, END)]):
            plain.train(first, last)
            expected = but_frozen(join_all([plain.snapshot()]))
            actual = but_frozen(join_all([result[recipe][at] for result in results]))
            if on == "cpu":
                assert_same(actual, expected)
            else:
                torch.testing.assert_close(actual, expected)


def but_frozen(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """In the order of their names. The frozen weight was rounded, and keeps no initial values."""
    return {name: found[name] for name in sorted(found) if "frozen.weight" not in name}


@EACH
def test_fp32_weights_become_their_masters(recipe: str) -> None:
    run, plain = Run(recipe, "plain", torch.float32), PlainRun(recipe, torch.float32)
    run.train(0, HALF)
    masters = {name: value.clone() for name, value in run.optimizer.master_state_dict(run.model).items()}
    dequantize_model_(run.model, run.optimizer)
    assert_same({name: run.model.get_parameter(name).detach() for name in masters}, masters)
    assert all("master_param" not in states for states in run.optimizer.state.values())
    run.params = {name: param for name, param in run.model.named_parameters() if param.requires_grad}
    run.train(HALF, END)
    plain.train(0, END)
    for name, param in plain.params.items():
        assert torch.equal(run.params[name], param), name


# --- without masters ----------------------------------------------------------------------------------------------


@EACH
def test_values_are_the_initial_ones_or_the_decoded_ones(recipe: str) -> None:
    """Frozen weights keep no initial values."""
    model, plain = quantized_model(recipe), plain_model(recipe)
    decoded = model.frozen.weight.dequantize()
    dequantize_model_(model)
    assert torch.equal(model.uneven.weight, plain.uneven.weight) and torch.equal(model.frozen.weight, decoded)
    assert model.uneven.weight.requires_grad and not model.frozen.weight.requires_grad
    model = quantized_model(recipe, keep_initial=False)
    decoded = model.uneven.weight.dequantize()
    assert torch.equal(dequantize_model_(model).uneven.weight, decoded) and type(model.uneven.weight) is nn.Parameter


@EACH
def test_weights_without_masters_keep_their_decoded_values(recipe: str) -> None:
    run = Run(recipe, "plain", master_weights=False)
    run.train(0, HALF)
    decoded = run.model.uneven.weight.dequantize()
    moments = run.optimizer.get_unscaled_state(run.model.uneven.weight, "exp_avg").clone()
    dequantize_model_(run.model, run.optimizer)
    assert torch.equal(run.model.uneven.weight, decoded)
    assert torch.equal(run.optimizer.get_unscaled_state(run.model.uneven.weight, "exp_avg"), moments)


def test_optimizers_without_states_start_from_the_plain_values() -> None:
    run, plain = Run("nvfp4", "plain"), plain_model("nvfp4")
    dequantize_model_(run.model, run.optimizer)
    run.optimizer.initialize_state()
    masters = run.optimizer.master_state_dict(run.model)
    assert all(torch.equal(masters[name], plain.get_parameter(name).float()) for name in masters)


def test_tied_weights_stay_tied_and_meta_weights_on_meta() -> None:
    model = nn.Sequential(nn.Embedding(7, 64), nn.Linear(64, 7))
    model[1].weight = model[0].weight
    quantize_model_(model, RECIPES["mxfp8"])
    optimizer = FusedAdam(model.parameters())
    dequantize_model_(model, optimizer)
    assert model[0].weight is model[1].weight is optimizer.param_groups[0]["params"][0]
    meta = dequantize_model_(quantize_model_(nn.Linear(64, 7, device="meta"), RECIPES["mxfp8"]))
    assert type(meta.weight) is nn.Parameter and meta.weight.is_meta


# --- FSDP2 --------------------------------------------------------------------------------------------------------


def compute_plain(cases: list[tuple[str, str]], how: str) -> list[str]:
    """Where outputs or gradients differ from those of a model that was built plain with the same values."""
    different = []
    for recipe, way in cases:
        dtype = dtype_of(way)
        model = sharded(quantized_model(recipe, dtype), way, how)
        train(model, 0, way)  # so FSDP2 has gathered quantized ones
        model.zero_grad()
        dequantize_model_(model)
        plain: Layers = plain_model(recipe, dtype)
        frozen = quantize_model_(plain_model(recipe, dtype), recipe_of(recipe)).frozen.weight
        plain.frozen.weight.data.copy_(frozen.dequantize())
        plain = sharded(plain, way, how)
        for step in (1, 2):
            results = [train(each, step, way) for each in (model, plain)]
            if not torch.equal(*results):
                different.append(f"{recipe} {way}: outputs of step {step}")
        for name, param in plain.named_parameters():
            grad = model.get_parameter(name).grad
            if (grad is None) != (param.grad is None) or (
                grad is not None and not torch.equal(local_tensor(grad), local_tensor(param.grad))
            ):
                different.append(f"{recipe} {way}: gradient of {name}")
    return different


# Not all numbers of ranks x recipes x ways: each two of them.
CASES = pairwise([1, 2, 3, 4], list(RECIPES), list(WAYS))


@pytest.mark.parametrize("ranks, how, on", on_each_device((1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "hsdp")))
def test_fsdp2_gathers_plain_weights_afterwards(ranks: int, how: str, on: str) -> None:
    cases = [(recipe, way) for number, recipe, way in CASES if number == ranks or on == "cuda"]
    for different in distributed.run(ranks, compute_plain, cases, how, on=on, timeout=120):
        assert not different


def accumulate() -> str:
    model = quantized_model("mxfp8")
    fully_shard(model, mesh=distributed.mesh())
    model.set_requires_gradient_sync(False)
    model(values((2, 144), 1).bfloat16()).sum().backward()
    with pytest.raises(RuntimeError) as error:
        dequantize_model_(model)
    assert sum(map(is_quantized, model.parameters())) == 5
    return str(error.value)


def test_gradients_that_were_not_reduced_are_not_lost() -> None:
    for error in distributed.run(2, accumulate):
        assert "weight: FSDP2 has not reduced its gradients yet: do this after the last micro-batch" in error


# --- what is refused ----------------------------------------------------------------------------------------------


def test_other_optimizers_are_refused_before_anything_changes() -> None:
    model = quantized_model("mxfp8")
    with pytest.raises(TypeError, match="optimizer: expected a FusedAdam, got a SGD"):
        dequantize_model_(model, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    assert is_quantized(model.uneven.weight)


def test_replacements_that_do_not_fit_are_refused_before_anything_changes() -> None:
    first, second = (nn.Parameter(values((4, 32), i)) for i in range(2))
    optimizer = FusedAdam([("first", first), ("second", second)])
    fits = nn.Parameter(torch.zeros(4, 32))
    for new, error, text in [
        (nn.Parameter(torch.zeros(3, 32)), ValueError, r"second.*\(4, 32\), no mesh, got shape \(3, 32\)"),
        (nn.Parameter(torch.zeros(4, 32, dtype=torch.float64)), TypeError, "second.*float64"),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            optimizer.replace_parameters({first: fits, second: new})
        assert optimizer.param_groups[0]["params"] == [first, second]
    with pytest.raises(KeyError, match="does not hold"):
        optimizer.replace_parameters({fits: first})


def test_replaced_parameters_take_states_along() -> None:
    """Also from BF16 to FP32, as if the optimizer had had FP32 parameters all along."""
    start = values((4, 64), 1).bfloat16()
    half, full = (FusedAdam([nn.Parameter(start.to(dtype))], lr=0.1) for dtype in (torch.bfloat16, torch.float32))
    for step in range(6):
        if step == 3:
            (old,) = half.param_groups[0]["params"]
            half.replace_parameters({old: nn.Parameter(torch.zeros(4, 64))})
            assert old not in half.state
        for optimizer in (half, full):
            (param,) = optimizer.param_groups[0]["params"]
            param.grad = shard_like(gradient(param.shape, 0, step).bfloat16().to(param.dtype), param)
            optimizer.step()
    assert torch.equal(half.param_groups[0]["params"][0], full.param_groups[0]["params"][0])
    assert half.param_groups[0]["step"] == 6


@pytest.mark.parametrize("recipe", [
    Float8CurrentScaling(compute="decode"), Float8DelayedScaling(compute="fp8", activation_scaling="delayed"),
], ids=lambda recipe: recipe.name)  # fmt: skip
def test_layers_are_torchs_again(recipe: Recipe) -> None:
    """So that they can be scripted, exported, quantized by others and pickled without this package."""
    layer = nn.Linear(128, 128).bfloat16()
    before, buffers = set(vars(layer)), list(layer.named_buffers())
    model = dequantize_model_(quantize_model_(nn.Sequential(layer), recipe, lambda m, _: isinstance(m, nn.Linear)))
    assert type(model[0]) is nn.Linear and set(vars(model[0])) == before and list(model[0].named_buffers()) == buffers
    x = torch.randn(4, 128).bfloat16()
    assert torch.equal(torch.jit.script(model)(x), model(x))
