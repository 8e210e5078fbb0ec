"""The optimizer's adapter (``fused_optim/adapters.py``) for TransformerEngine's quantized tensors.

The update pass writes the codes of delayed scaling, whose scale is known before it. All others are written by their own
``quantize_`` from the FP32 master: it has their scales, reductions over ranks and transposes in its care. Those without
masters are written by ``transformer_engine_codes``. Nothing of TransformerEngine is imported here; these are methods
and attributes of the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fused_optim.adapters import Place, SimpleBatch, Target, Update, equal_or_nan
from fused_optim.backends import is_capturing
from fused_optim.formats.arithmetic import SMALLEST_NORMAL
from fused_optim.quantized.adapters import transformer_engine_codes
from fused_optim.quantized.adapters.transformer_engine_codes import (
    DELAYED,
    Float8Weight,
    float8,
    is_e4m3,
    scaling_of,
    set_numbers,
)
from fused_optim.quantized.recipes import Float8DelayedScaling, codec
from fused_optim.sharding.dtensor import local_tensor, sharded_dim, sharding_dims

_E4M3 = Float8DelayedScaling().kernel
_STORAGES = ("_rowwise_storage", "_columnwise_storage")  # of a HybridQuantizedTensor
_CODES = ("_data", "_rowwise_data", "_transpose", "_columnwise_data")  # each kind of tensor has two of them


class _HasInitialValues(Protocol):
    def get_high_precision_init_val(self) -> Tensor | None: ...
    def clear_high_precision_init_val(self) -> None: ...


class _Quantizer(Protocol):
    amax_reduction_group: ProcessGroup | None
    with_amax_reduction: bool

    def make_empty(self, shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor: ...


class _Quantized(Protocol):
    """What all quantized tensors have, or the two storages of a hybrid one."""

    _quantizer: _Quantizer
    amax_reduction_group: ProcessGroup | None  # newer versions; older ones have the quantizer's only

    def dequantize(self, *, dtype: torch.dtype) -> Tensor: ...
    def quantize_(self, tensor: Tensor) -> object: ...


def _quantized(local: Tensor) -> _Quantized:
    return cast(_Quantized, local)


def needs_master(param: Tensor) -> str | None:
    if needs_collective(param):
        _reduction_group(param)
    return transformer_engine_codes.problem(local_tensor(param))


def retain_initial(param: Tensor) -> None:
    pass


def has_initial(param: Tensor) -> bool:
    return any(holder.get_high_precision_init_val() is not None for holder in _holders(param))


def initial_values(param: Tensor) -> Tensor:
    """Those of ``quantized_model_init(preserve_high_precision_init_val=True)``, which lie in host memory."""
    if needs_collective(param):
        _reduction_group(param)
    local = local_tensor(param.detach())
    for holder in _holders(param):
        value = holder.get_high_precision_init_val()
        if value is not None and value.shape == local.shape:
            return value.to(device=local.device, dtype=torch.float32, copy=True)
    return values(local)


def discard_initial(param: Tensor) -> None:
    for holder in _holders(param):
        holder.clear_high_precision_init_val()


def _holders(param: Tensor) -> list[_HasInitialValues]:
    """What remembers the initial values: the local tensor or, before it was sharded, the parameter."""
    candidates = [param] if local_tensor(param) is param else [param, local_tensor(param)]
    return [cast(_HasInitialValues, x) for x in candidates if hasattr(x, "get_high_precision_init_val")]


def values(local: Tensor) -> Tensor:
    return _quantized(local).dequantize(dtype=torch.float32).clone()


def codes(local: Tensor) -> Tensor | None:
    """By rows; those by columns, which its layers make and drop as they like, only where there are no others."""
    holders = [getattr(local, name, None) for name in _STORAGES] + [local]
    found: list[Tensor | None] = [getattr(holder, name, None) for holder in holders for name in _CODES]
    return next((each for each in found if each is not None), None)


def is_master(param: Tensor, master: Tensor, written: Tensor) -> Tensor:
    found = transformer_engine_codes.is_master(param, master, written)
    if found is not None:
        return found | _rounded_twice(param, master, written).all()  # all of them: else others have written
    near = _near(master, written)
    if needs_collective(param) or not master.numel():  # the other ranks may not ask
        return near
    return near | equal_or_nan(_rounded(local_tensor(param), master), written)


@torch.no_grad()
def _rounded(local: Tensor, master: Tensor) -> Tensor:
    """What the tensor's quantizer makes of a master, which only TransformerEngine knows."""
    other = _quantized(local)._quantizer.make_empty(local.shape, dtype=local.dtype, device=local.device)
    _quantized(other).quantize_(master)
    return values(other)


