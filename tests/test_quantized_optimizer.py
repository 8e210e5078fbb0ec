"""The optimizer's updates of quantized weights: the same on any number of ranks, from FP32 masters or without them."""

from __future__ import annotations

import pytest

import distributed
from distributed import Part, assert_same, join_all
from quantized_cases import RECIPES, Run

MASTERS = pytest.mark.parametrize("master_weights", [True, False], ids=["masters", "no masters"])


def train_each(recipes: list[str], how: str, master_weights: bool) -> dict[str, dict[str, Part]]:
    found = {}
    for recipe in recipes:
        run = Run(recipe, how, master_weights=master_weights)
        run.train(0, 5)
        found[recipe] = run.snapshot()
    return found


@MASTERS
def test_ranks_do_not_change_a_bit(master_weights: bool) -> None:
    whole = train_each(list(RECIPES), "plain", master_weights)
    for ranks, how in [(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp"), (4, "hsdp")]:
        results = distributed.run(ranks, train_each, list(RECIPES), how, master_weights)
        for recipe, expected in whole.items():
            assert_same(join_all([result[recipe] for result in results]), join_all([expected]))
