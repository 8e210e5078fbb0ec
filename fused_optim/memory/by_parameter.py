"""What belongs to parameters and does not keep them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar, overload

from torch import Tensor

Value = TypeVar("Value")
Default = TypeVar("Default")


class ByParameter(Generic[Value]):
    """Values of parameters, by identity. Where nobody else holds a parameter any more, its value goes with it.

    The parameters cannot be asked for: who looks for values has them.
    """

    def __init__(self, values: Mapping[Tensor, Value] | None = None) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Value]] = {}  # by `id()`
        for param, value in (values or {}).items():
            self[param] = value

    def __setitem__(self, param: Tensor, value: Value) -> None:
        forget = functools.partial(_forget, weakref.ref(self), id(param))  # not this itself: it would be a cycle
        self._entries[id(param)] = weakref.ref(param, forget), value

    def __getitem__(self, param: Tensor) -> Value:
        if id(param) not in self._entries:
            raise KeyError(param)
        return self._entries[id(param)][1]

    def __contains__(self, param: Tensor) -> bool:
        return id(param) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def get(self, param: Tensor) -> Value | None: ...
    @overload
    def get(self, param: Tensor, default: Default) -> Value | Default: ...
    def get(self, param: Tensor, default: Default | None = None) -> Value | Default | None:
        found = self._entries.get(id(param))
        return default if found is None else found[1]

    def pop(self, param: Tensor) -> None:
        """Without a value, nothing happens."""
        self._entries.pop(id(param), None)

    def clear(self) -> None:
        self._entries.clear()

    def of(self, params: Iterable[Tensor]) -> dict[Tensor, Value]:
        """The values of those that have one."""
        return {param: self[param] for param in params if param in self}


def _forget(values: weakref.ref[ByParameter[Value]], key: int, _: object) -> None:
    if (kept := values()) is not None:
        kept._entries.pop(key, None)
