"""Fewer cases than a product of parameters: every two values meet in one, or the usual run has each value once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each case begins with two values that have not met, and goes on with those that meet most for the first time."""
    assert len(parameters) > 1 and all(map(len, parameters))
    options = [[(place, index) for index in range(len(values))] for place, values in enumerate(parameters)]
    unmet = dict.fromkeys(frozenset(two) for some, others in combinations(options, 2) for two in product(some, others))
    cases = []
    while unmet:
        chosen = dict(next(iter(unmet)))
        for place in range(len(parameters)):
            if place not in chosen:
                new = {
                    option: sum(frozenset((option, other)) in unmet for other in chosen.items())
                    for option in options[place]
                }
                chosen |= [max(new, key=lambda option: new[option])]
        for two in combinations(chosen.items(), 2):
            unmet.pop(frozenset(two), None)
        cases.append(tuple(values[chosen[place]] for place, values in enumerate(parameters)))
    return cases


def each_once(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The cases in their order, of which the usual run has enough for each value of each parameter; others are long."""
    listed = list(cases)
    values = [[(place, repr(value)) for place, value in enumerate(case)] for case in listed]
    met: Counter[tuple[int, str]] = Counter()
    usual: set[int] = set()

    def gain(case: int) -> tuple[int, int]:
        """New values first, then those that were seldom met."""
        return sum(not met[value] for value in values[case]), -sum(met[value] for value in values[case])

    while gain(best := max(range(len(listed)), key=gain))[0]:
        usual.add(best)
        met.update(values[best])
    return [case if i in usual else pytest.param(*case, marks=pytest.mark.long) for i, case in enumerate(listed)]


def each_once_with(ways: Iterable[tuple[Any, ...]], values: Sequence[Any]) -> list[Any]:
    """Each way with a list of one value, the next one each time; with a list of all others it is long."""
    found: list[Any] = []
    for number, way in enumerate(ways):
        usual = number % len(values)
        others = [*values[:usual], *values[usual + 1 :]]
        found += [(*way, [values[usual]]), pytest.param(*way, others, marks=pytest.mark.long)]
    return found
