"""Writes models with quantized weights as inference servers load them."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_optim.quantized.files import layouts
from fused_optim.quantized.files.layouts import Layout, Readers
from fused_optim.quantized.fp8.kept import plain_values
from fused_optim.quantized.recipes import Float8TensorScaling, NVFP4BlockScaling, Recipe
from fused_optim.quantized.tensor import QuantizedTensor, local_weight
from fused_optim.roles import is_head, is_router
from fused_optim.sharding.collective import gather, on_all_ranks, this_rank
from fused_optim.sharding.dtensor import full_tensor, local_tensor, rewrap_like
from fused_optim.sharding.model_files import Entry, check_gathered, safetensors_writer, write_json, write_model_files
from fused_optim.sharding.model_tensors import (
    FileTensors,
    Holder,
    file_tensors,
    linear_experts,
    names_to_write,
    parameter_holders,
    tensor_names,
)
from fused_optim.sharding.replicas import check_replicas

CONFIG = "config.json"


@torch.no_grad()
def save_quantized_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: Layout = "compressed-tensors",
    *,
    readers: Readers = "servers",
) -> None:
    """Write a model's parameters and buffers as safetensors files, quantized weights as codes and scales.

    In the layout of Hugging Face's sharded models, a file per rank and an index; tied tensors once, experts one by one.
    The ``quantization_config`` is put into ``config.json``, which the model's own configuration may have been saved to
    before. Elements are those of training, bit for bit.

    Plain values, in the weight's dtype, are written of quantized weights that the layout has no words for: those that
    several modules share, of modules that are no linear layers, of routers, of experts of which not all are quantized
    alike, and of output heads in ``"fp8"`` or with blocks of several rows.

    Args:
        layout: ``"compressed-tensors"``, for all recipes, or ``"fp8"``, Hugging Face's fine-grained FP8, for
            ``Float8BlockScaling`` and ``MXFP8BlockScaling``; see ``layouts.py``.
        readers: ``"servers"``: layers that vLLM and SGLang join (queries, keys and values; gate and up) have one FP32
            scale in NVFP4, since these take one for all of them; their scales of blocks are rounded to E4M3 for it, by
            2 ** -4 at most, but for the one with the most elements. ``"transformers"``: all bits are kept, and what
            transformers does not decode is plain: in compressed-tensors experts with scales of blocks, in ``"fp8"``
            weights with 128 x 128 blocks of which the last ones are short; NVFP4 in models with experts is refused.

    A collective: all ranks call it. Raises on every rank if it fails on one: ValueError for weights that the layout
    does not have, and for adapters of PEFT, TypeError for shards with chunk lists of their own. Nothing has been
    written then.
    """
    folder = Path(folder)
    doing = f"saving quantized weights to {folder}"
    with on_all_ranks(doing):
        safetensors_writer(doing)
        layouts.check_arguments(layout, readers)
        _check_merged(model)
        tensors = _tensors(model)
    quantizes = any(gather(any(_recipe(tensor) is not None for tensor in tensors.values())))
    with on_all_ranks(doing):
        written = _written(model, tensors, layout, readers, layout == "compressed-tensors" and quantizes)
    everyone = gather(_modules(written, layout))
    with on_all_ranks(doing):
        quantization = _config(everyone, layout)
        folder.mkdir(parents=True, exist_ok=True)
    check_replicas(doing, _plain_parameters(tensors))
    common = _common_scales(written) if readers == "servers" else {}
    write_model_files(folder, {each.name: _entry(each, layout, common.get(each.name)) for each in written}, doing)
    with on_all_ranks(doing):
        if this_rank() == 0:
            path = folder / CONFIG
            before = json.loads(path.read_text()) if path.exists() else {}
            write_json(path, {**before, **quantization})


@dataclass(frozen=True)
class Written:
    """Tensors that are written together, as the files' tensors need them.

    ``rows``: the rows of a quantized weight in each file tensor, as ``FileTensors.rows`` has them (names only, if files
    have views of it). None: values are written.
    """

    files: FileTensors
    tensors: Mapping[str, Tensor]
    holders: tuple[Holder, ...]
    rows: dict[str, Tensor | None] | None = None

    @property
    def name(self) -> str:
        return self.files.names[0]

    @property
    def weight(self) -> Tensor:
        return self.tensors[self.name]

    def empty(self) -> dict[str, Tensor]:
        """The file tensors without memory, by name."""
        return self.files.empty(self.tensors)

    def values(self) -> dict[str, Tensor]:
        """The file tensors with their values, by name; a collective."""
        return self.files.convert({name: self._whole(tensor.detach()) for name, tensor in self.tensors.items()})

    def matrices(self, values: Tensor) -> dict[str, Tensor]:
        """The file tensors, by name, of values at all elements of a quantized weight."""
        assert self.rows is not None
        if self.files.are_views:
            return {name: matrix.contiguous() for name, matrix in self.files.convert({self.name: values}).items()}
        return {
            name: values if part is None else values.flatten(0, -2)[part.to(values.device)]
            for name, part in self.rows.items()
        }

    @staticmethod
    def _whole(tensor: Tensor) -> Tensor:
        local = local_tensor(tensor)
        quantized = isinstance(local, QuantizedTensor)
        return full_tensor(rewrap_like(local.dequantize(), tensor) if quantized else plain_values(tensor))


def _check_merged(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if any(kind.__module__.startswith("peft.") for kind in type(module).__mro__):
            raise ValueError(
                f"{path or 'the model'}, a {type(module).__name__}, has adapters, whose names no server knows: "
                "merge_and_unload() makes them part of the weights"
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the names that they are written under."""
    names = tensor_names(model)
    return {name: tensor for tensor, all_names in names.items() for name in names_to_write(model, all_names)}


