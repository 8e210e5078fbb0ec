"""Reads models with quantized weights that were written for inference servers, as initial weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _get_fqns

from fused_optim.optional import optional
from fused_optim.quantized.files import layouts
from fused_optim.quantized.model import finish_initialization
from fused_optim.quantized.tensor import QuantizedTensor
from fused_optim.sharding.collective import on_all_ranks
from fused_optim.sharding.dtensor import local_tensor, placed_part, rewrap_like
from fused_optim.sharding.model_files import INDEX, read_index

_SINGLE = "model.safetensors"


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
            names = {name: found for name in targets if (found := _found(targets[name].names, keys)) is not None}
            if strict:
                _check_names(targets, names, keys)
            for name, found in names.items():
                _load(targets[name].tensor, [read(key) for key in layouts.keys_of(found, keys)], name)
    finish_initialization(model)


class _Target:
    """A parameter or buffer, and all of its names."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.names: list[str] = []


def _targets(model: nn.Module) -> dict[str, _Target]:
    """By the first name. Raises RuntimeError for what has no memory yet."""
    by_tensor: dict[Tensor, _Target] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if local_tensor(value).is_meta:
                raise RuntimeError(f"{name} is on the meta device: call model.to_empty(device=...) first")
            by_tensor.setdefault(value, _Target(value)).names.extend(sorted(_get_fqns(model, name)))
    return {target.names[0]: target for target in by_tensor.values()}


def _found(names: Collection[str], keys: Collection[str]) -> str | None:
    """The name under which files hold a tensor."""
    return next((name for name in names if layouts.keys_of(name, keys)), None)


def _check_names(targets: dict[str, _Target], names: dict[str, str], keys: Collection[str]) -> None:
    missing = sorted(set(targets).difference(names))
    used = {key for found in names.values() for key in layouts.keys_of(found, keys)}
    known = {name for target in targets.values() for name in target.names}
    left = sorted(key for key in set(keys) - used if layouts.weight_of(key) not in known)
    if missing or left:
        texts = [f"the files lack {', '.join(missing[:5])}"] if missing else []
        texts += [f"the model has no {', '.join(left[:5])}"] if left else []
        raise KeyError(f"{' and '.join(texts)} ({len(missing)} and {len(left)} names); strict=False loads the others")


def _load(tensor: Tensor, found: list[Tensor], name: str) -> None:
    local = local_tensor(tensor)
    loaded = layouts.read(found, name, tensor.dtype if isinstance(local, QuantizedTensor) else torch.float32)
    if tuple(loaded.shape) != tuple(tensor.shape):
        raise ValueError(f"{name}: expected shape {tuple(tensor.shape)}, the files have {tuple(loaded.shape)}")
    if isinstance(loaded, QuantizedTensor):
        if isinstance(local, QuantizedTensor) and local.recipe.same_format(loaded.recipe):
            placed = _placed(loaded, tensor)
            if placed is not None:
                tensor.copy_(rewrap_like(placed, tensor))
                local.discard_high_precision_init()  # masters start from what the bytes decode to
                return
        loaded = loaded.values()
    tensor.copy_(rewrap_like(placed_part(loaded, tensor), tensor))


def _placed(source: QuantizedTensor, like: Tensor) -> Tensor | None:
    """This rank's part of a weight; None where cuts go through its blocks."""
    try:
        return placed_part(source, like)
    except ValueError:
        return None


# --- files --------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path, doing: str) -> Iterator[tuple[Collection[str], Callable[[str], Tensor]]]:
    """The keys, and what reads a tensor into host memory."""
    safe_open = optional("safetensors", doing, "safetensors").safe_open
    files: dict[Path, Any] = {}

    def opened(file: Path) -> Any:
        if file not in files:
            files[file] = safe_open(file, "pt")
        return files[file]

    where = _files(path)
    if where is None:
        file = path if path.is_file() else path / _SINGLE
        where = dict.fromkeys(opened(file).keys(), file)
    try:
        yield where, lambda key: opened(where[key]).get_tensor(key)
    finally:
        files.clear()


def _files(path: Path) -> dict[str, Path] | None:
    """The files of all keys, as the index says; None where there is one file without an index."""
    index = path / INDEX
    if not index.exists():
        return None
    return read_index(index)
