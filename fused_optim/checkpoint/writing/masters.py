"""Writes the FP32 masters as safetensors files in the layout of Hugging Face's sharded models."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adam import FusedAdam
from fused_optim.options.checks import can_be_updated, check_belongs, check_order, check_whole
from fused_optim.sharding.collective import on_all_ranks, parameter_names
from fused_optim.sharding.dtensor import full_tensor
from fused_optim.sharding.model_files import Entry, check_gathered, safetensors_writer, write_model_files
from fused_optim.sharding.model_tensors import FileTensors, file_tensors, names_to_write
from fused_optim.sharding.replicas import check_replicas


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
