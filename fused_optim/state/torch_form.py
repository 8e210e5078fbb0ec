"""The "torch" form: state dicts as torch.optim.AdamW has them, for it to load: made and read here, at the border.

FP32 moments and a ``step`` for each parameter, the keys of its param groups and no others; no masters. Running param
groups and states have our own keys.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon  # themselves, whatever programs put under their names later

from fused_optim.memory.layout import MASTER, STEP
from fused_optim.options.table import IMPLEMENTATIONS
from fused_optim.state.groups import DESCRIPTION
from fused_optim.state.param_state import ParamState
from fused_optim.state.state_dict import numbers_of, packed
from fused_optim.state.store import StateStore

_OWN_KEYS = {STEP, "bias_correction", "exp_avg_dtype", "exp_avg_sq_dtype", *DESCRIPTION}
_SHARED_KEYS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


def torch_state_dict(store: StateStore, device: str | None) -> dict[str, Any]:
    """A state dict in this form. FP32 moments go by reference.

    Raises ValueError for a run that torch.optim.AdamW cannot continue.
    """
    state, packed_groups = packed(store)
    steps = {param: group[STEP] for group in store.groups for param in group["params"]}
    for param, number in numbers_of(store).items():
        if param in store:
            state[number] = torch_states(store[param], steps[param], device)
    adam_w_mode, settings = store.rule.options["adam_w_mode"], store.settings
    chosen = {key: getattr(settings, key) for key in IMPLEMENTATIONS}
    groups = [torch_group({**chosen, **group}, adam_w_mode) for group in packed_groups]
    return {"state": state, "param_groups": groups}


def unflattened(store: StateStore, flat: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in this form of one with keys such as ``state.<name>.exp_avg`` and ``param_groups.<name>.lr``.

    Of parameters that have names, and states. Raises KeyError for what is missing.
    """
    found = torch_state_dict(store, None)
    for i, name in enumerate(store.names):
        if i in found["state"]:
            found["state"][i] = {key: flat[f"state.{name}.{key}"] for key in found["state"][i]}
    for group in found["param_groups"]:
        for name in group["param_names"][:1]:
            given = {key: flat[f"param_groups.{name}.{key}"] for key in group if key not in ("params", "param_names")}
            group.update(given)
    return found


@functools.cache
def _adamw_settings() -> Mapping[str, Any]:
    """The keys of a param group of torch.optim.AdamW's, but for the parameters, with their defaults."""
    group = AdamW([torch.zeros(1)]).param_groups[0]
    return {key: value for key, value in group.items() if key != "params"}


@functools.cache
def muon_keys() -> frozenset[str]:
    """The keys of a param group of torch.optim.Muon's, but for the parameters."""
    return frozenset(Muon([torch.zeros(1, 1)]).param_groups[0]) - {"params"}


def step_tensor(step: float) -> torch.Tensor:
    """A parameter's step as torch.optim.AdamW keeps it: exact to 2^24, whatever the default dtype and device are."""
    with torch.inference_mode(False):
        return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def without_adamws_keys(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group without the keys that only torch.optim.AdamW has."""
    return {key: value for key, value in group.items() if key in _SHARED_KEYS or key not in _adamw_settings()}


def torch_group(group: Mapping[str, Any], adam_w_mode: bool) -> dict[str, Any]:
    """A param group as torch.optim.AdamW saves it. Raises ValueError where its step is another one."""
    if not group["bias_correction"]:
        raise ValueError("bias_correction=False: torch.optim.AdamW always corrects, so it cannot continue this run")
    shown = {**_adamw_settings(), **{key: value for key, value in group.items() if key not in _OWN_KEYS}}
    if "decoupled_weight_decay" in shown:
        shown["decoupled_weight_decay"] = adam_w_mode
    return shown


def torch_states(states: ParamState, step: int, device: str | None) -> dict[str, Any]:
    """A parameter's states as torch.optim.AdamW saves them: FP32 moments, by reference where they are, and a step."""
    own = [spec.name for spec in states.layout.specs]
    others = {name: value for name, value in states.tensors.items() if name not in (STEP, *own, MASTER)}
    moments: dict[str, Tensor] = {name: states.unscaled(name, device) for name in own}
    return {STEP: step_tensor(step), **moments, **others}
