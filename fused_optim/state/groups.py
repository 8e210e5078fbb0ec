"""Param groups: what they hold beyond torch.optim.AdamW's, and what checkpoints say there of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Protocol

import torch

from fused_optim.options.table import Settings
from fused_optim.rules import ADAM, RULE_KEY, Rule, Rules

Group = MutableMapping[str, Any]
VERSION = 1
# What a checkpoint says of itself, as numbers and in every param group: torch.distributed.checkpoint keeps no metadata,
# and its flattened form only such keys of a param group as the running optimizer has. The second: flags.
DESCRIPTION = {"fused_optim_version": VERSION, "fused_optim_native": 0}
NATIVE, KEYED_BY_NAMES = 1, 2  # some state is in native form; rounding goes by names, not by positions


def description(rule: Rule) -> dict[str, Any]:
    """The keys of ``DESCRIPTION`` in a running param group, and its update rule.

    But for Adam, once the only one: ``dcp.load`` asks older checkpoints for every key of a running param group.
    """
    return DESCRIPTION if rule.spec == ADAM else {**DESCRIPTION, RULE_KEY: rule.name}


def saved_group(
    group: Mapping[str, Any], formats: Mapping[str, Any], described: Mapping[str, Any], *, native: bool, keyed: bool
) -> dict[str, Any]:
    """A param group as it is saved beside states in a form of our own.

    ``formats``: by the states' options; they become text, since torch.distributed.checkpoint gathers no torch.dtype.
    ``native``: some state is in native form; ``keyed``: rounding goes by names.
    """
    as_text = {option: str(value) for option, value in formats.items()}
    return {**group, **as_text, **described, "fused_optim_native": NATIVE * native | KEYED_BY_NAMES * keyed}


def check_rule(rule: Rule, saved_groups: Iterable[Mapping[str, Any]], what: str) -> None:
    """Raise ValueError for the param groups of another update rule. Those that say nothing pass."""
    expected = rule.name
    for saved in saved_groups:
        found = saved.get(RULE_KEY, ADAM.name if "exp_avg_sq_dtype" in saved else expected)
        if found != expected:
            raise ValueError(f"{what} is of another optimizer: expected the update rule {expected}, found {found}")


class Owner(Protocol):
    """The parts of an optimizer that its state needs."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    rule: Rules
    settings: Settings

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The tensors by parameter and name."""
