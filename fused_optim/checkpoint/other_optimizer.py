"""Loads what the Checkpointer has saved of an optimizer that is not of this package, as torch.optim's.

As in torch.optim, its hyperparameters become the checkpoint's, and what users keep in states and param groups is
loaded. Which states it has, nothing but a step of it knows.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fused_optim.checkpoint.collect import taken_for_initialized
from fused_optim.checkpoint.reading.buffers import buffer_beside
from fused_optim.checkpoint.reading.contents import common_settings, find_others, sort_contents
from fused_optim.checkpoint.reading.dcp_folder import DcpFolder
from fused_optim.checkpoint.reading.leeway import Naming
from fused_optim.checkpoint.reading.model import misfit
from fused_optim.checkpoint.storage.nested import Path, assembled, flat, setting_after
from fused_optim.options.checks import describe, some_of
from fused_optim.sharding.collective import parameter_names

_PREFIX = "optimizer."
_NO_OPTIONS = ("params", "param_names")  # of a param group
_States = dict[Tensor, dict[str, Any] | None]  # of trained parameters; None: not known


class OtherLoader:
    """Compares names and param groups when it is made, then states; nothing is changed before :meth:`load`.

    ``everyone``: the names of all ranks' models. ``is_known``: the checkpoint names its optimizer, which is this kind.
    Raises ValueError for the checkpoint of another model or optimizer.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, source: DcpFolder, everyone: Collection[str], is_known: bool
    ) -> None:
        self._model, self._optimizer, self._source, self._is_known = model, optimizer, source, is_known
        self._is_flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        self._contents = find_others(source, Naming(everyone), _PREFIX)
        sort_contents(source, self._contents)
        self._names = self._match(set(everyone))
        self._check_partition()
        self._groups = [self._group(number, group) for number, group in enumerate(optimizer.param_groups)]
        self._buffers: dict[str, Tensor | None] = {}
        self._places: dict[str, tuple[str, Path]] = {}  # the parameter's name, the state's own place
        self._state: dict[str, dict[str, Any]] = {}
        self._before = optimizer.state, optimizer.param_groups

    def compare_states(self) -> None:
        """With those of the optimizer. A collective under FSDP1. Takes the memory that states are read into."""
        saved = self._contents.others
        params = {p for p, names in self._names.items() if p.requires_grad or not saved.keys().isdisjoint(names)}
        current = _first_states(self._optimizer, self._optimizer.param_groups, params, keep=False)
        expected = _first_states(self._optimizer, self._groups, params)
        self._check_options(expected, current)
        with _set_aside(self._optimizer):
            self._optimizer.param_groups = self._groups
            self._optimizer.state = defaultdict(dict, {p: own for p, own in expected.items() if own is not None})
            with taken_for_initialized(self._optimizer):
                named: Any = get_optimizer_state_dict(self._model, self._optimizer)["state"]
        for param in expected:
            for name in self._names[param]:
                if keys := saved.get(name):  # without any it had no gradient, and starts anew
                    self._match_states(name, param, keys, named.get(name, {}))

    def read(self) -> None:
        """The states that were compared."""
        found: dict[str, dict[Path, Any]] = {}
        for key, value in self._source.read(self._buffers).items():
            name, place = self._places[key]
            found.setdefault(name, {})[place] = value
        self._state = {name: assembled(values) for name, values in found.items()}

    def load(self) -> None:
        """What was read."""
        named = [{**g, "params": [name for p in g["params"] for name in self._names[p]]} for g in self._groups]
        state: Any = {"state": self._state, "param_groups": named}
        try:
            if not self._is_flat:
                self._optimizer.load_state_dict(state)
                self._put_texts()
                return
            with taken_for_initialized(self._optimizer):
                set_optimizer_state_dict(self._model, self._optimizer, state, options=StateDictOptions(strict=False))
        except KeyError as error:  # some of torch.optim's ask for a step of whatever has any state
            kind = type(self._optimizer).__name__
            text = f"{kind} loads nothing of parameters that have no states of its own yet: it lacks {error}"
            raise ValueError(f"{self._source.path}: {text}") from error

    def _put_texts(self) -> None:
        """torch.optim takes texts in states apart, as if they were lists."""
        for param, names in self._names.items():
            saved, loaded = self._state.get(names[0], {}), self._optimizer.state.get(param, {})
            loaded.update({key: _with_texts(loaded[key], saved[key]) for key in loaded.keys() & saved.keys()})

    def undo(self) -> None:
        """Of a load that has failed, here or on another rank: torch.optim puts new states and param groups there."""
        self._optimizer.state, self._optimizer.param_groups = self._before

    # --- names and param groups ---------------------------------------------------------------------------------

    def _match(self, everyone: Collection[str]) -> dict[Tensor, list[str]]:
        """Each parameter's name in the checkpoint; several for a flat one of FSDP1."""
        names, listed = parameter_names(self._model), self._contents.settings.keys()
        found, missing = {}, []
        for i, param in enumerate(chain.from_iterable(group["params"] for group in self._optimizer.param_groups)):
            own = names.get(param, [])
            if not own:
                raise ValueError(f"{describe(param, i)} is not one of the model's parameters, so it has no name")
            met = [name for name in own if name in listed] or own
            found[param] = met if self._is_flat else met[:1]
            missing += [own[0]] if param.requires_grad and listed.isdisjoint(own) else []
        removed = sorted(listed - set(everyone))
        texts = [f"it lacks the states of {some_of(missing)}"] if missing else []
        texts += [f"the model lacks {len(removed)} of its parameters: {some_of(removed)}"] if removed else []
        if texts:
            raise ValueError(f"{self._source.path} is of another model: {'; '.join(texts)}")
        return found

    def _check_partition(self) -> None:
        """Raise ValueError where the checkpoint's param groups are not those of the optimizer, in any order."""
        groups = self._optimizer.param_groups
        number = {name: i for i, group in enumerate(groups) for p in group["params"] for name in self._names[p]}
        saved = self._contents.order  # none where each parameter has its settings
        met = [{number[name] for name in names if name in number} for names in saved]
        numbers = list(chain.from_iterable(met))
        fits = len(saved) == len(groups) and max(map(len, met)) <= 1 and len(set(numbers)) == len(numbers)
        if saved and not fits:
            ours, theirs = [len(group["params"]) for group in groups], [len(names) for names in saved]
            raise ValueError(
                f"{self._source.path} has other param groups: expected groups of {ours} parameters, found {theirs}"
            )

    def _group(self, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """As it is to be: with the checkpoint's entries; users' and schedulers' that it lacks stay."""
        what, listed = f"param group {number}", self._contents.settings
        members = [name for param in group["params"] for name in self._names[param] if name in listed]
        taken = (
            (name, {key: value for key, value in listed[name].items() if key not in _NO_OPTIONS}) for name in members
        )
        settings = common_settings(self._source, what, taken)
        options = self._optimizer.defaults.keys() & group.keys() - {*_NO_OPTIONS}
        if lacking := sorted(options - settings.keys()) if members else []:
            raise ValueError(f"{what}: {self._source.path} is of another optimizer: it lacks {', '.join(lacking)}")
        return {**_copied_group(group), **settings, "params": group["params"]}

    # --- states -------------------------------------------------------------------------------------------------

    def _check_options(self, saved: _States, current: _States) -> None:
        """Raise ValueError where the checkpoint's options come with other states than the optimizer's, as amsgrad."""
        for number, (theirs, ours) in enumerate(zip(self._groups, self._optimizer.param_groups, strict=True)):
            for param in ours["params"]:
                found, expected = saved.get(param), current.get(param)
                if found is None or expected is None or found.keys() == expected.keys():
                    continue
                options = [key for key in self._optimizer.defaults if bool(theirs.get(key)) != bool(ours.get(key))]
                shown = ", ".join(f"{key}={theirs.get(key)} (here {ours.get(key)})" for key in options)
                states = ", ".join(sorted(map(str, found.keys() ^ expected.keys())))
                raise ValueError(
                    f"param group {number}: {self._source.path} was saved with {shown or 'other options'}, on which "
                    f"{states} depends: build the optimizer with the same"
                )

    def _match_states(self, name: str, param: Tensor, keys: Mapping[str, str], own: dict[str, Any]) -> None:
        """What one parameter's are read into; those that are not among its ``own`` are users'.

        Users may also keep something of a parameter that had no gradient yet.
        """
        first = f"{_PREFIX}state.{name}."
        values, places = flat({"optimizer": {"state": {name: own}}})
        expected = {key.removeprefix(first): value for key, value in values.items()}
        has_own = not self._is_known or not expected.keys().isdisjoint(keys)
        if lacking := sorted(expected.keys() - keys.keys()) if has_own else []:
            raise ValueError(f"{self._source.path} is of another optimizer: it lacks {', '.join(lacking)} of {name}")
        for text, key in keys.items():
            info, current = self._source.entries[key], expected.get(text)
            if text in expected and (differs := misfit(current, info)):
                raise ValueError(f"{self._source.path}: {text} of {name}: {differs}")
            beside = None if text in expected else buffer_beside(param, info)
            self._buffers[key] = current if isinstance(current, Tensor) else beside
            place = places[first + text][3:] if text in expected else setting_after(self._source.place(key), text)
            self._places[key] = name, place


# --- what a step does, without its effects -----------------------------------------------------------------------


def _first_states(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], params: Collection[Tensor], keep: bool = True
) -> _States:
    """What the first step gives these parameters: each by itself, zeros with gradients of zero. ``keep``: else names.

    Not known of optimizers that cannot step so, such as ones that need a closure.
    """
    found: _States = {}
    devices = {p.device for group in groups for p in group["params"] if p.is_cuda}
    with _set_aside(optimizer), _without_step_hooks(optimizer), torch.random.fork_rng(devices):
        for group in groups:
            for param in filter(params.__contains__, group["params"]):
                own = _states_of_zeros(optimizer, group, torch.zeros_like(param))
                found[param] = own if keep or own is None else dict.fromkeys(own)
    return found


