"""A parameter's states in another form, encoded from a checkpoint's values as by an optimizer that loads them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_optim.checkpoint.open import TensorInfo
from fused_optim.formats.masters import Master
from fused_optim.formats.states import StateFormat, state_format
from fused_optim.memory.layout import MASTER, StateLayout
from fused_optim.rules import StateSpec
from fused_optim.state.param_state import ParamState
from fused_optim.tools.entries import Entry
from fused_optim.tools.names import STATES
from fused_optim.tools.saved_optimizer import SavedState

Place = tuple[str, ...]  # in the state dict of the optimizer
Form = Callable[[ParamState], Mapping[str, Any]]  # a parameter's states as state dicts have them


def known_format(name: str, given: torch.dtype | str) -> StateFormat:
    """A format of states. Raises ValueError, which names the option, for what is none."""
    try:
        return state_format(given)
    except KeyError:
        raise ValueError(f"{name}: expected one of {', '.join(STATES)}, got {given!r}") from None


class Encoded:
    """The states of one parameter. ``formats``: their dtypes, where blocks fit."""

    def __init__(
        self, states: Mapping[str, SavedState], master: Master, formats: Mapping[StateSpec, torch.dtype], form: Form
    ) -> None:
        self._states = states
        self.master = master
        self._specs, self._formats = tuple(formats), [*formats.values()]
        self._form = form

    def entries(self) -> Iterator[tuple[Place, Entry]]:
        """Entries to write, by place in the parameter's states. Nothing is read yet."""
        created = self._created("meta")
        for place, value in _flat(self._form(created)):
            if not isinstance(value, Tensor):
                yield place, Entry((), partial(int, value))
                continue
            yield place, Entry((), self._reader(place, value, created), TensorInfo(tuple(value.shape), value.dtype))

    def _reader(self, place: Place, value: Tensor, created: ParamState) -> Callable[[], Tensor]:
        if not value.is_meta:  # it is known without reading
            return value.clone
        return self._states[place[0]].values if self._is_plain(place, created) else partial(self._value, place)

    def _is_plain(self, place: Place, created: ParamState) -> bool:
        """True if it is stored in FP32, so that it can be read without the parameter's other states."""
        return place[0] in self._states and created.layout.dtypes().get(place[0]) == torch.float32

    def parameter(self) -> Tensor:
        """The BF16 parameter: the high bits of the FP32 master, whose low bits are the remainders."""
        created = self._created("cpu")
        created.write_master(self._states[MASTER].values())
        return created.param

    def values(self) -> dict[Place, Any]:
        """All states by place, read and encoded."""
        created = self._created("cpu")
        for spec in self._specs:
            created.write(spec.name, self._states[spec.name].values())
        if self.master is not Master.PARAMETER:
            created.write_master(self._states[MASTER].values())
        return dict(_flat(self._form(created)))

    def _created(self, device: str) -> ParamState:
        shape = self._states[self._specs[0].name].shape
        dtype = torch.bfloat16 if self.master.is_remainder else torch.float32
        param = torch.zeros(shape, dtype=dtype, device=device)
        return ParamState.create(param, StateLayout.create(param, self.master, self._specs, self._formats))

    def _value(self, place: Place) -> Tensor:
        value: Tensor = _values_of(self)[place]
        return value


@functools.lru_cache(maxsize=1)
def _values_of(encoded: Encoded) -> dict[Place, Any]:
    """All values of a parameter. The last parameter's are kept: its entries are written one after the other."""
    return encoded.values()


def forget() -> None:
    """Free the last parameter's values."""
    _values_of.cache_clear()


def _flat(states: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    for name, value in states.items():
        if isinstance(value, Mapping):
            yield from (((name, component), inner) for component, inner in value.items())
        else:
            yield (name,), value
