"""Loads what the Checkpointer has saved of an optimizer that is not of this package, as torch.optim's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.optim import Optimizer

from fused_optim.checkpoint.collect import Collector
from fused_optim.checkpoint.reading.dcp_folder import DcpFolder
from fused_optim.checkpoint.storage.torch_errors import cause
from fused_optim.options.checks import some_of

_GROUPS, _STATE = "param_groups.", "state."


def read_other_optimizer(optimizer: Optimizer, states: Collector, source: DcpFolder) -> dict[str, Any]:
    """For :func:`load_other_optimizer`; nothing is changed. Raises ValueError for that of another model or optimizer.

    Parameters that had no states at the save, frozen or without a gradient until then, have none in it.
    """
    with _without_states(optimizer):
        wanted = _nested(states.optimizer_state("unscaled", None))
    absent = [name for name, own in wanted["state"].items() if _keys(name, own).isdisjoint(source.entries)]
    for name in absent:
        del wanted["state"][name]
    flat = states.options is not None
    try:
        loaded = {"optimizer": _flat(wanted) if flat else wanted}
        source.load(loaded)
    except CheckpointException as error:
        raise ValueError(f"{source.path} is of another model or optimizer: {cause(error)}") from error
    found = _nested(loaded["optimizer"])
    listed = {name for group in found["param_groups"] for name in group["params"]}
    if unlisted := [name for name in absent if name not in listed]:
        raise ValueError(f"{source.path} is of another model: it lacks the states of {some_of(unlisted)}")
    return found


def load_other_optimizer(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Parameters that are frozen now keep no states."""
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))


@contextmanager
def _without_states(optimizer: Optimizer) -> Iterator[None]:
    """So that torch gives it states for all parameters that are trained, not those alone that had a gradient."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before, grads = optimizer.state, [param.grad for param in params]
    optimizer.state = defaultdict(dict)
    try:
        for param in params:
            param.grad = None
        yield
    finally:
        optimizer.state = before
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def _keys(name: str, states: Any) -> set[str]:
    return set(flatten_state_dict({"optimizer": {"state": {name: states}}})[0])


def _nested(state: dict[str, Any]) -> dict[str, Any]:
    """Of the flattened form, which has a param group for each parameter; the nested form as it is.

    torch gives a parameter whose states the flattened form lacks empty dicts for them.
    """
    if "state" in state:
        return state
    groups: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith(_GROUPS):
            name, _, setting = key.removeprefix(_GROUPS).rpartition(".")
            groups.setdefault(name, {"params": [name]})[setting] = value
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key.startswith(_STATE):
            name, _, own = key.removeprefix(_STATE).rpartition(".")
            while name not in groups:  # states may be nested
                name, _, before = name.rpartition(".")
                own = f"{before}.{own}"
            found.setdefault(name, {})[own] = value
    return {"state": found, "param_groups": list(groups.values())}


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    states = {f"{_STATE}{name}.{own}": each for name, all_ in state["state"].items() for own, each in all_.items()}
    return states | {
        f"{_GROUPS}{name}.{key}": value
        for group in state["param_groups"]
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
