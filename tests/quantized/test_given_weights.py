"""quantized_model_init quantizes the weights that layers are given after they are built, as loaders do it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fused_optim import FusedAdam
from fused_optim.quantized import QuantizedTensor, finish_initialization, quantize_model_, quantized_model_init
from pairwise import each_once
from quantized_cases import RECIPES, same_components, values
from weight_cases import MATRIX


class Model(nn.Module):
    """Two layers and an embedding, which the last one may share its weight with."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        rows, columns = MATRIX
        self.embedding = nn.Embedding(rows, columns)
        self.blocks = nn.ModuleList([nn.Linear(columns, rows), nn.Linear(rows, columns, bias=False)])
        self.head = nn.Linear(columns, rows, bias=False)
        self.tied = tied
        self.tie()

    def tie(self) -> None:
        if self.tied:
            self.head.weight = self.embedding.weight


def state(model: Model) -> dict[str, Tensor]:
    given = {name: values(x.shape, index) for index, (name, x) in enumerate(model.state_dict().items())}
    return {**given, "head.weight": given["embedding.weight"]} if model.tied else given


def by_setattr(model: nn.Module, given: dict[str, Tensor]) -> None:
    """As from_pretrained does it."""
    for name, value in given.items():
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, nn.Parameter(value))


def by_register_parameter(model: nn.Module, given: dict[str, Tensor]) -> None:
    for name, value in given.items():
        path, _, key = name.rpartition(".")
        model.get_submodule(path).register_parameter(key, nn.Parameter(value))


def by_parameters(model: nn.Module, given: dict[str, Tensor]) -> None:
    """As Accelerate does it."""
    for name, value in given.items():
        path, _, key = name.rpartition(".")
        model.get_submodule(path)._parameters[key] = nn.Parameter(value)


def by_assignment(model: nn.Module, given: dict[str, Tensor]) -> None:
    model.load_state_dict(given, assign=True)


def by_copies(model: nn.Module, given: dict[str, Tensor]) -> None:
    model.to_empty(device="cpu").load_state_dict(given)


def by_both(model: nn.Module, given: dict[str, Tensor]) -> None:
    model.to_empty(device="cpu").load_state_dict(given, assign=True)


WAYS: dict[str, Callable[[nn.Module, dict[str, Tensor]], None]] = {
    "setattr": by_setattr, "register_parameter": by_register_parameter, "_parameters": by_parameters,
    "assign": by_assignment, "to_empty": by_copies, "to_empty and assign": by_both,
}  # fmt: skip


def loaded(recipe: str, way: str, tied: bool, device: str = "meta", **filters: Any) -> nn.Module:
    with torch.device(device), quantized_model_init(RECIPES[recipe], **filters):
        model = Model(tied)
        given = state(model)
        WAYS[way](model, {name: value.clone() for name, value in given.items()})
        model.tie()
    finish_initialization(model)
    return model


def expected_model(recipe: str, tied: bool, **filters: Any) -> nn.Module:
    model = Model(tied)
    model.load_state_dict(state(model))
    return quantize_model_(model, RECIPES[recipe], **filters)


def check_same(found: nn.Module, expected: nn.Module) -> None:
    """Codes, and what masters start from; by values, for those are of plain layers."""
    pairs = list(zip(found.named_parameters(), expected.named_parameters(), strict=True))
    for (name, a), (other, b) in pairs:
        assert name == other and isinstance(a, QuantizedTensor) == isinstance(b, QuantizedTensor), name
        assert same_components(a, b) if isinstance(a, QuantizedTensor) else torch.equal(a, b), name
    optimizers = [FusedAdam(model.parameters()) for model in (found, expected)]
    for (_, a), (_, b) in pairs:
        starts = [getattr(x, "initial_values", x.detach)() for x in (a, b)]
        assert torch.equal(*starts)
    for optimizer in optimizers:
        optimizer.initialize_state()


@pytest.mark.parametrize("recipe, way", each_once(product(RECIPES, WAYS)))
def test_weights_that_layers_are_given_are_quantized(recipe: str, way: str) -> None:
    check_same(loaded(recipe, way, tied=False), expected_model(recipe, tied=False))


@pytest.mark.parametrize("way", ["setattr", "assign"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tied_weights_stay_tied(way: str, device: str) -> None:
    model = loaded("mxfp8", way, tied=True, device=device)
    assert model.head.weight is model.embedding.weight
    check_same(model, expected_model("mxfp8", tied=True))


@pytest.mark.parametrize("way", WAYS)
def test_filters_pick_among_given_weights(way: str) -> None:
    picks = {"filter_fn": lambda module, name: name == "blocks.1"}
    model = loaded("mxfp8", way, tied=False, **picks)
    assert [name for name, x in model.named_parameters() if isinstance(x, QuantizedTensor)] == ["blocks.1.weight"]
    check_same(model, expected_model("mxfp8", tied=False, **picks))


def test_the_given_layers_learn() -> None:
    model, plain = loaded("mxfp8up", "setattr", tied=False), Model()
    plain.load_state_dict(state(plain))
    x = values((4, MATRIX[1]), 9)
    for each in (model, plain):
        optimizer = FusedAdam(each.blocks.parameters(), lr=0.01)
        each.blocks[1](each.blocks[0](x).relu()).square().mean().backward()
        optimizer.step()
    for layer in range(2):
        found, expected = model.blocks[layer].weight, plain.blocks[layer].weight
        assert (found.dequantize() - expected).norm() < 0.06 * expected.norm()


def test_what_cannot_be_quantized_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^blocks\.0\.weight, shape .*float64"), quantized_model_init(RECIPES["mxfp8"]):
        model = Model()
        model.blocks[0].weight = nn.Parameter(torch.zeros(MATRIX, dtype=torch.float64))
    with pytest.raises(ValueError, match="run a lazy module once"), quantized_model_init(RECIPES["mxfp8"]):
        _lazy = nn.Sequential(nn.LazyLinear(32))


def test_computed_weights_and_errors_are_left_alone() -> None:
    """As is what was built by an abandoned context, and what is gone by its end."""
    with quantized_model_init(RECIPES["mxfp8"]):
        layer = nn.Linear(32, 32)
        layer.weight = nn.Parameter(torch.zeros(32, 32))
        parametrize.register_parametrization(layer, "weight", nn.Identity())
        nn.Linear(32, 32).weight = nn.Parameter(torch.zeros(32, 32))
    assert not isinstance(layer.weight, QuantizedTensor)
    kept: list[nn.Linear] = []
    with pytest.raises(KeyError), quantized_model_init(RECIPES["mxfp8"]):
        kept.append(nn.Linear(32, 32))
        kept[0].weight = nn.Parameter(torch.zeros(32, 32))
        raise KeyError
    assert type(kept[0].weight) is nn.Parameter and type(nn.Linear(2, 2).weight) is nn.Parameter
