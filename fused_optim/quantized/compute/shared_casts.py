"""Layers that take the same activations, as queries, keys and values do, share their codes in eager mode.

Compilers find out by themselves what is computed twice. Here the last cast is remembered, as long as its activations
live, and taken again where they are the same tensor, unchanged.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_optim.quantized.compute import casts
from fused_optim.quantized.compute.casts import Codes
from fused_optim.quantized.compute.delayed import cast_both
from fused_optim.quantized.recipes import ProductFormat

Both = tuple[Codes | None, Codes | None]


class _Cast(NamedTuple):
    of: weakref.ref[Tensor]
    circumstances: tuple[Any, ...]
    codes: Both
    history: Tensor | None


_last: _Cast | None = None


def cast_activations(
    x: Tensor, format: ProductFormat, rows: bool, columns: bool, history: Tensor | None = None, begins: bool = False
) -> Both:
    """:func:`~fused_optim.quantized.compute.casts.cast_both` of ``x``, seen as a matrix, in E4M3.

    ``history``, ``begins``: of a delayed scale, see ``delayed.py``.
    """
    global _last
    shares = _can_share(x, history)
    circumstances = _circumstances(x, format, history, begins) if shares else ()
    last = _last
    if shares and last is not None and last.of() is x and last.circumstances == circumstances:
        known = last.codes
        if (known[0] is not None or not rows) and (known[1] is not None or not columns):
            if history is not None and last.history is not None and history is not last.history:
                history.copy_(last.history)
            return known[0] if rows else None, known[1] if columns else None
    tiles = format.activation_tiles
    codes = cast_both(casts.matrix_of(x), torch.float8_e4m3fn, format, rows, columns, history, begins, tiles)
    if shares:
        _last = _Cast(weakref.ref(x, _forget), circumstances, codes, history)
    return codes


def _can_share(x: Tensor, history: Tensor | None) -> bool:
    """Whether ``x`` was computed, for a backward pass: then nobody writes into it without its version telling.

    Graphs that are captured would miss the cast of a tensor that was cast before. Compilers do not see that layers with
    a history each would make the same codes.
    """
    if history is not None and casts.is_traced():
        return True
    if x.grad_fn is None or casts.is_observed(x):
        return False
    return x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _circumstances(x: Tensor, format: ProductFormat, history: Tensor | None, begins: bool) -> tuple[Any, ...]:
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.device.type == "cuda" else 0
    return x._version, format.scaling, format.power_of_two, format.activation_tiles, history is None, begins, stream


def _forget(of: weakref.ref[Tensor]) -> None:
    """The activations are gone."""
    global _last
    if _last is not None and _last.of is of:
        _last = None
