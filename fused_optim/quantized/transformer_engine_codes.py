"""Writes TransformerEngine's FP8 tensors in their own memory, with rotating rounding: for weights without masters.

Scales follow TransformerEngine's rules, codes are those of this library's recipes. A tensor holds its scales as they
multiply codes when decoding, in the order that matrix products want: see :func:`_copies`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_optim.adapters import Update
from fused_optim.formats import SMALLEST_NORMAL
from fused_optim.quantized import elements, engine
from fused_optim.quantized.engine import Encoding
from fused_optim.quantized.recipes import Float8BlockScaling, Float8CurrentScaling, Native
from fused_optim.quantized.update import reduce_over_shards
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.step.scalars import is_capturing

_TENSORS = "transformer_engine.pytorch.tensor"
DELAYED = f"{_TENSORS}.float8_tensor.Float8Quantizer"
CURRENT = f"{_TENSORS}.float8_tensor.Float8CurrentScalingQuantizer"
BLOCKS = f"{_TENSORS}.float8_blockwise_tensor.Float8BlockQuantizer"

_ONE_SCALE = Float8CurrentScaling()


@dataclass(frozen=True)
class _BlockScaling(Float8BlockScaling):
    """``amax_epsilon``: blocks whose absmax is smaller get the scale of this one."""

    amax_epsilon: float = 0.0

    @functools.cached_property
    def native(self) -> Native | None:  # type: ignore[override]
        return None if self.amax_epsilon else super().native

    def _scales(self, absmax: Tensor) -> Tensor:
        return super()._scales(absmax.clamp_min(self.amax_epsilon))


def scaling_of(local: Any) -> str:
    """The quantizer's class; not a subclass's base, which may quantize in another way."""
    kind = type(local._quantizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_e4m3(local: Any) -> bool:
    """Whether its codes are of E4M3 and will be."""
    return local._quantizer.dtype.name == "kFloat8E4M3" and local._fp8_dtype == local._quantizer.dtype


def problem(local: Any) -> str | None:
    """Why this module cannot write a tensor; None if it can."""
    scaling = scaling_of(local)
    if scaling not in (DELAYED, CURRENT, BLOCKS):
        return f"only TransformerEngine's own quantize_ knows {scaling.rpartition('.')[2]}, and it rounds to nearest"
    if not is_e4m3(local):
        return f"expected {scaling.rpartition('.')[2]} to make E4M3 codes, got {local._quantizer.dtype.name}"
    if _codes(local) is None:
        return "it has no codes by rows, only those by columns"
    return None


def _codes(local: Any) -> Tensor | None:
    return local._rowwise_data if scaling_of(local) == BLOCKS else local._data


@torch.no_grad()
def write(updates: Sequence[Update], applies: Tensor | None) -> None:
    """As ``adapters.Adapter.write``, after ``transformer_engine.prepare``, which sets the scales of delayed scaling."""
    updates = [_again(update) if _follows_others(update) else update for update in updates]
    updates = [update for update in updates if update.values is not None]
    _rescale(updates, applies)
    copies = [copy for update in updates for copy in _copies(update)]
    before = None if applies is None else [copy.encoding.components["data"].clone() for copy in copies]
    engine.encode([copy.encoding for copy in copies])
    for i, copy in enumerate(copies):
        codes = copy.encoding.components["data"]
        if before is not None:
            codes.copy_(torch.where(applies.to(codes.device), codes, before[i]))
        if copy.scales is not None:
            _set_where(copy.scales, copy.encoding.components["scale"], applies)
    for update in updates:
        _follow(local_tensor(update.param))


def _follows_others(update: Update) -> bool:
    """Whether a weight without new values may get a new scale from other ranks."""
    return update.values is None and scaling_of(local_tensor(update.param)) == CURRENT


def _again(update: Update) -> Update:
    """To nearest, so that nothing moves without need."""
    return replace(update, values=local_tensor(update.param).dequantize(dtype=torch.float32), fractions=None)


def _set_where(target: Tensor, value: Tensor, applies: Tensor | None) -> None:
    target.copy_(value if applies is None else torch.where(applies.to(target.device), value, target))


# --- one scale per weight ---------------------------------------------------------------------------------------


def set_numbers(targets: Sequence[Tensor], values: Tensor, applies: Tensor | None) -> None:
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
        amaxes = [local_tensor(param)._quantizer.amax.view(1) for param in delayed]
        torch._foreach_maximum_(amaxes, list(delayed.values()))
    by_rule: dict[tuple[torch.device, bool, float], dict[Tensor, Tensor]] = {}
    for param, absmax in reduce_over_shards(_absmaxes(by_scaling.get(CURRENT, []), applies)).items():
        quantizer = local_tensor(param)._quantizer
        rule = (absmax.device, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        by_rule.setdefault(rule, {})[param] = absmax
    for (_, power_of_two, epsilon), absmaxes in by_rule.items():
        inverse = _inverse_scale(torch.cat(list(absmaxes.values())), power_of_two, epsilon)
        set_numbers([local_tensor(param)._scale_inv.view(()) for param in absmaxes], inverse, applies)


def _absmaxes(updates: Sequence[Update], applies: Tensor | None) -> dict[Tensor, Tensor]:
    """The largest finite magnitude of each weight's local values, 0 in skipped steps: shape ``(1,)``."""
    by_device: dict[torch.device, list[Update]] = {}
    for update in updates:
        by_device.setdefault(local_tensor(update.param).device, []).append(update)
    found: dict[Tensor, Tensor] = {}
    for device, there in by_device.items():
        absmax = engine.absmax([_ONE_SCALE] * len(there), [update.values for update in there], device)
        absmax = absmax if applies is None else torch.where(applies.to(device), absmax, 0.0)
        found.update(zip((update.param for update in there), absmax.split(1), strict=True))
    return {update.param: found[update.param] for update in updates}  # in the order in which all ranks reduce


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
    local = local_tensor(update.param)
    if scaling_of(local) != BLOCKS:
        components = {"data": local._data, "tensor_scale": local._scale_inv}
        return [_Copy(Encoding(_ONE_SCALE, components, update.values, update.fractions), None)]
    tiles = local._is_2D_scaled
    quantizer = local._quantizer
    recipe = _BlockScaling(
        (128, 128) if tiles else (1, 128), quantizer.force_pow_2_scales, amax_epsilon=quantizer.amax_epsilon
    )
    values = update.values.reshape(-1, local.shape[-1])
    found = [_of_blocks(recipe, local._rowwise_data.view(values.shape), local._rowwise_scale_inv, values, update)]
    if not tiles and local._columnwise_data is not None:
        codes = local._columnwise_data.view(local.shape[-1], -1)
        found.append(_of_blocks(recipe, codes, local._columnwise_scale_inv, values.t().contiguous(), update))
    return found


def _of_blocks(recipe: _BlockScaling, codes: Tensor, scales: Tensor, values: Tensor, update: Update) -> _Copy:
    if recipe.block[0] == 1:
        scales = scales.t()
    rows, columns = (-(-size // tile) for size, tile in zip(codes.shape, recipe.block, strict=True))
    own = torch.empty(rows, columns, dtype=torch.float32, device=codes.device)
    return _Copy(Encoding(recipe, {"data": codes, "scale": own}, values, update.fractions), scales[:rows, :columns])


def _follow(local: Any) -> None:
    """Transposed codes: those of blocks are made anew, others marked as stale, which no replay of a graph could do."""
    if scaling_of(local) == BLOCKS:
        if local._is_2D_scaled and local._columnwise_data is not None:
            local._create_columnwise()
    elif is_capturing() and local._transpose is not None:
        local._create_transpose()
    else:
        local._reset_caches()
