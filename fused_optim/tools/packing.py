"""States in the native form, encoded from the values of a checkpoint as an optimizer does that loads them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_optim.adam import EXP_AVG, EXP_AVG_SQ, MOMENTS
from fused_optim.formats import Master
from fused_optim.layout import MASTER, StateLayout
from fused_optim.state.param_state import ParamState
from fused_optim.state.state_dict import Options, converted
from fused_optim.tools.contents import State
from fused_optim.tools.writing import Entry

_NATIVE = Options("native", None, False)


class Packed:
    """The states of one parameter. ``formats``: dtypes of both moments, where blocks fit."""

    def __init__(self, states: Mapping[str, State], master: Master, formats: Sequence[torch.dtype]) -> None:
        self._states = states
        self._master = master
        self._formats = formats

    def entries(self) -> Iterator[tuple[tuple[str, ...], Entry]]:
        """What is to be written, by its place in the parameter's states. Nothing is read yet."""
        for place, value in _flat(converted(self._created("meta"), _NATIVE)):
            if isinstance(value, Tensor):
                yield place, Entry((), partial(self._part, place), tuple(value.shape), value.dtype)
            else:
                yield place, Entry((), partial(int, value))

    def _created(self, device: str) -> ParamState:
        shape = self._states[MOMENTS[0]].shape
        dtype = torch.bfloat16 if self._master.is_remainder else torch.float32
        param = torch.zeros(shape, dtype=dtype, device=device)
        return ParamState.create(param, StateLayout.create(param, self._master, (EXP_AVG, EXP_AVG_SQ), self._formats))

    def encoded(self) -> dict[tuple[str, ...], Any]:
        """All parts, by place."""
        created = self._created("cpu")
        for name in MOMENTS:
            created.write(name, self._states[name].values())
        if MASTER in self._states:
            created.write_master(self._states[MASTER].values())
        return dict(_flat(converted(created, _NATIVE)))

    def _part(self, place: tuple[str, ...]) -> Tensor:
        part: Tensor = _encoded(self)[place]
        return part


@functools.lru_cache(maxsize=1)
def _encoded(packed: Packed) -> dict[tuple[str, ...], Any]:
    """The last one's are kept: its parts are written one after the other."""
    return packed.encoded()


def let_go() -> None:
    """Free what is kept."""
    _encoded.cache_clear()


def _flat(states: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in states.items():
        if isinstance(value, Mapping):
            yield from (((name, part), inner) for part, inner in value.items())
        else:
            yield (name,), value
