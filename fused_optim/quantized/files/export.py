"""Writes models with quantized weights as inference servers load them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.tensor import DTensor

from fused_optim.quantized.files import layouts
from fused_optim.quantized.files.layouts import Layout
from fused_optim.quantized.recipes import Recipe
from fused_optim.quantized.tensor import QuantizedTensor, local_weight
from fused_optim.sharding.collective import gather, on_all_ranks, this_rank
from fused_optim.sharding.dtensor import full_tensor, has_own_chunks, local_tensor, rewrap_like
from fused_optim.sharding.model_files import Entry, safetensors_writer, write_json, write_model_files
from fused_optim.sharding.replicas import check_replicas

CONFIG = "config.json"


@torch.no_grad()
def save_quantized_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], layout: Layout = "compressed-tensors"
) -> None:
    """Write a model's parameters and buffers as safetensors files, quantized weights as codes and scales.

    In the layout of Hugging Face's sharded models, a file per rank and an index; tied tensors once. The
    ``quantization_config`` is put into ``config.json``, which the model's own configuration may have been saved to
    before. Elements are those of training, bit for bit.

    Args:
        layout: ``"compressed-tensors"``, for all recipes, or ``"fp8"``, Hugging Face's fine-grained FP8, for
            ``Float8BlockScaling`` and ``MXFP8BlockScaling``; see ``layouts.py``.

    A collective: all ranks call it. Raises on every rank if it fails on one: ValueError for weights that the layout
    does not have, TypeError for shards with chunk lists of their own. Nothing has been written then.
    """
    folder = Path(folder)
    doing = f"saving quantized weights to {folder}"
    with on_all_ranks(doing):
        safetensors_writer(doing)
        layouts.check_layout(layout)
        named = named_tensors(model)
        for name, tensor in named.items():
            _check(name, tensor, layout)
        own = _modules(model, named)
    everyone = gather(own)
    with on_all_ranks(doing):
        quantization = _config(everyone, layout)
        folder.mkdir(parents=True, exist_ok=True)
    check_replicas(doing, _plain_parameters(named))
    write_model_files(folder, {name: _entry(name, tensor, layout) for name, tensor in named.items()}, doing)
    with on_all_ranks(doing):
        if this_rank() == 0:
            path = folder / CONFIG
            before = json.loads(path.read_text()) if path.exists() else {}
            write_json(path, {**before, "quantization_config": quantization})


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the names that torch.distributed.checkpoint gives them; tied ones once."""
    names: dict[Tensor, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(value, min(_get_fqns(model, name)))
    return {name: value for value, name in names.items()}


def _check(name: str, tensor: Tensor, layout: Layout) -> None:
    local = local_tensor(tensor)
    if has_own_chunks(tensor):  # gathering goes by placements, and would mix up rows
        raise TypeError(f"{name}: shards with chunk lists of their own are not gathered")
    if isinstance(local, QuantizedTensor):
        local.check_quantized()
        problem = layouts.problem(local.recipe, tuple(tensor.shape), layout)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")


Modules = tuple[dict[Recipe, list[str]], bool, list[str]]


def _modules(model: nn.Module, named: dict[str, Tensor]) -> Modules:
    """The modules of quantized weights by recipe, whether these are linear layers, and linear layers that are plain."""
    names = {tensor: name for name, tensor in named.items()}
    linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    quantized: dict[Recipe, list[str]] = {}
    for tensor, name in names.items():
        if isinstance(local_tensor(tensor), QuantizedTensor):
            quantized.setdefault(local_weight(tensor).recipe, []).append(name.rpartition(".")[0])
    plain = [names[weight] for weight in linear if not isinstance(local_tensor(weight), QuantizedTensor)]
    only_linear = all(t in linear for t in names if isinstance(local_tensor(t), QuantizedTensor))
    return quantized, only_linear, [name.rpartition(".")[0] for name in plain]


def _config(everyone: list[Modules], layout: Layout) -> Any:
    """Of all ranks' modules: pipeline stages have different ones."""
    by_recipe: dict[Recipe, set[str]] = {}
    for quantized, _, _ in everyone:
        for recipe, names in quantized.items():
            by_recipe.setdefault(recipe, set()).update(names)
    linear = all(only_linear for _, only_linear, _ in everyone)
    return layouts.config(by_recipe, linear, {name for _, _, plain in everyone for name in plain}, layout)


def _plain_parameters(named: dict[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    for name, param in named.items():
        if isinstance(param, nn.Parameter) and not isinstance(param, DTensor):
            local = local_tensor(param.detach())
            if isinstance(local, QuantizedTensor):
                yield name, [local.components[key] for key in local.recipe.of_elements]
            else:
                yield name, [local]


def _entry(name: str, tensor: Tensor, layout: Layout) -> Entry:
    if not isinstance(local_tensor(tensor), QuantizedTensor):
        return Entry({name: tensor.numel() * tensor.element_size()}, lambda: {name: full_tensor(tensor.detach())})
    recipe = local_weight(tensor).recipe

    def written(whole: Any) -> dict[str, Tensor]:
        return {f"{name}{suffix}": part for suffix, part in layouts.tensors(recipe, whole, layout).items()}

    shapes = written(lambda _: torch.empty(tensor.shape, device="meta"))
    return Entry({key: part.nbytes for key, part in shapes.items()}, lambda: written(partial(_whole, tensor)))


def _whole(param: Tensor, component: str) -> Tensor:
    """The FP32 values of one component at every element of the whole weight: it is decoded with ones for the others."""
    local = local_weight(param)
    parts = {
        part.name: local.components[part.name] if part.name == component else _ones(local, part.name)
        for part in local.recipe.components
    }
    values = local.view_with(parts).values()
    return full_tensor(rewrap_like(values, param))


def _ones(local: QuantizedTensor, component: str) -> Tensor:
    """A component of which every entry decodes to one."""
    part = local.components[component]
    if part.dtype == torch.float32:
        return torch.ones_like(part)
    return torch.full_like(part, layouts.one(local.recipe, component))
