"""Reads what was written by somebody else: objects of torch.save, and JSON.

Runs no code that they might hold.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from fused_optim import rebuild as _rebuild  # noqa: F401  such files may hold quantized weights
from fused_optim.checkpoint.storage.damage import Damaged

_DEEPEST = 32  # JSON that is nested
_LARGEST = (1 << 63) - 1


class Refused(ValueError):
    """Raised for what might run code if it were read."""


def load_object(file: Path | IO[bytes], what: str, admits_registered: bool = True) -> Any:
    """``torch.load(weights_only=True)`` into host memory, of a path mapped into it.

    ``what`` it is, for messages. ``admits_registered``: also classes that torch admits only because a package that this
    process has imported told it to. Raises :class:`Refused` for what torch does not admit, Damaged (a ValueError) for
    what cannot be read.
    """
    try:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is no archive; files of torch.save before 1.6 have to be saved again")
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.file_size > member.compress_size:  # it may hold a thousand times its size
                    raise ValueError(f"{member.filename} in it is compressed, which torch.save does not do")
                if not admits_registered and member.filename.endswith("/data.pkl"):
                    content = io.BytesIO(archive.read(member))
                    names = torch._weights_only_unpickler.get_globals_in_pkl(content)
                    if others := names & _registered_by_others():
                        raise Refused(f"{what} names {min(others)}, which other processes may not admit")
        if not isinstance(file, Path):
            file.seek(0)
        return torch.load(file, map_location="cpu", mmap=isinstance(file, Path), weights_only=True)
    except Refused:
        raise
    except Exception as error:
        named = re.search(r"\bGLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if named:
            hint = "if you trust it, admit it by torch.serialization.add_safe_globals"
            raise Refused(f"{what} names {named[1]}, which might run code, and is not read; {hint}") from error
        reason = str(error).partition("\n")[0]
        raise Damaged(f"{what} cannot be read by torch.load ({reason}); it is truncated or damaged") from error


def _registered_by_others() -> set[str]:
    """Names that other packages have passed to ``torch.serialization.add_safe_globals``, beside torch's own."""
    names: set[str] = set()
    for entry in torch.serialization.get_safe_globals():
        try:
            name = entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
        except AttributeError:  # a functools.partial has no name by which a pickle could ask for it
            continue
        if name.partition(".")[0] not in ("torch", "fused_optim"):
            names.add(name)
    return names.difference(torch._weights_only_unpickler._get_allowed_globals())


def load_json(content: bytes, what: str) -> dict[str, Any]:
    """An object of JSON. Raises Damaged, a ValueError, for what is none, and for numbers that are none of 64 bits."""
    try:
        parsed = json.loads(content, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except json.JSONDecodeError as error:
        raise Damaged(f"{what} cannot be read (JSONDecodeError); it is truncated or damaged") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what} cannot be read ({error}); it is truncated or damaged") from error
    if not isinstance(parsed, dict):
        raise Damaged(f"{what} cannot be read (found a {type(parsed).__name__}); it is truncated or damaged")
    level: list[Any] = [parsed]
    for _ in range(_DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
    if level:
        raise Damaged(f"{what} cannot be read (it is nested more than {_DEEPEST} deep); it is damaged")
    return parsed


def number_in(content: dict[str, Any], field: str, what: str) -> int:
    """A whole number of an object of JSON. Raises Damaged where it is none."""
    found = content.get(field)
    if type(found) is not int or found < 0:
        raise Damaged(f"{what} is damaged: {field}: expected a number of at least 0, found {type(found).__name__}")
    return found


def _whole(text: str) -> int:
    if abs(found := int(text)) > _LARGEST:
        raise ValueError(f"{text[:100]}: expected a number of 64 bits")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(f"{text[:100]}: expected a finite number")
    return found
