"""Writes checkpoints entry by entry: the values of each are asked for when they are written, and let go then."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from fused_optim.adapters import adapter_of
from fused_optim.checkpoint.storage.checksums import write_checksums
from fused_optim.sharding.model_files import safetensors_writer, write_json
from fused_optim.tools.progress import progress
from fused_optim.tools.reading import OBJECTS


@dataclass(frozen=True)
class Entry:
    """What is to be written, and where in the nested state dict. ``shape``, ``dtype``: None where it is no tensor."""

    path: tuple[str | int, ...]
    read: Callable[[], Any]
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.shape is None else self.empty().nbytes

    def empty(self) -> Tensor:
        """A tensor without values."""
        assert self.shape is not None
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------------


class _Planner(DefaultSavePlanner):
    """Plans tensors without values, and reads these one by one as the writer asks for them."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__()
        self._entries = entries
        self._left: Iterator[Any] = progress(entries, "converting", lambda key: entries[key].nbytes)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = {key: None if e.shape is None else e.empty() for key, e in self._entries.items()}
        self.mappings = {key: entry.path for key, entry in self._entries.items()}
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        next(self._left, None)
        return self._entries[index.fqn].read()


def write_folder(entries: Mapping[str, Entry], folder: Path) -> None:
    """A folder of torch.distributed.checkpoint, and its checksums. Raises what reading an entry raises."""
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({}, storage_writer=writer, planner=_Planner(entries), no_dist=True)
    except CheckpointException as failure:
        raise next(error for error, _ in failure.failures.values()) from None
    write_checksums(folder, no_dist=True)


# --- safetensors --------------------------------------------------------------------------------------------------


def write_safetensors(entries: Mapping[str, Entry], folder: Path, stem: str) -> None:
    """Safetensors files, each no larger than the largest tensor, and their index.

    What is no tensor goes into the first file's header, as JSON. Quantized weights are decoded.

    Raises ImportError without safetensors, ValueError for an object that JSON does not know.
    """
    save_file = safetensors_writer(f"writing {folder}", "tools")
    tensors = {key: entry for key, entry in entries.items() if entry.shape is not None}
    objects = {key: _as_json(key, entry.read()) for key, entry in entries.items() if entry.shape is None}
    parts = _parts({key: entry.nbytes for key, entry in tensors.items()})
    left = progress(tensors, "converting", lambda key: tensors[key].nbytes)
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(parts, 1):
        name = f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        values = {key: _decoded(tensors[key].read()) for key, _ in zip(keys, left, strict=False)}
        header = {"format": "pt", **({OBJECTS: json.dumps(objects)} if objects and number == 1 else {})}
        save_file(values, folder / name, metadata=header)
        weight_map |= dict.fromkeys(keys, name)
    total = sum(entry.nbytes for entry in tensors.values())
    write_json(folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _parts(sizes: Mapping[str, int]) -> list[list[str]]:
    """Neighbours together, as long as they are no larger than the largest."""
    parts: list[list[str]] = [[]]
    limit, size = max(sizes.values(), default=0), 0
    for key, own in sizes.items():
        if parts[-1] and size + own > limit:
            parts.append([])
            size = 0
        parts[-1].append(key)
        size += own
    return parts


def _decoded(value: Tensor) -> Tensor:
    adapter = adapter_of(value)
    return (value if adapter is None else adapter.values(value).to(value.dtype)).contiguous()


def _as_json(key: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_as_json(key, each) for each in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    raise ValueError(f"{key}: safetensors files hold tensors, numbers, texts and lists, not {type(value).__name__}")
