"""torch.optim.Muon's checkpoints: what their param groups and states have, and what FusedMuon's have beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fused_optim.memory.layout import STEP
from fused_optim.muon import ALGORITHM
from fused_optim.rules import MUON, RULE_KEY, rule_of
from fused_optim.state.groups import DESCRIPTION
from fused_optim.state.param_state import ParamState
from fused_optim.state.torch_form import muon_keys, torch_states

# Of FusedMuon's param groups: what torch.optim.Muon does, which has no such keys.
_ONLY_OURS: dict[str, Any] = {
    ALGORITHM: "muon",
    "ns_dtype": "bfloat16",
    "splits": None,
    "maximize": False,
    "experts": False,
}


def is_muons(group: Mapping[str, Any]) -> bool:
    return rule_of(group) == MUON


def muon_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A saved param group of Muon as torch.optim.Muon saves it. Raises ValueError where it would go on otherwise."""
    for key, expected in (("splits", None), ("maximize", False)):
        if group.get(key):
            raise ValueError(
                f"{key}={group[key]}: torch.optim.Muon has {key}={expected}, so it cannot continue this run"
            )
    coefficients = group["ns_coefficients"]
    if isinstance(coefficients, str) or not all(isinstance(each, float | int) for each in coefficients):
        raise ValueError(f"ns_coefficients={coefficients}: torch.optim.Muon takes three numbers for all steps alike")
    ours = {*_ONLY_OURS, *DESCRIPTION, RULE_KEY, STEP, "momentum_dtype"}
    return {key: value for key, value in group.items() if key in muon_keys() or key not in ours}


def our_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A saved param group of Muon, torch's or ours, with all that FusedMuon's have."""
    return {RULE_KEY: "muon", **_ONLY_OURS, **group}


def muon_states(states: ParamState) -> dict[str, Any]:
    """A parameter's states as torch.optim.Muon saves them: FP32 momentum, no step."""
    return {name: value for name, value in torch_states(states, 0, None).items() if name != STEP}