def _near(master: Tensor, written: Tensor) -> Tensor:
    """Where ``written`` may be the rounded master in a format with three bits of mantissa."""
    return ((master - written).abs() <= master.abs() * 2.0**-4) | (master.isnan() & written.isnan())


def keeps(param: Tensor, master: Tensor) -> bool:
    return bool(_rounded_twice(param, master, values(local_tensor(param.detach()))).all())


def _rounded_twice(param: Tensor, master: Tensor, written: Tensor) -> Tensor:
    """Where ``written`` may be the master rounded with one scale, and then with the tensor's.

    Delayed scaling's scales are in a module's extra state, which DCP does not save: codes are rounded a second time
    when a model is loaded, be it before its optimizer or after it. So they may be half a step off by each scale.
    """
    local = local_tensor(param.detach())
    if scaling_of(local) != DELAYED or not is_e4m3(local):
        return torch.zeros_like(master, dtype=torch.bool)
    largest = master.abs() * 2.0**-3 + float8(local)._scale_inv * 2.0**-8  # a step; twice that of denormals
    return (((written - master).abs() <= largest) & master.isfinite()) | (written.isnan() & master.isnan())


# --- delayed scaling --------------------------------------------------------------------------------------------


def target(param: Tensor) -> Target | None:
    local = _delayed_scaling(local_tensor(param))
    if is_capturing() or local is None:  # replays could not mark transposes as invalid: quantize_ fills them
        return None
    return Target(_E4M3.format, _E4M3.round_up, local._data, local._scale_inv, measures=True)


def _delayed_scaling(tensor: Tensor) -> Float8Weight | None:
    """The tensor if it fits the pass."""
    if scaling_of(tensor) != DELAYED or not is_e4m3(tensor):
        return None
    local, quantizer = float8(tensor), float8(tensor)._quantizer
    if not quantizer.rowwise_usage or local._data is None:
        return None
    parts = (local._data, local._scale_inv, quantizer.scale, quantizer.amax)
    plain = all(codec.is_plain(part) and part.device == local.device for part in parts)
    return local if plain and local._data.numel() == local.numel() else None


@torch.no_grad()
def prepare(updates: Sequence[Update], applies: Tensor | None) -> None:
    """Decoding follows the scale that TransformerEngine has found by now. Few launches for all parameters."""
    by_device: dict[torch.device, list[Float8Weight]] = {}
    for update in updates:
        local = local_tensor(update.param)
        if update.written or (update.fractions is not None and scaling_of(local) == DELAYED):
            by_device.setdefault(local.device, []).append(float8(local))
    for locals_ in by_device.values():
        current = [local._scale_inv.view(()) for local in locals_]
        scales = torch.stack([local._quantizer.scale.view(()) for local in locals_])
        # That of a weight of tiny values is the largest FP32 number, whose inverse has no finite inverse.
        inverse = scales.reciprocal_().clamp_min_(SMALLEST_NORMAL)
        set_numbers(current, inverse, applies)


