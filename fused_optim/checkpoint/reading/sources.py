"""What checkpoints on disk hold: folders of torch.distributed.checkpoint and files of torch.save.

Both are seen through the same flat keys, ``state.<id>.exp_avg`` and ``param_groups...``, where the id is a parameter's
name or its position.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fused_optim.checkpoint.reading.reader import load
from fused_optim.checkpoint.storage.checksums import check_finished
from fused_optim.checkpoint.storage.folders import Folder, LocalFolder, PathLike, folder_at
from fused_optim.checkpoint.storage.metadata import check_files, read_metadata
from fused_optim.checkpoint.storage.torch_errors import cause
from fused_optim.checkpoint.storage.untrusted import Refused, load_object
from fused_optim.host_memory import room
from fused_optim.sharding.collective import unwrapped_name
from fused_optim.sharding.dtensor import has_own_chunks, keep_chunks, local_tensor, placed_part_of, rewrap_shaped

# `exp_avg.bits` and the like: the parts of a state in the native form
_STATE_KEY = re.compile(r"(?P<id>.+)\.(?P<name>exp_avg|exp_avg_sq|max_exp_avg_sq|master_param|step)(\.(?P<part>\w+))?")
_NATIVE_PARTS = ("bits", "scale", "format", "block", "rem16", "rem8", "check")


@dataclass(frozen=True)
class Stored:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    @property
    def path(self) -> Folder | Path: ...

    @property
    def entries(self) -> Mapping[str, Stored | None]:
        """By flat key; None: not a tensor."""

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Fill the tensors, this rank's part of DTensors; read what is no tensor where there is None."""


def open_source(path: PathLike | Folder, metadata: Metadata | None = None) -> Source:
    """``metadata``: of a folder, where somebody has read it."""
    folder = folder_at(path)
    if isinstance(folder, LocalFolder) and folder.path.is_file():
        return _File(folder.path)
    if not folder.exists():
        text = "expected a folder of torch.distributed.checkpoint or a file, found nothing"
        raise FileNotFoundError(f"{folder}: {text}")
    check_finished(folder)
    return _Folder(folder, read_metadata(folder) if metadata is None else metadata)


class _Folder:
    """A checkpoint of torch.distributed.checkpoint. Each rank reads for itself, so a failure leaves no rank waiting."""

    def __init__(self, path: Folder, metadata: Metadata) -> None:
        self.path, self.metadata = path, metadata
        self.entries: dict[str, Stored | None] = {}
        for key, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self.entries[key] = Stored(tuple(entry.size), entry.properties.dtype)
            else:
                self.entries[key] = None

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        check_files(self.path, self.metadata, wanted.keys())
        self._check_chunks(wanted)
        try:
            return self._load(wanted)
        except (Exception, CheckpointException) as failure:
            for key, buffer in wanted.items():  # which one it was
                try:
                    self._load({key: buffer})
                except (Exception, CheckpointException) as error:
                    if isinstance(cause(error), Refused):
                        raise cause(error) from None
                    raise ValueError(f"{key} in {self.path} cannot be read; its file is damaged") from error
            raise cause(failure) from None

    def _load(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        values = dict(wanted)
        load(values, self.path, self.metadata)
        return values

    def _check_chunks(self, wanted: Iterable[str]) -> None:
        for key in wanted:
            entry = self.metadata.state_dict_metadata[key]
            if isinstance(entry, TensorStorageMetadata):
                held, size = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
                if held < size:
                    raise ValueError(f"{key} in {self.path}: only {held} of its {size} elements were saved")


class _File:
    """A checkpoint of torch.save. Memory-mapped, so that a rank reads little more than its own part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = load_object(path, str(path))
        if isinstance(content, (tuple, list)):  # of get_state_dict
            content = dict(enumerate(content))
        if not isinstance(content, Mapping):
            raise ValueError(f"{path}: expected a dict of torch.save, found {type(content).__name__}")
        self.values, _ = flatten_state_dict(dict(content))
        self.entries: dict[str, Stored | None] = {
            key: Stored(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
            for key, value in self.values.items()
        }

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        for key, buffer in wanted.items():
            if isinstance(self.values[key], DTensor):
                hint = (
                    "save full tensors (StateDictOptions(full_state_dict=True)), or with torch.distributed.checkpoint"
                )
                raise TypeError(f"{key} in {self.path} is one rank's shard; {hint}")
            if buffer is not None:
                _copy_part(buffer, self.values[key])
        return {key: self.values[key] if buffer is None else buffer for key, buffer in wanted.items()}


def _copy_part(buffer: Tensor, full: Tensor) -> None:
    if isinstance(buffer, DTensor):
        (chunk,) = buffer.__create_chunk_list__()
        full = full[tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))]
    local_tensor(buffer).copy_(full)


def buffer_for(param: Tensor, stored: Stored) -> Tensor:
    """A tensor in host memory, placed as ``param`` is."""
    if not isinstance(param, DTensor):
        return room(stored.shape, stored.dtype)
    if has_own_chunks(param):
        local = room(local_tensor(param).shape, stored.dtype)
        return keep_chunks(rewrap_shaped(local, param, stored.shape), param)
    shape, _ = placed_part_of(stored.shape, param.device_mesh, param.placements)
    return rewrap_shaped(room(shape, stored.dtype), param, stored.shape)


def native_buffer_for(param: Tensor, stored: Stored) -> Tensor:
    """For a part of a state in the native form, which can be cut by rows only: otherwise every rank reads all of it."""
    if isinstance(param, DTensor) and all(p.is_replicate() or p.is_shard(0) for p in param.placements):
        return buffer_for(param, stored)
    return room(stored.shape, stored.dtype)


# --- the keys of a checkpoint ---------------------------------------------------------------------------------------


class NoStates(ValueError):
    """Raised for a checkpoint without states of Adam."""


@dataclass
class Contents:
    """An optimizer's flat keys, sorted by parameter; ids are names or positions, as text."""

    states: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)  # id -> state -> part ("": whole) -> key
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # id -> setting -> value
    order: list[list[str]] = field(default_factory=list)  # ids by group, where the checkpoint has groups


