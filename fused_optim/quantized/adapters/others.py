"""The optimizer's adapter (``fused_optim/adapters.py``) for quantized tensors of TransformerEngine and torchao.

The update makes new FP32 values, as of a plain FP32 parameter. The tensor quantizes them by its own public call,
``quantize_`` (TransformerEngine) or ``copy_`` (torchao), which takes care of codes, scales, amaxes, transposes and
reductions over ranks. Nothing of these packages is imported, and none of their private fields is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fused_optim.adapters import Place, Update, equal_or_nan
from fused_optim.backends import is_capturing
from fused_optim.sharding.dtensor import local_tensor, sharded_dim, sharding_dims

_HALF_STEP = 2.0**-4 + 2.0**-8  # relative: of three bits of mantissa, and of a scale that BF16 has rounded in a file
_INT8_STEPS = 126  # at least so many steps are between 0 and the largest element of a row of INT8 codes


class _SelfQuantizing(Protocol):
    """The methods of TransformerEngine's ``QuantizedTensor`` that are used here."""

    def dequantize(self, *, dtype: torch.dtype) -> Tensor: ...
    def quantize_(self, tensor: Tensor) -> object: ...
    def get_data_tensors(self) -> tuple[Tensor | None, ...]: ...


class _HasInitialValues(Protocol):
    def get_high_precision_init_val(self) -> Tensor | None: ...
    def clear_high_precision_init_val(self) -> None: ...


def _self_quantizing(local: Tensor) -> _SelfQuantizing | None:
    """The tensor if it is TransformerEngine's."""
    return cast(_SelfQuantizing, local) if hasattr(local, "quantize_") else None


def _quantizer(local: Tensor) -> Any:
    """The tensor's quantizer, for which TransformerEngine has no public name."""
    return cast(Any, local)._quantizer


def needs_master(param: Tensor) -> str | None:
    local = local_tensor(param)
    if _self_quantizing(local) is None:
        return None  # torchao's `copy_` rounds stochastically
    if not _is_delayed(_quantizer(local)):
        return "its quantize_ rounds to nearest, so that small updates would be lost"
    # TransformerEngine's own FusedAdam takes these without masters, and so do programs that were written for it.
    warnings.warn(
        f"{type(local).__name__} without a master: its quantize_ rounds to nearest, so that updates of less than half "
        "a step are lost; use master_bits=32 (master_weights=True)",
        stacklevel=2,
    )
    return None


# --- values -----------------------------------------------------------------------------------------------------


def retain_initial(param: Tensor) -> None:
    pass


def has_initial(param: Tensor) -> bool:
    return any(holder.get_high_precision_init_val() is not None for holder in _holders(param))


def initial_values(param: Tensor) -> Tensor:
    """The values kept by ``quantized_model_init(preserve_high_precision_init_val=True)``, or else the decoded ones;

    FP32.
    """
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
    """The tensors that remember initial values: the local tensor or, before it was sharded, the parameter."""
    candidates = [param] if local_tensor(param) is param else [param, local_tensor(param)]
    return [cast(_HasInitialValues, x) for x in candidates if hasattr(x, "get_high_precision_init_val")]


def values(local: Tensor) -> Tensor:
    quantized = _self_quantizing(local)
    if quantized is None:
        return local.dequantize().to(torch.float32, copy=True)
    return quantized.dequantize(dtype=torch.float32).clone()


def codes(local: Tensor) -> Tensor | None:
    """The codes by rows. Those by columns, which its layers make and drop as they like, only if there are no others."""
    quantized = _self_quantizing(local)
    found = () if quantized is None else quantized.get_data_tensors()
    return next((each for each in found if each is not None), None)


@torch.no_grad()
def is_master(param: Tensor, master: Tensor, written: Tensor) -> Tensor:
    """A mask: True if an element is the tensor's own rounding of its master, or within half a step of that.

    torchao's steps are rounded up or down. TransformerEngine's formats are taken to have three bits of mantissa.
    """
    local = local_tensor(param.detach())
    off, same = (master - written).abs(), master.isnan() & written.isnan()
    if _self_quantizing(local) is None:
        step = written.abs().amax(-1, keepdim=True) / _INT8_STEPS
        return same | (off <= step + written.abs() * torch.finfo(local.dtype).eps)
    if _is_rounded_twice(local, master, written):
        return torch.ones_like(same)
    half_step = (master.abs() * _HALF_STEP).clamp_min(_smallest_step(local, written) * (0.5 + 2.0**-5))
    same |= (off <= half_step) & master.isfinite()
    if not needs_collective(param) and master.numel():  # other ranks may not ask
        same |= equal_or_nan(_rounded(local, master), written)
    return same


def _smallest_step(local: Tensor, written: Tensor) -> float:
    """The distance between E4M3's numbers next to 0, in units of the weight; 0.0 unless all codes have one scale."""
    found = codes(local)
    if found is None or found.dtype != torch.uint8 or found.shape != written.shape:
        return 0.0
    coded, decoded = found.view(torch.float8_e4m3fn).float().nan_to_num(0.0), written.nan_to_num(0.0)
    scale = decoded.abs().sum() / coded.abs().sum()
    return float(scale) * 2.0**-9 if torch.allclose(coded * scale, decoded, rtol=2.0**-16, atol=0.0) else 0.0