def _states_of_zeros(optimizer: Optimizer, group: Mapping[str, Any], zeros: Tensor) -> dict[str, Any] | None:
    zeros.grad = torch.zeros_like(zeros)
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = [{**_copied_group(group), "params": [zeros]}]
    try:
        type(optimizer).step(optimizer)  # not the instance's: schedulers count the calls of that
    except Exception:
        return None
    return dict(optimizer.state.get(zeros, {}))


@contextmanager
def _set_aside(optimizer: Optimizer) -> Iterator[None]:
    """Whatever happens to the optimizer meanwhile is undone, and its parameters have no gradients."""
    kept, groups, state = dict(vars(optimizer)), optimizer.param_groups, optimizer.state
    grads = {param: param.grad for group in groups for param in group["params"]}
    try:
        vars(optimizer).update({name: _copied(value) for name, value in kept.items()})
        for param in grads:
            param.grad = None
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(kept)
        optimizer.param_groups, optimizer.state = groups, state
        for param, grad in grads.items():
            param.grad = grad


@contextmanager
def _without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """In what is set aside: neither its own nor those of all optimizers."""
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    of_all: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    hooks = [(each, dict(each)) for each in of_all]
    try:
        for each, _ in hooks:
            each.clear()
        yield
    finally:
        for each, kept in hooks:
            each.update(kept)


def _with_texts(loaded: Any, saved: Any) -> Any:
    """What torch.optim has made of saved values, with their texts; what the optimizer itself has put there stays."""
    if type(loaded) is not type(saved):
        return loaded
    if isinstance(saved, dict):
        return {key: _with_texts(item, saved[key]) if key in saved else item for key, item in loaded.items()}
    if isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(saved)(_with_texts(*pair) for pair in zip(loaded, saved, strict=True))
    return saved if isinstance(saved, str) else loaded


def _copied_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def _copied(value: Any) -> Any:
    """So that changes in place have no effect elsewhere."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict | set) else value
