"""Optimizer checkpoints on disk, ours and other optimizers'.

Loading recognises who wrote a checkpoint, reads this rank's part of every state into buffers of its own, checks all of
it, and hands it to ``optimizer.load_state_dict`` only when every rank has succeeded. Both kinds of source, a folder of
torch.distributed.checkpoint and a file of torch.save, are seen through the same flat keys, ``state.<id>.exp_avg`` and
``param_groups...``, where the id is a parameter's name or its position.
"""

from __future__ import annotations

import math
import os
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fused_optim.adam import FusedAdam
from fused_optim.checkpoint.checksums import check_finished, read_metadata, verify_items, write_checksums
from fused_optim.formats import join_remainder
from fused_optim.sharding.collective import gather, on_all_ranks, parameter_names, this_rank
from fused_optim.sharding.dtensor import has_own_chunks, keep_chunks, local_tensor, rewrap_like, rewrap_shaped
from fused_optim.sharding.uneven import locate_uneven_shards
from fused_optim.state.states import MASTER, MOMENTS, read_moment
from fused_optim.validate import check_hyperparameters, describe

# `exp_avg.bits` and the like: the parts of a state in the native form
_STATE_KEY = re.compile(r"(?P<id>.+)\.(?P<name>exp_avg|exp_avg_sq|max_exp_avg_sq|master_param|step)(\.(?P<part>\w+))?")
_NATIVE_PARTS = ("bits", "scale", "format", "block", "rem16", "rem8", "check")
_REQUIRED_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_NOT_SETTINGS = ("params", "param_names", "step")
_FILE_SUFFIXES = (".pt", ".pth")
_SINGLE_PROCESS = "torch.distributed is disabled"  # a warning of torch.distributed.checkpoint


@dataclass(frozen=True)
class LoadReport:
    """What a checkpoint was recognised as, and what was loaded from it."""

    source: str  # "torch.optim.AdamW"
    parameters: int  # with states in the checkpoint
    without_states: int  # parameters that had no gradient before the checkpoint was written; their moments are zero
    steps: tuple[int, ...]  # of the param groups
    masters: str  # "seeded from parameters"

    def __str__(self) -> str:
        steps = sorted(set(self.steps))
        parts = [f"{self.source} checkpoint", f"{self.parameters} parameters"]
        if self.without_states:
            parts.append(f"{self.without_states} without states")
        parts.append(f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}")
        return ", ".join([*parts, self.masters])


@torch.no_grad()
def load_optimizer_checkpoint(
    model: torch.nn.Module, optimizer: FusedAdam, path: str | os.PathLike[str], *, verify: bool | None = None
) -> LoadReport:
    """Load this library's, torch.optim.Adam(W)'s, TransformerEngine's or Apex's optimizer checkpoint.

    ``path`` is a folder of torch.distributed.checkpoint or a file of torch.save with full tensors; see
    ``docs/foreign_checkpoints.md``. Load the model's parameters first: masters that the checkpoint lacks are seeded
    from them, and 16-bit remainders complete them. Learning rate, betas, eps, weight decay and step become the
    checkpoint's; state formats and seed stay the optimizer's. A group whose parameters were saved at different steps
    continues from the largest, with a warning.

    ``verify``: compare what belongs to the optimizer with the checksums of ``write_checksums``, each rank a share,
    before any of it is read. None: where there are checksums; True: their absence is an error; False: no.

    A collective: all ranks call it. Raises on every rank if it fails on one; nothing has been changed then.
    """
    path = Path(path)
    locate_uneven_shards(optimizer._params())
    everyone = {name for names in gather(_all_names(model)) for name in names}
    with on_all_ranks(f"loading {path}"):
        source = _open(path)
        keys = _optimizer_keys(source, everyone)
    if verify is not False:
        verify_items(path, keys, required=bool(verify))
    with on_all_ranks(f"loading {path}"):
        loader = _Loader(model, optimizer, source, everyone)
        state_dict, report = loader.prepare()
    with on_all_ranks(f"loading {path}"):
        optimizer.load_state_dict(state_dict)
    return report


