"""share_memory() of quantized weights: other processes see codes and scales, and what is written into them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import distributed
from fused_optim import FusedAdam
from fused_optim.quantized import QuantizedTensor, discard_high_precision_init, finish_initialization, quantize_model_
from quantized_cases import RECIPES, same_components, values
from weight_cases import MATRIX, pair

EACH = pytest.mark.parametrize("recipe", RECIPES)


def addresses(weight: QuantizedTensor) -> list[int]:
    return [part.data_ptr() for part in weight.components.values()]


@EACH
def test_all_components_are_shared(recipe: str) -> None:
    model, plain = pair(recipe)
    weight, view = model.weight, model.weight.detach()[:128]
    before = [part.clone() for part in weight.components.values()]
    assert not weight.is_shared()
    assert model.share_memory() is model and model.weight is weight
    assert weight.is_shared() and view.is_shared() and weight.detach()[:, 3].is_shared()
    assert all(part.is_shared() for part in weight.components.values())
    assert all(torch.equal(a, b) for a, b in zip(before, weight.components.values(), strict=True))
    assert torch.equal(weight.initial_values(), plain) and torch.equal(view.dequantize(), weight.dequantize()[:128])
    at = addresses(weight)
    assert weight.share_memory_() is weight and addresses(weight) == at


def test_what_waits_to_be_quantized_is_not_shared() -> None:
    model, _ = pair("mxfp8")
    nn.init.normal_(model.weight)
    with pytest.raises(RuntimeError, match=r"weight: plain values .* call .*finish_initialization\(model\)"):
        model.share_memory()
    assert not any(part.is_shared() for part in model.weight.components.values())
    finish_initialization(model)
    assert model.share_memory().weight.is_shared()


def test_shared_weights_are_updated_in_place() -> None:
    models = [quantize_model_(nn.Linear(64, 64, bias=False), RECIPES["mxfp8"]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].share_memory()
    for model in models:
        optimizer = FusedAdam(model.parameters(), lr=0.1)
        model.weight.grad = values((64, 64), 3)
        optimizer.step()
    assert same_components(models[0].weight, models[1].weight) and models[1].weight.is_shared()


def write(weights: dict[str, QuantizedTensor], models: dict[str, nn.Module], new: Tensor) -> None:
    """In another process."""
    for weight in [*weights.values(), *(model.weight for model in models.values())]:
        assert weight.is_shared()
        with torch.no_grad():
            weight.copy_(new)


def test_other_processes_write_into_shared_weights() -> None:
    models = {}
    for recipe in RECIPES:
        models[recipe], _ = pair(recipe)
        discard_high_precision_init(models[recipe])
        models[recipe].share_memory()
    names = list(RECIPES)
    given = {name: models[name].weight for name in names[::2]}, {name: models[name] for name in names[1::2]}
    new = values(MATRIX, 4)
    process = distributed.processes().Process(target=write, args=(*given, new))
    process.start()
    process.join()
    assert process.exitcode == 0
    for recipe, model in models.items():
        assert same_components(model.weight, QuantizedTensor.from_values(new, RECIPES[recipe])), recipe
