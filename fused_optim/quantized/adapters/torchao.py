"""The optimizer's adapter (``fused_optim/adapters.py``) for torchao's INT8 training weights.

These round stochastically.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from fused_optim.adapters import Place, SimpleBatch, Update
from fused_optim.sharding.dtensor import local_tensor


class _ScaledRows(Protocol):
    int_data: Tensor
    scale: Tensor  # of each row


def needs_master(param: Tensor) -> None:
    return None


def retain_initial(param: Tensor) -> None:
    pass


def has_initial(param: Tensor) -> bool:
    return False


def initial_values(param: Tensor) -> Tensor:
    return values(local_tensor(param.detach()))


def discard_initial(param: Tensor) -> None:
    pass


def values(local: Tensor) -> Tensor:
    return local.dequantize().to(torch.float32, copy=True)


def codes(local: Tensor) -> Tensor:
    return cast(_ScaledRows, local).int_data


def keeps(param: Tensor, master: Tensor) -> bool:
    return False


def is_master(param: Tensor, master: Tensor, written: Tensor) -> Tensor:
    """Within a whole step, and what its dtype rounds: they are rounded up or down."""
    local = local_tensor(param.detach())
    step = cast(_ScaledRows, local).scale.float().view(-1, 1)
    within = (master - written).abs() <= step + written.abs() * torch.finfo(local.dtype).eps
    return within | (master.isnan() & written.isnan())


def products(param: Tensor, rows: int | None) -> dict[str, str | None]:
    return {}  # its own library decides


def parts(param: Tensor) -> None:
    return None  # of classes of another package, which may keep more


def place(param: Tensor, part: str) -> Place:
    raise NotImplementedError(f"{type(local_tensor(param)).__name__}: where its {part} lies is not known")


def needs_collective(param: Tensor) -> bool:
    return False  # one scale per row


def target(param: Tensor) -> None:
    return None


def prepare(updates: Sequence[Update], applies: Tensor | None) -> None:
    pass


def batch(updates: Sequence[Update]) -> SimpleBatch:
    return SimpleBatch(prepare, write, updates)


@torch.no_grad()
def write(updates: Sequence[Update], applies: Tensor | None = None, advance: bool = True) -> None:
    for update in updates:
        if update.values is not None:
            local_tensor(update.param).copy_(update.values)