def _all_names(model: torch.nn.Module) -> list[str]:
    return [name for names in parameter_names(model).values() for name in names]


# --- sources --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Source(Protocol):
    path: Path
    entries: Mapping[str, _Stored | None]  # by flat key; None: not a tensor

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Fill the tensors, this rank's part of DTensors; read what is no tensor where there is None."""


def _open(path: Path) -> _Source:
    if path.is_file():
        return _File(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a folder of torch.distributed.checkpoint or a file, found nothing")
    check_finished(path)
    return _Folder(path)


class _Folder:
    """A checkpoint of torch.distributed.checkpoint. Each rank reads for itself, so a failure leaves no rank waiting."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata = read_metadata(path)
        self.entries: dict[str, _Stored | None] = {}
        for key, entry in self.metadata.state_dict_metadata.items():
            is_tensor = isinstance(entry, TensorStorageMetadata)
            self.entries[key] = _Stored(tuple(entry.size), entry.properties.dtype) if is_tensor else None

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        self._check_files(wanted)
        self._check_chunks(wanted)
        try:
            return self._load(wanted)
        except (Exception, CheckpointException):
            for key, buffer in wanted.items():  # which one it was
                try:
                    self._load({key: buffer})
                except (Exception, CheckpointException) as error:
                    raise ValueError(f"{key} in {self.path} cannot be read; its file is damaged") from error
            raise

    def _load(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        values = dict(wanted)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _SINGLE_PROCESS)
            dcp.load(values, checkpoint_id=self.path, no_dist=True)
        return values

    def _check_files(self, wanted: Iterable[str]) -> None:
        keys, sizes = set(wanted), {}
        for index, info in self.metadata.storage_data.items():
            if index.fqn not in keys:
                continue
            name = info.relative_path
            if name not in sizes:
                file = self.path / name
                sizes[name] = file.stat().st_size if file.is_file() else None
            if sizes[name] is None:
                raise FileNotFoundError(f"{index.fqn}: its file {name} is missing from {self.path}")
            if sizes[name] < info.offset + info.length:
                expected = f"expected at least {info.offset + info.length} bytes, found {sizes[name]}"
                raise ValueError(f"{index.fqn}: its file {self.path / name} is truncated: {expected}")

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
        try:
            content = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        except Exception as error:
            raise ValueError(f"{path} cannot be read by torch.load ({_first_line(error)}); is it truncated?") from error
        if isinstance(content, (tuple, list)):  # of get_state_dict
            content = dict(enumerate(content))
        if not isinstance(content, Mapping):
            raise ValueError(f"{path}: expected a dict of torch.save, found {type(content).__name__}")
        self.values, _ = flatten_state_dict(content)
        self.entries = {
            key: _Stored(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _copy_part(buffer: Tensor, full: Tensor) -> None:
    if isinstance(buffer, DTensor):
        (chunk,) = buffer.__create_chunk_list__()
        full = full[tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))]
    local_tensor(buffer).copy_(full)


def _buffer(param: Tensor, stored: _Stored) -> Tensor:
    """A tensor in host memory, placed as ``param`` is."""
    if not isinstance(param, DTensor):
        return torch.empty(stored.shape, dtype=stored.dtype)
    if has_own_chunks(param):
        local = torch.empty(local_tensor(param).shape, dtype=stored.dtype)
        return keep_chunks(rewrap_shaped(local, param, stored.shape), param)
    shape, _ = compute_local_shape_and_global_offset(stored.shape, param.device_mesh, param.placements)
    return rewrap_shaped(torch.empty(shape, dtype=stored.dtype), param, stored.shape)


def _native_buffer(param: Tensor, stored: _Stored) -> Tensor:
    """For a part of a state in the native form, which can be cut by rows only: otherwise every rank reads all of it."""
    if isinstance(param, DTensor) and all(p.is_replicate() or p.is_shard(0) for p in param.placements):
        return _buffer(param, stored)
    return torch.empty(stored.shape, dtype=stored.dtype)


# --- the keys of a checkpoint ---------------------------------------------------------------------------------------


@dataclass
class _Contents:
    """An optimizer's flat keys, sorted by parameter; ids are names or positions, as text."""

    states: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)  # id -> state -> part ("": whole) -> key
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # id -> setting -> value
    order: list[list[str]] = field(default_factory=list)  # ids by group, where the checkpoint has groups


