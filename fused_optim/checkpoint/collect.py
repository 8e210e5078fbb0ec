"""State dicts of a model and its optimizer, named as ``torch.distributed.checkpoint.state_dict`` names them.

Names are looked up once: at every save that would take longer than all else that the host has to do.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from fused_optim.checkpoint.reading.contents import ENTRIES
from fused_optim.decorators import callers_level
from fused_optim.known_rules import RULES
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import check_belongs, check_order, check_whole
from fused_optim.options.reading import CheckpointDevice, CheckpointFormat
from fused_optim.sharding.collective import distinct, parameter_names, state_name
from fused_optim.sharding.dtensor import has_own_chunks
from fused_optim.state.groups import rule_name

_ADAMS_OF_TORCH = ("torch.optim.Adam", "torch.optim.AdamW")
NO_MASTERS = (
    "this checkpoint has no masters of quantized weights, as these have had no step: after a load they start from "
    "codes, not from the values before quantization. Call optimizer.initialize_state() before such a save"
)


def kind_of(optimizer: Optimizer) -> str:
    """What manifests call it: "adam", an update rule; "torch.optim.AdamW", a class that it is or is derived from."""
    if isinstance(optimizer, ShardedOptimizer):
        return rule_name(optimizer.rule)
    classes = (each for each in type(optimizer).__mro__ if each.__module__.startswith("torch.optim."))
    known = next(classes, Optimizer)
    return type(optimizer).__qualname__ if known is Optimizer else f"torch.optim.{known.__name__}"


def check_kind(optimizer: Optimizer, saved: str | None, what: str, any_rule: bool = False) -> None:
    """Raise ValueError for the checkpoint of another kind of optimizer. None: it does not say.

    ``any_rule``: an optimizer of this package takes those of its others.
    """
    kinds = {kind_of(optimizer), *(RULES if any_rule else ())}
    if isinstance(optimizer, ShardedOptimizer) and optimizer.rule.has_torch_form:
        kinds.update(_ADAMS_OF_TORCH)
    if saved is not None and saved not in kinds:
        hint = "model_only=True loads the model alone"
        raise ValueError(f"{what} is of another optimizer: expected {kind_of(optimizer)}, found {saved}; {hint}")


class _Initialized(defaultdict[Any, Any]):
    """States that are, however few."""

    def __bool__(self) -> bool:
        return True


@contextmanager
def taken_for_initialized(optimizer: Optimizer) -> Iterator[None]:
    """For torch's functions: where there are no states they would make some, by a step that counts and runs hooks."""
    before = optimizer.state
    optimizer.state = shown = _Initialized(dict, before)
    try:
        yield
    finally:
        if optimizer.state is shown:
            optimizer.state = before
            before.clear()
            before.update(shown)


@contextmanager
def _without(optimizer: Optimizer, entries: Mapping[Any, Any]) -> Iterator[None]:
    for key in entries:
        del optimizer.state[key]
    try:
        yield
    finally:
        optimizer.state.update(entries)


class Collector:
    """A collective over the default group. Raises TypeError for flat shards of FSDP1 in an optimizer of this package,
    KeyError for one that has none of the model's parameters, TypeError where the two are exchanged."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        check_order(model, optimizer)
        if isinstance(optimizer, ShardedOptimizer):
            check_whole(model, optimizer.store.params)
            check_belongs(model, optimizer.store.params)
        self._model, self._optimizer = model, optimizer
        self.kind = kind_of(optimizer)
        self._names: dict[Tensor, str] = {}
        self._keys: dict[str, str] = {}
        # Keys of what is no parameter, of which each rank may have its own: batch statistics, say.
        self.buffers: set[str] = set()
        self._wrapped = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        names = sorted(name for names in parameter_names(model).values() for name in names)
        # Of nested param groups torch saves those of one rank: where ranks own different parameters (pipeline stages),
        # every parameter has its settings.
        alike = len(distinct(names)) == 1
        self._options = None if alike else StateDictOptions(flatten_optimizer_state_dict=True)

    def check_form(self, form: CheckpointFormat) -> None:
        """Raise ValueError for a form that the optimizer's shards cannot be loaded from."""
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.store.exchange_offsets()
            if form == "native" and any(map(has_own_chunks, self._optimizer.store.params)):
                raise ValueError("shards with chunk lists of their own load from format='unscaled' only")

    def formats(self) -> dict[str, list[str]]:
        """The formats of the states of an optimizer of this package, of all param groups."""
        if not isinstance(self._optimizer, ShardedOptimizer):
            return {}
        groups = self._optimizer.store.groups
        specs = self._optimizer.rule.states
        found = {spec.name: {str(group[spec.option]) for group in groups if spec.option in group} for spec in specs}
        return {name: sorted(dtype.removeprefix("torch.") for dtype in dtypes) for name, dtypes in found.items()}

    def warn_of_masters(self) -> None:
        """Where those of quantized weights are still to start from values that are in no file."""
        if isinstance(self._optimizer, ShardedOptimizer) and self._optimizer.store.wants_initial_values():
            warnings.warn(NO_MASTERS, UserWarning, stacklevel=callers_level())

    def model_state(self) -> dict[str, Any]:
        state = get_model_state_dict(self._model) if self._wrapped else self._model.state_dict()
        if not self._keys.keys() >= state.keys():
            self._keys = {key: key if self._wrapped else state_name(self._model, key) for key in state}
            parameters = {name for names in parameter_names(self._model).values() for name in names}
            self.buffers = {f"model.{name}" for name in self._keys.values() if name not in parameters}
        return {self._keys[key]: value for key, value in state.items()}

    def optimizer_state(self, form: CheckpointFormat, device: CheckpointDevice) -> dict[str, Any]:
        """``form`` and ``device``: of an optimizer of this package."""
        optimizer = self._optimizer
        if not isinstance(optimizer, ShardedOptimizer):
            with taken_for_initialized(optimizer):
                return get_optimizer_state_dict(self._model, optimizer, options=self._options)
        before = optimizer.checkpoint_format, optimizer.checkpoint_device
        optimizer.checkpoint_format, optimizer.checkpoint_device = form, device
        users = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        try:
            if self._options is None:
                found = self._named(optimizer.state_dict())
            else:
                with _without(optimizer, users):  # which torch takes for parameters
                    found = get_optimizer_state_dict(self._model, optimizer, options=self._options)
            return {**found, ENTRIES: list(map(list, users.items()))} if users else found
        finally:
            optimizer.checkpoint_format, optimizer.checkpoint_device = before

    def _named(self, state: dict[str, Any]) -> dict[str, Any]:
        """By the parameters' names instead of their numbers."""
        assert isinstance(self._optimizer, ShardedOptimizer)
        params = self._optimizer.store.params
        if not all(param in self._names for param in params):
            self._names = {param: names[0] for param, names in parameter_names(self._model).items()}
        names = [self._names[param] for param in params]
        groups = [{**group, "params": [names[id_] for id_ in group["params"]]} for group in state["param_groups"]]
        numbered = [(id_, states) for id_, states in state["state"].items() if type(id_) is int]
        return {"state": {names[id_]: states for id_, states in numbered}, "param_groups": groups}
