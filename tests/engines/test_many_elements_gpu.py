"""Steps of so many elements that a thread block of a GPU takes 8 or 16 tiles of 1,024 at once, not fewer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backend_pair import Pair, UseBackend, assert_same_bits
from cases import MASTERS, Master
from fused_optim.quantized import Float8BlockScaling, Float8DelayedScaling, MXFP8BlockScaling, QuantizedTensor, Recipe
from peers import FusedAdam

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

ROWS = 143_361  # of 1,024: eight chunks of 16 tiles for each of seven thread blocks of 160 multiprocessors, and a tile
SHAPES = ((ROWS, 1024), (300_003,))


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Made on the GPU: on a CPU that would take longer than all else."""
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_many_elements(master: Master, dtype: torch.dtype, use_backend: UseBackend) -> None:
    def groups() -> list[dict[str, Any]]:
        return [{"params": [nn.Parameter(random(shape, master.param_dtype, seed=0)) for shape in SHAPES]}]

    options: dict[str, Any] = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, **master.options}
    pair = Pair(groups, "cuda", use_backend, **options)
    for step in range(1, 3):
        pair.step([random(shape, torch.bfloat16, seed=step) for shape in SHAPES])


def components(weight: Tensor) -> dict[str, Tensor]:
    assert isinstance(weight, QuantizedTensor)
    return {name: part.clone() for name, part in weight.components.items()}


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), Float8BlockScaling(), Float8DelayedScaling()], ids=repr)
def test_many_quantized_weights(recipe: Recipe, grad_dtype: torch.dtype, use_backend: UseBackend) -> None:
    """Masters and states are those of an FP32 parameter; codes and scales are what torch makes of these masters."""
    shape = (ROWS // 128 * 128, 1024)
    weight = nn.Parameter(QuantizedTensor.from_values(random(shape, torch.bfloat16, seed=0), recipe))
    weight.grad_dtype = grad_dtype
    quantized = FusedAdam([weight], lr=0.01, state_dtype="int8")
    plain_weight = nn.Parameter(weight.detach().dequantize(torch.float32))
    plain_weight.grad_dtype = grad_dtype
    plain = FusedAdam([plain_weight], lr=0.01, state_dtype="int8")
    use_backend("cuda")
    for step in range(1, 3):
        weight.grad = plain_weight.grad = random(shape, grad_dtype, seed=step)
        quantized.step()
        plain.step()
    state, expected = quantized.state[weight], plain.state[plain_weight]
    assert_same_bits(state["master_param"], plain_weight, "master weights")
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same_bits(state[name], expected[name], name)
    written = components(weight)
    use_backend("torch")
    quantized.sync_params_from_master()
    for name, part in components(weight).items():
        assert torch.equal(written[name].view(torch.uint8), part.view(torch.uint8)), name
