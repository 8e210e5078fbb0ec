"""Cases in place of a product of parameters: every two values of different parameters meet in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


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
