"""Reads pickles without doing what they ask for.

Whatever one names is a stand-in that notes what it is called with and told to hold, and does nothing. Of Python's codes
for pickles those are left that plain values need: others let a few bytes reserve all memory.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from typing import Any, Self


class Given:
    """What a pickle gives to a class or function: the base of stand-ins for these."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Self:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Outside(Given):
    """An object that is not in the pickle; its argument is the key there."""

    __slots__ = ()


class UnknownName(ValueError):
    """Raised for a pickle that names what it may not."""

    def __init__(self, module: str, name: str) -> None:
        super().__init__(f"it names {module}.{name}, which it has no use for")
        self.module, self.name = module, name


def stand_in(name: str) -> type[Given]:
    return type(name, (Given,), {"__slots__": ()})


def read_pickle(content: bytes, names: Mapping[tuple[str, str], Any]) -> Any:
    """The pickle that ``content`` begins with. ``names``: what it may name, and what stands in for it.

    Values of ``names`` are stand-ins, or objects that cannot be called and have no attributes to be set. Raises
    ValueError for a pickle that names anything else, that is not whole, or has codes that plain values do not need.
    """
    _check_codes(content)
    try:
        return _Unpickler(content, names).load()
    except ValueError:
        raise
    except Exception as error:  # there are no limits to what damaged pickles raise
        raise ValueError(f"it is damaged: {error}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            raise UnknownName(module, name)
        return self._names[module, name]

    def persistent_load(self, key: Any) -> Outside:
        return Outside(key)


# What protocols 2 to 5 have for None, bools, integers of 64 bits, floats, tuples, lists, dicts, sets, values that were
# there before, names, calls and states. Left out are long integers and numbers at which values are kept, which may be
# any.
_PLAIN = re.compile(
    rb"(?s:[N\x88\x89()\x85\x86\x87t\]ae}su\x8f-\x91\x94\x93R\x81bQ]|[Kq\x80h].|M..|[Jj].{4}|[\x95G].{8}"
    rb"|c[^\n]*\n[^\n]*\n|\x8a(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9}))*+"
)
_TEXTS = {0x8C: 1, ord("X"): 4, ord("C"): 1, ord("B"): 4}  # and bytes: how many bytes their lengths take
_STOP = ord(".")


def _check_codes(content: bytes) -> None:
    at = 0
    while True:
        found = _PLAIN.match(content, at)
        at = found.end() if found else at
        if at >= len(content):
            raise ValueError("its end is missing")
        if content[at] == _STOP:
            return
        if content[at] not in _TEXTS:
            raise ValueError(f"it has code {content[at]:#04x}, for which plain values have no use")
        width = _TEXTS[content[at]]
        at += 1 + width + int.from_bytes(content[at + 1 : at + 1 + width], "little")
