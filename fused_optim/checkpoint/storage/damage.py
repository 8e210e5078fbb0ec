"""Errors of checkpoints that are not whole."""

from __future__ import annotations


class Damaged(ValueError):
    """Something that a checkpoint should hold is missing, torn or changed. Another checkpoint may be whole."""


class Replaced(Damaged):
    """Another checkpoint was published in its place while it was read."""


def is_damage(error: BaseException) -> bool:
    """True if a checkpoint is not whole; False if it cannot be opened now, or is newer than the code."""
    return isinstance(error, Damaged | FileNotFoundError | EOFError)
