"""RMSNorm, cast to FP8 where it is computed, and its gradients.

:func:`rstd_of`, :func:`normed` and :func:`gradients` define the values: FP32, rounded once, where PyTorch's operations
round the sum of several gradients, too. Codes are those that ``casts.py`` and ``delayed.py`` give these values. The
CUDA engine reads its input twice for them, and writes no values; its sums have another order. It computes the gradients
in one pass, with the sum of those of all layers that read the norm.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fused_optim.backends.compiled import address, run_on
from fused_optim.backends.engine import CudaEngine
from fused_optim.backends.tables import CastScaling
from fused_optim.quantized.compute import casts, computed
from fused_optim.quantized.compute.casts import Codes
from fused_optim.quantized.recipes import ProductFormat

MOST_GRADIENTS = 3  # of one norm
MOST_COLUMNS = 16384
_PARTS = 512  # of rows, at most, each of them with a result of its own for each column in the engine


def rstd_of(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x * x) + eps)`` of each row: FP32 of shape ``(rows,)``."""
    return (x.float().square().mean(1) + eps).rsqrt()


def normed(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * rstd[:, None] * weight.float()).to(x.dtype)


def gradients(
    x: Tensor, weight: Tensor, rstd: Tensor, incoming: list[Tensor], addend: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Those of ``x`` and of the weight. ``incoming``: gradients of the result; ``addend``: another one of ``x``."""
    gradient, unscaled = incoming[0].float(), x.float() * rstd[:, None]
    for other in incoming[1:]:
        gradient = gradient + other.float()
    weighted = gradient * weight.float()
    of_x = rstd[:, None] * (weighted - unscaled * (weighted * unscaled).mean(1, keepdim=True))
    if addend is not None:
        of_x = of_x + addend.float()
    return of_x.to(x.dtype), (gradient * unscaled).sum(0).to(weight.dtype)


def cast_normed(
    x: Tensor, weight: Tensor, eps: float, format: ProductFormat, history: Tensor | None
) -> tuple[Codes, Codes, Tensor]:
    """The result in E4M3, and its transpose, and what gradients need: ``rstd``.

    ``history``: of a delayed scale, moved on. Compilers compute ``rstd`` with what comes before, where nothing else is
    measured.
    """
    scaling, tiles = computed.scaling_of(format, history), format.activation_tiles
    traced = casts.is_traced() and scaling in (CastScaling.DELAYED, CastScaling.BLOCK)
    known = rstd_of(x, eps) if traced else None
    *parts, measured = _cast_normed(
        x, weight, known, eps, history, torch.float8_e4m3fn, scaling, format.power_of_two, tiles
    )
    return *computed.codes_of(parts, format.scaling, tiles), measured if known is None else known


# --- operators ----------------------------------------------------------------------------------------------------


def _room_of_normed(
    x: Tensor,
    weight: Tensor,
    rstd: Tensor | None,
    eps: float,
    history: Tensor | None,
    dtype: torch.dtype,
    scaling: int,
    power_of_two: bool,
    tiles: bool,
) -> tuple[Tensor | None, ...]:
    return *computed.room(x, dtype, scaling, tiles), None if rstd is not None else _room_of_rstd(x)


def _room_of_rstd(x: Tensor) -> Tensor:
    return casts.room(x, (x.shape[0],), torch.float32)


@casts.operator(
    "fp8_rms_norm(Tensor x, Tensor weight, Tensor? rstd, float eps, Tensor(a!)? history, ScalarType dtype, "
    "int scaling, bool power_of_two, bool tiles) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _room_of_normed,
)
def _cast_normed(
    x: Tensor,
    weight: Tensor,
    rstd: Tensor | None,
    eps: float,
    history: Tensor | None,
    dtype: torch.dtype,
    scaling: int,
    power_of_two: bool,
    tiles: bool,
) -> tuple[Tensor | None, ...]:
    """The last one is ``rstd`` where it is not given."""
    if not computed.has_kernel(x, weight):
        measured = rstd_of(x, eps) if rstd is None else rstd
        values = normed(x, measured, weight)
        parts = computed.cast_values(values, history, dtype, scaling, power_of_two, tiles)
        return *parts, measured if rstd is None else None
    parts = computed.room(x, dtype, scaling, tiles)
    found = _room_of_rstd(x) if rstd is None else rstd
    cast(CudaEngine, casts.engine_for(x, torch.bfloat16)).rms_norm(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        rstd=found.data_ptr(),
        eps=eps,
        measured=rstd is not None,
        result=computed.row_of(parts, history),
        absmax=address(_room_of_absmax(x, scaling)),
        remembered=0 if history is None else len(history) - 1,
        rows=x.shape[0],
        columns=x.shape[1],
        format=casts.FORMATS[dtype],
        scaling=scaling,
        power_of_two=power_of_two,
        tiles=tiles,
        **run_on(x.device),
    )
    return *parts, found if rstd is None else None


def _parts(x: Tensor) -> int:
    return min(x.shape[0], _PARTS)


def _room_of_absmax(x: Tensor, scaling: int) -> Tensor | None:
    """With scales of rows also for those of columns over parts of the rows, in BF16."""
    if scaling != CastScaling.ROW:
        return computed.room_of_absmax(x, scaling)
    return casts.room(x, (sum(x.shape) + _parts(x) * x.shape[1] // 2,), torch.float32)


def _room_of_gradients(
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    addend: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@casts.operator(
    "rms_norm_gradients(Tensor x, Tensor weight, Tensor rstd, Tensor first, Tensor? second, Tensor? third, "
    "Tensor? addend) -> (Tensor, Tensor)",
    _room_of_gradients,
)
def differentiate(
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    addend: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """:func:`gradients`, of up to three incoming ones, by the engine where it can. Matrices are contiguous."""
    incoming = [each for each in (first, second, third) if each is not None]
    if not computed.has_kernel(x, weight, addend, *incoming):
        return gradients(x, weight, rstd, incoming, addend)
    of_x, of_weight = _room_of_gradients(x, weight, rstd, first, second, third, addend)
    parts = casts.room(x, (_parts(x), x.shape[1]), torch.float32)
    cast(CudaEngine, casts.engine_for(x, torch.bfloat16)).rms_norm_backward(
        gradients=[each.data_ptr() for each in incoming],
        addend=address(addend),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        rstd=rstd.data_ptr(),
        of_x=of_x.data_ptr(),
        of_weight=of_weight.data_ptr(),
        parts=parts.data_ptr(),
        rows=x.shape[0],
        columns=x.shape[1],
        **run_on(x.device),
    )
    return of_x, of_weight
