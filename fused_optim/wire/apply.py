"""Applies changes to the weights of another process: checked as a whole, then written in place."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fused_optim.wire.form import Changes, integer, read_changes

# The step whose weights a model has, as far as apply_changes knows.
_STEPS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What a scale is called by those who serve, after the weight's name: "fp8" of transformers, compressed-tensors.
_SCALES = ("_scale", "_scale_inv", "_weight_scale_inv")
_TENSOR_SCALE, _PACKED = "_tensor_scale", "_packed"


@dataclass(frozen=True)
class Box:
    """A part of a published tensor, and its place in a target.

    ``sizes`` elements in each dim, from ``source`` on, go to ``offsets`` in the tensor ``name``.
    """

    name: str
    source: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


# Gives the places of a published tensor of this name and shape; None: it has its own name there.
Names = Callable[[str, tuple[int, ...]], Sequence[Box] | None]


def fused_rows(model: nn.Module | Mapping[str, Tensor], fused: Mapping[str, Mapping[str, int]]) -> Names:
    """Map published layers to rows of a server's fused tensors, such as vLLM's ``qkv_proj`` and ``gate_up_proj``.

    Args:
        model: whose tensors they go to, or its state dict.
        fused: the server's name of a layer -> the published names of those in it, in order, with their rows:
            ``{"qkv_proj": {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024}}``. Of tensors with three dims (experts) the
            rows of each expert. Scales of blocks of rows, whose tensors have fewer, lie in the same proportion.

    The names raise ValueError for a tensor that is not so many rows of the server's.
    """
    rows: dict[str, tuple[str, int, int, int]] = {}
    for layer, parts in fused.items():
        before = 0
        for published, count in parts.items():
            rows[published] = layer, before, count, sum(parts.values())
            before += count
    places = {published: (place, len(parts)) for parts in fused.values() for place, published in enumerate(parts)}
    shapes = {key: tuple(part.shape) for key, _, part in _named(model)}

    def names(name: str, shape: tuple[int, ...]) -> Sequence[Box] | None:
        path = name.split(".")
        at = next((i for i, part in enumerate(path) if part in rows), None)
        if at is None:
            return None
        layer, before, own_rows, total = rows[path[at]]
        key = next(iter(_known_as(".".join([*path[:at], layer, *path[at + 1 :]]), shapes)), None)
        if key is None:
            return None
        if name.endswith(_TENSOR_SCALE):
            place, count = places[path[at]]
            if shapes[key] != (count,):
                raise ValueError(f"{name!r}: {key!r} has shape {shapes[key]}, not a scale for each of {count} layers")
            return [Box(key, (0,) * len(shape), (place,), (1,))]
        return [_among_rows(name, shape, key, shapes[key], before, own_rows, total)]

    return names


def _among_rows(
    name: str, shape: tuple[int, ...], key: str, here: tuple[int, ...], before: int, own: int, total: int
) -> Box:
    """The box for ``own`` of ``total`` rows, ``before`` of which come first, in a tensor of shape ``here``."""
    dim = 1 if len(shape) == 3 else 0  # of experts, each has these rows
    others = [sizes[:dim] + sizes[dim + 1 :] for sizes in (shape, here)]
    rows = shape[dim], here[dim]
    are_all = rows == (own, total) or (name.endswith("_scale") and rows[0] * total == rows[1] * own)
    if others[0] != others[1] or not are_all:
        text = f"{name!r} of shape {shape} is not {own} of the {total} rows of {key!r}, which has shape {here}"
        raise ValueError(f"{text}: fused_rows is for whole tensors; other places are Boxes")
    if before * rows[1] % total:
        raise ValueError(f"{name!r}: {before} rows of {total} are no whole rows of {key!r}, which has {rows[1]}")
    offsets = [0] * len(shape)
    offsets[dim] = before * rows[1] // total
    return Box(key, (0,) * len(shape), tuple(offsets), shape)


def apply_changes(
    model: nn.Module | Mapping[str, Tensor],
    file: str | os.PathLike[str],
    *,
    base: int | None = None,
    names: Names | None = None,
) -> int:
    """Write the values of a file into a model's tensors. Returns the step whose weights it has now.

    Nothing is written unless all of the file fits: its version, its checksum, its base, names, shapes and dtypes.
    Tensors are found by their names; scales, and packed codes, also under the names that transformers and
    compressed-tensors have for them, a scale of a whole weight also in a tensor that has it once per row.

    Args:
        model: plain tensors, on any device: a module, or a mapping of names to tensors that are written in place.
        base: the step whose weights it has. None: the one that the last call for this module returned.
        names: where tensors go that have another name, or lie in another, there; see :func:`fused_rows`.

    Raises ValueError for a file that is damaged, of another version or for another base, and for another shape or
    dtype; KeyError for a tensor that is not there; TypeError for a base that is no integer, and for targets that are no
    plain tensors, have no values, or have elements that share memory; RuntimeError for quantized weights into which
    plain values were written, and which wait for ``finish_initialization``. Quantized weights of this package are taken
    as they are: an optimizer's masters follow them, as after any other write.
    """
    read = read_changes(file)
    if base is None:
        base = _STEPS.get(model) if isinstance(model, nn.Module) else None
    if base is None:
        raise ValueError("which step's weights the model has is not known yet: say base=")
    if integer("base", base) != read.base:
        raise ValueError(
            f"{os.fspath(file)} changes the weights of step {read.base}, and the model has those of {base}"
        )
    named = list(_named(model))
    targets = {key: part.detach() for key, _, part in named}
    planned = [write for name, changes in read.changes.items() for write in _planned(targets, name, changes, names)]
    weights = {key: tensor for key, tensor, part in named if part is not tensor}
    written = dict.fromkeys(weights[write.key] for write in planned if write.key in weights)
    for weight in written:
        if isinstance(weight, _Quantized):
            weight.check_quantized()
    with torch.no_grad():
        for _, target, at, values in planned:
            target[tuple(index.to(target.device) for index in at)] = values.to(target.device)
        for weight in written:
            _mark_written(weight)
    if isinstance(model, nn.Module):
        _STEPS[model] = read.step
    return read.step


class _Write(NamedTuple):
    key: str  # of the target
    target: Tensor
    at: tuple[Tensor, ...]
    values: Tensor


def _planned(targets: Mapping[str, Tensor], name: str, changes: Changes, names: Names | None) -> list[_Write]:
    """The writes for one tensor's changes, all checked: integers of the target's size, at indices in each dim."""
    boxes = None if names is None else names(name, changes.shape)
    if boxes is not None:
        return [_into_box(targets, name, changes, box) for box in boxes]
    key = next(iter(_known_as(name, targets)), None)
    if key is None:
        raise KeyError(f"{name!r} is in the file, and not in the model")
    target = _checked(targets[key], key, changes.values.dtype)
    if name.endswith(_TENSOR_SCALE) and changes.values.numel() == 1:  # of a whole weight, once or for each row
        return [_Write(key, target, (), _integers(changes.values).view(()))]
    shapes = tuple(target.shape), tuple(changes.shape)
    # Of a weight with more dims than the matrix that was quantized, or the other way round.
    if shapes[0] == shapes[1] or _is_merged(*shapes) or _is_merged(*reversed(shapes)):
        at = (changes.indices,) if target.is_contiguous() else torch.unravel_index(changes.indices, target.shape)
        return [_Write(key, target.view(-1) if target.is_contiguous() else target, at, _integers(changes.values))]
    raise ValueError(f"{key!r}: expected shape {changes.shape}, as {name!r} was published, got {tuple(target.shape)}")


def _is_merged(fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
    """True if merging neighbouring dims of ``fine`` gives ``coarse``."""
    rest = list(fine)
    for size in coarse:
        product = 1
        while rest and product < size:
            product *= rest.pop(0)
        if product != size:
            return False
    return math.prod(rest) == 1


def _into_box(targets: Mapping[str, Tensor], name: str, changes: Changes, box: Box) -> _Write:
    if box.name not in targets:
        raise KeyError(f"{name!r} goes to {box.name!r}, which is not in the model")
    target = _checked(targets[box.name], box.name, changes.values.dtype)
    fits = len(box.source) == len(changes.shape) == target.dim()
    fits = fits and all(s + n <= size for s, n, size in zip(box.source, box.sizes, changes.shape, strict=True))
    if not fits or any(o + n > size for o, n, size in zip(box.offsets, box.sizes, target.shape, strict=True)):
        raise ValueError(f"{name!r} of shape {changes.shape} does not fit {box} of shape {tuple(target.shape)}")
    at = torch.unravel_index(changes.indices, changes.shape)
    inside = torch.ones_like(changes.indices, dtype=torch.bool)
    for index, first, size in zip(at, box.source, box.sizes, strict=True):
        inside &= (index >= first) & (index < first + size)
    moved = tuple(index[inside] - s + o for index, s, o in zip(at, box.source, box.offsets, strict=True))
    return _Write(box.name, target, moved, _integers(changes.values)[inside])


def _named(model: nn.Module | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, tensor, part) of all parts that are published.

    Parts are the components of weights that this package has quantized, or their kept values; else the tensors
    themselves.
    """
    given = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):  # what a module returns from get_extra_state
            continue
        components: Mapping[str, Tensor] = getattr(tensor, "components", {"": getattr(tensor, "plain", tensor)})
        for part, value in components.items():
            yield part_name(name, part), tensor, value


