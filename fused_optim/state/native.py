"""The "native" form of states in state dicts: the bits as they are kept, and their scales.

A block-scaled moment is a dict of ``bits`` (shaped and placed as the parameter), ``scale`` (FP32, one row per row of
the parameter, placed likewise), ``format`` (the number in ``STATE_FORMATS``) and ``block``. Blocks never straddle rows,
so both reshard on dim 0 together.

Remainders are a dict of ``rem8`` (int8) or ``rem16`` and ``check``. They are the low bits of masters whose high bits
are the BF16 parameter, which the model's checkpoint holds: ``check`` has one number per row of that parameter, so that
they are never joined with another one. ``rem16`` is viewed as bytes (the last dim is twice as long), because
neither NCCL nor gloo moves int16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_optim.formats import STATE_FORMATS, Master, StateFormat, decode_state, join_remainder
from fused_optim.sharding.dtensor import (
    cut_by_rows,
    dense,
    full_tensor,
    local_tensor,
    placed_part,
    rewrap_like,
    rewrap_rows,
)
from fused_optim.slots import MASTER
from fused_optim.state.param_state import PIECE, ParamState

REMAINDERS = {"rem16": Master.REMAINDER16, "rem8": Master.REMAINDER8}
_FORMATS = {fmt.code: fmt for fmt in STATE_FORMATS.values()}


# --- saving -----------------------------------------------------------------------------------------------------


def pack_moment(states: ParamState, name: str, device: str | None) -> dict[str, Any]:
    """A block-scaled moment as a copy: bits that change under their scales, or the reverse, would be garbage."""
    param, slots = states.param, states.slots
    bits = _copied(local_tensor(states.tensors[name]), device)
    kept = slots.scale(name)
    assert kept is not None
    scale = _copied(kept, device).view(bits.shape[0], _row(param) // slots.geometry.block)
    return {
        "bits": rewrap_like(bits, param),
        "scale": rewrap_rows(scale, param),
        "format": slots.format(name).code,
        "block": slots.geometry.block,
    }


def pack_remainder(states: ParamState, device: str | None) -> dict[str, Tensor]:
    """Remainders, and what tells whether a parameter is the one that they were split from."""
    param = states.param
    low = _copied(local_tensor(states.tensors[MASTER]), device)
    check = rewrap_rows(_copied(_row_checks(local_tensor(param)), device), param)
    if states.slots.master is Master.REMAINDER8:
        return {"rem8": rewrap_like(low, param), "check": check}
    return {"rem16": rewrap_rows(low.view(torch.uint8), param), "check": check}


def _copied(tensor: Tensor, device: str | None) -> Tensor:
    return tensor.to(device or tensor.device, copy=True)


def _row(param: Tensor) -> int:
    return math.prod(param.shape[1:])


def _row_checks(param: Tensor) -> Tensor:
    """One int32 per row of a BF16 tensor; any single element that differs changes it."""
    bits = dense(param.detach()).view(torch.int16).flatten(1)
    odd = torch.arange(bits.shape[1], dtype=torch.int32, device=bits.device).mul_(2).add_(1)
    checks = torch.empty(bits.shape[0], dtype=torch.int32, device=bits.device)
    rows = max(1, PIECE // max(bits.shape[1], 1))
    for own, part in zip(checks.split(rows), bits.split(rows), strict=True):
        own.copy_(part.int().mul_(odd).sum(1))  # modulo 2^32
    return checks


# --- loading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredMoment:
    """This rank's part of a moment in native form."""

    bits: Tensor
    scale: Tensor
    format: StateFormat
    block: int

    def values(self, name: str) -> Tensor:
        return decode_state(self.bits.contiguous(), self.scale.flatten(), name, self.format, self.block)

    def write(self, states: ParamState, name: str) -> None:
        """Bit for bit where the parameter's state has this format, else encoded from the values."""
        slots = states.slots
        kept = slots.scale(name)
        if kept is None or (slots.format(name), slots.geometry.block) != (self.format, self.block):
            states.write_moment(name, self.values(name))
            return
        local_tensor(states.tensors[name]).copy_(self.bits)
        kept.copy_(self.scale.flatten())


