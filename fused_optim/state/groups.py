"""Param groups: what they hold beyond torch.optim.AdamW's, and how they are made to look like those."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from fused_optim.backends.compiled import same_objects
from fused_optim.backends.tables import Rule as RuleNumber
from fused_optim.memory.layout import STEP
from fused_optim.options.reading import IMPLEMENTATIONS
from fused_optim.options.settings import Settings
from fused_optim.rule import Rule, Rules

Group = MutableMapping[str, Any]
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
    """A parameter's step as torch.optim.AdamW keeps it: exact to 2^24, whatever the default dtype and device are."""
    with torch.inference_mode(False):
        return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def without_adamws_keys(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group without the keys that only torch.optim.AdamW has."""
    return {key: value for key, value in group.items() if key in _SHARED_KEYS or key not in adamw_settings()}


class Owner(Protocol):
    """What the state of an optimizer asks of it."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    rule: Rules
    settings: Settings

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The tensors by parameter and name."""


class WholeGroup(MutableMapping[str, Any]):
    """A param group that looks like torch.optim.AdamW's, and beside it what is not in it: our own keys.

    Loads of flattened state dicts go through the keys of running groups, and torch.compile reads plain dicts only. What
    users write into the group under one of our own keys is taken from there.
    """

    def __init__(self, shown: dict[str, Any], own: Mapping[str, Any], switches: Mapping[str, Any]) -> None:
        self.shown, self.own = shown, dict(own)
        self.shown_step = step_tensor(0)  # in the states of all parameters of the group
        self.take()
        self[STEP] = self.own[STEP]
        for key, value in {**adamw_settings(), **switches}.items():
            if key not in _SHARED_KEYS:
                shown.setdefault(key, value)

    def take(self) -> None:
        """Take our own keys from the group."""
        self.update({key: self.shown.pop(key) for key in OWN_KEYS & self.shown.keys()})

    def put_back(self) -> None:
        """Let the group be as it is in the other forms."""
        kept = {**without_adamws_keys(self.shown), **self.own}
        self.shown.clear()
        self.shown.update(kept)

    def __getitem__(self, key: str) -> Any:  # each step asks for a dozen of them
        return (self.own if key in OWN_KEYS else self.shown)[key]

    def get(self, key: str, default: Any = None) -> Any:
        return (self.own if key in OWN_KEYS else self.shown).get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        (self.own if key in OWN_KEYS else self.shown)[key] = value
        if key == STEP:
            self.shown_step.fill_(value)

    def __delitem__(self, key: str) -> None:
        del (self.own if key in OWN_KEYS else self.shown)[key]

    def __iter__(self) -> Iterator[str]:
        return chain(self.shown, self.own)

    def __len__(self) -> int:
        return len(self.shown) + len(self.own)


class ParamGroups:
    """The param groups of an optimizer, by the form of its state dicts as torch.optim.AdamW's or with our own keys."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._whole: list[WholeGroup] = []  # of groups that look like AdamW's

    def whole(self) -> Sequence[Group]:
        """All with our own keys, whatever they look like."""
        shown = self._owner.param_groups
        if self._owner.settings.checkpoint_format != "torch":
            return shown
        if not same_objects(shown, [each.shown for each in self._whole]):
            known = {id(each.shown): each for each in self._whole}
            self._whole = [known.get(id(group)) or self._new(group) for group in shown]
        for each in self._whole:
            if not OWN_KEYS.isdisjoint(each.shown):
                each.take()
        return self._whole

    def _new(self, group: dict[str, Any]) -> WholeGroup:
        """What the group lacks it has from the one that its parameters were in, or else from the defaults."""
        owner, params = self._owner, {*group["params"]}
        former = next((each.own for each in self._whole if not params.isdisjoint(each.shown["params"])), None)
        shown = [owner.state[param] for param in params if STEP in owner.state.get(param, {})]
        if former is None:
            chosen = {key: owner.defaults[key] for key in OWN_KEYS & owner.defaults.keys()}
            step = max((int(states[STEP]) for states in shown), default=0)
            former = {**chosen, **description(owner.rule.for_group(group)), STEP: step}
        found = WholeGroup(group, former, {key: getattr(owner.settings, key) for key in IMPLEMENTATIONS})
        for states in shown:
            states[STEP] = found.shown_step
        return found

    def show(self) -> None:
        """Let them look as the form says."""
        if self._owner.settings.checkpoint_format == "torch":
            self.whole()
        else:
            for each in self._whole:
                each.put_back()
            self._whole = []
