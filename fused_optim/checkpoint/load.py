"""Loads optimizer checkpoints on disk, ours and other optimizers'.

Loading recognises who wrote a checkpoint, reads this rank's part of every state into buffers of its own, checks all of
it, and hands it to ``optimizer.load_state_dict`` only when every rank has succeeded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from fused_optim.checkpoint.folders import Folder, PathLike, Replaced, folder_at
from fused_optim.checkpoint.open import (
    DcpFolder,
    Source,
    assembled,
    buffer_beside,
    buffer_for,
    native_buffer_for,
    open_source,
    setting_after,
)
from fused_optim.checkpoint.plan import (
    AMSGRAD,
    Contents,
    Differences,
    LoadOptions,
    Naming,
    Rename,
    common_settings,
    find_contents,
    nested,
    optimizer_keys,
    read_entries,
    read_small,
    read_steps,
    sort_contents,
)
from fused_optim.checkpoint.verify import verify_items
from fused_optim.memory.layout import MASTER, STEP
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import check_order, check_whole, describe, some_of
from fused_optim.rules import RULE_KEY
from fused_optim.sharding.collective import distinct, on_all_ranks, parameter_names
from fused_optim.sharding.dtensor import has_own_chunks, local_tensor
from fused_optim.state.given import warn_of_earlier_steps
from fused_optim.state.groups import DESCRIPTION, check_rule
from fused_optim.state.remainders import is_remainder, misfits, unpack_remainder
from fused_optim.state.state_dict import check_state_dict, check_states, taken_keys

_Components = Mapping[str, Mapping[str, str]]  # state -> component ("": whole) -> key


@dataclass(frozen=True)
class LoadReport:
    """The kind of checkpoint that was recognised, and the states that were loaded from it."""

    source: str  # "torch.optim.AdamW"
    parameters: int  # with states in the checkpoint
    without_states: int  # parameters that were frozen or had no gradient before the save: they start anew
    steps: tuple[int, ...]  # of the param groups
    masters: str  # "seeded from parameters"
    differences: Differences = field(default_factory=Differences)  # between the checkpoint and the optimizer

    def __str__(self) -> str:
        steps = sorted(set(self.steps))
        parts = [f"{self.source} checkpoint", f"{self.parameters} parameters"]
        if self.without_states:
            parts.append(f"{self.without_states} without states")
        parts.append(f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}")
        parts += [self.masters, *([str(self.differences)] if self.differences else [])]
        return ", ".join(parts)


def load_optimizer_checkpoint(
    model: torch.nn.Module,
    optimizer: ShardedOptimizer,
    path: PathLike | Folder,
    *,
    verify: bool | None = None,
    strict: bool = True,
    partial: Collection[str] = (),
    rename: Rename | None = None,
) -> LoadReport:
    """Load this library's optimizer checkpoint; a FusedAdam loads torch.optim.Adam(W)'s, Apex's, TransformerEngine's.

    ``path`` is a folder of torch.distributed.checkpoint, also one that fsspec opens (``s3://...``), a file of
    torch.save with full tensors, or what ``convert`` writes as safetensors; see ``docs/foreign_checkpoints.md``. Code
    that it might hold is not run. Load the model's parameters first: masters that the checkpoint lacks are seeded from
    them, and 16-bit remainders complete them. Learning rate, betas, eps, weight decay and step become the checkpoint's;
    state formats and seed stay the optimizer's. A group whose parameters were saved at different steps continues from
    the largest, with a warning.

    ``verify``: compare what belongs to the optimizer with the checksums of ``write_checksums``, each rank a share,
    before any of it is read. None: where there are checksums; True: their absence is an error; False: no.

    ``strict=False``: load what fits; parameters that are new, or of another shape now, start anew, and what the
    checkpoint has beyond the model is left out. Where another update rule has made the states (AdamW's, and this is
    Muon), they start anew, masters go on, and param groups keep their hyperparameters. ``partial``: names, or shell
    patterns (``head.*``), of parameters of which alone that is so. ``rename``: names of parameters or modules in the
    checkpoint and what they are called now (``{"encoder": "backbone.encoder"}``), or a function from one name to the
    other. The report's ``differences`` list all of them.

    A collective: all ranks call it. Raises on every rank if it fails on one; nothing has been changed then. Raises
    TypeError for flat shards of FSDP1, ValueError for a checkpoint of another update rule, and of another model, with
    what it lacks and what it has beyond it.
    """
    with on_all_ranks(f"loading {path}"):
        options = LoadOptions.checked(strict, partial, rename)
        check_order(model, optimizer)
        check_whole(model, optimizer.store.params)
        source = open_source(path)
    if len(distinct(source.published)) > 1:
        raise Replaced(f"{path} was replaced by a run that saves there while ranks opened it: load again")
    loader = prepare(model, optimizer, source, options, verify=verify)
    loader.read()
    return loader.load()


def prepare(
    model: torch.nn.Module, optimizer: ShardedOptimizer, source: Source, options: LoadOptions, *, verify: bool | None
) -> Loader:
    """The loader of an open checkpoint, which has been compared with the optimizer; a collective.

    Changes nothing and reads no states. Arguments and errors are those of :func:`load_optimizer_checkpoint`.
    """
    doing = f"loading {source.path}"
    optimizer.store.exchange_offsets()
    own = [name for names in parameter_names(model).values() for name in names]
    everyone = {name for names in distinct(own) for name in names}
    with on_all_ranks(doing):
        contents = find_contents(source, Naming(everyone, options.rename), optimizer.store.state_names)
    if verify is not False:
        metadata = source.metadata if isinstance(source, DcpFolder) else None
        keys = optimizer_keys(source, contents.prefix)
        verify_items(folder_at(source.path), keys, required=bool(verify), metadata=metadata)
    with on_all_ranks(doing):
        sort_contents(source, contents)
        loader = Loader(model, optimizer, source, contents, options)
    return loader


class Loader:
    """Turns a checkpoint into a state dict of one optimizer. All of it is checked when this is made."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: ShardedOptimizer,
        source: Source,
        contents: Contents,
        options: LoadOptions,
    ) -> None:
        self.optimizer = optimizer
        self.source = source
        self.names = parameter_names(model)
        self.params = optimizer.store.params
        self.contents = contents
        self._options = options
        self._differences = Differences()
        self._rules = optimizer.store.rules()
        self.ids = self._match()
        self._restarted = self._of_other_rules()
        untimed = [id_ for param, id_ in zip(self.params, self.ids, strict=True) if not self._rules[param].needs_step]
        self.saved_steps = dict.fromkeys(untimed, 0) | read_steps(self.source, self.contents)
        self.saved_steps |= {self.ids[i]: 0 for i in self._restarted}
        self._saved_states = self._states()
        positions = iter(range(len(self.params)))
        members = [list(islice(positions, len(group["params"]))) for group in optimizer.param_groups]
        self._groups = [self._group(number, own) for number, own in enumerate(members)]
        keys = [key for states in self._saved_states.values() for key in _keys(states)]
        self._objects = read_small(source, [key for key in keys if source.entries[key] is None])
        self._state: dict[int, dict[str, Any]] = {}
        self._entries: dict[Any, Any] = {}
        self._check()

    @torch.no_grad()
    def read(self) -> None:
        """Read the states into host memory, for :meth:`load`. A collective; changes nothing."""
        with on_all_ranks(f"loading {self.source.path}"):
            self._state = self._read()

    @torch.no_grad()
    def load(self) -> LoadReport:
        """Load the optimizer. A collective, to be called once the model's parameters are loaded."""
        doing = f"loading {self.source.path}"
        try:
            with on_all_ranks(doing):  # parameters are those that remainders were split from
                loaded = [
                    (self.params[i], unpack_remainder(self.params[i], saved, self._describe(i)))
                    for i, states in self._state.items()
                    if is_remainder(saved := states.get(MASTER))
                ]
                for remainder in misfits(loaded):
                    raise remainder.misfit()
            with on_all_ranks(doing):
                state = {**self._state, **self._entries}
                self.optimizer.load_state_dict({"state": state, "param_groups": self._groups})
                self.optimizer.store.resolve_pending()
        finally:
            self._state = {}
        going_on = self._saved_states.keys() - self._restarted
        latest = {i: group["step"] for group in self._groups for i in group["params"] if i in going_on}
        behind = sum(self.saved_steps[self.ids[i]] != step for i, step in latest.items())
        warn_of_earlier_steps(behind, len(latest), str(self.source.path))
        return self.report

    @property
    def report(self) -> LoadReport:
        """The report of this load."""
        has_masters = self.optimizer.settings.master_weights
        if all(param.dtype == torch.float32 for param in self.params):
            masters = "no masters needed"
        elif any(MASTER in states for states in self._saved_states.values()):
            masters = "masters loaded" if has_masters else "parameters written from masters"
        else:
            masters = "masters seeded from parameters" if has_masters else "no masters"
        return LoadReport(
            source=self.contents.writer,
            parameters=len(self._saved_states),
            without_states=len(self.ids) - len(self._saved_states),
            steps=tuple(group["step"] for group in self._groups),
            masters=masters,
            differences=self._differences,
        )

    def _name(self, i: int) -> str | None:
        return next(iter(self.names.get(self.params[i], [])), None)

    def _describe(self, i: int) -> str:
        return describe(self.params[i], i, self._name(i))

    def _match(self) -> list[str]:
        """Each parameter's id in the checkpoint; "" where it has nothing for it."""
        known, saved = self.contents.naming.known, self.contents.states
        listed = set(self.contents.settings) | set(saved)
        if self.contents.is_numbered:
            return self._match_positions()
        ids = [next((n for n in self.names.get(p, ()) if n in listed), "") for p in self.params]
        new = [i for i, id_ in enumerate(ids) if not id_ and self.params[i].requires_grad]
        untied = {name for names in self.names.values() for name in [n for n in names if n in listed][1:]}
        removed = sorted((listed - known) | untied)
        missing = [self._describe(i) for i in new if not self._is_admitted(i)]
        unexpected = [name for name in removed if not self._options.admits(name)]
        if missing or unexpected:
            shown = [f"{name} (tied in the model)" if name in untied else name for name in unexpected]
            self._refuse_other_model(missing, shown)
        trainable = [i for i, id_ in enumerate(ids) if id_ and id_ not in saved and self.params[i].requires_grad]
        self._differences = Differences(
            new=tuple(map(self._shown, new)),
            removed=tuple(removed),
            renamed=self.contents.naming.renamed,
            unfrozen=tuple(map(self._shown, trainable)) if saved else (),
        )
        return ids

    def _refuse_other_model(self, missing: list[str], unexpected: list[str]) -> None:
        texts = []
        if missing:
            texts.append(f"it lacks the states of {len(missing)} of {len(self.params)} parameters: {some_of(missing)}")
        if unexpected:
            texts.append(f"the model lacks {len(unexpected)} of its parameters: {some_of(unexpected)}")
        hint = "strict=False loads what fits, rename= what is called otherwise"
        raise ValueError(f"{self.source.path} is of another model: {'; '.join(texts)}; {hint}")

    def _is_admitted(self, i: int) -> bool:
        return any(map(self._options.admits, self.names.get(self.params[i], ())))

    def _shown(self, i: int) -> str:
        return self._name(i) or f"parameter {i}"

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

    def _of_other_rules(self) -> set[int]:
        """Parameters whose states another update rule has made: they start anew, and their masters go on.

        Raises ValueError where ``strict`` does not admit it.
        """
        restarted = set()
        for i, (param, id_) in enumerate(zip(self.params, self.ids, strict=True)):
            try:
                check_rule(self._rules[param], [self.contents.settings.get(id_, {})], str(self.source.path))
            except ValueError as error:
                if not self._is_admitted(i):
                    hint = "strict=False starts the states of such parameters anew, and keeps their masters"
                    raise ValueError(f"{error}; {hint}") from None
                restarted.add(i)
        self._differences = replace(self._differences, restarted=tuple(map(self._shown, sorted(restarted))))
        return restarted

    def _states(self) -> dict[int, _Components]:
        """The keys of each parameter's states in the checkpoint, by component. Notes which parameters were reshaped."""
        names, saved = self.optimizer.store.state_names, self.contents.states
        by_parameter: dict[int, _Components] = {}
        reshaped = []
        for i, id_ in enumerate(self.ids):
            if id_ not in saved:
                continue
            states = {name: saved[id_][name] for name in names if name in saved[id_]}
            if i in self._restarted:
                states = {name: components for name, components in states.items() if name == MASTER}
            else:
                if self._is_admitted(i):
                    objects = {key: None for key in _keys(states) if self.source.entries[key] is None}
                    values = {**self._described(states), **self.source.read(objects)}
                    found = {name: nested(components, values) for name, components in states.items()}
                    try:
                        check_states(self._rules[self.params[i]], self.params[i], found, "")
                    except (KeyError, RuntimeError, TypeError, ValueError):
                        reshaped.append(self._shown(i))
                        continue
                self._check_states(i)
            by_parameter[i] = states
        self._differences = replace(self._differences, reshaped=tuple(reshaped))
        return by_parameter

    def _check_states(self, i: int) -> None:
        states, param = self.contents.states[self.ids[i]], self.params[i]
        if unknown := sorted(states.keys() - {*self.optimizer.store.state_names, STEP}):
            reason = (
                "amsgrad=True: not supported" if unknown == [AMSGRAD] else f"{', '.join(unknown)}: another optimizer's"
            )
            raise ValueError(f"{self._describe(i)}: {self.source.path} was saved with {reason}")
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

    def _group(self, number: int, members: list[int]) -> dict[str, Any]:
        """The group as a state dict has it, with the settings on which all members agree in the checkpoint."""
        group = self.optimizer.store.groups[number]

        def taken(i: int) -> dict[str, Any]:
            if i in self._restarted:  # hyperparameters of another rule mean something else
                return {}
            found = self.contents.settings.get(self.ids[i], {})
            keys = {*taken_keys(self.optimizer.store, group, found), *DESCRIPTION, RULE_KEY}
            return {key: value for key, value in found.items() if key in keys}

        described = ((self._describe(i), taken(i)) for i in members)
        settings = common_settings(self.source, f"param group {number}", described)
        rule = self.optimizer.rule.for_group(group)
        lacking = [key for key in ("lr", *rule.repr_keys, "weight_decay") if key not in settings]
        saved = [i for i in members if self.ids[i] and i not in self._restarted]
        if lacking and any(self.params[i].requires_grad for i in saved):
            raise ValueError(f"param group {number}: {self.source.path} lacks its {', '.join(lacking)}")
        step = max((self.saved_steps.get(self.ids[i], 0) for i in saved if i in self._saved_states), default=0)
        names = [self._name(i) for i in members]  # for messages
        return {**settings, "step": step, "params": members, "param_names": names}

    def _described(self, states: _Components) -> dict[str, Tensor]:
        """Tensors without memory (``meta``) of the shapes and dtypes of these states, by key."""
        infos = {key: self.source.entries[key] for key in _keys(states)}
        return {
            key: torch.empty(info.shape, dtype=info.dtype, device="meta")
            for key, info in infos.items()
            if info is not None
        }

    def _check(self) -> None:
        """Raise TypeError or ValueError for states that do not fit, by shapes and dtypes: tensors are read later."""
        state: dict[int, dict[str, Any]] = {}
        for i, states in self._saved_states.items():
            values = self._objects | self._described(states)
            state[i] = self._zeros(i) | {name: nested(components, values) for name, components in states.items()}
            state[i][STEP] = self.saved_steps[self.ids[i]]
        try:
            check_state_dict(self.optimizer.store, {"state": state, "param_groups": self._groups})
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self.source.path}: {error.args[0]}") from error

    def _read(self) -> dict[int, dict[str, Any]]:
        """States as ``optimizer.load_state_dict`` takes them: a tensor each or, in the native form, a dict."""
        buffers: dict[str, Tensor | None] = {}
        for i, states in self._saved_states.items():
            for component, key in chain.from_iterable(components.items() for components in states.values()):
                buffer = native_buffer_for if component else buffer_for
                if (info := self.source.entries[key]) is not None:
                    buffers[key] = buffer(self.params[i], info)
        others = {i: self.contents.others.get(id_, {}) for i, id_ in enumerate(self.ids)}
        for i, keys in others.items():
            buffers |= {key: buffer_beside(self.params[i], self.source.entries[key]) for key in keys.values()}
        values = self._objects | self.source.read(buffers)
        state: dict[int, dict[str, Any]] = {i: {} for i in range(len(self.ids)) if i in self._saved_states or others[i]}
        self._entries = read_entries(self.source, self.contents.prefix)
        for i, own in state.items():
            own |= self._zeros(i) | {name: nested(keys, values) for name, keys in self._saved_states.get(i, {}).items()}
            own |= assembled({setting_after(self.source.place(key), t): values[key] for t, key in others[i].items()})
        return state

    def _zeros(self, i: int) -> dict[str, Tensor]:
        """Zeros in place of the states of a restarted parameter: whole ones without memory.

        Empty for other parameters.
        """
        if i not in self._restarted:
            return {}
        param = self.params[i]
        zero = torch.zeros((), device=local_tensor(param).device).expand(param.shape)
        return {spec.name: zero for spec in self._rules[param].states}


def _keys(states: _Components) -> Iterator[str]:
    return (key for components in states.values() for key in components.values())
