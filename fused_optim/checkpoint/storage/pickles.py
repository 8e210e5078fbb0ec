"""Reads pickles without doing what they ask for.

Whatever one names is a stand-in that notes what it is called with and told to hold, and does nothing. Of Python's codes
for pickles those are left that plain values need: others let a few bytes reserve all memory. Dicts and sets are read as
lists, so nothing is hashed: a tuple that holds one tuple twice, which holds another twice, and so on, takes for ever to
hash, and one that is nested deeply overflows the stack.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

DEEPEST = 200  # that values are nested: .metadata less than 15 deep; a dict of one pair counts twice
_SHARED = 1 << 20  # values that may be there more than once: a pickle refers to what was there before by two bytes


class Given(list[Any]):
    """Base of stand-ins: records a call. Its first item is the call's arguments; states and items follow."""

    __slots__ = ()

    def __new__(cls, *args: Any) -> Self:
        made = super().__new__(cls)
        made.append(args)
        return made

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.append(state)

    @property
    def args(self) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self[0]
        return found


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
    """The pickle that ``content`` begins with; :func:`items` are those of what was a dict.

    ``names``: what it may name, and what stands in for it: stand-ins, or objects that cannot be called and have no
    attributes to be set. Raises ValueError for a pickle that names anything else, that is not whole, has codes that
    plain values do not need, is nested deeply, or says many times more than it has bytes.
    """
    try:
        plain = b"".join(_without_hashing(content))
        value = _Unpickler(_FRAME + len(plain).to_bytes(8, "little") + plain, names).load()
    except ValueError:
        raise
    except Exception as error:  # there are no limits to what damaged pickles raise
        raise ValueError(f"it is damaged: {error}") from error
    _check_extent(value, len(content) + _SHARED)
    return value


def items(given: list[Any]) -> Iterator[tuple[Any, Any]]:
    """(key, value) pairs of a former dict: a list of keys and values in turns.

    A pair set alone, as the last may be, is a tuple.
    """
    if len(given) % 2:
        *given, last = given
        if type(last) is not tuple or len(last) != 2:
            raise ValueError("a dict lacks a value")
        given += last
    return zip(given[::2], given[1::2], strict=True)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            raise UnknownName(module, name) from None

    def persistent_load(self, key: Any) -> Outside:
        return Outside(key)


def _check_extent(found: Any, most: int) -> None:
    """Raise ValueError if a value is nested too deeply or has too many parts, counting repeated ones each time."""
    level: list[Any] = [[found]]
    count = 0
    for _ in range(DEEPEST):
        count += sum(map(len, level))
        if count > most:
            raise ValueError(f"it says more than {most} values, by referring to some of them again and again")
        level = [item for holder in level for item in holder if isinstance(item, (list, tuple))]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} deep")


# What protocols 2 to 5 have for None, bools, numbers, tuples, lists, values that were there before, names, calls and
# states. Left out are numbers at which values are kept, which may be any.
_PLAIN = re.compile(
    rb"(?s:[N\x88\x89()\x85\x86\x87t\]ae\x94\x93R\x81bQ]|[Kq\x80h].|M..|[Jj].{4}|G.{8}|c[^\n]*\n[^\n]*\n)*+"
)
_TEXTS = {0x8C: 1, ord("X"): 4, ord("C"): 1, ord("B"): 4, 0x8A: 1}  # bytes, integers: how many bytes their lengths take
# What makes and fills dicts and sets, and what does so with lists.
_HASHING = {ord("}"): b"]", ord("u"): b"e", ord("s"): b"\x86a", 0x8F: b"]", 0x90: b"e", 0x91: b"l"}
_STOP, _KEEP, _FRAME = b".", b"r", b"\x95"  # the latter says how many bytes follow that are read at once


def _without_hashing(content: bytes) -> Iterator[bytes]:
    """The pickle, in chunks, that makes lists in place of dicts and sets: keys are compared without hashing them.

    Raises ValueError for an opcode that pickles of plain values do not have.
    """
    at = start = 0
    while (at := _PLAIN.match(content, at).end()) < len(content):  # type: ignore[union-attr]
        code = content[at]
        if code in _TEXTS:
            width = _TEXTS[code]
            at += 1 + width + int.from_bytes(content[at + 1 : at + 1 + width], "little")
        elif code in _HASHING:
            yield content[start:at]
            yield _HASHING[code]
            at = start = at + 1
        elif code == _FRAME[0]:
            yield content[start:at]
            at = start = at + 9
        elif code == _KEEP[0] and int.from_bytes(content[at + 1 : at + 5], "little") < len(content):
            at += 5
        elif code == _STOP[0]:
            yield content[start : at + 1]
            return
        else:
            raise ValueError(f"it has code {code:#04x}, for which plain values have no use")
    raise ValueError("its end is missing")