@dataclass(frozen=True)
class StoredRemainder:
    """This rank's part of a parameter's low bits."""

    low: Tensor
    kind: Master

    def master(self, param: Tensor) -> Tensor:
        """The FP32 master, for a local ``param`` that has the high bits in whatever dtype."""
        low = self.low.to(param.device).flatten().clone()  # at an address that int16 may have
        return join_remainder(param.to(torch.bfloat16), low.view(self.kind.dtype).view(param.shape))


def unpack_moment(param: Tensor, name: str, saved: Mapping[str, Any], what: str) -> StoredMoment | Tensor:
    """This rank's part of a saved moment: as it is stored, or FP32 values where the parameter's cut allows no more."""
    bits, scale, fmt, block = _checked_moment(param, name, saved, what)
    if cut_by_rows(param):
        return StoredMoment(placed_part(bits, param), placed_part(scale, param), fmt, block)
    stored = StoredMoment(local_tensor(bits), local_tensor(scale), fmt, block)
    return placed_part(rewrap_like(stored.values(name), bits), param)


def _checked_moment(
    param: Tensor, name: str, saved: Mapping[str, Any], what: str
) -> tuple[Tensor, Tensor, StateFormat, int]:
    missing = [key for key in ("bits", "scale", "format", "block") if key not in saved]
    if missing:
        raise KeyError(f"{what}: the state dict lacks {' and '.join(missing)} of its native form")
    bits, scale, code, block = saved["bits"], saved["scale"], int(saved["format"]), int(saved["block"])
    fmt = _FORMATS.get(code)
    if fmt is None or not fmt.scaled:
        raise ValueError(f"{what}: unknown state format {code} in the state dict")
    if block <= 0 or _row(param) % block:
        raise ValueError(f"{what}: blocks of {block} elements do not divide rows of {_row(param)}")
    expected = fmt.dtype(name)
    _check_tensor(bits, tuple(param.shape), expected, f"{what}: bits of {fmt.name}")
    _check_tensor(scale, (param.shape[0], _row(param) // block), torch.float32, f"{what}: scale")
    return bits if bits.dtype == expected else bits.view(expected), scale, fmt, block


def _check_tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(value).__name__}")
    if value.dtype != dtype and {value.dtype, dtype} != {torch.int8, torch.uint8}:  # these two hold the same bits
        raise TypeError(
            f"{what}: expected {dtype}, got {value.dtype}; torch.distributed.checkpoint casts to the dtypes of the "
            "state dict that it loads into, so take that from an optimizer with the checkpoint's state formats"
        )
    if tuple(value.shape) != shape:
        raise ValueError(f"{what}: expected shape {shape}, the state dict has {tuple(value.shape)}")


def unpack_remainder(param: Tensor, saved: Mapping[str, Any], what: str) -> tuple[StoredRemainder | Tensor, bool]:
    """This rank's part of saved remainders, and whether the parameter has the high bits that belong to them.

    FP32 masters where the parameter is not cut by rows: rows are checked, so all of it is put together.
    """
    key = next((key for key in REMAINDERS if key in saved), None)
    if key is None or "check" not in saved:
        raise KeyError(f"{what}: expected rem16 or rem8, and check, got {', '.join(saved)}")
    dtype, longer = (torch.uint8, 2) if key == "rem16" else (torch.int8, 1)
    _check_tensor(saved[key], (*param.shape[:-1], param.shape[-1] * longer), dtype, f"{what}: {key}")
    _check_tensor(saved["check"], tuple(param.shape[:1]), torch.int32, f"{what}: check")
    if cut_by_rows(param):
        own = local_tensor(param.detach())
        low, check = placed_part(saved[key], param), placed_part(saved["check"], param)
        return StoredRemainder(low, REMAINDERS[key]), _has_checks(own, check)
    whole, low, check = (full_tensor(value) for value in (param.detach(), saved[key], saved["check"]))
    master = StoredRemainder(low, REMAINDERS[key]).master(whole)
    return placed_part(master, param), _has_checks(whole, check)


def _has_checks(param: Tensor, check: Tensor) -> bool:
    return torch.equal(_row_checks(param.to(torch.bfloat16)), check.to(param.device))
