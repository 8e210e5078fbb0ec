"""The cases that stand for products: none of the pairs is lost, and they are few."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from pairwise import pairwise


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


def test_values_need_no_order_and_no_hash() -> None:
    assert pairwise([{}, None], [[1], "a"]) == [({}, [1]), ({}, "a"), (None, [1]), (None, "a")]