@runtime_checkable
class _Quantized(Protocol):
    """A weight that this package has quantized, of a class that need not be imported here."""

    def check_quantized(self) -> None: ...
    def mark_updated(self) -> None: ...


def _mark_written(weight: Tensor) -> None:
    """Mark a weight as written, so that an optimizer's master follows; initial values are outdated."""
    if isinstance(weight, _Quantized):
        weight.mark_updated()
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)


def part_name(name: str, part: str) -> str:
    """The published name of a weight's part: ``NAME`` for codes, ``NAME_scale`` for scales."""
    return name if part in ("", "data") else f"{name}_{part}"


def _known_as(name: str, targets: Mapping[str, Any]) -> list[str]:
    """The names in ``targets`` that mean a published tensor: its own first."""
    found = [name, name + _PACKED]
    if name.endswith(_TENSOR_SCALE):
        found += [name.removesuffix(_TENSOR_SCALE) + suffix for suffix in _SCALES]
    elif name.endswith("_scale"):
        found += [name.removesuffix("_scale") + suffix for suffix in _SCALES]
    return [each for each in found if each in targets]


def _checked(target: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """The target as integers of its size."""
    if type(target) not in (Tensor, nn.Parameter) or target.layout != torch.strided:
        raise TypeError(f"{name!r}: expected a plain tensor, got {type(target).__name__} ({target.layout})")
    if target.is_meta or any(
        size > 1 and not stride for size, stride in zip(target.shape, target.stride(), strict=True)
    ):
        place = "on the meta device" if target.is_meta else f"with strides {target.stride()}"
        raise TypeError(f"{name!r}: expected a tensor with memory for each element, got one {place}")
    bytes_alike = target.element_size() == dtype.itemsize == 1 and torch.uint8 in (target.dtype, dtype)
    if target.dtype != dtype and not bytes_alike:
        raise ValueError(f"{name!r}: expected {dtype}, as it was published, got {target.dtype}")
    return _integers(target)


def _integers(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_INTEGERS[tensor.element_size()])
