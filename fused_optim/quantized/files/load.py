"""Reads models with quantized weights that were written for inference servers, as initial weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_optim.quantized.files import layouts
from fused_optim.quantized.model import finish_initialization
from fused_optim.quantized.tensor import QuantizedTensor
from fused_optim.sharding.collective import on_all_ranks
from fused_optim.sharding.dtensor import local_tensor, placed_part, rewrap_like
from fused_optim.sharding.model_files import INDEX, SINGLE, open_safetensors, read_index
from fused_optim.sharding.model_tensors import FileTensors, file_tensors, linear_experts, tensor_names


@torch.no_grad()
def load_quantized_safetensors(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
    """Load parameters and buffers from safetensors files, also of weights that are quantized there.

    ``path``: a folder of Hugging Face's layout, or one file. Weights may be plain, or FP8, MXFP8 or NVFP4 as
    compressed-tensors or Hugging Face's fine-grained FP8 have them; ``layouts.py`` says what is known. A weight that
    the model keeps in the same format takes the bytes, any other the values, quantized or plain, and masters start
    from these. Every rank reads the tensors that it needs, one at a time, and keeps its part.

    Quantizes what it has loaded, so it is a collective where the model is sharded. Raises on every rank if it fails on
    one: KeyError where ``strict`` and names are missing or left over, ValueError for scales or shapes that do not fit;
    for names before anything is changed.
    """
    path = Path(path)
    doing = f"loading {path}"
    with on_all_ranks(doing):
        targets = _targets(model)
        with _opened(path, doing) as (keys, read):
            parts_found = {name: parts for name, target in targets.items() if (parts := target.parts_in(keys))}
            if strict:
                _check_names(targets, parts_found, keys)
            for name, parts in parts_found.items():
                _load(targets[name], parts, lambda part: [read(key) for key in layouts.keys_of(part, keys)])
    finish_initialization(model)


Parts = Mapping[str, Tensor | None]  # names in files, and which rows of the weight these are: None for all


@dataclass(frozen=True)
class _Target:
    """A parameter or buffer, all of its names, and the parts that files may have in place of it."""

    tensor: Tensor
    names: list[str]
    parts: Parts
    views: FileTensors | None = None  # of it, which files may have instead

    def parts_in(self, keys: Collection[str]) -> Parts:
        """The parts that files have: itself, or all of its parts; else none."""
        ways: list[Parts] = [*({name: None} for name in self.names), self.parts, self.of_views()]
        return next((parts for parts in ways if parts and all(layouts.keys_of(name, keys) for name in parts)), {})

    def of_views(self, tensor: Tensor | None = None) -> dict[str, Tensor]:
        """The file tensors of ``tensor`` by name; of nothing, meta tensors with their shapes."""
        whole = torch.empty(self.tensor.shape, device="meta") if tensor is None else tensor
        return {} if self.views is None else self.views.convert({self.names[0]: whole})


def _targets(model: nn.Module) -> dict[str, _Target]:
    """All targets by their first name. Raises RuntimeError for tensors on the meta device."""
    tensors = {names[0]: (tensor, names) for tensor, names in tensor_names(model).items()}
    for name, (tensor, _) in tensors.items():
        if local_tensor(tensor).is_meta:
            raise RuntimeError(f"{name} is on the meta device: call model.to_empty(device=...) first")
    shapes = {name: tensor.shape for name, (tensor, _) in tensors.items()}
    experts = [name for name, shape in shapes.items() if len(shape) == 3]
    parts = {files.names[0]: files.rows(shapes[files.names[0]]) for files in file_tensors(model, shapes, experts)}
    return {
        name: _Target(tensor, names, parts.get(name) or {}, linear_experts(model, name))
        for name, (tensor, names) in tensors.items()
    }


def _check_names(targets: dict[str, _Target], found: Mapping[str, Parts], keys: Collection[str]) -> None:
    missing = sorted(set(targets).difference(found))
    used = {key for parts in found.values() for name in parts for key in layouts.keys_of(name, keys)}
    known = {name for target in targets.values() for name in (*target.names, *target.parts, *target.of_views())}
    left = sorted(key for key in set(keys) - used if layouts.weight_of(key) not in known)
    if missing or left:
        texts = [f"the files lack {', '.join(missing[:5])}"] if missing else []
        texts += [f"the model has no {', '.join(map(repr, left[:5]))}"] if left else []
        raise KeyError(f"{' and '.join(texts)} ({len(missing)} and {len(left)} names); strict=False loads the others")


def _load(target: _Target, parts: Parts, read: Callable[[str], list[Tensor]]) -> None:
    tensor = target.tensor
    local = local_tensor(tensor)
    dtype = tensor.dtype if isinstance(local, QuantizedTensor) else torch.float32
    if parts.keys() == target.of_views().keys():
        loaded = _of_views(target, {part: layouts.read(read(part), part, dtype) for part in parts})
        tensor.copy_(rewrap_like(placed_part(loaded, tensor), tensor))
        return
    read_parts = [(layouts.read(read(part), part, dtype), rows) for part, rows in parts.items()]
    for (part, rows), of in zip(read_parts, parts, strict=True):
        expected = tuple(tensor.shape) if rows is None else (*rows.shape, tensor.shape[-1])
        if tuple(part.shape) != expected:
            raise ValueError(f"{of}: expected shape {expected}, the files have {tuple(part.shape)}")
    loaded = _joined(read_parts, tensor.shape)
    if isinstance(loaded, QuantizedTensor):
        if isinstance(local, QuantizedTensor) and local.recipe.same_format(loaded.recipe):
            placed = _placed(loaded, tensor)
            if placed is not None:
                tensor.copy_(rewrap_like(placed, tensor))
                local.discard_high_precision_init()  # masters start from what the bytes decode to
                return
        loaded = loaded.values()
    tensor.copy_(rewrap_like(placed_part(loaded, tensor), tensor))


def _of_views(target: _Target, parts: Mapping[str, Tensor]) -> Tensor:
    values = torch.empty(target.tensor.shape)
    for name, view in target.of_views(values).items():
        part = parts[name]
        if part.shape != view.shape:
            raise ValueError(f"{name}: expected shape {tuple(view.shape)}, the files have {tuple(part.shape)}")
        view.copy_(part.values() if isinstance(part, QuantizedTensor) else part)
    return values


def _joined(parts: list[tuple[Tensor, Tensor | None]], shape: torch.Size) -> Tensor:
    """A weight of its parts: quantized where all of these are, in the same way."""
    (first, rows), *others = parts
    if rows is None:
        return first
    if not isinstance(first, QuantizedTensor) or not all(_fits(part, first) for part, _ in others):
        plain = [(part.values() if isinstance(part, QuantizedTensor) else part, at) for part, at in parts]
        return _of_rows([(values.flatten(0, -2), at) for values, at in plain], shape).view(shape)
    quantized = [(part.components, at) for part, at in parts if isinstance(part, QuantizedTensor)]
    components = {
        part.name: first.components[part.name]
        if part.tile is None
        else _of_rows([(of_part[part.name], at) for of_part, at in quantized], shape).view(shape[0], -1)
        for part in first.recipe.components
    }
    return QuantizedTensor(components, first.recipe, shape, first.dtype)


def _fits(part: Tensor, first: QuantizedTensor) -> bool:
    """True for parts of one quantized weight: rows with blocks of their own, and the same scale for all, if any."""
    if not isinstance(part, QuantizedTensor) or part.recipe != first.recipe or first.recipe.block_rows > 1:
        return False
    return all(a.equal(b) for a, b in zip(part.of_whole_weight(), first.of_whole_weight(), strict=True))


def _of_rows(parts: list[tuple[Tensor, Tensor | None]], shape: torch.Size) -> Tensor:
    """A matrix with as many rows as those of ``shape``, of matrices of some of them."""
    matrix = torch.empty((shape[:-1].numel(), *parts[0][0].shape[1:]), dtype=parts[0][0].dtype)
    for part, rows in parts:
        assert rows is not None
        matrix[rows.flatten()] = part
    return matrix


def _placed(source: QuantizedTensor, like: Tensor) -> Tensor | None:
    """This rank's part of a weight; None where cuts go through its blocks."""
    try:
        return placed_part(source, like)
    except ValueError:
        return None


# --- files --------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path, doing: str) -> Iterator[tuple[Collection[str], Callable[[str], Tensor]]]:
    """(the keys, a function that reads a key's tensor into host memory)."""
    files: dict[Path, Any] = {}

    def opened(file: Path) -> Any:
        if file not in files:
            files[file] = open_safetensors(file, doing)
        return files[file]

    if (index := path / INDEX).exists():
        where = read_index(index)
    else:  # one file
        file = path if path.is_file() else path / SINGLE
        where = dict.fromkeys(opened(file).keys(), file)
    try:
        yield where, lambda key: opened(where[key]).get_tensor(key)
    finally:
        files.clear()