def _read_contents(source: _Source, names: Iterable[str]) -> _Contents:
    prefix = _find_prefix(source, set(names))
    contents = _Contents()
    for key in source.entries:
        if match := _state_of(key, prefix):
            parts = contents.states.setdefault(match["id"], {}).setdefault(match["name"], {})
            parts[match["part"] or ""] = key
    first = f"{prefix}param_groups."
    values = _read_small(source, [key for key in source.entries if key.startswith(first)])
    values = {key.removeprefix(first): value for key, value in values.items()}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        owner, _, name = key.rpartition(".")
        groups.setdefault(owner, {})[name] = value
    numbered = [group for group in groups if "params" in groups[group]]
    for group in sorted(numbered, key=int):
        settings = groups.pop(group)
        contents.order.append([str(id_) for id_ in settings.pop("params")])
        contents.settings.update({id_: settings for id_ in contents.order[-1]})
    contents.settings.update(groups)  # the flattened form has a group per parameter
    return contents


def _read_small(source: _Source, keys: Iterable[str]) -> dict[str, Any]:
    """Settings and steps: numbers, texts, tensors of one element."""
    wanted: dict[str, Tensor | None] = {}
    for key in keys:
        stored = source.entries[key]
        if stored is not None and math.prod(stored.shape) != 1:
            raise ValueError(f"{key} in {source.path}: expected one number, found a tensor of shape {stored.shape}")
        wanted[key] = None if stored is None else torch.empty(stored.shape, dtype=stored.dtype)
    return source.read(wanted)


def _state_of(key: str, prefix: str) -> re.Match[str] | None:
    first = f"{prefix}state."
    match = _STATE_KEY.fullmatch(key, len(first)) if key.startswith(first) else None
    return match if match and match["part"] in (None, *_NATIVE_PARTS) else None


def _find_prefix(source: _Source, names: set[str]) -> str:
    """What stands before ``state.`` and ``param_groups.``: the one under which most of the names are known."""
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
        raise ValueError(f"{source.path} holds no Adam states: {expected}, found {found}")
    if len(ranked) > 1 and known[ranked[1]] and known[ranked[0]] == known[ranked[1]]:
        raise ValueError(
            f"{source.path} holds several optimizers for these parameters: under {ranked[0]!r} and {ranked[1]!r}"
        )
    return ranked[0]


def _optimizer_keys(source: _Source, names: Iterable[str]) -> set[str]:
    """All that is read of the source."""
    prefix = _find_prefix(source, set(names))
    return {key for key in source.entries if key.startswith((f"{prefix}state.", f"{prefix}param_groups."))}


# --- loading --------------------------------------------------------------------------------------------------------


