"""Quantizes and decodes by a device's compiled engine, many weights at once; by the recipes' PyTorch where it cannot.

It cannot where there is no engine, or it does not know a recipe, or tensors are not plain contiguous ones, or something
looks on: a compiler or a dispatch mode would not see what the engine does.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_optim.adapters import Fractions
from fused_optim.backends import backend_for, forced_backend, load_engine
from fused_optim.backends.compiled import address, run_on, tensor_reader
from fused_optim.backends.engine import Engine
from fused_optim.formats import ELEMENT_TYPES
from fused_optim.quantized.recipes import Components, KernelFormat, Recipe

_NEAREST = (0, 0, 0, 0, 0, 0)
_TABLE = ("data", "scale", "tensor_scale")


class ScaleStage(enum.IntEnum):
    """When scales of whole weights are derived, as the engines number it."""

    BEFORE = 0  # an update: from earlier absmaxes
    AFTER = 1  # an update: with the absmax of its values
    AGAIN = 2  # for the values of the last update: likewise


class Encoding(NamedTuple):
    """New FP32 values of one weight."""

    recipe: Recipe
    components: Components
    values: Tensor
    fractions: Fractions | None = None


def absmax(recipes: Sequence[Recipe], values: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The largest finite magnitude of each tensor (0 of None): FP32 of shape ``(len(values),)``."""
    engine = compiled_engine(device)
    if engine is None or not all(value is None or _values_fit(value, device) for value in values):
        pairs = zip(recipes, values, strict=True)
        zero = torch.zeros((), dtype=torch.float32, device=device)
        return torch.stack([zero if value is None else recipe.absmax(value) for recipe, value in pairs])
    result = torch.empty(len(values), dtype=torch.float32, device=device)
    engine.quantize_absmax(
        addresses=[address(value) for value in values],
        numels=[0 if value is None else value.numel() for value in values],
        result=result.data_ptr(),
        **run_on(device),
    )
    return result


class Scales:
    """The scales of whole weights, of those that have them: which are alike is found out once."""

    def __init__(self, weights: Sequence[tuple[Recipe, Components]]) -> None:
        self._alike = [
            (device, recipe, members, [weights[i][1] for i in members])
            for (device, recipe), members in _alike(weights).items()
            if recipe.scales_whole_tensor
        ]

    def prepare(self, applies: Tensor | None) -> None:
        """:meth:`Recipe.prepare` of each."""
        for device, recipe, members, components in self._alike:
            if recipe.kernel is not None and recipe.kernel.history == 0:
                continue
            if not _rescale(recipe, components, [None] * len(members), applies, ScaleStage.BEFORE, device):
                for part in components:
                    recipe.prepare(part, applies)

    def rescale(self, absmaxes: Sequence[Tensor], applies: Tensor | None, advance: bool) -> None:
        """:meth:`Recipe.rescale` of each; ``absmaxes``: of shape ``(1,)``, one per weight."""
        stage = ScaleStage.AFTER if advance else ScaleStage.AGAIN
        for device, recipe, members, components in self._alike:
            largest = [absmaxes[i] for i in members]
            if not _rescale(recipe, components, largest, applies, stage, device):
                for part, absmax in zip(components, largest, strict=True):
                    recipe.rescale(part, absmax[0], applies, advance)


def _rescale(
    recipe: Recipe,
    components: Sequence[Components],
    absmaxes: Sequence[Tensor | None],
    applies: Tensor | None,
    stage: ScaleStage,
    device: torch.device,
) -> bool:
    """Whether the engine could do it."""
    engine, kernel = compiled_engine(device), recipe.kernel
    if engine is None or kernel is None:
        return False
    scales: list[Tensor | None] = [part["tensor_scale"] for part in components]
    histories = [part.get("amax_history") for part in components] if kernel.history else [None] * len(scales)
    found = [_addresses(tensors, device) for tensors in (scales, histories, absmaxes)]
    if any(addresses is None for addresses in found):
        return False
    applies = applies if applies is None else applies.to(device)
    engine.quantize_rescale(
        scales=found[0] or [],
        histories=found[1] or [],
        absmaxes=found[2] or [],
        largest=kernel.largest,
        factor=kernel.factor,
        history=kernel.history,
        most_recent=kernel.most_recent,
        stage=stage,
        applies=address(applies),
        **run_on(device),
    )
    written(part for part in chain(scales, histories) if part is not None)
    return True


def _addresses(tensors: Sequence[Tensor | None], device: torch.device) -> list[int] | None:
    """0 for None; None where not all of them are plain."""
    found = tensor_reader(device).addresses(list(tensors))
    if found is None and all(x is None or is_plain(x) for x in tensors):  # torch has no way to read them fast
        return [address(x) for x in tensors]
    return found


