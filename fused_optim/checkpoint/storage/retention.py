"""Rule for the checkpoints of a folder that are not removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fused_optim.options.checks import whole_number


class Written(Protocol):
    """A checkpoint in the folder."""

    @property
    def name(self) -> str: ...

    @property
    def step(self) -> int: ...


@dataclass(frozen=True)
class Retention:
    """Keeps the ``newest`` checkpoints, and every step that is a multiple of ``every``."""

    newest: int | None = 3  # None: all
    every: int | None = None

    @classmethod
    def checked(cls, keep: int | None, keep_every: int | None) -> Retention:
        """Raises TypeError or ValueError unless both are None or whole numbers of at least 1."""
        given = ("keep", keep), ("keep_every", keep_every)
        return cls(*(None if number is None else whole_number(name, number, 1) for name, number in given))

    def keeps(self, newest_first: Sequence[Written]) -> set[str]:
        """The names of the checkpoints that stay. Of several attempts at a step, only the newest can."""
        latest: dict[int, Written] = {}
        for each in newest_first:
            latest.setdefault(each.step, each)
        listed = list(latest.values())
        kept = [each for each in listed if self.every is not None and each.step % self.every == 0]
        return {each.name for each in (*listed[: self.newest], *kept)}