class _Loader:
    """Turns a checkpoint into a state dict of one optimizer, checked in full; changes nothing."""

    def __init__(self, model: torch.nn.Module, optimizer: FusedAdam, source: _Source, everyone: set[str]) -> None:
        self.optimizer = optimizer
        self.source = source
        self.names = parameter_names(model)
        self.params = optimizer._params()
        self.contents = _read_contents(source, everyone)
        self.ids = self._match(everyone)
        self.saved_steps = self._read_steps()

    def prepare(self) -> tuple[dict[str, Any], LoadReport]:
        states = self.contents.states
        loaded = [i for i, id_ in enumerate(self.ids) if id_ in states]
        for i in loaded:
            self._check_states(i)
        groups = self._groups()
        state = self._read_states(loaded)
        report = LoadReport(
            source=self._writer(),
            parameters=len(loaded),
            without_states=len(self.ids) - len(loaded),
            steps=tuple(group["step"] for group in groups),
            masters=self._masters(state),
        )
        return {"state": state, "param_groups": groups}, report

    def _name(self, i: int) -> str | None:
        return next(iter(self.names.get(self.params[i], [])), None)

    def _describe(self, i: int) -> str:
        return describe(self.params[i], i, self._name(i))

    def _match(self, everyone: set[str]) -> list[str]:
        """Each parameter's id in the checkpoint."""
        listed = set(self.contents.settings) | set(self.contents.states)
        if listed and all(id_.isdigit() for id_ in listed) and not listed & everyone:
            return self._match_positions()
        ids = [next((n for n in self.names.get(p, ()) if n in listed), None) for p in self.params]
        missing = [i for i, id_ in enumerate(ids) if id_ is None and self.params[i].requires_grad]
        stateless = [i for i, id_ in enumerate(ids) if id_ not in self.contents.states and i not in missing]
        missing += [i for i in stateless if self.params[i].requires_grad and self.contents.states]
        unexpected = sorted(listed - everyone)
        if missing or unexpected:
            self._refuse_other_model([self._describe(i) for i in sorted(missing)], unexpected)
        return [id_ if id_ is not None else "" for id_ in ids]

    def _refuse_other_model(self, missing: list[str], unexpected: list[str]) -> None:
        text = f"{self.source.path} is of another model:"
        if missing:
            text += f" it lacks the states of {len(missing)} of {len(self.params)} parameters: {_some(missing)};"
        if unexpected:
            text += f" the model lacks {len(unexpected)} of its parameters: {_some(unexpected)};"
        raise ValueError(text.removesuffix(";"))

    def _match_positions(self) -> list[str]:
        groups, saved = self.optimizer.param_groups, self.contents.order
        if [len(group["params"]) for group in groups] != [len(ids) for ids in saved]:
            ours, theirs = [len(group["params"]) for group in groups], [len(ids) for ids in saved]
            text = (
                f"{self.source.path} numbers its parameters: expected param groups of {ours} parameters, found {theirs}"
            )
            raise ValueError(text)
        ids = [id_ for group in saved for id_ in group]
        if unexpected := sorted(set(self.contents.states) - set(ids)):
            self._refuse_other_model([], unexpected)
        return ids

    def _read_steps(self) -> dict[str, int]:
        """The step of every id that has one: its group's, or its own as torch.optim keeps it."""
        keys = {
            id_: self.contents.states[id_]["step"][""]
            for id_ in self.ids
            if "" in self.contents.states.get(id_, {}).get("step", {})
        }
        values = _read_small(self.source, keys.values())
        steps = {id_: int(values[key]) for id_, key in keys.items()}
        return steps | {id_: int(s["step"]) for id_, s in self.contents.settings.items() if "step" in s}

    def _check_states(self, i: int) -> None:
        states, param = self.contents.states[self.ids[i]], self.params[i]
        if "max_exp_avg_sq" in states:
            raise ValueError(f"{self._describe(i)}: {self.source.path} was saved with amsgrad=True: not supported")
        if lacking := [name for name in MOMENTS if name not in states]:
            raise ValueError(f"{self._describe(i)}: {self.source.path} lacks its {' and '.join(lacking)}")
        if self.ids[i] not in self.saved_steps:
            text = "has its moments but no step, neither its own nor its param group's; it is not guessed"
            if self.contents.settings and self.ids[i] not in self.contents.settings:
                hint = "where ranks own different parameters, save with flatten_optimizer_state_dict=True"
                text = f"has its moments but lists it in no param group; {hint}"
            raise ValueError(f"{self._describe(i)}: {self.source.path} {text}")
        for name in (*MOMENTS, MASTER):
            if "" in states.get(name, {}):
                self._check_whole(i, name, self.source.entries[states[name][""]], tuple(param.shape))
            elif name in states and has_own_chunks(param):
                text = "does not load into shards with chunk lists of their own; save with checkpoint_format='unscaled'"
                raise TypeError(f"{self._describe(i)}: the native form of {name} in {self.source.path} {text}")

    def _check_whole(self, i: int, name: str, stored: _Stored | None, shape: tuple[int, ...]) -> None:
        what = f"{self._describe(i)}: {name} in {self.source.path}"
        if stored is None:
            raise TypeError(f"{what}: expected a tensor, found another object")
        if stored.shape != shape:
            raise ValueError(f"{what}: expected shape {shape}, found {stored.shape}")
        if name == MASTER and stored.dtype == torch.int16:
            if self.params[i].dtype != torch.bfloat16:
                raise TypeError(f"{what}: int16 remainders belong to a torch.bfloat16 parameter")
        elif not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            raise TypeError(f"{what}: expected a floating-point tensor of at least 16 bits, found {stored.dtype}")

    def _groups(self) -> list[dict[str, Any]]:
        groups, first, behind = [], 0, 0
        for number, group in enumerate(self.optimizer.param_groups):
            members = range(first, first + len(group["params"]))
            first += len(members)
            settings = self._group_settings(number, group, members)
            steps = [self.saved_steps[self.ids[i]] for i in members if self.ids[i] in self.saved_steps]
            step = max(steps, default=0)
            behind += sum(s != step for s in steps)
            self._check_group(number, group, settings, members, step)
            names = [self._name(i) for i in members]  # for messages
            groups.append({**settings, "step": step, "params": list(members), "param_names": names})
        if behind:
            text = f"{behind} of {len(self.params)} parameters were saved at an earlier step than their group's latest"
            reason = "the step is shared by a param group, so they continue from the latest"
            warnings.warn(f"{self.source.path}: {text}; {reason}", stacklevel=5)
        return groups

    def _group_settings(self, number: int, group: Mapping[str, Any], members: Iterable[int]) -> dict[str, Any]:
        """What the checkpoint has for all members alike."""
        found: dict[str, Any] = {}
        owner: dict[str, int] = {}
        for i in members:
            for key, value in self.contents.settings.get(self.ids[i], {}).items():
                if key in _NOT_SETTINGS or (key not in group and key != "initial_lr"):
                    continue
                if key in found and not _equal(found[key], value):
                    both = f"{self._describe(owner[key])} and {self._describe(i)}"
                    raise ValueError(
                        f"param group {number}: {self.source.path} has different values of {key} for {both}, which are "
                        "in one group of this optimizer; build it with the checkpoint's groups"
                    )
                found.setdefault(key, value)
                owner.setdefault(key, i)
        return found

    def _check_group(
        self, number: int, group: Mapping[str, Any], settings: Mapping[str, Any], members: range, step: int
    ) -> None:
        what = f"param group {number}"
        lacking = [key for key in _REQUIRED_SETTINGS if key not in settings]
        trained = [i for i in members if self.params[i].requires_grad]
        if lacking and trained:
            raise ValueError(f"{what}: {self.source.path} lacks its {', '.join(lacking)}")
        if step and trained and not any(self.ids[i] in self.contents.states for i in members):
            text = f"is at step {step} but holds no states of its {len(members)} parameters"
            raise ValueError(f"{what}: {self.source.path} {text}")
        try:
            own = {key: group[key] for key in ("exp_avg_dtype", "exp_avg_sq_dtype")}
            check_hyperparameters({**group, **settings, **own})
        except (TypeError, ValueError) as error:
            raise type(error)(f"{what} in {self.source.path}: {error}") from error

    def _read_states(self, loaded: Iterable[int]) -> dict[int, dict[str, Any]]:
        found = {i: self.contents.states[self.ids[i]] for i in loaded}
        buffers: dict[str, Tensor | None] = {}
        for i, states in found.items():
            for name in (*MOMENTS, MASTER):
                for part, key in states.get(name, {}).items():
                    stored, buffer = self.source.entries[key], _native_buffer if part else _buffer
                    buffers[key] = None if stored is None else buffer(self.params[i], stored)
        values = self.source.read(buffers)
        return {
            i: {name: self._value(i, name, states[name], values) for name in (*MOMENTS, MASTER) if name in states}
            for i, states in found.items()
        }

    def _value(self, i: int, name: str, parts: Mapping[str, str], values: Mapping[str, Any]) -> Any:
        if "" not in parts:
            return _native_state(parts, values)
        value, param = values[parts[""]], self.params[i]
        if name == MASTER and value.dtype == torch.int16:
            master = join_remainder(local_tensor(param.detach()).cpu(), local_tensor(value))
            return rewrap_shaped(master, param, param.shape)
        return value

    def _writer(self) -> str:
        settings = next(iter(self.contents.settings.values()), {})
        if "exp_avg_dtype" in settings:
            return "fused_optim"
        if any("step" in states for states in self.contents.states.values()):
            decoupled = settings.get("decoupled_weight_decay")
            return "torch.optim.Adam(W)" if decoupled is None else f"torch.optim.Adam{'W' * bool(decoupled)}"
        return "TransformerEngine or Apex FusedAdam"

    def _masters(self, state: Mapping[int, Mapping[str, Any]]) -> str:
        if all(param.dtype == torch.float32 for param in self.params):
            return "no masters needed"
        if not any(MASTER in states for states in state.values()):
            return "masters seeded from parameters" if self.optimizer.master_weights else "no masters"
        return "masters loaded" if self.optimizer.master_weights else "parameters written from masters"