def read_contents(source: Source, names: Iterable[str]) -> Contents:
    names = set(names)
    prefix = _find_prefix(source, names)
    contents = Contents()
    for key in source.entries:
        if match := _state_of(key, prefix):
            parts = contents.states.setdefault(_unwrapped(match["id"], names), {}).setdefault(match["name"], {})
            parts[match["part"] or ""] = key
    first = f"{prefix}param_groups."
    values = read_small(source, [key for key in source.entries if key.startswith(first)])
    values = {key.removeprefix(first): value for key, value in values.items()}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        owner, _, name = key.rpartition(".")
        groups.setdefault(owner, {})[name] = value
    numbered = [group for group in groups if "params" in groups[group]]
    for group in sorted(numbered, key=int):
        settings = groups.pop(group)
        contents.order.append([_unwrapped(str(id_), names) for id_ in settings.pop("params")])
        contents.settings.update({id_: settings for id_ in contents.order[-1]})
    # The flattened form has a group per parameter.
    contents.settings.update({_unwrapped(id_, names): settings for id_, settings in groups.items()})
    return contents


def _unwrapped(id_: str, names: set[str]) -> str:
    """The model's name for a parameter that was saved from a wrapped or compiled model under its name there."""
    bare = unwrapped_name(id_)
    return next((name for name in (id_, bare, bare.removeprefix("module.")) if name in names), id_)


def read_small(source: Source, keys: Iterable[str]) -> dict[str, Any]:
    """Settings and steps: numbers, texts, tensors of one element."""
    wanted: dict[str, Tensor | None] = {}
    for key in keys:
        stored = source.entries[key]
        if stored is not None and math.prod(stored.shape) != 1:
            raise ValueError(f"{key} in {source.path}: expected one number, found a tensor of shape {stored.shape}")
        wanted[key] = None if stored is None else torch.empty(stored.shape, dtype=stored.dtype)
    return source.read(wanted)


def read_steps(source: Source, contents: Contents) -> dict[str, int]:
    """The step of every id that has one: its param group's; where that has none its own, as torch.optim keeps it."""
    own = {id_: states["step"][""] for id_, states in contents.states.items() if "" in states.get("step", {})}
    values = read_small(source, own.values())
    steps = {id_: int(values[key]) for id_, key in own.items()}
    return steps | {id_: int(settings["step"]) for id_, settings in contents.settings.items() if "step" in settings}


def _state_of(key: str, prefix: str) -> re.Match[str] | None:
    first = f"{prefix}state."
    match = _STATE_KEY.fullmatch(key, len(first)) if key.startswith(first) else None
    return match if match and match["part"] in (None, *_NATIVE_PARTS) else None


def _find_prefix(source: Source, names: set[str]) -> str:
    """What comes before ``state.`` and ``param_groups.``: the one under which most of the names are known."""
    known: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for key in source.entries:
        for start in re.finditer(r"(?:^|(?<=\.))(?:state\.|param_groups\.)", key):
            prefix = key[: start.start()]
            match = _state_of(key, prefix)
            total[prefix] += bool(match) or start[0] == "param_groups."
            known[prefix] += bool(match and (match["id"] in names or match["id"].isdigit()))
    ranked = sorted(total, key=lambda prefix: (known[prefix], total[prefix]), reverse=True)
    if not ranked or not total[ranked[0]]:
        found = ", ".join(list(source.entries)[:4]) or "nothing"
        expected = "expected keys such as state.<parameter>.exp_avg and param_groups.0.lr"
        raise NoStates(f"{source.path} holds no Adam states: {expected}, found {found}")
    if len(ranked) > 1 and known[ranked[1]] and known[ranked[0]] == known[ranked[1]]:
        raise ValueError(
            f"{source.path} holds several optimizers for these parameters: under {ranked[0]!r} and {ranked[1]!r}"
        )
    return ranked[0]


def optimizer_keys(source: Source, names: Iterable[str]) -> set[str]:
    """All that is read of the source."""
    prefix = _find_prefix(source, set(names))
    return {key for key in source.entries if key.startswith((f"{prefix}state.", f"{prefix}param_groups."))}