def keeps(param: Tensor, master: Tensor) -> bool:
    local = local_tensor(param.detach())
    return _self_quantizing(local) is not None and _is_rounded_twice(local, master, values(local))


def _is_rounded_twice(local: Tensor, master: Tensor, written: Tensor) -> bool:
    """True if all of a weight may be its master rounded with one scale, and then with another one.

    Delayed scaling's scales are in a module's extra state, which DCP does not save. So codes may be rounded a second
    time when a model is loaded, before or after its optimizer: each scale may put them half a step off.
    """
    quantizer = _quantizer(local)
    if not _is_delayed(quantizer):
        return False
    largest = master.abs() * 2.0**-3 + 2.0**-8 / quantizer.scale  # a step; twice that of denormals
    within = ((written - master).abs() <= largest) & master.isfinite()
    return bool((within | (master.isnan() & written.isnan())).all())


def _is_delayed(quantizer: Any) -> bool:
    """True for delayed scaling. Older current-scaling quantizers have a ``scale``, too, as kernels' memory."""
    return hasattr(quantizer, "scale") and not hasattr(quantizer, "with_amax_reduction")


def _rounded(local: Tensor, master: Tensor) -> Tensor:
    other = _quantizer(local).make_empty(local.shape, dtype=local.dtype, device=local.device)
    other.quantize_(master)
    return values(other)


# --- scales that ranks share ------------------------------------------------------------------------------------


def needs_collective(param: Tensor) -> bool:
    """True if ``quantize_`` computes one scale of a whole weight, which it reduces over ranks."""
    local = local_tensor(param)
    return _self_quantizing(local) is not None and _reduces(_quantizer(local)) and bool(sharding_dims(param))


def _reduces(quantizer: Any) -> bool:
    """True if the quantizer, or one of the two in a ``HybridQuantizer``, can reduce amaxes."""
    parts = [getattr(quantizer, f"{way}_quantizer", quantizer) for way in ("rowwise", "columnwise")]
    return any(hasattr(part, "with_amax_reduction") for part in parts)


def _reduction_group(param: Tensor) -> ProcessGroup:
    """The ranks that share a weight's scale. Raises, on all of them alike, where the quantizer cannot reduce."""
    assert isinstance(param, DTensor)
    weight = f"a TransformerEngine weight of shape {tuple(param.shape)} with placements {tuple(param.placements)}"
    dims = sharding_dims(param)
    if len(dims) != 1:
        raise NotImplementedError(
            f"{weight}: its quantizer reduces scales over one mesh dim only, and several shard it; use a recipe whose "
            "scales are of blocks, or delayed scaling"
        )
    dim, ranks = sharded_dim(param.placements[dims[0]]), param.device_mesh.size(dims[0])
    assert dim is not None
    size = param.shape[dim]
    if -(-size // ranks) * (ranks - 1) >= size:
        raise NotImplementedError(
            f"{weight}: some of its {ranks} ranks hold nothing, and quantizers do not reduce scales there, so that the "
            "other ranks would wait for ever; use fewer ranks, or leave this weight unsharded or unquantized"
        )
    return param.device_mesh.get_group(dims[0])


def _reduce_within_quantize(param: Tensor) -> None:
    """Let ``quantize_`` reduce amaxes, as TransformerEngine does when it first gathers a weight.

    Checkpoints are loaded before that.
    """
    local, group = local_tensor(param), _reduction_group(param)
    if hasattr(local, "amax_reduction_group"):
        cast(Any, local).amax_reduction_group = group
    else:  # hybrids and older versions have it at the quantizer
        quantizer = _quantizer(local)
        quantizer.amax_reduction_group, quantizer.with_amax_reduction = group, True


# --- writes -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def write(updates: Sequence[Update], applies: Tensor | None = None, advance: bool = True) -> None:
    """Write updates one by one. In a skipped step TransformerEngine's tensors quantize the same masters again."""
    has_rounding = any(_self_quantizing(local_tensor(update.param)) is None for update in updates)
    # torchao rounds stochastically, and would move the codes of a skipped step. The device is asked once.
    skips = has_rounding and applies is not None and not is_capturing() and not bool(applies)
    for update in updates:
        local, new, reduces = local_tensor(update.param), update.values, needs_collective(update.param)
        if reduces:
            _reduce_within_quantize(update.param)
            new = values(local) if new is None else new  # to take part in the reduction
        if new is None or not new.numel():
            continue
        quantized = _self_quantizing(local)
        if quantized is not None:
            quantized.quantize_(new)
        elif not skips:
            local.copy_(new)


class Batch:
    """The updates of one step; each has new values."""

    lasts = False

    def __init__(self, updates: Sequence[Update]) -> None:
        self._updates = updates

    def prepare(self, applies: Tensor | None) -> None:
        pass

    def write(self, applies: Tensor | None) -> None:
        write(self._updates, applies)


def batch(updates: Sequence[Update]) -> Batch:
    return Batch(updates)


# --- of no use here ---------------------------------------------------------------------------------------------


def parts(param: Tensor) -> None:
    return None  # of classes of another package, which may keep more


def place(param: Tensor, part: str) -> Place:
    raise NotImplementedError(f"{type(local_tensor(param)).__name__}: where its {part} lies is not known")


def target(param: Tensor) -> None:
    return None
