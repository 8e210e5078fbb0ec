"""The "torch" form: state dicts as torch.optim.AdamW has them, which it loads and which are laid against its own.

FP32 moments and a ``step`` for each parameter, the keys of its param groups and no others; no masters. Flattened state
dicts are loaded, by torch.distributed.checkpoint as by torchtitan, key by key of the *running* param groups and states.
So in this form these are as AdamW's, too: each parameter's states have a ``step``, and our own keys of param groups are
beside these, in ``groups.WholeGroup``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fused_optim.memory.layout import MASTER, STEP
from fused_optim.state.groups import OWN_KEYS, adamw_settings, step_tensor
from fused_optim.state.param_state import ParamState
from fused_optim.state.store import StateStore


def convert(store: StateStore, state_dict: dict[str, Any], device: str | None) -> dict[str, Any]:
    """A state dict of torch.optim's in this form. FP32 moments go by reference.

    Raises ValueError for a run that torch.optim.AdamW cannot continue.
    """
    steps = {param: group[STEP] for group in store.groups for param in group["params"]}
    params = store.params
    state = {
        key: torch_states(store[params[key]], steps[params[key]], device) if params[key] in store else states
        for key, states in state_dict["state"].items()
        if states
    }
    packed = zip(store.groups, state_dict["param_groups"], strict=True)
    adam_w_mode = store.rule.options["adam_w_mode"]
    groups = [{**torch_group(group, adam_w_mode), "params": saved["params"]} for group, saved in packed]
    return {**state_dict, "state": state, "param_groups": groups}


def torch_group(group: Mapping[str, Any], adam_w_mode: bool) -> dict[str, Any]:
    """A param group as torch.optim.AdamW saves it. Raises ValueError where its step is another one."""
    if not group["bias_correction"]:
        raise ValueError("bias_correction=False: torch.optim.AdamW always corrects, so it cannot continue this run")
    shown = {**adamw_settings(), **{key: value for key, value in group.items() if key not in OWN_KEYS}}
    if "decoupled_weight_decay" in shown:
        shown["decoupled_weight_decay"] = adam_w_mode
    return shown


def torch_states(states: ParamState, step: int, device: str | None) -> dict[str, Any]:
    """A parameter's states as torch.optim.AdamW saves them: FP32 moments, by reference where they are, and a step."""
    own = [spec.name for spec in states.layout.specs]
    others = {name: value for name, value in states.tensors.items() if name not in (STEP, *own, MASTER)}
    moments: dict[str, Tensor] = {name: states.unscaled(name, device) for name in own}
    return {STEP: step_tensor(step), **moments, **others}
