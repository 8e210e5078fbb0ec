"""Options of a load, names in the checkpoint and in the model, and the differences between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from fused_optim.options.checks import some_of
from fused_optim.sharding.collective import unwrapped_name

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
        """The name of what is loaded. Raises ValueError where two names in the checkpoint mean the same."""
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
