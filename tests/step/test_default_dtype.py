"""What the optimizer computes and saves does not depend on torch.set_default_dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import same_bits
from pairwise import pairwise
from peers import FusedAdamW

SHAPES = [(4, 128), (7,)]
DEFAULTS = [torch.bfloat16, torch.float16, torch.float64]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "fp8"},
    {"exp_avg_dtype": "fp16", "store_param_remainders": False},
    {"skip_nonfinite": True, "master_weight_dtype": torch.float16, "store_param_remainders": False},
    {"checkpoint_format": "torch"},
    {"checkpoint_format": "native", "exp_avg_dtype": "int8"},
    {"capturable": True},
]


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def values(shape: tuple[int, ...], device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float32, generator=generator).to(device, torch.bfloat16)


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)


def train(options: dict[str, Any], device: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    params = [nn.Parameter(values(shape, device, i)) for i, shape in enumerate(SHAPES)]
    optimizer = FusedAdamW(params, lr=torch.tensor(0.001, dtype=torch.float32), weight_decay=0.1, **options)
    optimizer.initialize_state()
    optimizer.param_groups[0]["step"] = 1000
    for step in range(3):
        for i, param in enumerate(params):
            param.grad = 1000 * values(tuple(param.shape), device, 10 * step + i)
        optimizer.grad_scale = 1002.0
        optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
    return [*params, *tensors_of(saved["state"])], saved["param_groups"]


@pytest.mark.parametrize("default, options, backend", pairwise(DEFAULTS, OPTIONS, ["", "torch"]), ids=str)
def test_the_same_bits_under_every_default(
    default: torch.dtype, options: dict[str, Any], backend: str, device: str, use_backend: Any
) -> None:
    use_backend(backend)
    expected, groups = train(options, device)
    torch.set_default_dtype(default)
    found, found_groups = train(options, device)
    torch.set_default_dtype(torch.float32)
    assert len(found) == len(expected) and all(map(same_bits, found, expected))
    assert found_groups == groups
