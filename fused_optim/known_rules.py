"""The update rules of this package, as checkpoints name them, and their states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fused_optim.adam import ADAM_STATES
from fused_optim.lion import EXP_AVG
from fused_optim.matrices.passes import MOMENTUM_BUFFER
from fused_optim.rule import StateSpec
from fused_optim.state.groups import ADAM, RULE

_STATES: dict[str, tuple[StateSpec, ...]] = {ADAM: ADAM_STATES, "lion": (EXP_AVG,), "muon": (MOMENTUM_BUFFER,)}
RULES = tuple(_STATES)
ALL_STATES: dict[str, StateSpec] = {spec.name: spec for own in _STATES.values() for spec in own}


def rule_of(group: Mapping[str, Any]) -> str:
    """The update rule of a saved param group, also of torch.optim.Muon's. Raises ValueError for one that is unknown."""
    rule = str(group.get(RULE, "muon" if "ns_coefficients" in group else ADAM))
    if rule not in _STATES:
        raise ValueError(f"{RULE}: expected one of {', '.join(_STATES)}, found {rule}")
    return rule


def states_of(group: Mapping[str, Any]) -> tuple[StateSpec, ...]:
    """The states that a saved param group's parameters have. Raises ValueError as :func:`rule_of` does."""
    return _STATES[rule_of(group)]