def encode(weights: Sequence[Encoding]) -> None:
    """:meth:`Recipe.encode` of each."""
    for (device, recipe), members in _alike(weights).items():
        engine, kernel = compiled_engine(device), recipe.kernel
        others = [weights[i] for i in members]
        if engine is not None and kernel is not None:
            rows = _rows(others, device)
            fitting = [weight for weight, row in zip(others, rows, strict=True) if row is not None]
            others = [weight for weight, row in zip(others, rows, strict=True) if row is None]
            _encode(engine, kernel, fitting, [row for row in rows if row is not None], device)
        for weight in others:
            fractions = None if weight.fractions is None else weight.fractions.tensor(device)
            recipe.encode(weight.values, weight.components, fractions)


def decode(recipe: Recipe, components: Components, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The values, rounded from FP32 to ``dtype``: a new tensor."""
    device = components["data"].device
    engine, kernel = compiled_engine(device), recipe.kernel
    if engine is not None and kernel is not None and dtype in ELEMENT_TYPES:
        out = torch.empty(shape, dtype=dtype, device=device)
        row = _row(out, components)
        if row is not None:
            engine.quantize_decode(weight=row, format=kernel.format, type=ELEMENT_TYPES[dtype], **run_on(device))
            return out
    return recipe.decode(components, shape).to(dtype)


def compiled_engine(device: torch.device) -> Engine | None:
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return None
    return _engine_of(device.type, forced_backend())


@functools.cache
def _engine_of(device_type: str, forced: str | None) -> Engine | None:
    if forced not in (None, device_type):
        return None
    backend = backend_for(device_type)
    return None if backend == "torch" else load_engine(backend)[0]


def _alike(weights: Sequence[tuple[Any, ...]]) -> dict[tuple[torch.device, Recipe], list[int]]:
    """The numbers of weights, each of which begins with its recipe and its components, by device and recipe."""
    groups: dict[tuple[torch.device, Recipe], list[int]] = {}
    for i, (recipe, components, *_) in enumerate(weights):
        groups.setdefault((components["data"].device, recipe), []).append(i)
    return groups


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory is its elements, one after the other."""
    return type(tensor) is Tensor and tensor.is_contiguous()


def _values_fit(values: Tensor, device: torch.device) -> bool:
    return values.dtype == torch.float32 and values.device == device and is_plain(values) and not values.is_neg()


def _rows(weights: Sequence[Encoding], device: torch.device) -> Sequence[tuple[int, ...] | None]:
    """Weights as the engines' tables have them; None for those that they cannot take."""
    tensors: list[list[Tensor | None]] = [[x.values for x in weights]]
    tensors += [[x.components.get(name) for x in weights] for name in _TABLE]
    found = [tensor_reader(device).addresses(column) for column in tensors]
    alike = all(x.values.dtype == torch.float32 and x.values.device == device for x in weights)
    if not alike or any(column is None for column in found):
        return [_row(x.values, x.components) if _values_fit(x.values, device) else None for x in weights]
    counts = [(x.components["data"].shape[0], x.values.numel()) for x in weights]
    sizes = [(rows, numel // rows if rows else 0) for rows, numel in counts]
    return [(*of, *size) for *of, size in zip(*(column or [] for column in found), sizes, strict=True)]


def _row(values: Tensor, components: Components) -> tuple[int, ...] | None:
    """A weight as the engines' tables have it; None where they cannot take it."""
    addresses = []
    for part in (values, *map(components.get, _TABLE)):
        if part is None:
            addresses.append(0)
        elif is_plain(part):
            addresses.append(part.data_ptr())
        else:
            return None
    rows = components["data"].shape[0]
    return *addresses, rows, values.numel() // rows if rows else 0


def _encode(
    engine: Engine, kernel: KernelFormat, weights: list[Encoding], rows: list[tuple[int, ...]], device: torch.device
) -> None:
    rotates = any(weight.fractions is not None for weight in weights)
    engine.quantize_encode(
        weights=rows,
        roundings=[_rounding(weight.fractions) for weight in weights] if rotates else [],
        format=kernel.format,
        round_up=kernel.round_up,
        **run_on(device),
    )
    written(part for weight in weights for name, part in weight.components.items() if name in ("data", "scale"))


def _rounding(fractions: Fractions | None) -> tuple[int, ...]:
    if fractions is None:
        return _NEAREST
    geometry, step = fractions.geometry, fractions.step
    counter, number = (step.data_ptr(), 0) if isinstance(step, Tensor) else (0, step)
    return counter, number, geometry.offset, geometry.inner_local, geometry.inner_global, fractions.key


def written(tensors: Iterable[Tensor]) -> None:
    """Count versions, as torch's own operations in place do."""
    torch.autograd.graph.increment_version(countable(tensors))


def countable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that have versions."""
    return [tensor for tensor in tensors if not tensor.is_inference()]
