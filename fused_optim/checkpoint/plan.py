"""The contents of a checkpoint for this model and optimizer: names, the keys of each parameter, and differences."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.checkpoint.open import DcpFolder, Place, Source, TensorInfo, assembled, flat, path_after, setting_after
from fused_optim.memory.host_memory import empty_host
from fused_optim.memory.layout import MASTER, STEP
from fused_optim.options.checks import some_of
from fused_optim.rules import MUON, known_states, rule_of
from fused_optim.sharding.collective import unwrapped_name

# --- names -----------------------------------------------------------------------------------------------------------


Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True)
class LoadOptions:
    """Checked options of a load, see :meth:`Checkpointer.load`.

    ``partial``: shell patterns of the model's names that may lack their match; ``("*",)`` for ``strict=False``.
    """

    partial: tuple[str, ...] = ()
    rename: Rename | None = None
    without: frozenset[str] = frozenset()
    model_only: bool = False
    dry_run: bool = False

    @classmethod
    def checked(
        cls,
        strict: bool,
        partial: Iterable[str],
        rename: Rename | None,
        without: Iterable[str] = (),
        model_only: bool = False,
        dry_run: bool = False,
    ) -> LoadOptions:
        """Raises TypeError for ``partial`` or ``without`` that are no lists, and for a ``rename`` of another type."""
        if without is None or isinstance(without, str):
            raise TypeError(f"without: expected a list of names of extras, got {without!r}")
        is_list = isinstance(partial, Iterable) and not isinstance(partial, str)
        patterns = tuple(partial) if is_list else ()
        if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"partial: expected a list of names or patterns such as ['head.*'], got {partial!r}")
        if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
            raise TypeError(f"rename: expected a mapping or a function of names, got {type(rename).__name__}")
        return cls(patterns if strict else ("*",), rename, frozenset(without), model_only, dry_run)

    def admits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.partial)


class Naming:
    """The model's name for a checkpoint's name, which may be of a wrapped or compiled model, or was renamed.

    ``rename`` maps names of the checkpoint's parameters or modules to the model's, the longest match counts; or it is a
    function from one to the other.
    """

    def __init__(self, known: Iterable[str] = (), rename: Rename | None = None) -> None:
        self.known = set(known)
        self._rename = rename
        self._saved: dict[str, str] = {}  # by name in the model

    def __call__(self, saved: str) -> str:
        renamed = self._renamed(saved)
        bare = unwrapped_name(renamed)
        candidates = (renamed, bare, bare.removeprefix("module."))
        return next((candidate for candidate in candidates if candidate in self.known), renamed)

    def note(self, saved: str) -> str:
        """The new name of an entry. Raises ValueError if two names in the checkpoint mean the same."""
        name = self(saved)
        if (other := self._saved.setdefault(name, saved)) != saved:
            raise ValueError(f"{other} and {saved} of the checkpoint are both loaded as {name}; see rename")
        return name

    def _renamed(self, saved: str) -> str:
        if self._rename is None:
            return saved
        if not isinstance(self._rename, Mapping):
            try:
                new = self._rename(saved)
            except Exception as error:
                raise ValueError(f"rename: it failed for {saved!r}: {type(error).__name__}: {error}") from error
            return _name(new, saved)
        parts = saved.split(".")
        for count in range(len(parts), -1, -1):
            before = ".".join(parts[:count])
            if before in self._rename:
                new = _name(self._rename[before], before)
                return ".".join([*([new] if new else []), *parts[count:]])
        return saved

    @property
    def renamed(self) -> dict[str, str]:
        """The noted names that differ: the model's name by the checkpoint's."""
        return {saved: name for name, saved in sorted(self._saved.items()) if saved != name and name in self.known}


def _name(given: object, saved: str) -> str:
    if not isinstance(given, str):
        raise TypeError(f"rename: expected a name for {saved!r}, got {given!r}")
    return given


@dataclass(frozen=True)
class Differences:
    """The differences between a checkpoint and the model or optimizer, by the model's names.

    False if there are none.
    """

    new: tuple[str, ...] = ()  # not in the checkpoint, they stayed as they were
    removed: tuple[str, ...] = ()  # only in the checkpoint
    reshaped: tuple[str, ...] = ()  # of another shape or kind in the checkpoint, they stayed as they were
    renamed: Mapping[str, str] = field(default_factory=dict)  # the model's name by the checkpoint's
    unfrozen: tuple[str, ...] = ()  # trainable now, without states in the checkpoint: their moments are zero
    restarted: tuple[str, ...] = ()  # with states of another update rule in the checkpoint: theirs are zero

    @property
    def _lists(self) -> dict[str, list[str]]:
        return {
            "new": list(self.new),
            "removed": list(self.removed),
            "reshaped": list(self.reshaped),
            "renamed": [f"{saved} -> {name}" for saved, name in self.renamed.items()],
            "unfrozen": list(self.unfrozen),
            "restarted": list(self.restarted),
        }

    def __bool__(self) -> bool:
        return any(self._lists.values())

    def __str__(self) -> str:
        return ", ".join(f"{len(names)} {kind} ({some_of(names)})" for kind, names in self._lists.items() if names)


# --- the optimizer's part: its keys, ``state.<id>.exp_avg`` and ``param_groups...``, by parameter --------------------


AMSGRAD = "max_exp_avg_sq"
ENTRIES = "entries"  # of `optimizer.state` under keys that are no parameters: a list of keys and values
_OTHER_STATES = (AMSGRAD, MASTER, STEP)  # in the checkpoints of other libraries, too
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
        """The parameter's id here: the model's name for it, or its number."""
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
        writers = []
        if any("step" in states for states in self.states.values()):
            decoupled = {each.get("decoupled_weight_decay") for each in self.settings.values()} & {True, False}
            known = decoupled.pop() if len(decoupled) == 1 else None
            writers.append("torch.optim.Adam(W)" if known is None else f"torch.optim.Adam{'W' * bool(known)}")
        if any(rule_of(each) == MUON for each in self.settings.values()):
            writers.append("torch.optim.Muon")
        return " and ".join(writers) or "TransformerEngine or Apex FusedAdam"


def read_contents(source: Source) -> Contents:
    """:func:`find_contents` without a model: with all that the checkpoint holds."""
    contents = find_contents(source, Naming())
    sort_contents(source, contents)
    return contents


def find_contents(source: Source, naming: Naming, states: Iterable[str] = ()) -> Contents:
    """The empty contents of an optimizer's states: their prefix and the names they may have. Nothing is read.

    ``states``: names of states to expect beside those known here. Raises :class:`NoStates` if there are neither states
    nor param groups.
    """
    if long := next((key for key in source.entries if len(key) > _LONGEST), None):
        raise ValueError(f"{source.path}: {long[:100]}...: expected keys of {_LONGEST} characters at most")
    known = _component_of(frozenset({*known_states(), *_OTHER_STATES, *states}))
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
    by_group: dict[str, dict[Place, Any]] = {}
    for key, text in texts.items():
        group, setting = _group_and_setting(text, source.place(key), lists, contents)
        by_group.setdefault(group, {})[setting_after(source.place(key), setting)] = values[key]
    groups = {group: assembled(settings) for group, settings in by_group.items()}
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
        if split := _split(key.removeprefix(first), contents):
            contents.others.setdefault(contents.id(split[0]), {})[split[1]] = key


def _split(text: str, contents: Contents) -> tuple[str, str] | None:
    """The parameter that a key begins with, and the rest of the key. None without such a parameter."""
    parts = text.split(".")
    for count in range(len(parts) - 1, 0, -1):
        saved = ".".join(parts[:count])
        id_ = contents.id(saved)
        if id_ in contents.states or (not contents.is_numbered and id_ in contents.naming.known):
            return saved, ".".join(parts[count:])
    return None


def optimizer_keys(source: Source, prefix: str) -> set[str]:
    """The keys of all entries that belong to the optimizer."""
    firsts = tuple(f"{prefix}{each}." for each in ("state", "param_groups", ENTRIES))
    return {key for key in source.entries if f"{key}.".startswith(firsts)}


def read_entries(source: Source, prefix: str) -> dict[Any, Any]:
    """Entries that users keep in ``optimizer.state`` under keys that are no parameters."""
    first = f"{prefix}{ENTRIES}"
    keys = [key for key in source.entries if key == first or key.startswith(f"{first}.")]
    infos = {key: source.entries[key] for key in keys}
    values = source.read(
        {key: None if info is None else empty_host(info.shape, info.dtype) for key, info in infos.items()}
    )
    places = {key: path_after(source.place(key), key.removeprefix(prefix)) for key in keys}
    return dict(assembled({places[key]: value for key, value in values.items()}).get(ENTRIES, ()))


def _group_and_setting(text: str, place: Place, numbers: Collection[str], contents: Contents) -> tuple[str, str]:
    """Split a key of the param groups: ``0.lr`` is ("0", "lr").

    In the flattened form each parameter has a group of its own: ``net.weight.lr`` is ("net.weight", "lr").
    """
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
    """The settings on which all members of a param group agree. ``settings``: (member for messages, its settings) each.

    Raises ValueError if two members differ.
    """
    common: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for member, of_member in settings:
        for key, value in of_member.items():
            if key in common and not _equal(common[key], value):
                raise ValueError(
                    f"{what}: {source.path} has different values of {key} for {owner[key]} and {member}, which are in "
                    "one group of this optimizer; build it with the checkpoint's groups"
                )
            common.setdefault(key, value)
            owner.setdefault(key, member)
    return common


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
    """The text before ``state.`` and ``param_groups.`` in the keys: the prefix under which most names are known."""
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
        sample = ", ".join(list(source.entries)[:4]) or "nothing"
        expected = "expected keys such as state.<parameter>.exp_avg and param_groups.0.lr"
        raise NoStates(f"{source.path} holds no states of an optimizer: {expected}, found {sample}")
    if len(ranked) > 1 and known[ranked[1]] and known[ranked[0]] == known[ranked[1]]:
        raise ValueError(
            f"{source.path} holds several optimizers for these parameters: under {ranked[0]!r} and {ranked[1]!r}"
        )
    return ranked[0]


# --- the model's part ------------------------------------------------------------------------------------------------


_PREFIX, _STATES = "model.", "optimizer.state."
_EXTRA_STATE = re.compile(r"(?P<name>(?:.+\.)?_extra_state)(?:\.(?P<rest>.*))?")


def misfit(current: Any, info: TensorInfo | None) -> str:
    """The difference between a value and the checkpoint's entry for it, as text; "" if it fits."""
    expected = f"shape {tuple(current.shape)}" if isinstance(current, Tensor) else "an object"
    found = "an object" if info is None else f"shape {tuple(info.shape)}"
    return "" if expected == found else f"expected {expected}, found {found}"


