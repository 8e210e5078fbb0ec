"""Writes checkpoints that others load: torch.optim, and readers of safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fused_optim.adam import MOMENTS, FusedAdam
from fused_optim.checkpoint.folders import folder_at
from fused_optim.checkpoint.verify import write_checksums
from fused_optim.checkpoint.write import Saver
from fused_optim.options.checks import can_be_updated, check_belongs, check_order, check_whole, describe, some_of
from fused_optim.sharding.collective import distinct, on_all_ranks, parameter_names, this_rank
from fused_optim.sharding.dtensor import full_tensor, has_own_chunks, keep_chunks, local_tensor, rewrap_like
from fused_optim.sharding.model_files import (
    Entry,
    check_gathered,
    safetensors_writer,
    write_model_files,
)
from fused_optim.sharding.model_tensors import FileTensors, file_tensors, names_to_write
from fused_optim.sharding.replicas import check_replicas
from fused_optim.state.torch_form import torch_group, torch_states

_FILE_SUFFIXES = (".pt", ".pth")


@torch.no_grad()
def export_optimizer_checkpoint(
    model: torch.nn.Module, optimizer: FusedAdam, path: str | os.PathLike[str], layout: str = "torch"
) -> None:
    """Write a checkpoint that torch.optim.Adam(W) loads: FP32 moments and one step per parameter, without masters.

    Frozen parameters without states are listed in their param groups alone, as torch.optim saves them.

    ``path`` ending in .pt or .pth: a file of torch.save, written by rank 0, that holds ``optimizer.state_dict()`` by
    parameter names, for ``load_state_dict`` and ``set_optimizer_state_dict``. Otherwise a folder of
    torch.distributed.checkpoint, which holds the same under "optimizer", nested and flattened, and its checksums. Where
    ranks own different parameters (pipeline stages), write a folder and load the flattened form.

    A collective: all ranks call it. Raises on every rank if it fails on one. Raises ValueError for what torch.optim
    cannot continue, ``bias_correction=False``, and for plain tensors that differ between ranks; TypeError for flat
    shards of FSDP1.
    """
    check_order(model, optimizer)
    path = Path(path)
    optimizer.store.exchange_offsets()
    with on_all_ranks(f"exporting to {path}"):
        if layout != "torch":
            raise ValueError(f"layout: expected 'torch', got {layout!r}")
        check_whole(model, optimizer.store.params)
        optimizer.initialize_state()
        optimizer.stepper.scalars.pull(optimizer.store.groups)
        names = _export_names(model, optimizer)
        groups = [_group(optimizer, group, names) for group in optimizer.store.groups]
    check_replicas(f"exporting to {path}", _plain_moments(optimizer, names))
    everyone = distinct(list(names.values()))
    if path.suffix in _FILE_SUFFIXES:
        with on_all_ranks(f"exporting to {path}"):
            if missing := sorted({name for of_rank in everyone for name in of_rank}.difference(names.values())):
                raise ValueError(f"this rank lacks {some_of(missing)}: rank 0 writes what it has; export to a folder")
            for index, param in enumerate(optimizer.store.params):
                if has_own_chunks(param):  # gathering goes by placements, and would mix up rows
                    text = "shards with chunk lists of their own are not gathered into a file; export to a folder"
                    raise TypeError(f"{describe(param, index)}: {text}")
        _export_file(optimizer, names, groups, path)
    else:
        _export_folder(optimizer, names, groups, path)


def _export_names(model: torch.nn.Module, optimizer: FusedAdam) -> dict[Tensor, str]:
    names = parameter_names(model)
    for index, param in enumerate(optimizer.store.params):
        if param not in names:
            raise KeyError(f"{describe(param, index)} is not one of the model's parameters, so it has no name")
    return {param: names[param][0] for param in optimizer.store.params}


def _plain_moments(optimizer: FusedAdam, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """(name, moments) of parameters that are plain tensors."""
    for param, name in names.items():
        if not isinstance(param, DTensor) and param in optimizer.store:
            yield name, map(optimizer.store[param].read, MOMENTS)


def _group(optimizer: FusedAdam, group: Mapping[str, Any], names: Mapping[Tensor, str]) -> dict[str, Any]:
    shown = torch_group(group, optimizer.rule.decoupled)
    shown.pop("param_names", None)  # the parameters have their names here
    return {**shown, "params": [names[param] for param in group["params"]]}


def _states(optimizer: FusedAdam, device: str | None) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    for group in optimizer.store.groups:
        for param in filter(optimizer.store.__contains__, group["params"]):
            yield param, torch_states(optimizer.store[param], group["step"], device)


def _export_folder(optimizer: FusedAdam, names: Mapping[Tensor, str], groups: list[dict[str, Any]], path: Path) -> None:
    doing = f"exporting to {path}"
    with on_all_ranks(doing):
        state = {
            names[param]: {
                name: keep_chunks(rewrap_like(local_tensor(value).detach(), param), param) if name in MOMENTS else value
                for name, value in states.items()
            }
            for param, states in _states(optimizer, "cpu")
        }
        flat = {
            f"param_groups.{name}.{key}": value
            for group in groups
            for name in group["params"]
            for key, value in group.items()
            if key != "params"
        }
    Saver(None).save({"optimizer": {"state": state, "param_groups": groups, **flat}}, folder_at(path), doing)
    write_checksums(path)


def _export_file(optimizer: FusedAdam, names: Mapping[Tensor, str], groups: list[dict[str, Any]], path: Path) -> None:
    state: dict[str, dict[str, Any]] = {}
    for param, states in _states(optimizer, None):
        whole = tree_map_only(Tensor, lambda value: full_tensor(value).cpu(), states)
        if this_rank() == 0:
            state[names[param]] = whole
    temporary = path.with_name(f".{path.name}.tmp")
    with on_all_ranks(f"exporting to {path}"):
        if this_rank() == 0:
            try:
                temporary.unlink(missing_ok=True)  # it might be a link, which is not followed
                torch.save({"state": state, "param_groups": groups}, temporary)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)


# --- masters as safetensors files, in the layout of Hugging Face's sharded models -----------------------------------


@torch.no_grad()
def save_master_safetensors(model: torch.nn.Module, optimizer: FusedAdam, folder: str | os.PathLike[str]) -> None:
    """Write the masters of the optimizer's parameters, one safetensors file per rank, and an index of them.

    Every tensor is whole in one file, so the ranks that have it or a part of it share them out by size; pipeline stages
    have different ones. Tensors are gathered one at a time: a device holds one whole tensor, the host memory of a rank
    what goes into its file. Tied parameters are written once, under their first name; experts of a model of
    transformers one by one, as it writes them itself. The files appear at the end, the index last; no index means an
    export that was not finished.

    A collective: all ranks call it. Raises on every rank if it fails on one. Raises TypeError for flat shards of FSDP1,
    ValueError for plain tensors that differ between ranks.
    """
    check_order(model, optimizer)
    folder = Path(folder)
    optimizer.store.exchange_offsets()
    doing = f"saving masters to {folder}"
    with on_all_ranks(doing):
        safetensors_writer(doing)
        check_whole(model, optimizer.store.params)
        check_belongs(model, optimizer.store.params)
        optimizer.store.resolve_pending()
        optimizer.stepper.sync_written_masters()
        folder.mkdir(parents=True, exist_ok=True)
        params = _named(model, optimizer)
        for name, param in params.items():
            check_gathered(name, param)
    plain = ((name, [optimizer.store.master(p)]) for name, p in params.items() if not isinstance(p, DTensor))
    check_replicas(doing, plain)
    files = file_tensors(model, {name: param.shape for name, param in params.items()})
    write_model_files(folder, {file.names[0]: _entry(optimizer, file, params) for file in files}, doing)


def _named(model: torch.nn.Module, optimizer: FusedAdam) -> dict[str, Tensor]:
    held = {param for param in optimizer.store.params if can_be_updated(param)}
    names = {param: names for param, names in parameter_names(model).items() if param in held}
    return {name: param for param, of_param in names.items() for name in names_to_write(model, of_param)}


def _entry(optimizer: FusedAdam, files: FileTensors, params: dict[str, Tensor]) -> Entry:
    own = {name: params[name] for name in files.names}
    return Entry.like(
        files.empty(own, torch.float32),
        lambda: files.convert({name: full_tensor(optimizer.store.master(param)) for name, param in own.items()}),
    )
