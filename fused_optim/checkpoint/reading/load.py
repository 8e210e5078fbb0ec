"""Loads optimizer checkpoints on disk, ours and other optimizers'.

Loading recognises who wrote a checkpoint, reads this rank's part of every state into buffers of its own, checks all of
it, and hands it to ``optimizer.load_state_dict`` only when every rank has succeeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fused_optim.adam import FusedAdam
from fused_optim.checkpoint.reading.buffers import buffer_for, native_buffer_for
from fused_optim.checkpoint.reading.contents import (
    NOT_SETTINGS,
    Contents,
    find_contents,
    nested,
    optimizer_keys,
    read_settings,
    read_small,
    read_steps,
)
from fused_optim.checkpoint.reading.opening import open_source
from fused_optim.checkpoint.reading.source import Source
from fused_optim.checkpoint.storage.checksums import verify_items
from fused_optim.checkpoint.storage.folders import Folder, PathLike, folder_at
from fused_optim.memory.host_memory import locked
from fused_optim.memory.layout import MASTER, STEP
from fused_optim.options.checks import check_whole, describe, some_of
from fused_optim.sharding.collective import distinct, on_all_ranks, parameter_names
from fused_optim.sharding.dtensor import has_own_chunks, local_tensor
from fused_optim.state.remainders import is_remainder, unpack_remainder
from fused_optim.state.state_dict import check, warn_of_earlier_steps

_REQUIRED_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_Keys = Mapping[int, Mapping[str, Mapping[str, str]]]  # parameter's position -> state -> component -> key


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


def load_optimizer_checkpoint(
    model: torch.nn.Module, optimizer: FusedAdam, path: PathLike | Folder, *, verify: bool | None = None
) -> LoadReport:
    """Load this library's, torch.optim.Adam(W)'s, TransformerEngine's or Apex's optimizer checkpoint.

    ``path`` is a folder of torch.distributed.checkpoint, also one that fsspec opens (``s3://...``), a file of
    torch.save with full tensors, or what ``convert`` writes as safetensors; see ``docs/foreign_checkpoints.md``. Code
    that it might hold is not run. Load the model's parameters first: masters that the checkpoint lacks are seeded from
    them, and 16-bit remainders complete them. Learning rate, betas, eps, weight decay and step become the checkpoint's;
    state formats and seed stay the optimizer's. A group whose parameters were saved at different steps continues from
    the largest, with a warning.

    ``verify``: compare what belongs to the optimizer with the checksums of ``write_checksums``, each rank a share,
    before any of it is read. None: where there are checksums; True: their absence is an error; False: no.

    A collective: all ranks call it. Raises on every rank if it fails on one; nothing has been changed then. Raises
    TypeError for flat shards of FSDP1.
    """
    with on_all_ranks(f"loading {path}"):
        check_whole(model, optimizer.store.params)
        source = open_source(path)
    return load_from(model, optimizer, source, verify=verify)


@torch.no_grad()
def load_from(model: torch.nn.Module, optimizer: FusedAdam, source: Source, *, verify: bool | None) -> LoadReport:
    """:func:`load_optimizer_checkpoint` of one that is open."""
    doing = f"loading {source.path}"
    optimizer.store.exchange_offsets()
    everyone = {name for names in distinct(_all_names(model)) for name in names}
    with on_all_ranks(doing):
        contents = find_contents(source, everyone)
    if verify is not False:
        verify_items(folder_at(source.path), optimizer_keys(source, contents.prefix), required=bool(verify))
    with on_all_ranks(doing):
        read_settings(source, contents)
        loader = Loader(model, optimizer, source, contents)
        state_dict, report = loader.prepare()
    with on_all_ranks(doing):
        loader.check_parameters(state_dict["state"])
    on_gpu = any(param.is_cuda for param in optimizer.store.params)
    with on_all_ranks(doing), locked(loader.memory if on_gpu else ()):
        optimizer.load_state_dict(state_dict)
        optimizer.store.resolve_pending()
    return report


def _all_names(model: torch.nn.Module) -> list[str]:
    return [name for names in parameter_names(model).values() for name in names]


class Loader:
    """Turns a checkpoint into a state dict of one optimizer, checked in full; changes nothing."""

    def __init__(self, model: torch.nn.Module, optimizer: FusedAdam, source: Source, contents: Contents) -> None:
        self.optimizer = optimizer
        self.source = source
        self.names = parameter_names(model)
        self.params = optimizer.store.params
        self.contents = contents
        self.ids = self._match(contents.names)
        self.saved_steps = read_steps(self.source, self.contents)
        self.memory: list[Tensor] = []  # that states are read into

    def prepare(self) -> tuple[dict[str, Any], LoadReport]:
        loaded = {i: self.contents.states[id_] for i, id_ in enumerate(self.ids) if id_ in self.contents.states}
        for i in loaded:
            self._check_states(i)
        groups = [self._group(number, members) for number, members in enumerate(self._members())]
        latest = {i: group["step"] for group in groups for i in group["params"]}
        behind = sum(self.saved_steps.get(self.ids[i], step) != step for i, step in latest.items())
        warn_of_earlier_steps(behind, len(latest), str(self.source.path))
        names = self.optimizer.store.state_names
        keys = {i: {name: states[name] for name in names if name in states} for i, states in loaded.items()}
        values = self._read_objects(keys)
        self._check(groups, keys, values)
        state = _nested(keys, values | self._read_tensors(keys))
        report = LoadReport(
            source=self.contents.writer,
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
            text += f" it lacks the states of {len(missing)} of {len(self.params)} parameters: {some_of(missing)};"
        if unexpected:
            text += f" the model lacks {len(unexpected)} of its parameters: {some_of(unexpected)};"
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

    def _check_states(self, i: int) -> None:
        states, param = self.contents.states[self.ids[i]], self.params[i]
        if "max_exp_avg_sq" in states:
            raise ValueError(f"{self._describe(i)}: {self.source.path} was saved with amsgrad=True: not supported")
        if self.ids[i] not in self.saved_steps:
            text = "has its states but no step, neither its own nor its param group's; it is not guessed"
            if self.contents.settings and self.ids[i] not in self.contents.settings:
                hint = "where ranks own different parameters, save with flatten_optimizer_state_dict=True"
                text = f"has its states but lists it in no param group; {hint}"
            raise ValueError(f"{self._describe(i)}: {self.source.path} {text}")
        native = [name for name in self.optimizer.store.state_names if "" not in states.get(name, {"": ""})]
        if native and has_own_chunks(param):
            text = "does not load into shards with chunk lists of their own; save with checkpoint_format='unscaled'"
            raise TypeError(f"{self._describe(i)}: the native form of {native[0]} in {self.source.path} {text}")

    def _members(self) -> Iterator[range]:
        """The positions of each group's parameters."""
        first = 0
        for group in self.optimizer.param_groups:
            yield range(first, first + len(group["params"]))
            first += len(group["params"])

    def _group(self, number: int, members: range) -> dict[str, Any]:
        what = f"param group {number}"
        settings = self._group_settings(number, self.optimizer.param_groups[number], members)
        lacking = [key for key in _REQUIRED_SETTINGS if key not in settings]
        if lacking and any(self.params[i].requires_grad for i in members):
            raise ValueError(f"{what}: {self.source.path} lacks its {', '.join(lacking)}")
        step = max((self.saved_steps.get(self.ids[i], 0) for i in members), default=0)
        names = [self._name(i) for i in members]  # for messages
        return {**settings, "step": step, "params": list(members), "param_names": names}

    def _group_settings(self, number: int, group: Mapping[str, Any], members: Iterable[int]) -> dict[str, Any]:
        """What the checkpoint has for all members alike."""
        found: dict[str, Any] = {}
        owner: dict[str, int] = {}
        for i in members:
            for key, value in self.contents.settings.get(self.ids[i], {}).items():
                if key in NOT_SETTINGS or (key not in group and key != "initial_lr"):
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

    def _read_objects(self, keys: _Keys) -> dict[str, Any]:
        """What is no tensor."""
        return read_small(self.source, [key for key in _all_keys(keys) if self.source.entries[key] is None])

    def _check(self, groups: list[dict[str, Any]], keys: _Keys, objects: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for what does not fit, by shapes and dtypes alone: tensors are read later."""
        described = {
            key: torch.empty(info.shape, dtype=info.dtype, device="meta")
            for key in _all_keys(keys)
            if (info := self.source.entries[key]) is not None
        }
        state = _nested(keys, {**objects, **described})
        for i, states in state.items():
            states[STEP] = self.saved_steps[self.ids[i]]
        try:
            check(self.optimizer.store, {"state": state, "param_groups": groups})
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self.source.path}: {error.args[0]}") from error

    def _read_tensors(self, keys: _Keys) -> dict[str, Any]:
        buffers: dict[str, Tensor | None] = {}
        for i, states in keys.items():
            for component, key in chain.from_iterable(components.items() for components in states.values()):
                buffer = native_buffer_for if component else buffer_for
                if (info := self.source.entries[key]) is not None:
                    buffers[key] = buffer(self.params[i], info)
        self.memory = [local_tensor(buffer) for buffer in buffers.values() if buffer is not None]
        return self.source.read(buffers)

    def check_parameters(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Raise ValueError for parameters that are not those that their remainders belong to. A collective."""
        misfits = []
        for i, states in state.items():
            saved, param = states.get(MASTER), self.params[i]
            if is_remainder(saved):
                loaded = unpack_remainder(param, saved, self._describe(i))
                misfits += [] if loaded.fits(param) else [loaded.misfit()]
        if misfits:  # not before all of them were looked at together
            raise misfits[0]

    def _masters(self, state: Mapping[int, Mapping[str, Any]]) -> str:
        if all(param.dtype == torch.float32 for param in self.params):
            return "no masters needed"
        if not any(MASTER in states for states in state.values()):
            return "masters seeded from parameters" if self.optimizer.master_weights else "no masters"
        return "masters loaded" if self.optimizer.master_weights else "parameters written from masters"


def _all_keys(keys: _Keys) -> Iterator[str]:
    return (key for states in keys.values() for components in states.values() for key in components.values())


def _nested(keys: _Keys, values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """States as ``optimizer.load_state_dict`` takes them: a tensor each or, in the native form, a dict."""
    return {i: {name: nested(own, values) for name, own in states.items()} for i, states in keys.items()}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.equal(torch.as_tensor(a).flatten(), torch.as_tensor(b).flatten())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return list(a) == list(b)
    return bool(a == b)
