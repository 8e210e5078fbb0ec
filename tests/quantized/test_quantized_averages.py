"""Who else would update quantized weights: torch's optimizers, functions of lists, averages."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import distributed
from distributed import Part, join_all, long, on_each_device, part
from fused_optim import FusedAdam
from fused_optim.quantized import QuantizedTensor, finish_initialization
from quantized_cases import RECIPES, Run, parameter_parts, plain_model, same_components
from weight_cases import MATRIX, pair

EACH = pytest.mark.parametrize("recipe", RECIPES)

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    **{f"SGD {key}": lambda p, key=key: torch.optim.SGD(p, lr=0.1, **{key: True}) for key in ("foreach", "fused")},
    **{f"AdamW {key}": lambda p, key=key: torch.optim.AdamW(p, **{key: True}) for key in ("foreach", "fused")},
    "Adam": lambda p: torch.optim.Adam(p, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, foreach=True),
}


@pytest.mark.parametrize("recipe, keep_initial", [("current", True), ("mxfp8", False)])
def test_torchs_optimizers_are_refused(recipe: str, keep_initial: bool) -> None:
    for name, build in OPTIMIZERS.items():
        model, plain = pair(recipe, MATRIX, keep_initial)
        model.weight.square().sum().backward()
        before = copy.deepcopy(model.weight)
        with pytest.raises(RuntimeError, match=r"weight: .*cannot change a quantized weight.* FusedAdam"):
            build(list(model.parameters())).step()
        assert same_components(model.weight, before) and not model.weight.is_pending, name
        assert torch.equal(model.weight.initial_values(), plain), name


@EACH
def test_functions_of_lists_copy_or_raise(recipe: str) -> None:
    for keep_initial in (True, False):
        models, _ = zip(*(pair(recipe, MATRIX, keep_initial) for _ in range(2)), strict=True)
        weights = [model.weight.detach() for model in models]
        before = copy.deepcopy(weights)
        for change in (
            lambda many: torch._foreach_mul_(many, 2.0),
            lambda many: torch._foreach_lerp_(many, [torch.ones(x.shape) for x in many], 0.25),
            lambda many: torch._foreach_addcdiv_(many, many[::-1], many[::-1], value=2.0),
            lambda many: torch._foreach_zero_(many),
        ):
            with pytest.raises(NotImplementedError, match=r"weight: .*cannot change a quantized weight in place"):
                change(weights)
        assert all(map(same_components, weights, before))
        torch._foreach_copy_(weights, [torch.ones(128, 256), torch.ones(128, 256)])
        assert all(torch.allclose(weight.values(), torch.ones(()), rtol=2**-4) for weight in weights)
    assert type(torch._foreach_add([models[0].weight, models[1].weight[:, 3]], 1.0)[1]) is Tensor


@pytest.mark.parametrize(
    "average",
    [{}, {"avg_fn": get_ema_avg_fn(0.99)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.99)}],
    ids=["mean", "avg_fn", "multi_avg_fn"],
)
def test_averages_of_quantized_weights_are_refused(average: dict[str, Any]) -> None:
    model, _ = pair("mxfp8")
    with pytest.raises(TypeError, match=r"weight: AveragedModel would round .*master_state_dict"):
        AveragedModel(nn.Sequential(nn.Linear(2, 2), model), **average)
    assert AveragedModel(nn.Linear(2, 2), **average).module.weight.shape == (2, 2)


# --- averages of masters ----------------------------------------------------------------------------------------

DECAY = 0.9
Averages = tuple[dict[str, Part], dict[str, Part]]


def average_masters(recipes: list[str], how: str) -> dict[str, Averages]:
    """The average that docs/quantized.md shows, and the weights of a model that it was loaded into."""
    found = {}
    for recipe in recipes:
        run = Run(recipe, how)
        average = {name: master.clone() for name, master in run.optimizer.master_state_dict(run.model).items()}
        for step in range(3):
            run.train(step, step + 1)
            masters = run.optimizer.master_state_dict(run.model)
            torch._foreach_lerp_(list(average.values()), [masters[name] for name in average], 1 - DECAY)
        averaged = Run(recipe, how, fresh=True).model
        averaged.load_state_dict(average, strict=False)
        finish_initialization(averaged)
        shown = {name: parts for name, parts in parameter_parts(averaged).items() if not name.startswith("frozen")}
        found[recipe] = {name: part(value) for name, value in average.items()}, shown
    return found


@functools.cache
def average_of_plain(recipe: str) -> dict[str, Tensor]:
    """Of the FP32 parameters of a plain model that is trained alike, by torch's own averaging."""
    plain, steps = plain_model(recipe, torch.bfloat16).float(), Run(recipe, "plain")
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(plain)
    optimizer = FusedAdam(
        [p for p in plain.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    )
    for step in range(3):
        steps.set_gradients(step)
        for name, param in steps.params.items():
            plain.get_parameter(name).grad = None if param.grad is None else param.grad.float()
            param.grad = None
        optimizer.step()
        averaged.update_parameters(plain)
    return {name: averaged.module.get_parameter(name).detach() for name in steps.params}


@pytest.mark.parametrize(
    "ranks, how, on",
    on_each_device((1, "plain"), long(2, "fsdp"), (3, "fsdp"), (4, "hsdp"), nccl=[(1, "plain"), (2, "fsdp")]),
)
def test_averages_of_masters_are_those_of_plain_parameters(ranks: int, how: str, on: str) -> None:
    results = distributed.run(ranks, average_masters, list(RECIPES), how, on=on)
    for recipe in RECIPES:
        average, shown = (join_all([result[recipe][at] for result in results]) for at in (0, 1))
        expected = average_of_plain(recipe)
        assert list(average) == list(expected)
        for name, value in average.items():
            assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-7), (recipe, name)
            if name.endswith("weight"):
                assert any(
                    all(
                        torch.equal(shown[f"{name}: {part.name}"], made.components[part.name])
                        for part in made.recipe.components
                    )
                    for made in (
                        QuantizedTensor.from_values(each, RECIPES[recipe]) for each in (value, value.bfloat16())
                    )
                ), (
                    recipe,
                    name,
                )  # shards with a scale for all of them keep values in the weight's dtype until it is known