def flat_names(state: dict[str, Any]) -> list[str]:
    """The flat names of the entries in a model's state dict, sorted."""
    return sorted(_flat(state)[0])


def _flat(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Place]]:
    """(values, places) of a state dict by flat name. Extra states without shards stay whole, whatever their structure.

    Parts of such a state may be others in the checkpoint, and are not compared.
    """
    whole = {
        name: value
        for name, value in state.items()
        if _is_extra(name) and not any(isinstance(part, DTensor) for part in flat({"": value})[0].values())
    }
    values, places = flat({"model": {name: value for name, value in state.items() if name not in whole}})
    names = {key: key.removeprefix(_PREFIX) for key in values}
    return (
        {names[key]: value for key, value in values.items()} | whole,
        {names[key]: place[1:] for key, place in places.items()} | {name: (name,) for name in whole},
    )


def _is_extra(name: str) -> bool:
    return _EXTRA_STATE.fullmatch(name) is not None and name.endswith("_extra_state")


class ModelLoader:
    """Compares a model's state dict with a checkpoint when it is made; nothing is changed before :meth:`load`.

    ``everyone``: the names of all ranks' models. ``tied``: names of one parameter each. Raises ValueError for the
    checkpoint of another model.
    """

    def __init__(
        self,
        state: dict[str, Any],
        source: DcpFolder,
        everyone: Collection[str],
        tied: Iterable[list[str]],
        options: LoadOptions,
    ) -> None:
        self.state = state
        self._source = source
        self._current, self._places = _flat(state)
        naming = Naming(everyone, options.rename)
        self._keys = self._saved(naming)
        self._untied = {name for names in tied for name in self._drop_aliases(names)}
        new = [name for name in self._current if name not in self._keys]
        removed = sorted((self._keys.keys() - naming.known) | self._untied)
        reshaped = [name for name in self._current if name in self._keys and self._misfit(name)]
        self.differences = Differences(tuple(new), tuple(removed), tuple(reshaped), naming.renamed)
        self._fitting = [name for name in self._current if name not in {*new, *reshaped}]
        self._refuse(*([name for name in names if not options.admits(name)] for names in (new, removed, reshaped)))

    def _saved(self, naming: Naming) -> dict[str, dict[str, Place]]:
        """The keys of each value, by name in the model, with their places in it: () if the entry is the whole value."""
        saved: dict[str, dict[str, Place]] = {}
        for key in self._source.entries:
            if not key.startswith(_PREFIX):
                continue
            name, rest = key.removeprefix(_PREFIX), None
            extra = _EXTRA_STATE.fullmatch(name)
            if extra and naming(extra["name"]) in naming.known:
                name, rest = extra["name"], extra["rest"]
            saved.setdefault(naming.note(name), {})[key] = (
                () if rest is None else path_after(self._source.place(key), rest)
            )
        return saved

    def _drop_aliases(self, names: list[str]) -> list[str]:
        """Keep only the first saved name of a tied parameter.

        Returns its other names that have states in the checkpoint.
        """
        saved = [name for name in names if name in self._keys]
        for name in names if saved else ():
            if name != saved[0]:
                self._current.pop(name, None)
        with_states = []
        for name in saved:
            first = tuple(f"{_STATES}{key.removeprefix(_PREFIX)}." for key in self._keys[name])
            with_states += [name] if any(key.startswith(first) for key in self._source.entries) else []
        return with_states[1:]

    def _misfit(self, name: str) -> str:
        if self._is_whole(name):
            return ""
        return misfit(self._current[name], self._source.entries[next(iter(self._keys[name]))])

    def _refuse(self, missing: list[str], unexpected: list[str], reshaped: list[str]) -> None:
        texts = []
        if missing:
            texts.append(
                f"it lacks {len(missing)} of the {len(self._current)} tensors of the model: {some_of(missing)}"
            )
        if unexpected:
            shown = [f"{name} (tied in the model)" if name in self._untied else name for name in unexpected]
            texts.append(f"the model lacks {len(unexpected)} of its tensors: {some_of(shown)}")
        if reshaped:
            texts.append(f"{len(reshaped)} differ in shape: {some_of([f'{n}: {self._misfit(n)}' for n in reshaped])}")
        if texts:
            hint = "strict=False loads what fits, rename= what is called otherwise"
            raise ValueError(f"{self._source.path} is of another model: {'; '.join(texts)}; {hint}")

    def load(self) -> dict[str, Any]:
        """Fill the state dict's tensors; what the checkpoint lacks stays."""
        wanted = {key: self._target(name, key) for name in self._fitting for key in self._keys[name]}
        self._source.load(wanted)
        for name in self._fitting:
            value = assembled({place: wanted[key] for key, place in self._keys[name].items()})
            *outer, last = self._places[name]
            state: Any = self.state
            for step in outer:
                state = state[_own_key(state, step)]
            state[_own_key(state, last)] = value
        return self.state

    def _target(self, name: str, key: str) -> Tensor | None:
        """The tensor that an entry is read into; None for an object."""
        current, info = self._current[name], self._source.entries[key]
        if info is None:
            return None
        if isinstance(current, Tensor) and (not self._is_whole(name) or (*current.shape,) == info.shape):
            return current
        return empty_host(info.shape, info.dtype)

    def _is_whole(self, name: str) -> bool:
        """True for an extra state without shards, which may be of any structure."""
        return _is_extra(name) and not isinstance(self._current[name], DTensor)


def _own_key(state: Any, step: str | int) -> Any:
    """The mapping's own key that reads ``step`` as text; places hold texts for all keys."""
    return next((key for key in state if str(key) == step), step) if isinstance(state, Mapping) else step
