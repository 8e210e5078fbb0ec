"""FP16 masters: what their scales, powers of two, keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from peers import FusedAdamW

STEPS = 40


def masters_of(optimizer: FusedAdamW, param: Tensor) -> Tensor:
    return optimizer.get_unscaled_state(param, "master_param").view_as(param)


@pytest.mark.parametrize("backend", ["engine", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elements_without_updates_keep_their_values(
    dtype: torch.dtype, backend: str, engine: str, use_backend: Callable[[str], None]
) -> None:
    """A block's largest grows and shrinks by a factor of a hundred; the others start as their parameters and stay."""
    use_backend(engine if backend == "engine" else "torch")
    start = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    param = nn.Parameter(start.clone().to(engine))
    optimizer = FusedAdamW([param], lr=0.3, betas=(0.0, 0.5), weight_decay=0.0, master_weight_dtype=torch.float16)
    largest = []
    for step in range(STEPS):
        param.grad = torch.zeros_like(param)
        param.grad[:, 5] = 1.0 if step < 3 * STEPS // 4 else -1.0
        param.grad[:, 6] = -param.grad[:, 5] * 3
        optimizer.step()
        largest.append(float(masters_of(optimizer, param).abs().max()))
    assert max(largest) > 5 and optimizer.param_groups[0]["step"] == STEPS
    still = [i for i in range(128) if i not in (5, 6)]
    assert torch.equal(masters_of(optimizer, param).cpu()[:, still], start.float()[:, still])
    assert torch.equal(param.detach().cpu()[:, still], start[:, still])
    assert not torch.equal(param.detach().cpu()[:, 5:7], start[:, 5:7])
