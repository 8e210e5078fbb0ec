"""Nested state dicts as flat keys, as torch.distributed.checkpoint writes them, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

Path = tuple[str | int, ...]  # text: of a mapping; a number: of a list


def flat(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Values and places by key: torch's ``flatten_state_dict``, which loses some mappings; these stay whole.

    They are empty ones, and those with keys that are no texts, unless shards are in them. Raises ValueError where two
    values have one key.
    """
    values: dict[str, Any] = {}
    places: dict[str, Path] = {}
    for name, item in state.items():
        for path, value in _leaves((str(name),), item):
            key = ".".join(map(str, path))
            if key in values:
                raise ValueError(f"{places[key]} and {path} of a state dict have the same key {key!r}: rename one")
            values[key], places[key] = value, path
    return values, places


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        if not _is_structure(path) and _is_lost(value):
            yield path, _plain(value)
            return
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)
    elif isinstance(value, list) and any(map(_holds, value)):
        for i, item in enumerate(value):
            yield from _leaves((*path, i), item)
    else:
        yield path, value


def _holds(value: Any) -> bool:
    return isinstance(value, Tensor | Mapping) or (isinstance(value, list) and any(map(_holds, value)))


def _is_structure(path: Path) -> bool:
    """True for the path of a model, an optimizer, a param group or a parameter's states: these are always flattened."""
    return len(path) == 1 or (path[1] in ("state", "param_groups") and len(path) <= 3)


def _is_lost(value: Mapping[Any, Any]) -> bool:
    return not value or (any(type(key) is not str for key in value) and not _holds_shards(value))


def _holds_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_shards, value.values()))
    return any(map(_holds_shards, value)) if isinstance(value, list | tuple) else isinstance(value, DTensor)


def _plain(value: Any) -> Any:
    """The value with dicts in place of other mappings, whose classes few readers admit."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def path_after(place: Path, text: str) -> Path:
    """The end of a place that reads ``text``; what of it is not known of the place is one key.

    Where nothing is known of the place, which is the key alone then, every dot is taken for a step.
    """
    if len(place) == 1:
        return tuple(text.split("."))
    for count in range(1, len(place)):
        end = place[count:]
        joined = ".".join(map(str, end))
        if joined == text:
            return end
        if text.endswith(f".{joined}"):
            return text.removesuffix(f".{joined}"), *end
    return (text,)


def setting_after(place: Path, text: str) -> Path:
    """:func:`path_after` of what is in a mapping."""
    first, *inner = path_after(place, text)
    return str(first), *inner


def assembled(values: Mapping[Path, Any]) -> Any:
    """The inverse of :func:`flat`: nested dicts and lists of values by their places."""
    if () in values:
        return values[()]
    inner: dict[str | int, dict[Path, Any]] = {}
    for (first, *rest), value in values.items():
        inner.setdefault(first, {})[tuple(rest)] = value
    built = {key: assembled(below) for key, below in inner.items()}
    return [built[key] for key in sorted(built)] if built and all(type(key) is int for key in built) else built
