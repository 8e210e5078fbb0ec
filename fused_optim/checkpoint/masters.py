"""Writes the FP32 masters as safetensors files in the layout of Hugging Face's sharded models."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adam import FusedAdam
from fused_optim.checkpoint.replicas import check_replicas
from fused_optim.sharding.collective import gather, on_all_ranks, parameter_names, this_rank
from fused_optim.sharding.dtensor import has_own_chunks
from fused_optim.validate import check_belongs, check_whole

INDEX = "model.safetensors.index.json"


@torch.no_grad()
def save_master_safetensors(model: torch.nn.Module, optimizer: FusedAdam, folder: str | os.PathLike[str]) -> None:
    """Write the masters of the optimizer's parameters, one safetensors file per rank, and an index of them.

    Every tensor is whole in one file, so the ranks that have it or a part of it share them out by size; pipeline stages
    have different ones. Tensors are gathered one at a time: a device holds one whole tensor, the host memory of a rank
    what goes into its file. Tied parameters are written once, under their first name. The files appear at the end, the
    index last; no index means an export that was not finished.

    A collective: all ranks call it. Raises on every rank if it fails on one. Raises TypeError for flat shards of FSDP1,
    ValueError for plain tensors that differ between ranks.
    """
    folder = Path(folder)
    optimizer.store.locate()
    with on_all_ranks(f"saving masters to {folder}"):
        from safetensors.torch import save_file

        check_whole(model, optimizer.store.params)
        check_belongs(model, optimizer.store.params)
        optimizer.store.settle()
        optimizer.follow_parameters()
        folder.mkdir(parents=True, exist_ok=True)
        params = _named(model, optimizer)
        for name, param in params.items():
            if has_own_chunks(param):  # gathering goes by placements, and would mix up rows
                raise TypeError(f"{name}: shards with chunk lists of their own are not gathered")
    plain = ((name, [optimizer.store.master(p)]) for name, p in params.items() if not isinstance(p, DTensor))
    check_replicas(f"saving masters to {folder}", plain)
    held = gather({name: param.numel() for name, param in params.items()})
    sizes = {name: size for of_rank in held for name, size in of_rank.items()}
    owners = _share_out(sizes, held)
    files = _file_names(owners)
    own = _gather_own(optimizer, params, owners)

    name = files.get(this_rank(), "")  # empty where there are more ranks than tensors
    temporary = folder / f".{name}.tmp"
    try:
        with on_all_ranks(f"saving masters to {folder}"):
            if name:
                save_file(own, temporary, metadata={"format": "pt"})
            if this_rank() == 0:  # an older export is not to be taken for this one
                (folder / INDEX).unlink(missing_ok=True)
        with on_all_ranks(f"saving masters to {folder}"):
            if name:
                temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    with on_all_ranks(f"saving masters to {folder}"):
        if this_rank() == 0:
            weight_map = {name: files[owners[name]] for name in sizes}
            _write_index(folder, {"metadata": {"total_size": 4 * sum(sizes.values())}, "weight_map": weight_map})


def _named(model: torch.nn.Module, optimizer: FusedAdam) -> dict[str, Tensor]:
    held = set(optimizer.store.params)
    return {names[0]: param for param, names in parameter_names(model).items() if param in held}


def _share_out(sizes: Mapping[str, int], held: Sequence[Collection[str]]) -> dict[str, int]:
    """The rank that writes each tensor: the largest first, each to the rank that has least of those that hold it."""
    load = [0] * len(held)
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = min((rank for rank, names in enumerate(held) if name in names), key=load.__getitem__)
        load[owners[name]] += max(sizes[name], 1)
    return owners


def _file_names(owners: Mapping[str, int]) -> dict[int, str]:
    writers = sorted(set(owners.values()))
    return {rank: f"model-{i:05d}-of-{len(writers):05d}.safetensors" for i, rank in enumerate(writers, start=1)}


def _gather_own(optimizer: FusedAdam, params: Mapping[str, Tensor], owners: Mapping[str, int]) -> dict[str, Tensor]:
    own = {}
    for name, param in params.items():
        master = optimizer.store.master(param)
        if isinstance(master, DTensor):
            master = master.full_tensor()
        if owners[name] == this_rank():
            own[name] = master.cpu().contiguous()
    return own


def _write_index(folder: Path, index: Mapping[str, object]) -> None:
    temporary = folder / f".{INDEX}.tmp"
    temporary.write_text(json.dumps(index, indent=2) + "\n")
    temporary.replace(folder / INDEX)
