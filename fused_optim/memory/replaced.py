"""Parameters whose places in a model others have taken: whoever holds them still would train nothing."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

_BY = "_fused_optim_replaced_by"
times = 0  # that mark_replaced was called: as long as it is the same, no parameter is marked anew


def mark_replaced(params: Iterable[Tensor], by: str) -> None:
    """``by``: what has replaced them, and what to do, for messages."""
    global times
    for param in params:
        setattr(param, _BY, by)
    times += 1


def replaced_by(param: Tensor) -> str | None:
    """The parameter that has replaced this one, or None."""
    found: str | None = getattr(param, _BY, None)
    return found
