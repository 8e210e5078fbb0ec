"""Remainders on their way into an optimizer: the low bits of masters whose high bits are BF16 parameters.

They mean nothing beside another parameter, and a model's checkpoint may be loaded before or after its optimizer's. So
checkpoints in native form have a number for each row of the parameter, which is compared when both are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adapters import adapter_of
from fused_optim.formats.masters import Master, MasterTensors
from fused_optim.sharding.dtensor import cut_by_rows, dense, full_tensor, has_values, local_tensor, placed_part

PIECE = 2**20  # elements coded at a time: the codecs' temporaries take about 100 bytes for each; a multiple of BLOCKS
KINDS = {"rem16": Master.REMAINDER16, "rem8": Master.REMAINDER8}

_WHOLE_MASTERS = (
    "save with checkpoint_format='unscaled', which has whole masters, or write the checkpoint again so: "
    "python -m fused_optim convert --to unscaled"
)
_MISFIT = (
    "the state dict has the low bits of its master, but the parameter is not the one that they belong to. Load the "
    f"model's checkpoint of the same step first, without changing its precision; or {_WHOLE_MASTERS}"
)
MISFIT_ELSEWHERE = f"a parameter of another rank: {_MISFIT}"


@dataclass(frozen=True)
class LoadedRemainder:
    """This rank's part of a parameter's low bits.

    ``low``: as they are saved, perhaps as bytes. ``checks``: one int32 per row of the local parameter or, where that is
    not cut by rows, of the whole one; None where the state dict has none. ``who``: the parameter in messages.
    """

    low: Tensor
    kind: Master
    checks: Tensor | None
    who: str = field(repr=False)

    def checks_of(self, param: Tensor) -> Tensor | None:
        """The checks of ``param`` as high bits, on its device; None without ``checks``.

        A collective where the parameter is not cut by rows.
        """
        if self.checks is None:
            return None
        values = param.detach()
        checks = row_checks((local_tensor(values) if cut_by_rows(param) else full_tensor(values)).to(torch.bfloat16))
        return checks if has_values(checks) else None

    def has_checks(self, checks: Tensor) -> bool:
        return self.checks is not None and torch.equal(checks, self.checks.to(checks.device))

    def misfit(self) -> ValueError:
        """The error where it has not."""
        return ValueError(f"{self.who}: {_MISFIT}")

    def bits(self, shape: torch.Size) -> Tensor:
        """The remainders as an optimizer keeps them, of this shape. No copy, but where int16 may not begin there."""
        low, size = self.low.flatten(), self.kind.dtype.itemsize
        if has_values(low) and (low.data_ptr() % size or low.storage_offset() * low.element_size() % size):
            low = low.clone()
        return low.view(self.kind.dtype).view(shape)

    def master(self, param: Tensor) -> Tensor:
        """The local FP32 master, for a parameter that has the high bits in whatever dtype."""
        local = local_tensor(param.detach())
        low = self.bits(local.shape).to(local.device)
        return self.kind.codec.read(MasterTensors(local.to(torch.bfloat16), low, None, 0))


def misfits(loaded: Iterable[tuple[Tensor, LoadedRemainder]]) -> list[LoadedRemainder]:
    """Remainders that cannot belong to their parameters."""
    # Every comparison waits for its GPU: not before all that takes long is queued.
    compared = [(remainder, remainder.checks_of(param)) for param, remainder in loaded]
    return [remainder for remainder, checks in compared if checks is not None and not remainder.has_checks(checks)]


def row_checks(param: Tensor) -> Tensor:
    """One int32 per row of a plain BF16 tensor; any single element that differs changes it."""
    bits = dense(param.detach()).view(torch.int16).flatten(1)
    odd = torch.arange(bits.shape[1], dtype=torch.int32, device=bits.device).mul_(2).add_(1)
    checks = torch.empty(bits.shape[0], dtype=torch.int32, device=bits.device)
    piece = 8 * PIECE if bits.is_cuda else PIECE  # 32 MB of temporaries; launches take longer than their work
    rows = max(1, piece // max(bits.shape[1], 1))
    for sums, part in zip(checks.split(rows), bits.split(rows), strict=True):
        sums.copy_(torch.mul(part, odd).sum(1))  # modulo 2^32
    return checks


# --- from a state dict ------------------------------------------------------------------------------------------------


def is_remainder(value: Any) -> TypeGuard[Mapping[str, Any] | Tensor]:
    """True if a saved master is remainders: in native form, or int16 as TransformerEngine's."""
    if isinstance(value, Mapping):
        return bool(value) and "bits" not in value  # which FP16 masters have
    return isinstance(value, Tensor) and value.dtype == torch.int16


def check_remainder(param: Tensor, saved: Mapping[str, Any] | Tensor, label: str) -> None:
    """Raise for saved remainders that cannot be those of ``param``, whatever its values. No communication."""
    if adapter_of(param) is not None:
        raise TypeError(
            f"{label}: remainders belong to a torch.bfloat16 parameter, this one is quantized; {_WHOLE_MASTERS}"
        )
    if isinstance(saved, Tensor):
        if param.dtype != torch.bfloat16:
            raise TypeError(f"{label}: int16 remainders belong to a torch.bfloat16 parameter")
        check_tensor(saved, tuple(param.shape), torch.int16, label)
        return
    key = next((key for key in KINDS if key in saved), None)
    if key is None or "check" not in saved:
        raise KeyError(f"{label}: expected rem16 or rem8, and check, got {', '.join(map(str, saved))}")
    dtype, longer = (torch.uint8, 2) if key == "rem16" else (torch.int8, 1)
    check_tensor(saved[key], (*param.shape[:-1], param.shape[-1] * longer), dtype, f"{label}: {key}")
    check_tensor(saved["check"], tuple(param.shape[:1]), torch.int32, f"{label}: check")


def check_tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype, label: str) -> None:
    """Raise TypeError or ValueError for a part of the native form that is not of this shape and dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{label}: expected a tensor, got {type(value).__name__}")
    if value.dtype != dtype and {value.dtype, dtype} != {torch.int8, torch.uint8}:  # these two hold the same bits
        raise TypeError(
            f"{label}: expected {dtype}, got {value.dtype}; torch.distributed.checkpoint casts to the dtypes of the "
            "state dict that it loads into, so take that from an optimizer with the checkpoint's state formats"
        )
    if tuple(value.shape) != shape:
        raise ValueError(f"{label}: expected shape {shape}, the state dict has {tuple(value.shape)}")


def unpack_remainder(param: Tensor, saved: Mapping[str, Any] | Tensor, who: str) -> LoadedRemainder:
    """This rank's part of remainders that were checked. A collective where they are not placed as ``param`` is."""
    if isinstance(saved, Tensor):
        low = saved.int() if isinstance(saved, DTensor) else saved  # neither NCCL nor gloo moves int16
        return LoadedRemainder(placed_part(low, param).short(), Master.REMAINDER16, None, who)
    key = next(key for key in KINDS if key in saved)
    if cut_by_rows(param):
        return LoadedRemainder(placed_part(saved[key], param), KINDS[key], placed_part(saved["check"], param), who)
    whole = LoadedRemainder(full_tensor(saved[key]), KINDS[key], full_tensor(saved["check"]), who)
    return replace(whole, low=placed_part(whole.bits(param.shape), param))