def _written(
    model: nn.Module, tensors: Mapping[str, Tensor], layout: Layout, readers: Readers, linear: bool
) -> list[Written]:
    """Raises TypeError and ValueError for what cannot be written.

    ``linear``: whether the configuration will have readers make linear layers of Llama 4's experts.
    """
    for name, tensor in tensors.items():
        check_gathered(name, tensor)
        if _recipe(tensor) is not None:
            local_weight(tensor).check_quantized()
    holders = parameter_holders(model)
    known = {
        name: tensor
        for name, tensor in tensors.items()
        if _recipe(tensor) is not None and _is_known(model, tensor, holders[tensor], layout, readers)
    }
    experts = [name for name, tensor in known.items() if tensor.dim() == 3]
    all_written = []
    for files in file_tensors(model, {name: tensor.shape for name, tensor in tensors.items()}, experts):
        if linear:
            files = linear_experts(model, files.names[0]) or files
        own_tensors = {name: tensors[name] for name in files.names}
        entry = Written(
            files, own_tensors, tuple(holder for tensor in own_tensors.values() for holder in holders.get(tensor, ()))
        )
        all_written.append(replace(entry, rows=_rows(entry, layout)) if entry.name in known else entry)
    _check_nvfp4(all_written, readers)
    return all_written


def _check_nvfp4(written: list[Written], readers: Readers) -> None:
    """Raise, or warn, if transformers would load experts to other values."""
    quantized = [entry for entry in written if entry.rows is not None and _is_nvfp4(entry)]
    text = "transformers 5.23.0 decodes experts beside NVFP4 without their FP32 scale; vLLM and SGLang read them"
    joined = (entry for entry in written if len(entry.empty()) > 1 and not entry.files.are_views)
    if readers == "transformers" and quantized and any(joined):
        raise ValueError(f"{quantized[0].name}: {text}: use readers='servers', or another recipe")
    experts = [entry.name for entry in quantized if entry.weight.dim() == 3]
    if experts and this_rank() == 0:
        warnings.warn(f"{experts[0]}: {text}", stacklevel=5)


def _recipe(tensor: Tensor) -> Recipe | None:
    local = local_tensor(tensor)
    return local.recipe if isinstance(local, QuantizedTensor) else None


def _is_nvfp4(each: Written) -> bool:
    return isinstance(_recipe(each.weight), NVFP4BlockScaling)


def _is_known(model: nn.Module, weight: Tensor, holders: list[Holder], layout: Layout, readers: Readers) -> bool:
    """True if a layout can describe a quantized weight in its module: a linear layer, or experts of one recipe."""
    recipe, first = local_weight(weight).recipe, holders[0]
    if any(holder.module is not first.module for holder in holders):
        return False
    if readers == "transformers" and not layouts.transformers_reads_blocks(recipe, layout, tuple(weight.shape)):
        return False
    if weight.dim() == 3:
        beside = (param for param in first.module.parameters(recurse=False) if param.dim() == 3)
        reads = readers == "servers" or layouts.transformers_reads_experts(recipe, layout)
        others = map(_recipe, beside)
        return reads and all(other is not None and other.same_format(recipe) for other in others)
    if is_head(first.name) and (layout == "fp8" or recipe.block_rows > 1):  # servers cut heads by single rows
        return False
    return isinstance(first.module, nn.Linear) and first.key == "weight" and not is_router(model, first.path)


def _rows(each: Written, layout: Layout) -> dict[str, Tensor | None] | None:
    """The rows of a quantized weight in each file tensor; None unless these are matrices of whole blocks.

    Raises ValueError for shapes that the layout cannot have.
    """
    weight, recipe = each.weight, local_weight(each.weight).recipe
    if each.files.are_views:
        return dict.fromkeys(each.empty()) if isinstance(recipe, Float8TensorScaling) else None
    rows = each.files.rows(weight.shape)
    if rows is None or any((weight.dim() if part is None else part.dim() + 1) != 2 for part in rows.values()):
        return None
    if recipe.block_rows > 1 and any(part is not None for part in rows.values()):
        return None
    for name, part in rows.items():
        shape = tuple(weight.shape) if part is None else (*part.shape, weight.shape[-1])
        if (problem := layouts.problem(recipe, shape, layout)) is not None:
            raise ValueError(f"{name}: {problem}")
    return rows


# --- the configuration --------------------------------------------------------------------------------------------

Modules = tuple[dict[Recipe, set[str]], set[str]]


