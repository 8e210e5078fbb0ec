"""Param groups: what they hold beyond torch.optim.AdamW's, and how they are made to look like those."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fused_optim.backends.tables import Rule as RuleNumber
from fused_optim.memory.layout import STEP
from fused_optim.rule import Rule, Rules

VERSION = 1
# What a checkpoint says of itself, as numbers and in every param group: torch.distributed.checkpoint keeps no metadata,
# and its flattened form only such keys of a param group as the running optimizer has. The second: flags.
DESCRIPTION = {"fused_optim_version": VERSION, "fused_optim_native": 0}
NATIVE, KEYED_BY_NAMES = 1, 2  # some state is in native form; rounding goes by names, not by positions
RULE, ADAM = "fused_optim_rule", RuleNumber.ADAM.name.lower()
OWN_KEYS = frozenset({STEP, "bias_correction", "exp_avg_dtype", "exp_avg_sq_dtype", *DESCRIPTION})
_SHARED_KEYS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


def rule_name(rule: Rule | Rules) -> str:
    """What checkpoints call an update rule: "adam", "lion"."""
    return RuleNumber(rule.code).name.lower()


def description(rule: Rule) -> dict[str, Any]:
    """What a running param group has of ``DESCRIPTION``, and its update rule.

    But for Adam, once the only one: ``dcp.load`` asks older checkpoints for every key of a running param group.
    """
    name = rule_name(rule)
    return DESCRIPTION if name == ADAM else {**DESCRIPTION, RULE: name}


def check_rule(rule: Rule, saved_groups: Iterable[Mapping[str, Any]], what: str) -> None:
    """Raise ValueError for the param groups of another update rule. Those that say nothing pass."""
    expected = rule_name(rule)
    for saved in saved_groups:
        found = saved.get(RULE, ADAM if "exp_avg_sq_dtype" in saved else expected)
        if found != expected:
            raise ValueError(f"{what} is of another optimizer: expected the update rule {expected}, found {found}")


@functools.cache
def adamw_settings() -> Mapping[str, Any]:
    """The keys of a param group of torch.optim.AdamW's, but for the parameters, with their defaults."""
    group = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    return {key: value for key, value in group.items() if key != "params"}


def step_tensor(step: float) -> torch.Tensor:
    """A parameter's step as torch.optim.AdamW keeps it: exact to 2^24, whatever the default dtype is."""
    return torch.tensor(float(step), dtype=torch.float32)


class TorchGroup(dict[str, Any]):
    """A param group that shows torch.optim.AdamW's keys to all that go through them; our own are read and set by name.

    Loads of flattened state dicts go through the keys of running groups. Each value is kept once, as in any dict.
    """

    def __init__(self, group: Mapping[str, Any], switches: Mapping[str, Any] | None = None) -> None:
        super().__init__(whole(group))
        for key, value in {**adamw_settings(), **(switches or {})}.items():
            super().setdefault(key, value)

    def __reduce__(self) -> tuple[type[TorchGroup], tuple[dict[str, Any]]]:
        return TorchGroup, (whole(self),)

    def _shown(self) -> dict[str, Any]:
        return {key: value for key, value in super().items() if key not in OWN_KEYS}

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self._shown())

    def keys(self) -> Any:
        return self._shown().keys()

    def items(self) -> Any:
        return self._shown().items()

    def values(self) -> Any:
        return self._shown().values()

    def copy(self) -> TorchGroup:
        return TorchGroup(self)


def whole(group: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a param group of either kind."""
    return dict(dict.items(group)) if isinstance(group, TorchGroup) else dict(group)


def usual_group(group: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :class:`TorchGroup`: without the keys that only torch.optim.AdamW has."""
    if not isinstance(group, TorchGroup):
        return group
    return {key: value for key, value in whole(group).items() if key in _SHARED_KEYS or key not in adamw_settings()}


def shown(group: dict[str, Any], as_adamw: bool, switches: Mapping[str, Any]) -> dict[str, Any]:
    """The group with torch.optim.AdamW's keys or our own: itself where it has these already."""
    if not as_adamw or isinstance(group, TorchGroup):
        return group if as_adamw else usual_group(group)
    return TorchGroup(group, switches)
