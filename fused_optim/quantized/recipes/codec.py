"""Quantizes and decodes by a device's compiled engine, many weights at once; by the recipes' PyTorch where it cannot.

It cannot where there is no engine, or it does not know a recipe, or tensors are not plain contiguous ones, or something
looks on: a compiler or a dispatch mode would not see what the engine does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_optim.adapters import Fractions
from fused_optim.backends import backend_for, forced_backend, load_engine
from fused_optim.backends.compiled import address, increment_versions, run_on, tensor_reader
from fused_optim.backends.engine import Engine, EngineNumbers
from fused_optim.backends.tables import ScaleStage
from fused_optim.formats.elements import ELEMENT_TYPES
from fused_optim.quantized.recipes.recipe import Components, KernelFormat, Recipe

_NEAREST = (0, 0, 0, 0, 0, 0)
_TABLE = ("data", "scale", "tensor_scale")
_Column = EngineNumbers | list[int]  # of the engines' tables


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


def absmaxes(weights: Sequence[tuple[Recipe, Tensor | None, torch.device]]) -> list[Tensor]:
    """:func:`absmax` of many parameters' values on their devices: shape ``(1,)`` each, in the same order."""
    by_device: dict[torch.device, list[int]] = {}
    for i, (_, _, device) in enumerate(weights):
        by_device.setdefault(device, []).append(i)
    by_number: dict[int, Tensor] = {}
    for device, there in by_device.items():
        recipes, values, _ = zip(*(weights[i] for i in there), strict=True)
        by_number.update(zip(there, absmax(recipes, values, device).split(1), strict=True))
    return [by_number[i] for i in range(len(weights))]


class Scales:
    """Tensor-wide scales of many weights, grouped once by device and recipe. Weights without such a scale are left out.

    ``absmaxes``: of shape ``(1,)``, one per weight, if they are in the same memory at each :meth:`rescale`.
    """

    def __init__(
        self,
        weights: Sequence[tuple[Recipe, Components]],
        absmaxes: Sequence[Tensor] | None = None,
    ) -> None:
        self._alike = [
            (members, _AlikeScales(device, recipe, [weights[i][1] for i in members], _some(absmaxes, members)))
            for (device, recipe), members in _alike(weights).items()
            if recipe.scales_whole_tensor
        ]

    def prepare(self, applies: Tensor | None) -> None:
        """Call :meth:`Recipe.prepare` for each weight."""
        for _, alike in self._alike:
            alike.prepare(applies)

    def rescale(self, absmaxes: Sequence[Tensor] | None, applies: Tensor | None, advance: bool) -> None:
        """Call :meth:`Recipe.rescale` for each weight; ``absmaxes``: None if the constructor was given them."""
        for members, alike in self._alike:
            alike.rescale(_some(absmaxes, members), applies, advance)


def _some(tensors: Sequence[Tensor] | None, members: list[int]) -> list[Tensor] | None:
    return None if tensors is None else [tensors[i] for i in members]


