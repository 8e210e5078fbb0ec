"""Writes TransformerEngine's FP8 tensors in their own memory, with rotating rounding: for weights without masters.

Scales follow TransformerEngine's rules, codes are those of this library's recipes. A tensor holds its scales as they
multiply codes when decoding, in the order that matrix products want: see :func:`_copies`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from fused_optim.adapters import Fractions, Update, equal_or_nan
from fused_optim.backends import is_capturing
from fused_optim.formats.arithmetic import SMALLEST_NORMAL
from fused_optim.quantized.adapters.update import reduce_over_shards
from fused_optim.quantized.recipes import (
    Components,
    Encoding,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    KernelFormat,
    codec,
    elements,
    set_where,
)
from fused_optim.sharding.dtensor import local_tensor

_TENSORS = "transformer_engine.pytorch.tensor"
DELAYED = f"{_TENSORS}.float8_tensor.Float8Quantizer"
CURRENT = f"{_TENSORS}.float8_tensor.Float8CurrentScalingQuantizer"
BLOCKS = f"{_TENSORS}.float8_blockwise_tensor.Float8BlockQuantizer"

_ONE_SCALE, _DELAYED = Float8CurrentScaling(), Float8DelayedScaling()


@dataclass(frozen=True)
class _BlockScaling(Float8BlockScaling):
    """``amax_epsilon``: blocks whose absmax is smaller get the scale of this one."""

    amax_epsilon: float = 0.0

    @functools.cached_property
    def kernel(self) -> KernelFormat | None:
        return None if self.amax_epsilon else super().kernel

    def _scales(self, absmax: Tensor) -> Tensor:
        return super()._scales(absmax.clamp_min(self.amax_epsilon))


class Quantizer(Protocol):
    """``scale`` and ``amax``: of delayed scaling; the last two: of the others."""

    dtype: enum.Enum
    rowwise_usage: bool
    scale: Tensor
    amax: Tensor
    force_pow_2_scales: bool
    amax_epsilon: float


class Float8Weight(Protocol):
    """With one scale."""

    _data: Tensor | None
    _scale_inv: Tensor
    _transpose: Tensor | None
    _fp8_dtype: enum.Enum
    _quantizer: Quantizer
    device: torch.device

    def numel(self) -> int: ...
    def _reset_caches(self) -> None: ...
    def _create_transpose(self) -> None: ...


class BlockWeight(Protocol):
    """With scales of blocks."""

    _rowwise_data: Tensor | None
    _rowwise_scale_inv: Tensor
    _columnwise_data: Tensor | None
    _columnwise_scale_inv: Tensor
    _is_2D_scaled: bool
    _fp8_dtype: enum.Enum
    _quantizer: Quantizer

    def _create_columnwise(self) -> None: ...


def float8(local: Tensor) -> Float8Weight:
    return cast(Float8Weight, local)


def blocks(local: Tensor) -> BlockWeight:
    return cast(BlockWeight, local)


def scaling_of(local: Tensor) -> str:
    """The quantizer's class; not a subclass's base, which may quantize in another way."""
    kind = type(float8(local)._quantizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_e4m3(local: Tensor) -> bool:
    """Whether its codes are of E4M3 and will be."""
    dtype = float8(local)._quantizer.dtype
    return dtype.name == "kFloat8E4M3" and float8(local)._fp8_dtype == dtype


def problem(local: Tensor) -> str | None:
    """Why this module cannot write a tensor; None if it can."""
    scaling = scaling_of(local)
    name = scaling.rpartition(".")[2]
    if scaling not in (DELAYED, CURRENT, BLOCKS):
        return f"only TransformerEngine's own quantize_ knows {name}, and it rounds to nearest"
    if not is_e4m3(local):
        return f"expected {name} to make E4M3 codes, got {float8(local)._quantizer.dtype.name}"
    codes = blocks(local)._rowwise_data if scaling == BLOCKS else float8(local)._data
    return "it has no codes by rows, only those by columns" if codes is None else None


@torch.no_grad()
def is_master(param: Tensor, master: Tensor, written: Tensor) -> Tensor | None:
    """As ``adapters.Adapter.is_master``; None where only TransformerEngine knows."""
    local = local_tensor(param)
    if problem(local) is not None:
        return None
    copy = _copies(Update(param, master))[0]
    recipe, components = copy.encoding.recipe, dict(copy.encoding.components)
    if copy.scales is not None:
        components["scale"] = copy.scales
    if scaling_of(local) == DELAYED:
        recipe, components["amax_history"] = _DELAYED, float8(local)._quantizer.amax
    x = master.reshape(-1, master.shape[-1])
    same = equal_or_nan(recipe.rounded(x, components), written.view(x.shape))
    return (same & recipe.fits(x, components, same)).view(master.shape)


@torch.no_grad()
def write(updates: Sequence[Update], applies: Tensor | None) -> None:
    """As ``adapters.Adapter.write``, after ``transformer_engine.prepare``, which sets the scales of delayed scaling."""
    updates = [_again(update) if _follows_others(update) else update for update in updates]
    updates = [update for update in updates if update.values is not None]
    _rescale(updates, applies)
    copies = [copy for update in updates for copy in _copies(update)]
    encodings = [copy.encoding for copy in copies]
    codes = [encoding.components["data"] for encoding in encodings]
    before = codes if applies is None else [each.clone() for each in codes]
    codec.encode(encodings)
    if applies is not None:
        for each, old in zip(codes, before, strict=True):
            set_where(each, old, applies.logical_not())
    for copy in copies:
        if copy.scales is not None:
            set_where(copy.scales, copy.encoding.components["scale"], applies)
    for update in updates:
        _follow(local_tensor(update.param))


def _follows_others(update: Update) -> bool:
    """Whether a weight without new values may get a new scale from other ranks."""
    return update.values is None and scaling_of(local_tensor(update.param)) == CURRENT


def _again(update: Update) -> Update:
    """To nearest, so that nothing moves without need."""
    local = local_tensor(update.param)
    values = codec.decode(_ONE_SCALE, _one_scale(local), tuple(local.shape), torch.float32)
    return replace(update, values=values, fractions=None)


# --- one scale per weight ---------------------------------------------------------------------------------------


def set_numbers(targets: list[Tensor], values: Tensor, applies: Tensor | None) -> None:
    """Copy the entries of ``values`` into tensors of shape ``()``, unless ``applies`` is False."""
    if applies is not None:
        values = torch.where(applies.to(values.device), values, torch.stack(targets))
    torch._foreach_copy_(targets, values.unbind())


def _rescale(updates: Iterable[Update], applies: Tensor | None) -> None:
    """New scales of current scaling, and the absmaxes that delayed scaling takes later ones from."""
    by_scaling: dict[str, list[Update]] = {}
    for update in updates:
        by_scaling.setdefault(scaling_of(local_tensor(update.param)), []).append(update)
    delayed = _absmaxes(by_scaling.get(DELAYED, []), applies)
    if delayed:  # those of shards are of ranks: TransformerEngine reduces them
        amaxes = [float8(local_tensor(param))._quantizer.amax.view(1) for param in delayed]
        torch._foreach_maximum_(amaxes, list(delayed.values()))
    by_rule: dict[tuple[torch.device, bool, float], dict[Tensor, Tensor]] = {}
    for param, absmax in reduce_over_shards(_absmaxes(by_scaling.get(CURRENT, []), applies)).items():
        quantizer = float8(local_tensor(param))._quantizer
        rule = (absmax.device, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        by_rule.setdefault(rule, {})[param] = absmax
    for (_, power_of_two, epsilon), absmaxes in by_rule.items():
        inverse = _inverse_scale(torch.cat(list(absmaxes.values())), power_of_two, epsilon)
        set_numbers([float8(local_tensor(param))._scale_inv.view(()) for param in absmaxes], inverse, applies)


def _absmaxes(updates: Sequence[Update], applies: Tensor | None) -> dict[Tensor, Tensor]:
    """The largest finite magnitude of each weight's local values, 0 in skipped steps: shape ``(1,)``."""
    weights = [(_ONE_SCALE, update.values, local_tensor(update.param).device) for update in updates]
    return dict(zip((update.param for update in updates), codec.absmaxes(weights, applies), strict=True))


