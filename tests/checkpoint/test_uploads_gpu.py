"""Large states in host memory are loaded onto a GPU through page-locked memory: the same bits arrive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fused_optim import FusedAdamW
from fused_optim.memory import uploads

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_from_the_host_arrive_whole(
    state_dtype: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many pieces, each of which is overwritten by others soon after."""
    monkeypatch.setattr(uploads, "_PIECE", 1 << 12)
    monkeypatch.setattr(uploads, "_LARGE", 1 << 8)
    torch.manual_seed(0)
    params = [torch.randn(n, 512, device="cuda", dtype=dtype, requires_grad=True) for n in (1, 3, 40, 1000)]
    optimizer = FusedAdamW(params, lr=0.1, state_dtype=state_dtype)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    saved = tree_map_only(Tensor, Tensor.cpu, optimizer.state_dict())
    params_again = [param.detach().clone().requires_grad_() for param in params]
    other = FusedAdamW(params_again, lr=0.1, state_dtype=state_dtype)
    other.load_state_dict(saved)
    for again, param in zip(params_again, params, strict=True):
        again.grad = param.grad
    for each in (optimizer, other):
        each.step()
    assert all(torch.equal(again, param) for again, param in zip(params_again, params, strict=True))
