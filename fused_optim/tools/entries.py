"""Writes checkpoints entry by entry: the values of each are asked for when they are written, and let go then."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from fused_optim.adapters import adapter_of
from fused_optim.checkpoint.archives import Archives
from fused_optim.checkpoint.folders import LocalFolder
from fused_optim.checkpoint.metadata import FILE
from fused_optim.checkpoint.open import OBJECTS, TensorInfo
from fused_optim.checkpoint.verify import write_file
from fused_optim.checkpoint.write import Planner, RankFiles, Writer, set_places, size_of
from fused_optim.sharding.model_files import (
    numbered_files,
    safetensors_writer,
    write_index,
)


@dataclass(frozen=True)
class Entry:
    """An entry to write, and its place in the nested state dict. ``info``: None if it is no tensor."""

    place: tuple[str | int, ...]
    read: Callable[[], Any]
    info: TensorInfo | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.info is None else self.info.nbytes


class _Planner(Planner):
    """Plans tensors without values, and reads these one by one as the writer asks for them."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__()
        self._entries = entries

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = {
            key: None if (info := entry.info) is None else torch.empty(info.shape, dtype=info.dtype, device="meta")
            for key, entry in self._entries.items()
        }
        self.mappings = {key: entry.place for key, entry in self._entries.items()}
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._entries[index.fqn].read()


def write_folder(entries: Mapping[str, Entry], path: Path) -> None:
    """Write a folder of torch.distributed.checkpoint and its checksums, by this process only.

    Raises what reading an entry raises.
    """
    folder, planner = LocalFolder(path), _Planner(entries)
    planner.set_up_planner({}, StorageMeta(), is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    writer = Writer(folder, Archives(), files=1)
    results = writer.write(planner.finish_plan(plan), planner, RankFiles("__0_", sum(map(size_of, plan.items))))
    set_places(metadata, results)
    folder.write(FILE, pickle.dumps(metadata))
    write_file(folder, writer.written.checksums)


def write_safetensors(entries: Mapping[str, Entry], folder: Path, stem: str) -> None:
    """Write safetensors files, each no larger than the largest tensor, and their index.

    Other values go into the first file's header, as JSON. Quantized weights are decoded.

    Raises ImportError without safetensors, ValueError for an object that JSON does not know.
    """
    write = safetensors_writer(f"writing {folder}", "tools")
    tensors = {key: entry for key, entry in entries.items() if entry.info is not None}
    objects = {key: _as_json(key, entry.read()) for key, entry in entries.items() if entry.info is None}
    files = _files({key: entry.nbytes for key, entry in tensors.items()})
    weight_map: dict[str, str] = {}
    header = {OBJECTS: json.dumps(objects)} if objects else {}
    for name, keys in zip(numbered_files(stem, len(files)), files, strict=True):
        write({key: _decoded(tensors[key].read()) for key in keys}, folder / name, **header)
        weight_map |= dict.fromkeys(keys, name)
        header = {}
    write_index(folder, stem, weight_map, sum(entry.nbytes for entry in tensors.values()))


def _files(sizes: Mapping[str, int]) -> list[list[str]]:
    """Keys by file: neighbours share one as long as it is no larger than the largest tensor."""
    files: list[list[str]] = [[]]
    limit, size = max(sizes.values(), default=0), 0
    for key, nbytes in sizes.items():
        if files[-1] and size + nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(key)
        size += nbytes
    return files


def _decoded(value: Tensor) -> Tensor:
    adapter = adapter_of(value)
    return (value if adapter is None else adapter.values(value).to(value.dtype)).contiguous()


def _as_json(key: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_as_json(key, each) for each in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    raise ValueError(f"{key}: safetensors files hold tensors, numbers, texts and lists, not {type(value).__name__}")
