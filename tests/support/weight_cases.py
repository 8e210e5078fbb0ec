"""Single quantized weights of any shape, and plain tensors with the same values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fused_optim import FusedAdam
from fused_optim.quantized import QuantizedTensor, finish_initialization, quantize_model_
from quantized_cases import RECIPES, has_tiles, same_components, values

MATRIX, EXPERTS = (128, 256), (4, 8, 64)


class Weight(nn.Module):
    """A parameter ``weight`` of any shape."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(shape, 1).to(dtype))


def quantized(model: Weight, recipe: str, keep_initial: bool = True) -> Weight:
    quantize_model_(model, RECIPES[recipe], lambda module, _: module is model, keep_initial=keep_initial)
    return model


def shapes_of(recipe: str) -> list[tuple[int, ...]]:
    return [MATRIX] if has_tiles(recipe) else [MATRIX, EXPERTS]


def pair(
    recipe: str, shape: tuple[int, ...] = MATRIX, keep_initial: bool = True, device: str = "cpu"
) -> tuple[Weight, Tensor]:
    """A model with a quantized weight and, plain, the values it has: the initial ones, or the decoded ones."""
    model = Weight(shape).to(device)
    plain = model.weight.detach().clone()
    quantized(model, recipe, keep_initial)
    return model, plain if keep_initial else model.weight.dequantize()


def check_values(model: Weight, expected: Tensor, recipe: str) -> None:
    """That an unfinished weight decodes to them, a finished one is quantized from them, and masters start from them."""
    assert not model.weight.is_pending or torch.equal(model.weight.values(), expected)
    finish_initialization(model)
    assert same_components(model.weight, QuantizedTensor.from_values(expected.to(model.weight.dtype), RECIPES[recipe]))
    optimizer = FusedAdam(model.parameters())
    optimizer.initialize_state()
    assert torch.equal(optimizer.state[model.weight]["master_param"], expected)
