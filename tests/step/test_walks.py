"""Optimizers that are interrupted in every way, in any order, against one that is not; see ``support/walks.py``."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import distributed
from distributed import long
from walks import INTERRUPTIONS, NOTHING, TRAINING, Config, Operation, walk

MASTERS = ["float32", "bfloat16+rem16", "bfloat16+float32", "bfloat16+rem8", "bfloat16+float16", "float16+float32"]
FORMATS = ["fp32", "int8", "fp8", "fp16", "bf16"]
LENGTH = 40
# As often a step as an interruption. What fails shrinks towards the first, so to the fewest operations that fail.
NAMES = [NOTHING, *["step"] * len(INTERRUPTIONS), *TRAINING, *INTERRUPTIONS]
OPERATIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 11)), min_size=LENGTH, max_size=LENGTH)


def check_walks(count: int, seed: int, ranks: int, compiles: bool = False) -> None:
    moments = st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS))
    configs = st.builds(Config, st.sampled_from(MASTERS), moments, st.booleans(), st.booleans(), st.just(compiles))

    @hypothesis.seed(seed)
    @settings(max_examples=count, derandomize=False, phases=[Phase.generate, Phase.shrink])
    @given(configs, OPERATIONS)
    def check(config: Config, operations: list[Operation]) -> None:
        found = [walk(config, operations)] if ranks == 1 else distributed.run(ranks, walk, config, operations)
        assert not any(found), "\n".join(filter(None, found))

    check()


@pytest.mark.parametrize("ranks, count", [(1, 20), (2, 12), long(1, 50), long(2, 50)])
def test_walks(ranks: int, count: int) -> None:
    check_walks(count, ranks, ranks)


@pytest.mark.long
def test_compiled_walks() -> None:
    """Fewer: torch.compile takes a second each time."""
    check_walks(6, 3, 1, compiles=True)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_walks(seed: int, ranks: int) -> None:
    check_walks(200 if ranks == 1 else 100, seed, ranks)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(110, 115))
def test_many_compiled_walks(seed: int) -> None:
    check_walks(20, seed, 1, compiles=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_walk_sees_a_bit(ranks: int) -> None:
    """In a parameter, in a state or in a step: what the walker alone is given is found, on the rank that has it."""
    for operation in ("drop_bit", "drop_state", "drop_step"):
        config = Config("bfloat16+rem16", ("int8", "fp8"), named=True, skips=False)
        operations = [("step", 0), (operation, 0), ("look", 0)]
        found = [walk(config, operations)] if ranks == 1 else distributed.run(ranks, walk, config, operations)
        assert all("AssertionError" in text for text in found)