def _native_state(parts: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """A state in the native form, as ``optimizer.load_state_dict`` takes it, which checks it before it writes."""
    return {part: values[key] for part, key in parts.items()}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.equal(torch.as_tensor(a).flatten(), torch.as_tensor(b).flatten())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return list(a) == list(b)
    return a == b


def _some(items: list[str]) -> str:
    shown = "; ".join(items[:5])
    return shown if len(items) <= 5 else f"{shown}; and {len(items) - 5} more"


# --- exporting ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def export_optimizer_checkpoint(
    model: torch.nn.Module, optimizer: FusedAdam, path: str | os.PathLike[str], layout: str = "torch"
) -> None:
    """Write a checkpoint that torch.optim.Adam(W) loads: FP32 moments and one step per parameter, without masters.

    ``path`` ending in .pt or .pth: a file of torch.save, written by rank 0, that holds ``optimizer.state_dict()`` by
    parameter names, for ``load_state_dict`` and ``set_optimizer_state_dict``. Otherwise a folder of
    torch.distributed.checkpoint, which holds the same under "optimizer", nested and flattened, and its checksums. Where
    ranks own different parameters (pipeline stages), write a folder and load the flattened form.

    A collective: all ranks call it. Raises on every rank if it fails on one. Raises ValueError for what torch.optim
    cannot continue: ``bias_correction=False``.
    """
    path = Path(path)
    locate_uneven_shards(optimizer._params())
    with on_all_ranks(f"exporting to {path}"):
        if layout != "torch":
            raise ValueError(f"layout: expected 'torch', got {layout!r}")
        optimizer.initialize_state()
        optimizer._scalars.pull(optimizer.param_groups)
        names = _export_names(model, optimizer)
        groups = [_torch_group(optimizer, group, names) for group in optimizer.param_groups]
    everyone = gather(list(names.values()))
    if path.suffix in _FILE_SUFFIXES:
        with on_all_ranks(f"exporting to {path}"):
            if missing := sorted({name for each in everyone for name in each}.difference(names.values())):
                raise ValueError(f"this rank lacks {_some(missing)}: rank 0 writes what it has; export to a folder")
            for index, param in enumerate(optimizer._params()):
                if has_own_chunks(param):  # gathering goes by placements, and would mix up rows
                    text = "shards with chunk lists of their own are not gathered into a file; export to a folder"
                    raise TypeError(f"{describe(param, index)}: {text}")
        _export_file(optimizer, names, groups, path)
    else:
        _export_folder(optimizer, names, groups, path)


