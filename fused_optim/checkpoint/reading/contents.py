"""An optimizer's part of a checkpoint: its keys, sorted by parameter, and who wrote it.

Keys are ``state.<id>.exp_avg`` and ``param_groups...``, where the id is a parameter's name or its position.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fused_optim.checkpoint.reading.leeway import Naming
from fused_optim.checkpoint.reading.source import Source
from fused_optim.checkpoint.storage.nested import Path, assembled, path_after, setting_after
from fused_optim.known_rules import ALL_STATES, rule_of
from fused_optim.memory.host_memory import empty_host
from fused_optim.memory.layout import MASTER, STEP

AMSGRAD = "max_exp_avg_sq"
ENTRIES = "entries"  # of `optimizer.state` under keys that are no parameters: a list of keys and values
_KNOWN = (*ALL_STATES, AMSGRAD, MASTER, STEP)  # in the checkpoints of other libraries, too
NOT_SETTINGS = ("params", "param_names", "step")  # of a param group
_PARAMS = re.compile(r"(?P<number>\d+)\.params")  # of a param group with a number
_LONGEST = 1000  # of keys, each of whose prefixes is looked at
_COMPONENTS = ("bits", "scale", "format", "block", "rem16", "rem8", "check")


class NoStates(ValueError):
    """Raised for a checkpoint without states of an optimizer."""


@dataclass
class Contents:
    """An optimizer's flat keys, sorted by parameter; ids are names or positions, as text."""

    prefix: str  # of the keys: what is before ``state.``
    naming: Naming
    known_states: re.Pattern[str]  # see `_component_of`
    # id -> state -> component ("": whole) -> key
    states: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    others: dict[str, dict[str, str]] = field(default_factory=dict)  # id -> what users keep beside the states -> key
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # id -> setting -> value
    order: list[list[str]] = field(default_factory=list)  # ids by group, where the checkpoint has groups
    is_numbered: bool = False  # whether ids are positions, which are no names: a name may be a number, too

    def id(self, saved: str) -> str:
        """What a parameter is called here."""
        return saved if self.is_numbered else self.naming(saved)

    @property
    def state_keys(self) -> set[str]:
        return {key for states in self.states.values() for components in states.values() for key in components.values()}

    @property
    def writer(self) -> str:
        """The optimizer that wrote it, as far as that is known."""
        settings = next(iter(self.settings.values()), {})
        if "fused_optim_version" in settings or "exp_avg_dtype" in settings:
            return "fused_optim"
        found = []
        if any("step" in states for states in self.states.values()):
            decoupled = {each.get("decoupled_weight_decay") for each in self.settings.values()} & {True, False}
            known = decoupled.pop() if len(decoupled) == 1 else None
            found.append("torch.optim.Adam(W)" if known is None else f"torch.optim.Adam{'W' * bool(known)}")
        if any(rule_of(each) == "muon" for each in self.settings.values()):
            found.append("torch.optim.Muon")
        return " and ".join(found) or "TransformerEngine or Apex FusedAdam"


def read_contents(source: Source) -> Contents:
    """:func:`find_contents` with what it holds, where nothing is known of the model."""
    contents = find_contents(source, Naming())
    sort_contents(source, contents)
    return contents


def find_contents(source: Source, naming: Naming, states: Iterable[str] = ()) -> Contents:
    """Where they are; nothing is read. ``states``: the names of those that there may be beside Adam's.

    Raises :class:`NoStates` where there are neither states nor param groups.
    """
    if long := next((key for key in source.entries if len(key) > _LONGEST), None):
        raise ValueError(f"{source.path}: {long[:100]}...: expected keys of {_LONGEST} characters at most")
    known = _component_of(frozenset({*_KNOWN, *states}))
    return Contents(_find_prefix(source, naming, known), naming, known)


def sort_contents(source: Source, contents: Contents) -> None:
    """Sort what was found by parameter; of it, the settings of param groups are read."""
    first = f"{contents.prefix}param_groups."
    texts = {key: key.removeprefix(first) for key in source.entries if key.startswith(first)}
    lists = {match["number"]: key for key, text in texts.items() if (match := _PARAMS.fullmatch(text))}
    source.check(texts)  # before memory is reserved
    infos = {key: source.entries[key] for key in texts}
    values = source.read(
        {key: None if info is None else empty_host(info.shape, info.dtype) for key, info in infos.items()}
    )
    contents.is_numbered = any(type(id_) is int for key in lists.values() for id_ in values[key])
    _sort_states(source, contents)
    found: dict[str, dict[Path, Any]] = {}
    for key, text in texts.items():
        group, setting = _group_and_setting(text, source.place(key), lists, contents)
        found.setdefault(group, {})[setting_after(source.place(key), setting)] = values[key]
    groups = {group: assembled(settings) for group, settings in found.items()}
    for group in sorted(lists, key=int):
        settings = groups.pop(group)
        contents.order.append([contents.id(str(id_)) for id_ in settings.pop("params")])
        contents.settings.update({id_: settings for id_ in contents.order[-1]})
    contents.settings.update({contents.id(id_): settings for id_, settings in groups.items()})


def _sort_states(source: Source, contents: Contents) -> None:
    first, others = f"{contents.prefix}state.", []
    for key in source.entries:
        if match := _state_of(key, contents.prefix, contents.known_states):
            id_ = match["id"] if contents.is_numbered else contents.naming.note(match["id"])
            states = contents.states.setdefault(id_, {})
            states.setdefault(match["name"], {})[match["component"] or ""] = key
        elif key.startswith(first):
            others.append(key)
    for key in others:
        if found := _split(key.removeprefix(first), contents):
            contents.others.setdefault(contents.id(found[0]), {})[found[1]] = key


