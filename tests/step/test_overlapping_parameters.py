"""Parameters over one memory: both updates are made, one after the other, as torch.optim makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import values
from fused_optim import FusedAdamW
from pairwise import pairwise

STEPS = 3


def parameter(data: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.empty_like(data))
    param.data = data
    return param


def matrix(device: str, dtype: torch.dtype, rows: int = 12, columns: int = 10) -> Tensor:
    return values((rows, columns), torch.float32, device, seed=1).to(dtype)


Make = Callable[[Tensor], list[Tensor]]
MAKE: dict[str, Make] = {
    "transposed": lambda x: [x, x.t()],
    "transposed first": lambda x: [x.t(), x],
    "the same": lambda x: [x, x],
    "three": lambda x: [x, x.t(), x.view(-1)],
    "overlapping rows": lambda x: [x[:8], x[4:]],
    "a column": lambda x: [x, x[:, 3]],
    "chained": lambda x: [x[:5], x[4:9].t(), x[8:], x[:2]],
    "columns apart": lambda x: [x[:, :4], x[:, 4:]],
    "interleaved": lambda x: [x[::2], x[1::2]],
}


def give_gradients(params: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    for i, param in enumerate(params):
        param.grad = values(tuple(param.shape), torch.float32, str(param.device), seed=10 * step + i) * scale


def both(make: Make, device: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    ours, theirs = (list(map(parameter, make(matrix(device, torch.float32)))) for _ in range(2))
    return ours, theirs


@pytest.mark.parametrize(  # not the product: each two
    "any_backend, make, how",
    pairwise(["torch", "engine"], list(MAKE), ["usual", "clipped", "scaled", "groups", "tied later", "some gradients"]),
    indirect=["any_backend"],
)
def test_all_updates_are_made(make: str, how: str, any_backend: str) -> None:
    """The values, and where they lie, as torch's."""
    ours, theirs = both(MAKE[make], any_backend)
    if how == "tied later":
        ours = [nn.Parameter(param.detach().clone()) for param in ours]
    options = {"lr": 0.1, "weight_decay": 0.1}
    groups = [
        [{"params": [param]} for param in params] if how in ("groups", "some gradients") else params
        for params in (ours, theirs)
    ]
    optimizer, reference = FusedAdamW(groups[0], **options), torch.optim.AdamW(groups[1], foreach=False, **options)
    scaler = torch.amp.GradScaler(ours[0].device.type, init_scale=8.0)
    if how == "tied later":
        optimizer.initialize_state()
        optimizer.step()
        for param, data in zip(ours, MAKE[make](matrix(str(ours[0].device), torch.float32)), strict=True):
            param.data = data
    for step in range(STEPS):
        give_gradients(ours, step, 8.0 if how == "scaled" else 1.0)
        give_gradients(theirs, step)
        if how == "clipped":
            nn.utils.clip_grad_norm_(theirs, 1.0)
            optimizer.clip_grad_norm_(1.0)
        if how == "some gradients" and step == 1:
            ours[0].grad = theirs[0].grad = None
        if how == "scaled":
            scaler.scale(torch.ones((), device=ours[0].device))
            scaler.step(optimizer)
            scaler.update()
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine.grad, other.grad)
        else:
            optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", MAKE)
def test_masters_of_their_own_are_refused(make: str) -> None:
    """They cannot both be what the parameter is. Slices that lie beside each other may have theirs."""
    x = matrix("cpu", torch.bfloat16)
    params = [parameter(data) for data in MAKE[make](x)]
    for param in params:
        param.grad = torch.ones_like(param)
    before = x.clone()
    if make in ("columns apart", "interleaved"):
        FusedAdamW(params).step()
        return
    for options in ({}, {}):
        optimizer: Any = FusedAdamW(params, **options)
        with pytest.raises(ValueError, match=r"parameter 0 .* and parameter 1 .* share memory.*master_bits=0"):
            optimizer.step()
        assert torch.equal(x, before) and optimizer.param_groups[0]["step"] == 0
    FusedAdamW(params, lr=0.5, master_bits=0).step()
    assert x.ne(before).all() or make == "a column"
