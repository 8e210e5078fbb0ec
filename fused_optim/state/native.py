"""The "native" form of states in state dicts: the bits as they are kept, and their scales.

A block-scaled state or master is a dict of ``bits`` (shaped and placed as the parameter), ``scale`` (FP32, one row per
row of the parameter, placed likewise), ``format`` (its number in ``SAVED_FORMATS``) and ``block``. Blocks never
straddle rows, so both reshard on dim 0 together.

Remainders are a dict of ``rem8`` (int8) or ``rem16`` and ``check``. They are the low bits of masters whose high bits
are the BF16 parameter, which the model's checkpoint holds: ``check`` has one number per row of that parameter, so that
they are never joined with another one; ``remainders.py`` loads them. ``rem16`` is viewed as bytes (the last dim is
twice as long), because neither NCCL nor gloo moves int16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fused_optim.formats.states import FLOAT16, SAVED_FORMATS, Kind, StateFormat
from fused_optim.sharding.dtensor import cut_by_rows, local_tensor, placed_part, rewrap_like, rewrap_rows
from fused_optim.state.param_state import ParamState
from fused_optim.state.remainders import check_tensor
from fused_optim.state.values import STAGER, RowChecks, Stored, materialize

# --- saving -----------------------------------------------------------------------------------------------------


def pack_state(states: ParamState, name: str, device: str | None) -> dict[str, Any]:
    """A copy of a block-scaled state or of remainders: bits and scales of different steps would be garbage."""
    param, stored = states.param, states.stored(name)
    if stored.scale is None:
        return _pack_remainder(param, stored.bits, device)
    bits = _copied(stored.bits, device)
    scale = _copied(stored.scale, device).view(bits.shape[0], _row(param) // stored.block)
    return {
        "bits": rewrap_like(bits, param),
        "scale": rewrap_rows(scale, param),
        "format": stored.format.number,
        "block": stored.block,
    }


def _pack_remainder(param: Tensor, low: Tensor, device: str | None) -> dict[str, Tensor]:
    """Remainders, and checks that recognize the parameter that they were split from."""
    low = _copied(low, device)
    check = rewrap_rows(materialize(RowChecks(local_tensor(param).detach()), device), param)
    if low.dtype == torch.int8:
        return {"rem8": rewrap_like(low, param), "check": check}
    return {"rem16": rewrap_rows(low.view(torch.uint8), param), "check": check}


def _copied(tensor: Tensor, device: str | None) -> Tensor:
    return tensor if device == STAGER else tensor.to(device or tensor.device, copy=True)


def _row(param: Tensor) -> int:
    return math.prod(param.shape[1:])


# --- loading ----------------------------------------------------------------------------------------------------


def unpack_state(param: Tensor, kind: Kind, saved: Mapping[str, Any]) -> Stored | Tensor:
    """This rank's part of a state that was checked: as it is stored, or FP32 values where the cut allows no more.

    A collective where it is not placed as ``param`` is.
    """
    fmt, block = SAVED_FORMATS[int(saved["format"])], int(saved["block"])
    dtype = fmt.dtype(kind)
    bits = saved["bits"] if saved["bits"].dtype == dtype else saved["bits"].view(dtype)
    if cut_by_rows(param):
        local, scale = placed_part(bits, param), placed_part(saved["scale"], param)
        return Stored(local.contiguous(), scale.flatten(), kind, fmt, block)
    stored = Stored(local_tensor(bits).contiguous(), local_tensor(saved["scale"]).flatten(), kind, fmt, block)
    return placed_part(rewrap_like(stored.read(), bits), param)


def scaled_format(code: Any, label: str) -> StateFormat:
    """A format of states with scales, by its number. Raises ValueError for one that is not known."""
    fmt = SAVED_FORMATS.get(int(code))
    if fmt is None or not fmt.scaled:
        raise ValueError(f"{label}: unknown state format {int(code)}: update fused_optim")
    return fmt


def check_packed(param: Tensor, kind: Kind, saved: Mapping[str, Any], label: str) -> None:
    """Raise KeyError, TypeError or ValueError for what is no state of ``param``. No communication."""
    missing = [key for key in ("bits", "scale", "format", "block") if key not in saved]
    if missing:
        raise KeyError(f"{label}: the state dict lacks {' and '.join(missing)} of its native form")
    fmt, block = scaled_format(saved["format"], label), int(saved["block"])
    if kind is Kind.MASTER and fmt is not FLOAT16:
        raise ValueError(f"{label}: unknown state format {fmt.number} of masters: update fused_optim")
    if block <= 0 or _row(param) % block:
        raise ValueError(f"{label}: blocks of {block} elements do not divide rows of {_row(param)}")
    check_tensor(saved["bits"], tuple(param.shape), fmt.dtype(kind), f"{label}: bits of {fmt.name}")
    check_tensor(saved["scale"], (param.shape[0], _row(param) // block), torch.float32, f"{label}: scale")