def _finish(updates: Sequence[Update]) -> None:
    """What a cast of TransformerEngine's does beside the codes.

    Absmaxes of shards are those of ranks, as there: the next ``autocast`` reduces them before it takes new scales.
    """
    locals_ = [float8(local_tensor(update.param)) for update in updates]
    if locals_:
        amaxes = [local._quantizer.amax.view(1) for local in locals_]
        torch._foreach_maximum_(amaxes, [update.absmax for update in updates if update.absmax is not None])
    codec.written(local._data for local in locals_ if local._data is not None)
    for local in locals_:
        local._reset_caches()


# --- all others -------------------------------------------------------------------------------------------------


def products(param: Tensor, rows: int | None) -> dict[str, str | None]:
    return {}  # its own library decides


def parts(param: Tensor) -> None:
    return None  # of classes of another package, which may keep more


def place(param: Tensor, part: str) -> Place:
    raise NotImplementedError(f"{type(local_tensor(param)).__name__}: where its {part} lies is not known")


def needs_collective(param: Tensor) -> bool:
    """Where one scale is computed for all of a weight, by a reduction within ``quantize_``."""
    return bool(_reducing(local_tensor(param))) and bool(sharding_dims(param))


def _reducing(local: Tensor) -> list[_Quantized]:
    """The tensors whose scales are reduced: this one, or those that a ``HybridQuantizedTensor`` consists of."""
    hybrid: list[_Quantized | None] = [getattr(local, name, None) for name in _STORAGES]
    parts = [part for part in hybrid if part is not None] or [_quantized(local)]
    return [part for part in parts if hasattr(part._quantizer, "with_amax_reduction")]


def _reduction_group(param: Tensor) -> ProcessGroup:
    """The ranks that share a weight's scale. Raises, on all of them alike, where the quantizer cannot reduce."""
    assert isinstance(param, DTensor)
    what = f"a TransformerEngine weight of shape {tuple(param.shape)} with placements {tuple(param.placements)}"
    dims = sharding_dims(param)
    if len(dims) != 1:
        raise NotImplementedError(
            f"{what}: its quantizer reduces scales over one mesh dim only, and several shard it; use a recipe whose "
            "scales are of blocks, or delayed scaling"
        )
    dim, ranks = sharded_dim(param.placements[dims[0]]), param.device_mesh.size(dims[0])
    assert dim is not None
    size = param.shape[dim]
    if -(-size // ranks) * (ranks - 1) >= size:
        raise NotImplementedError(
            f"{what}: some of its {ranks} ranks hold nothing, and quantizers do not reduce scales there, so that the "
            "other ranks would wait for ever; use fewer ranks, or leave this weight unsharded or unquantized"
        )
    return param.device_mesh.get_group(dims[0])


def _reduce_within_quantize(param: Tensor) -> None:
    """TransformerEngine sets this up when a weight is first gathered; before, shards would get scales of their own."""
    group = _reduction_group(param)
    for part in _reducing(local_tensor(param)):
        if hasattr(part, "amax_reduction_group"):
            part.amax_reduction_group = group
        else:  # older versions look for it at the quantizer
            part._quantizer.amax_reduction_group = group
            part._quantizer.with_amax_reduction = True


def _quantize(param: Tensor, new: Tensor | None) -> None:
    local, reduces = local_tensor(param), needs_collective(param)
    if reduces:
        _reduce_within_quantize(param)
    if new is not None:
        _quantized(local).quantize_(new)
    elif reduces:
        _quantized(local).quantize_(values(local))


def batch(updates: Sequence[Update]) -> SimpleBatch:
    return SimpleBatch(prepare, write, updates)


@torch.no_grad()
def write(updates: Sequence[Update], applies: Tensor | None = None, advance: bool = True) -> None:
    """Where a step is skipped, masters are as before, hence so is what ``quantize_`` makes of them."""
    _finish([update for update in updates if update.written])
    transformer_engine_codes.write([update for update in updates if update.fractions is not None], applies)
    for update in updates:
        if not update.written and update.fractions is None:
            _quantize(update.param, update.values)
