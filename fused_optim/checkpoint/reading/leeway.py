"""How a checkpoint may differ from the model that it is loaded into: names, and what only one of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from fused_optim.options.checks import some_of
from fused_optim.sharding.collective import unwrapped_name

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True)
class Leeway:
    """``partial``: shell patterns of the model's names that may lack their match. ``rename``: see :class:`Naming`."""

    partial: tuple[str, ...] = ()
    rename: Rename | None = None

    @classmethod
    def of(cls, strict: bool, partial: Iterable[str], rename: Rename | None) -> Leeway:
        """Raises TypeError for what is no list of patterns, and no mapping or function."""
        is_list = isinstance(partial, Iterable) and not isinstance(partial, str)
        patterns = tuple(partial) if is_list else ()
        if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"partial: expected a list of names or patterns such as ['head.*'], got {partial!r}")
        if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
            raise TypeError(f"rename: expected a mapping or a function of names, got {type(rename).__name__}")
        return cls(patterns if strict else ("*",), rename)

    def admits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.partial)


class Naming:
    """What a checkpoint's names are in the model: those of wrapped and compiled models, and renamed ones.

    ``rename`` has names of the checkpoint's parameters or modules and what they are called in the model, the longest
    match counts; or is a function from one to the other.
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
        """The name of what is loaded. Raises ValueError where two names in the checkpoint mean the same."""
        name = self(saved)
        if (other := self._saved.setdefault(name, saved)) != saved:
            raise ValueError(f"{other} and {saved} of the checkpoint are both loaded as {name}; see rename")
        return name

    def _renamed(self, saved: str) -> str:
        if self._rename is None:
            return saved
        if not isinstance(self._rename, Mapping):
            return _name(self._called(saved), saved)
        parts = saved.split(".")
        for count in range(len(parts), -1, -1):
            before = ".".join(parts[:count])
            if before in self._rename:
                new = _name(self._rename[before], before)
                return ".".join([*([new] if new else []), *parts[count:]])
        return saved

    def _called(self, saved: str) -> Any:
        assert callable(self._rename)
        try:
            return self._rename(saved)
        except Exception as error:
            raise ValueError(f"rename: it failed for {saved!r}: {type(error).__name__}: {error}") from error

    @property
    def renamed(self) -> dict[str, str]:
        """What was noted and is called otherwise: the model's name by the checkpoint's."""
        return {saved: name for name, saved in sorted(self._saved.items()) if saved != name and name in self.known}


def _name(given: object, saved: str) -> str:
    if not isinstance(given, str):
        raise TypeError(f"rename: expected a name for {saved!r}, got {given!r}")
    return given


@dataclass(frozen=True)
class Differences:
    """Between a checkpoint and what it was loaded into, by the model's names. Empty where it fits."""

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
        return ", ".join(f"{len(names)} {what} ({some_of(names)})" for what, names in self._lists.items() if names)
