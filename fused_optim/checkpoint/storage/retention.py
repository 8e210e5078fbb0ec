"""Which checkpoints of a folder stay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fused_optim.checkpoint.storage.manifest import Manifest
from fused_optim.options.checks import whole_number

PINNED = "fused_optim_pinned"  # a file in a checkpoint that stays as long as it is there


class Written(Protocol):
    """A checkpoint that is there."""

    @property
    def name(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def manifest(self) -> Manifest | None: ...


@dataclass(frozen=True)
class Retention:
    """What stays: the ``newest``; every step that is a multiple of ``every``; the best ones by a metric.

    ``best``: its name, how many, and "min" or "max".
    """

    newest: int | None = 3  # None: all
    every: int | None = None
    best: tuple[str, int, str] | None = None

    @classmethod
    def of(cls, keep: int | None, keep_every: int | None, keep_best: Sequence[Any] | None) -> Retention:
        """Raises TypeError or ValueError for what makes no sense."""
        newest, every = (
            None if n is None else whole_number(name, n, 1) for name, n in (("keep", keep), ("keep_every", keep_every))
        )
        if keep_best is None:
            return cls(newest, every)
        match keep_best:
            case [str(metric), count]:
                mode = "min"
            case [str(metric), count, "min" | "max" as mode]:
                pass
            case _:
                raise ValueError(f"keep_best: expected ('loss', 3) or ('accuracy', 3, 'max'), got {keep_best!r}")
        return cls(newest, every, (metric, whole_number("keep_best", count, 1), mode))

    def keeps(self, newest_first: Sequence[Written]) -> set[str]:
        """The names of those that stay. Of attempts at the same step only the newest can."""
        latest: dict[int, Written] = {}
        for each in newest_first:
            latest.setdefault(each.step, each)
        listed = list(latest.values())
        kept = [*listed[: self.newest], *self._best(listed)]
        kept += [each for each in listed if self.every is not None and each.step % self.every == 0]
        return {each.name for each in kept}

    def _best(self, listed: Iterable[Written]) -> list[Written]:
        """Of equals the older ones."""
        if self.best is None:
            return []
        metric, count, mode = self.best
        sign = 1 if mode == "min" else -1
        measured = [
            (sign * each.manifest.metrics[metric], each.step, each)
            for each in listed
            if each.manifest is not None and metric in each.manifest.metrics
        ]
        return [each for *_, each in sorted(measured, key=lambda item: item[:2])[:count]]


def finite_metrics(given: Mapping[str, Any] | None) -> dict[str, float]:
    """Those that checkpoints can be ranked by: 64-bit floats. Raises TypeError for what are no numbers by name."""
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise TypeError(f"metrics: expected numbers by name, got {given!r}")
    metrics: dict[str, float] = {}
    for name, value in (given or {}).items():
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            metrics[name] = float(value)
        except OverflowError:
            metrics[name] = math.inf
        except Exception as error:
            raise TypeError(f"metrics: {name}: expected a number, got {type(value).__name__}") from error
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