def _modules(written: list[Written], layout: Layout) -> Modules:
    """Linear layers that are quantized, by recipe, and all other modules with matrices: by all their names."""
    quantized: dict[Recipe, set[str]] = {}
    plain: set[str] = set()
    for entry in written:
        names = {holder.name for holder in entry.holders}
        files = {name.rpartition(".")[0] for name in (entry.empty() if entry.rows is None else entry.rows)}
        patterns = len(files) > 1 and layout == "compressed-tensors"  # the other one has none
        if entry.rows is not None:
            targets = {_of_experts(name, only=True) for name in files} if patterns else files | names
            of_matrices = local_weight(entry.weight).recipe.for_shape(tuple(entry.weight.shape[-2:]))
            quantized.setdefault(of_matrices, set()).update(targets)
        elif any(tensor.dim() > 1 and isinstance(tensor, nn.Parameter) for tensor in entry.tensors.values()):
            plain |= names | ({_of_experts(name) for name in files} if patterns else files)
    return quantized, plain.difference(*quantized.values())


def _of_experts(name: str, only: bool = False) -> str:
    """compressed-tensors' pattern of this layer of all experts, or of all of their layers, as servers may name others.

    The name itself where it is of no expert.
    """
    expert, _, layer = name.rpartition(".")
    experts, _, number = expert.rpartition(".")
    return rf"re:{re.escape(experts)}\.\d+\.{re.escape(layer) + '$' if only else ''}" if number.isdigit() else name


def _config(everyone: list[Modules], layout: Layout) -> dict[str, Any]:
    """The configuration of all ranks' modules, as pipeline stages have different ones.

    Empty if no weight is quantized.
    """
    by_recipe: dict[Recipe, set[str]] = {}
    for quantized, _ in everyone:
        for recipe, names in quantized.items():
            by_recipe.setdefault(recipe, set()).update(names)
    plain = {name for _, of_rank in everyone for name in of_rank}
    return {"quantization_config": layouts.config(by_recipe, plain, layout)} if by_recipe else {}


# --- tensors ------------------------------------------------------------------------------------------------------


def _plain_parameters(named: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    for name, param in named.items():
        if isinstance(param, nn.Parameter) and not isinstance(param, DTensor):
            local = local_tensor(param.detach())
            if isinstance(local, QuantizedTensor):
                yield name, [local.components[key] for key in local.recipe.of_elements]
            else:
                yield name, [local]


# Layers that servers join to one, by their names beside each other.
_JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)


def _common_scales(written: list[Written]) -> dict[str, float]:
    """The FP32 scale of NVFP4 weights, by their names, that are written with a common one.

    A power of two times that of the largest weight, whose scales of blocks stay exact therefore, and none overflows.
    """
    joined: dict[tuple[str, tuple[str, ...]], dict[str, Tensor]] = {}
    for entry in written:
        for name in entry.rows or () if _is_nvfp4(entry) else ():
            parent, _, layer = name.removesuffix(".weight").rpartition(".")
            for names in _JOINED:
                if layer in names:
                    joined.setdefault((parent, names), {})[entry.name] = entry.weight
    common_scales = {}
    for weights in joined.values():
        scales = {name: local_weight(weight).components["tensor_scale"].item() for name, weight in weights.items()}
        first = scales[max(weights, key=lambda name: weights[name].numel())]
        if first > 0:
            common = first * 2.0 ** max(0, math.ceil(math.log2(max(scales.values()) / first)))
            common_scales.update(dict.fromkeys(scales, common))
    return common_scales


def _entry(each: Written, layout: Layout, common: float | None) -> Entry:
    """``common``: the scale that an NVFP4 weight is to be written with, if not its own."""
    if each.rows is None:
        return Entry.like(each.empty(), each.values)
    weight, recipe = each.weight, local_weight(each.weight).recipe

    def stored(whole: Callable[[str], Tensor]) -> dict[str, Tensor]:
        tensors = {}
        for component in layouts.components(recipe):
            for name, matrix in each.matrices(whole(component)).items():
                suffix, value = layouts.stored(recipe, component, matrix, layout)
                tensors[f"{name}{suffix}"] = value
        return tensors

    empty = stored(lambda _: torch.empty(weight.shape, device="meta"))
    return Entry.like(empty, lambda: stored(lambda component: _whole(weight, component, common)))


def _whole(param: Tensor, component: str, common: float | None) -> Tensor:
    """The FP32 values of one component at every element of the whole weight: it is decoded with ones for the others."""
    local = local_weight(param)
    parts = {
        part.name: local.components[part.name] if part.name == component else _ones(local, part.name)
        for part in local.recipe.components
    }
    values = full_tensor(rewrap_like(local.view_with(parts).values(), param))
    if common is not None and component == "tensor_scale":
        values.fill_(common)
    if common is not None and component == "scale":
        values *= local.components["tensor_scale"].item() / common
    return values


def _ones(local: QuantizedTensor, component: str) -> Tensor:
    """A component of which every entry decodes to one."""
    part = local.components[component]
    if part.dtype == torch.float32:
        return torch.ones_like(part)
    return torch.full_like(part, layouts.one(local.recipe, component))
