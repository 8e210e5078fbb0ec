"""The tables that Python and the engines both spell: numbers, names and sizes, as in ``csrc/multi_tensor/table.h``.

An engine carries its own; one whose tables are others, or that lacks a function, is not loaded.
"""

from __future__ import annotations

import enum
import functools
from types import ModuleType

from fused_optim.backends.engine import CachedShard, CpuEngine, CudaEngine
from fused_optim.formats.elements import ELEMENT_TYPES, Element
from fused_optim.formats.masters import Master
from fused_optim.formats.states import STATE_FORMATS
from fused_optim.rules import BUILT_IN, RuleSpec

Rows = tuple[tuple[object, ...], ...]


class WeightFormat(enum.IntEnum):
    """Formats of weights, as the engines number them; their elements and scales are in ``table.h``."""

    FLOAT8 = 0
    FLOAT8_BLOCKS = 1
    FLOAT8_TILES = 2
    MXFLOAT8 = 3
    NVFLOAT4 = 4


class ScaleStage(enum.IntEnum):
    """When scales of whole weights are derived, as the engines number it."""

    BEFORE = 0  # an update: from earlier absmaxes
    AFTER = 1  # an update: with the absmax of its values
    AGAIN = 2  # for the values of the last update: likewise


class CastFormat(enum.IntEnum):
    """Formats of codes, as the engines number them."""

    E4M3 = 0
    E5M2 = 1


_LARGEST = {CastFormat.E4M3: 448.0, CastFormat.E5M2: 57344.0}


def tables() -> dict[str, Rows]:
    """By name; a row's place is its number. Engines may have further update rules."""
    sizes = {element: dtype.itemsize for dtype, element in ELEMENT_TYPES.items()}
    formats = sorted(set(STATE_FORMATS.values()), key=lambda fmt: fmt.number)
    return {
        "Element": tuple((element.name, sizes[element]) for element in Element),
        "Master": tuple((kind.name, kind.dtype.itemsize if kind else 0) for kind in Master),
        "Format": tuple((fmt.name, fmt.signed_dtype.itemsize, fmt.scaled) for fmt in formats),
        "Rule": tuple(rule.engine_row for rule in BUILT_IN.values()),
        "CachedShard": tuple((name,) for name in CachedShard._fields),
        "CastFormat": tuple((kind.name, _LARGEST[kind]) for kind in CastFormat),
        **{kind.__name__: tuple((each.name,) for each in kind) for kind in (WeightFormat, ScaleStage)},
    }


@functools.cache  # an engine is asked for at every step
def problem_of(engine: ModuleType) -> str:
    """Why an engine cannot be used; empty if it can."""
    rows = getattr(engine, "TABLES", None)
    if rows is None or {**rows, "Rule": rows.get("Rule", ())[: len(BUILT_IN)]} != tables():
        return "built for other tables of formats: install fused_optim again"
    expected = dir(CudaEngine if engine.__name__.endswith("cuda") else CpuEngine)
    lacking = [name for name in expected if not name.startswith("_") and not hasattr(engine, name)]
    return f"built from other sources, without {', '.join(lacking)}: install fused_optim again" if lacking else ""


@functools.cache  # for each device of a plan
def number_of(rule: RuleSpec, engine: ModuleType) -> int | None:
    """The number by which an engine knows an update rule; None if it was built with no such row."""
    rows = engine.TABLES["Rule"]
    return rows.index(rule.engine_row) if rule.engine_row in rows else None
