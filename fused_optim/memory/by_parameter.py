"""Values by parameter, which do not keep the parameters alive, as far as torch lets anything refer to them weakly."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar, overload

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Value = TypeVar("Value")
Default = TypeVar("Default")


class StrongRef(tuple[Tensor]):
    """Called as a weak reference is, it gives a parameter that it keeps. The engines know both."""

    __slots__ = ()

    def __call__(self) -> Tensor:
        return self[0]


Reference: TypeAlias = "weakref.ref[Tensor] | StrongRef"


def reference_to(param: Tensor, when_gone: Callable[[Any], object] | None = None) -> Reference:
    """A weak reference, which ends with the parameter, but for those that torch may have to swap.

    ``nn.Module.to`` and the like swap DTensors and other wrapper subclasses, and with
    ``torch.__future__.set_swap_module_params_on_conversion`` all parameters: ``torch.utils.swap_tensors`` refuses
    what has weak references. These parameters are kept, until the next step finds others.
    """
    if is_traceable_wrapper_subclass(param) or torch.__future__.get_swap_module_params_on_conversion():
        return StrongRef((param,))
    return weakref.ref(param, when_gone)


class ByParameter(Generic[Value]):
    """Values of parameters, by identity. Where nobody else holds a parameter any more, its value goes with it.

    Not of those that :func:`reference_to` keeps: their values stay until they are taken out. The parameters cannot be
    asked for: who looks for values has them.
    """

    def __init__(self, values: Mapping[Tensor, Value] | None = None) -> None:
        self._entries: dict[int, tuple[Reference, Value]] = {}  # by `id()`
        for param, value in (values or {}).items():
            self[param] = value

    def __setitem__(self, param: Tensor, value: Value) -> None:
        forget = functools.partial(_forget, weakref.ref(self), id(param))  # not this itself: it would be a cycle
        self._entries[id(param)] = reference_to(param, forget), value

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

    def values(self) -> list[Value]:
        return [value for _, value in self._entries.values()]

    def of(self, params: Iterable[Tensor]) -> dict[Tensor, Value]:
        """The values of those that have one."""
        return {param: self[param] for param in params if param in self}


def _forget(values: weakref.ref[ByParameter[Value]], key: int, _: object) -> None:
    if (kept := values()) is not None:
        kept._entries.pop(key, None)