def _split(text: str, contents: Contents) -> tuple[str, str] | None:
    """The parameter that a key begins with, and what follows. None where no such parameter is known."""
    parts = text.split(".")
    for count in range(len(parts) - 1, 0, -1):
        saved = ".".join(parts[:count])
        id_ = contents.id(saved)
        if id_ in contents.states or (not contents.is_numbered and id_ in contents.naming.known):
            return saved, ".".join(parts[count:])
    return None


def optimizer_keys(source: Source, prefix: str) -> set[str]:
    """All that is the optimizer's."""
    firsts = tuple(f"{prefix}{each}." for each in ("state", "param_groups", ENTRIES))
    return {key for key in source.entries if f"{key}.".startswith(firsts)}


def read_entries(source: Source, prefix: str) -> dict[Any, Any]:
    """What users keep in an optimizer's states under keys of their own."""
    first = f"{prefix}{ENTRIES}"
    keys = [key for key in source.entries if key == first or key.startswith(f"{first}.")]
    infos = {key: source.entries[key] for key in keys}
    values = source.read(
        {key: None if info is None else empty_host(info.shape, info.dtype) for key, info in infos.items()}
    )
    places = {key: path_after(source.place(key), key.removeprefix(prefix)) for key in keys}
    return dict(assembled({places[key]: value for key, value in values.items()}).get(ENTRIES, ()))


def _group_and_setting(text: str, place: Path, numbers: Collection[str], contents: Contents) -> tuple[str, str]:
    """Of a key of the param groups. The flattened form has a group for each parameter, of its name."""
    group, _, setting = text.partition(".")
    if group in numbers and "param_groups" in place:
        return group, setting
    if (known := _split(text, contents)) and known[0] not in numbers:
        return known
    if group in numbers:
        return group, setting
    group, _, setting = text.rpartition(".")
    return group, setting


def common_settings(source: Source, what: str, settings: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """What the members of a param group have alike. ``settings``: of each, after its name for messages."""
    found: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for member, own in settings:
        for key, value in own.items():
            if key in found and not _equal(found[key], value):
                raise ValueError(
                    f"{what}: {source.path} has different values of {key} for {owner[key]} and {member}, which are in "
                    "one group of this optimizer; build it with the checkpoint's groups"
                )
            found.setdefault(key, value)
            owner.setdefault(key, member)
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        dtype = a.dtype if isinstance(a, Tensor) else b.dtype
        return torch.equal(torch.as_tensor(a, dtype=dtype).flatten(), torch.as_tensor(b, dtype=dtype).flatten())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    return bool(a == b)


def read_small(source: Source, keys: Iterable[str]) -> dict[str, Any]:
    """Steps and formats: numbers, texts, tensors of one element."""
    wanted: dict[str, Tensor | None] = {}
    for key in keys:
        info = source.entries[key]
        if info is not None and math.prod(info.shape) != 1:
            raise ValueError(f"{key} in {source.path}: expected one number, found a tensor of shape {info.shape}")
        wanted[key] = None if info is None else torch.empty(info.shape, dtype=info.dtype)
    return source.read(wanted)


def nested(components: Mapping[str, str], values: Mapping[str, Any]) -> Any:
    """A state of the values of its keys: one tensor or, in the native form, a dict."""
    return values[components[""]] if "" in components else {name: values[key] for name, key in components.items()}


def read_steps(source: Source, contents: Contents) -> dict[str, int]:
    """The step of every id that has one: its param group's; where that has none its own, as torch.optim keeps it."""
    own = {id_: states["step"][""] for id_, states in contents.states.items() if "" in states.get("step", {})}
    values = read_small(source, own.values())
    steps = {id_: int(values[key]) for id_, key in own.items()}
    return steps | {id_: int(settings["step"]) for id_, settings in contents.settings.items() if "step" in settings}


@functools.cache
def _component_of(names: frozenset[str]) -> re.Pattern[str]:
    """``exp_avg.bits`` and the like: the components of a state in the native form."""
    return re.compile(rf"(?P<id>.+)\.(?P<name>{'|'.join(sorted(names))})(\.(?P<component>\w+))?")


def _state_of(key: str, prefix: str, known: re.Pattern[str]) -> re.Match[str] | None:
    first = f"{prefix}state."
    match = known.fullmatch(key, len(first)) if key.startswith(first) else None
    return match if match and match["component"] in (None, *_COMPONENTS) else None


def _find_prefix(source: Source, naming: Naming, states: re.Pattern[str]) -> str:
    """What comes before ``state.`` and ``param_groups.``: the one under which most of the names are known."""
    known: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for key in source.entries:
        for start in re.finditer(r"(?:^|(?<=\.))(?:state\.|param_groups\.)", key):
            prefix = key[: start.start()]
            match = _state_of(key, prefix, states)
            total[prefix] += bool(match) or start[0] == "param_groups."
            known[prefix] += bool(match and (match["id"].isdigit() or naming(match["id"]) in naming.known))
    ranked = sorted(total, key=lambda prefix: (known[prefix], total[prefix]), reverse=True)
    if not ranked or not total[ranked[0]]:
        found = ", ".join(list(source.entries)[:4]) or "nothing"
        expected = "expected keys such as state.<parameter>.exp_avg and param_groups.0.lr"
        raise NoStates(f"{source.path} holds no states of an optimizer: {expected}, found {found}")
    if len(ranked) > 1 and known[ranked[1]] and known[ranked[0]] == known[ranked[1]]:
        raise ValueError(
            f"{source.path} holds several optimizers for these parameters: under {ranked[0]!r} and {ranked[1]!r}"
        )
    return ranked[0]
