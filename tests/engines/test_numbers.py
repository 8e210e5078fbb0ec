"""Numbers and places that Python and the engines both name: the lists of ``csrc/multi_tensor``."""

from __future__ import annotations

import pytest

from fused_optim.backends import Watched, load_engine
from fused_optim.formats import STATE_FORMATS, Element, Master
from fused_optim.quantized.engine import ScaleStage
from fused_optim.quantized.recipes import WeightFormat

NUMBERS: dict[str, dict[str, int]] = {
    "Format": {fmt.name: fmt.code for fmt in STATE_FORMATS.values()},
    "Watched": {name: place for place, name in enumerate(Watched._fields)},
    **{
        enum.__name__: {member.name: member.value for member in enum}
        for enum in (Element, Master, WeightFormat, ScaleStage)
    },
}


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_engines_and_python_number_alike(name: str) -> None:
    engine, reason = load_engine(name)
    if engine is None:
        pytest.skip(reason)
    assert engine.NUMBERS == NUMBERS