def _export_names(model: torch.nn.Module, optimizer: FusedAdam) -> dict[Tensor, str]:
    names = parameter_names(model)
    for index, param in enumerate(optimizer._params()):
        if param not in names:
            raise KeyError(f"{describe(param, index)} is not one of the model's parameters, so it has no name")
    return {param: names[param][0] for param in optimizer._params()}


def _torch_group(optimizer: FusedAdam, group: Mapping[str, Any], names: Mapping[Tensor, str]) -> dict[str, Any]:
    if not group["bias_correction"]:
        raise ValueError("bias_correction=False: torch.optim.AdamW always corrects, so it cannot continue this run")
    expected = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    exported = {key: group.get(key, value) for key, value in expected.items() if key != "params"}
    if "decoupled_weight_decay" in exported:
        exported["decoupled_weight_decay"] = optimizer.adam_w_mode
    if "initial_lr" in group:  # of learning-rate schedulers
        exported["initial_lr"] = group["initial_lr"]
    return {**exported, "params": [names[param] for param in group["params"]]}


def _torch_states(optimizer: FusedAdam, param: Tensor, step: int) -> dict[str, Tensor]:
    """Moments as FP32, in host memory: one parameter at a time passes through the device's."""
    states, slots = optimizer.state[param], optimizer._slots[param]
    local = {name: read_moment(states, slots, name, "cpu").cpu() for name in MOMENTS}
    moments = {name: keep_chunks(rewrap_shaped(value, param, param.shape), param) for name, value in local.items()}
    return {"step": torch.tensor(float(step)), **moments}