class _AlikeScales:
    """The scales of weights with one recipe on one device."""

    def __init__(
        self,
        device: torch.device,
        recipe: Recipe,
        components: Sequence[Components],
        absmaxes: list[Tensor] | None,
    ) -> None:
        self._device, self._recipe, self._components, self._absmaxes = device, recipe, components, absmaxes
        self._engine = _engine_of(device.type, forced_backend())
        self._scales = [part.get("tensor_scale") for part in components]
        has_history = recipe.kernel is not None and recipe.kernel.history > 0
        self._histories = [part["amax_history"] for part in components] if has_history else []
        self._nothing = _kept(self._engine, [0] * len(components))
        self._measured = None if absmaxes is None else _kept(self._engine, [x.data_ptr() for x in absmaxes])
        # Addresses of scales and histories, taken before an update and used again after it.
        self._found: tuple[_Column | None, _Column | None] | None = None
        self._countable_scales = countable(x for x in self._scales if x is not None)
        self._countable_histories = countable(self._histories)

    def prepare(self, applies: Tensor | None) -> None:
        kernel = self._recipe.kernel
        if kernel is not None and kernel.history == 0:
            return
        if not self._derive(None, applies, ScaleStage.BEFORE):
            for part in self._components:
                self._recipe.prepare(part, applies)

    def rescale(self, absmaxes: list[Tensor] | None, applies: Tensor | None, advance: bool) -> None:
        if not self._derive(absmaxes, applies, ScaleStage.AFTER if advance else ScaleStage.AGAIN):
            for part, absmax in zip(self._components, absmaxes or self._absmaxes or (), strict=True):
                self._recipe.rescale(part, absmax[0], applies, advance)

    def _derive(self, absmaxes: list[Tensor] | None, applies: Tensor | None, stage: ScaleStage) -> bool:
        """Let the engine set the scales. Returns False if it cannot."""
        engine, kernel = self._engine, self._recipe.kernel
        if engine is None or kernel is None or _is_looked_on():
            return False
        if stage is ScaleStage.BEFORE or self._found is None:
            histories = _addresses(self._histories, self._device) if self._histories else self._nothing
            self._found = _addresses(self._scales, self._device), histories
        scales, histories = self._found
        largest: _Column | None = self._nothing
        if stage is not ScaleStage.BEFORE:
            self._found = None
            largest = self._measured if absmaxes is None else _addresses(absmaxes, self._device)
        if scales is None or histories is None or largest is None:
            return False
        applies = applies if applies is None else applies.to(self._device)
        engine.quantize_rescale(
            scales=scales,
            histories=histories,
            absmaxes=largest,
            largest=kernel.largest,
            factor=kernel.factor,
            history=kernel.history,
            most_recent=kernel.most_recent,
            stage=stage,
            applies=address(applies),
            **run_on(self._device),
        )
        if stage is not ScaleStage.BEFORE:  # an update's writes of a scale count as one, at its end
            increment_versions(self._countable_scales)
        if stage is ScaleStage.AFTER and kernel.history:
            increment_versions(self._countable_histories)
        return True


def _addresses(tensors: list[Any], device: torch.device) -> _Column | None:
    """Addresses of tensors, 0 for None; None unless all of them are plain."""
    found = tensor_reader(device).addresses(tensors)
    if found is None and all(x is None or is_plain(x) for x in tensors):  # torch has no way to read them fast
        return [address(x) for x in tensors]
    return found


def _kept(engine: Engine | None, numbers: list[int]) -> _Column:
    """The numbers as a column of the engine's, which copies lists at each call."""
    return numbers if engine is None else engine.Numbers(numbers)


def encode(weights: Sequence[Encoding]) -> None:
    """Call :meth:`Recipe.encode` for each weight."""
    Encodings(weights).encode()


class Encodings:
    """New values of many weights, grouped once by device and recipe; they stay in the same memory."""

    def __init__(self, weights: Sequence[Encoding]) -> None:
        self._alike = [
            _AlikeEncodings(device, recipe, [weights[i] for i in members])
            for (device, recipe), members in _alike(weights).items()
        ]

    def encode(self) -> None:
        for alike in self._alike:
            alike.encode()


