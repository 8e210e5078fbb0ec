"""Numbers and places that Python and the engines both name: the lists of ``csrc/multi_tensor``."""

from __future__ import annotations

from types import ModuleType

import pytest

from fused_optim.backends import load_engine
from fused_optim.backends.engine import Rule, Watched
from fused_optim.formats import STATE_FORMATS, Element, Master
from fused_optim.quantized.casts import CastFormat
from fused_optim.quantized.engine import ScaleStage
from fused_optim.quantized.recipes import RECIPES, Float8BlockScaling, Recipe, WeightFormat

NUMBERS: dict[str, dict[str, int]] = {
    "Format": {fmt.name: fmt.code for fmt in STATE_FORMATS.values()},
    "Watched": {name: place for place, name in enumerate(Watched._fields)},
    **{
        enum.__name__: {member.name: member.value for member in enum}
        for enum in (Element, Master, Rule, WeightFormat, ScaleStage, CastFormat)
    },
}


def load(name: str) -> ModuleType:
    engine, reason = load_engine(name)
    if engine is None:
        pytest.skip(reason)
    return engine


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_engines_and_python_number_alike(name: str) -> None:
    assert load(name).NUMBERS == NUMBERS


@pytest.mark.parametrize("name", ["cpu", "cuda"])
@pytest.mark.parametrize("recipe", [*(cls() for cls in RECIPES.values()), Float8BlockScaling(block=(1, 128))], ids=repr)
def test_updates_write_the_blocks_of_the_recipe(name: str, recipe: Recipe) -> None:
    kernel = recipe.kernel
    assert kernel is not None
    assert kernel.block is None or kernel.block == load(name).WRITTEN_BLOCKS[kernel.format.name]