def _export_folder(optimizer: FusedAdam, names: Mapping[Tensor, str], groups: list[dict[str, Any]], path: Path) -> None:
    with on_all_ranks(f"exporting to {path}"):
        state = {
            names[param]: _torch_states(optimizer, param, group["step"])
            for group in optimizer.param_groups
            for param in group["params"]
        }
        flat = {
            f"param_groups.{name}.{key}": value
            for group in groups
            for name in group["params"]
            for key, value in group.items()
            if key != "params"
        }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _SINGLE_PROCESS)
            dcp.save({"optimizer": {"state": state, "param_groups": groups, **flat}}, checkpoint_id=path)
    except CheckpointException as error:  # on all ranks; no Exception, so that callers rarely catch it
        raise RuntimeError(f"exporting to {path}: {next(iter(error.failures.values()))[0]}") from error
    write_checksums(path)


def _export_file(optimizer: FusedAdam, names: Mapping[Tensor, str], groups: list[dict[str, Any]], path: Path) -> None:
    state: dict[str, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            full = _full_states(optimizer, param)
            if this_rank() == 0:
                state[names[param]] = {"step": torch.tensor(float(group["step"])), **full}
    temporary = path.with_name(f".{path.name}.tmp")
    with on_all_ranks(f"exporting to {path}"):
        if this_rank() == 0:
            try:
                torch.save({"state": state, "param_groups": groups}, temporary)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)


def _full_states(optimizer: FusedAdam, param: Tensor) -> dict[str, Tensor]:
    states, slots = optimizer.state[param], optimizer._slots[param]
    full = {}
    for name in MOMENTS:
        value: Tensor = rewrap_like(read_moment(states, slots, name), param)
        full[name] = (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
    return full
