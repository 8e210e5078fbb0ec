"""The cases that stand for products: none of the pairs is lost, and they are few."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from pairwise import each_once, pairwise


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ((9, 5, 2), 45),
        ((5, 5, 9), 50),
        ((2, 2, 2), 4),
        ((2, 3, 2, 4), 12),
        ((3, 3, 3, 3), 11),
        ((4, 3), 12),
        ((1, 6, 1), 6),
    ],
)
def test_every_pair_is_in_a_case(sizes: tuple[int, ...], most: int) -> None:
    parameters = [[f"{name}{i}" for i in range(size)] for name, size in zip("abcd", sizes)]
    cases = pairwise(*parameters)
    assert set(cases) <= set(product(*parameters))
    for i, j in combinations(range(len(sizes)), 2):
        assert {(case[i], case[j]) for case in cases} == set(product(parameters[i], parameters[j]))
    assert len(cases) <= most and cases == pairwise(*parameters)


@pytest.mark.parametrize("sizes, usual", [((8, 3), 8), ((2, 2), 2), ((3, 5, 4), 5), ((4, 1), 4)])
def test_the_usual_run_has_each_value(sizes: tuple[int, ...], usual: int) -> None:
    parameters = [[f"{name}{i}" for i in range(size)] for name, size in zip("abc", sizes)]
    cases = each_once(product(*parameters))
    plain = [case for case in cases if type(case) is tuple]
    others = [case for case in cases if type(case) is not tuple]
    assert len(plain) == usual and [set(values) for values in zip(*plain)] == list(map(set, parameters))
    assert all([mark.name for mark in case.marks] == ["long"] for case in others)
    everything = [case if type(case) is tuple else tuple(case.values) for case in cases]
    assert everything == [*product(*parameters)]  # in their order, and none is lost