def _inverse_scale(absmax: Tensor, power_of_two: bool, epsilon: float) -> Tensor:
    """The scale is 448 / absmax, at most the largest FP32 number and 1 for zeros, or the power of two below."""
    absmax = absmax.clamp_min(epsilon)
    scale = torch.full_like(absmax, elements.FLOAT8_LARGEST) / absmax
    scale = torch.where(absmax > 0, scale, 1.0).clamp_max(torch.finfo(torch.float32).max)
    if power_of_two:
        scale = elements.previous_power_of_two(scale)
    return scale.reciprocal().clamp_min(SMALLEST_NORMAL)


# --- layouts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copy:
    """One of a tensor's quantized copies, and where the scales of its blocks go; None: they are there already."""

    encoding: Encoding
    scales: Tensor | None


def _copies(update: Update) -> list[_Copy]:
    """What is encoded of a tensor.

    With one scale: ``_data``. With blocks of 128 x 128: ``_rowwise_data`` and ``_rowwise_scale_inv``, an entry per
    block, whose rows are padded to a multiple of 4. With blocks of 128 elements: the same, but scales are transposed
    before they are padded; and the transposed values, quantized for themselves, as ``_columnwise_data`` and
    ``_columnwise_scale_inv``.
    """
    local, values = local_tensor(update.param), update.values
    assert values is not None
    if scaling_of(local) != BLOCKS:
        return [_Copy(Encoding(_ONE_SCALE, _one_scale(local), values, update.fractions), None)]
    parts, columns = blocks(local), local.shape[-1]
    quantizer, tiles = parts._quantizer, parts._is_2D_scaled
    tile = (128, 128) if tiles else (1, 128)
    recipe = _BlockScaling(tile, quantizer.force_pow_2_scales, amax_epsilon=quantizer.amax_epsilon)
    values = values.reshape(-1, columns)
    assert parts._rowwise_data is not None
    codes = parts._rowwise_data.view(values.shape)
    found = [_of_blocks(recipe, codes, parts._rowwise_scale_inv, values, update.fractions)]
    if not tiles and parts._columnwise_data is not None:
        codes, values = parts._columnwise_data.view(columns, -1), values.t().contiguous()
        found.append(_of_blocks(recipe, codes, parts._columnwise_scale_inv, values, update.fractions))
    return found


def _one_scale(local: Tensor) -> Components:
    data = float8(local)._data
    assert data is not None
    return {"data": data, "tensor_scale": float8(local)._scale_inv}


def _of_blocks(
    recipe: _BlockScaling, codes: Tensor, scales: Tensor, values: Tensor, fractions: Fractions | None
) -> _Copy:
    if recipe.block[0] == 1:
        scales = scales.t()
    rows, columns = (-(-size // tile) for size, tile in zip(codes.shape, recipe.block, strict=True))
    own = torch.empty(rows, columns, dtype=torch.float32, device=codes.device)
    return _Copy(Encoding(recipe, {"data": codes, "scale": own}, values, fractions), scales[:rows, :columns])


def _follow(local: Tensor) -> None:
    """Transposed codes: those of blocks are made anew, others marked as invalid, as no replay of a graph could do."""
    if scaling_of(local) == BLOCKS:
        if blocks(local)._is_2D_scaled and blocks(local)._columnwise_data is not None:
            blocks(local)._create_columnwise()
    elif is_capturing() and float8(local)._transpose is not None:
        float8(local)._create_transpose()
    else:
        float8(local)._reset_caches()