class _AlikeEncodings:
    """A batch of weights' new values that are quantized together: all of one recipe, on one device."""

    def __init__(self, device: torch.device, recipe: Recipe, weights: list[Encoding]) -> None:
        weights = [x._replace(components=recipe.matrices(x.components)) for x in weights]
        self._device, self._recipe, self._weights = device, recipe, weights
        self._engine = _engine_of(device.type, forced_backend())
        self._columns: list[list[Tensor | None]] = [[x.values for x in weights]]
        self._columns += [[x.components.get(name) for x in weights] for name in _TABLE]
        rotates = any(weight.fractions is not None for weight in weights)
        self._roundings = [_rounding(weight.fractions) for weight in weights] if rotates else []
        self._written = countable(
            x.components[name] for x in weights for name in ("data", "scale") if name in x.components
        )
        self._has_fp32 = all(x.values.dtype == torch.float32 and x.values.device == device for x in weights)

    @functools.cached_property
    def _sizes(self) -> tuple[_Column, _Column]:
        """(rows, columns) of the weights. Not read while a compiler traces: it would make constants of them."""
        rows = [x.components["data"].shape[0] for x in self._weights]
        widths = [x.values.numel() // count if count else 0 for x, count in zip(self._weights, rows, strict=True)]
        return _kept(self._engine, rows), _kept(self._engine, widths)

    def encode(self) -> None:
        engine, kernel = self._engine, self._recipe.kernel
        if engine is None or kernel is None or _is_looked_on():
            self._encode_by_recipe()
            return
        read = tensor_reader(self._device).addresses
        columns = [read(column) for column in self._columns] if self._has_fp32 else [None]
        known: list[_Column] = [column for column in columns if column is not None]
        if len(known) == len(columns):
            self._launch(engine, kernel, [*known, *self._sizes])
        else:
            self._encode_some(engine, kernel)

    def _launch(self, engine: Engine, kernel: KernelFormat, columns: Sequence[_Column]) -> None:
        values, data, scales, tensor_scales, rows, widths = columns
        engine.quantize_encode(
            values=values,
            data=data,
            scales=scales,
            tensor_scales=tensor_scales,
            rows=rows,
            columns=widths,
            roundings=self._roundings,
            format=kernel.format,
            round_up=kernel.round_up,
            **run_on(self._device),
        )
        increment_versions(self._written)

    def _encode_some(self, engine: Engine, kernel: KernelFormat) -> None:
        """Encode by the engine the weights that it can take, by the recipe the others."""
        rows = [_row(x.values, x.components) if _values_fit(x.values, self._device) else None for x in self._weights]
        fitting = [weight for weight, row in zip(self._weights, rows, strict=True) if row is not None]
        others = [weight for weight, row in zip(self._weights, rows, strict=True) if row is None]
        if fitting:
            columns = [list(column) for column in zip(*(row for row in rows if row is not None), strict=True)]
            _AlikeEncodings(self._device, self._recipe, fitting)._launch(engine, kernel, columns)
        _AlikeEncodings(self._device, self._recipe, others)._encode_by_recipe()

    def _encode_by_recipe(self) -> None:
        for weight in self._weights:
            fractions = None if weight.fractions is None else weight.fractions.tensor(self._device)
            self._recipe.encode(weight.values, weight.components, fractions)


def decode(recipe: Recipe, components: Components, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The values, rounded from FP32 to ``dtype``: a new tensor."""
    device = components["data"].device
    engine, kernel, components = compiled_engine(device), recipe.kernel, recipe.matrices(components)
    if engine is not None and kernel is not None and dtype in ELEMENT_TYPES:
        out = torch.empty(shape, dtype=dtype, device=device)
        row = _row(out, components)
        if row is not None:
            engine.quantize_decode(weight=row, format=kernel.format, type=ELEMENT_TYPES[dtype], **run_on(device))
            return out
    return recipe.decode(components, shape).to(dtype)


def compiled_engine(device: torch.device) -> Engine | None:
    return None if _is_looked_on() else _engine_of(device.type, forced_backend())


def _is_looked_on() -> bool:
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


@functools.cache
def _engine_of(device_type: str, forced: str | None) -> Engine | None:
    if forced not in (None, device_type):
        return None
    backend = backend_for(device_type)
    return None if backend == "torch" else load_engine(backend)[0]


def _alike(weights: Sequence[tuple[Any, ...]]) -> dict[tuple[torch.device, Recipe], list[int]]:
    """Indices of weights by device and recipe; each weight is a tuple that starts with recipe and components."""
    groups: dict[tuple[torch.device, Recipe], list[int]] = {}
    for i, (recipe, components, *_) in enumerate(weights):
        groups.setdefault((components["data"].device, recipe), []).append(i)
    return groups


def is_plain(tensor: Tensor) -> bool:
    """True for a contiguous plain tensor: its memory is its elements in order."""
    return type(tensor) is Tensor and tensor.is_contiguous()


def _values_fit(values: Tensor, device: torch.device) -> bool:
    return values.dtype == torch.float32 and values.device == device and is_plain(values) and not values.is_neg()


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


def _rounding(fractions: Fractions | None) -> tuple[int, ...]:
    if fractions is None:
        return _NEAREST
    geometry, step = fractions.geometry, fractions.step
    counter, number = (step.data_ptr(), 0) if isinstance(step, Tensor) else (0, step)
    return counter, number, geometry.offset, geometry.inner_local, geometry.inner_global, fractions.key


def countable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that have a version counter: all but inference tensors."""
    return [tensor for tensor in tensors if not tensor.is_inference()]
