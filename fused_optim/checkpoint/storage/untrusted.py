"""Reads what was written by somebody else: objects of torch.save, and JSON. Runs no code that they might hold."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from fused_optim import rebuild as _rebuild  # noqa: F401  such files may hold quantized weights
from fused_optim.checkpoint.storage.damage import Damaged


class Refused(ValueError):
    """Raised for what might run code if it were read."""


def load_object(file: Path | IO[bytes], what: str) -> Any:
    """``torch.load(weights_only=True)`` into host memory, of a path mapped into it.

    ``what`` it is, for messages. Raises :class:`Refused` for what torch does not admit, Damaged (a ValueError) for
    what cannot be read.
    """
    try:
        is_archive = zipfile.is_zipfile(file)
        if is_archive:
            _check_sizes(file)
        if not isinstance(file, Path):
            file.seek(0)
        mapped = is_archive and isinstance(file, Path)
        return torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:
        named = re.search(r"\bGLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if named:
            hint = "if you trust it, admit it by torch.serialization.add_safe_globals"
            raise Refused(f"{what} names {named[1]}, which might run code, and is not read; {hint}") from error
        reason = str(error).partition("\n")[0]
        raise Damaged(f"{what} cannot be read by torch.load ({reason}); it is truncated or damaged") from error


def _check_sizes(file: Path | IO[bytes]) -> None:
    """torch stores what it writes as it is; archives that are compressed may hold a thousand times their size."""
    with zipfile.ZipFile(file) as archive:
        packed = next((each for each in archive.infolist() if each.file_size > each.compress_size), None)
    if packed is not None:
        raise ValueError(f"{packed.filename} in it is compressed, which torch.save does not do")


def load_json(content: bytes, what: str) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for what is none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what} cannot be read ({type(error).__name__}); it is truncated or damaged") from error
    if not isinstance(found, dict):
        raise Damaged(f"{what} cannot be read (found a {type(found).__name__}); it is truncated or damaged")
    return found
