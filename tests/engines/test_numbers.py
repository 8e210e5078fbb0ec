"""The tables that Python and the engines both spell. An engine with others, or that lacks a function, is refused."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from fused_optim.backends import COMPILED, load_engine
from fused_optim.backends.engine import CpuEngine, CudaEngine
from fused_optim.backends.tables import problem_of, tables
from fused_optim.quantized.recipes import RECIPES, Float8BlockScaling, Recipe


def load(name: str) -> ModuleType:
    """The engine itself, whatever its tables are."""
    try:
        return importlib.import_module(f"fused_optim._engine_{name}")
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", COMPILED)
def test_engines_and_python_have_the_same_tables(name: str) -> None:
    engine = load(name)
    assert tables() == engine.TABLES
    assert load_engine(name) == (engine, "")


def changed(name: str, row: int, *others: object) -> dict[str, Any]:
    """Tables with another row; without ``others`` with one less."""
    rows = list(tables()[name])
    rows[row : row + 1] = [others] if others else []
    return {**tables(), name: tuple(rows)}


OTHER_TABLES = {
    "a new format": {**tables(), "Format": (*tables()["Format"], ("toy8", 1, True))},
    "a format less": changed("Format", 2),
    "another name": changed("Format", 3, "float8_e5m2", 1, True),
    "other bytes": changed("Master", 4, "FLOAT16", 4),
    "scales": changed("Format", 1, "bfloat16", 2, True),
    "another order": {**tables(), "Rule": tables()["Rule"][::-1]},
    "states of another kind": changed("Rule", 1, "lion", ("SQUARE",), ("beta1", "beta2")),
    "other hyperparameters": changed("Rule", 1, "lion", ("SIGNED",), ("beta2", "beta1")),
    "another field": changed("CachedShard", 1, "exp_avg"),
    "one table less": {name: rows for name, rows in tables().items() if name != "CastFormat"},
    "none": None,
}


@pytest.mark.parametrize("other", OTHER_TABLES)
@pytest.mark.parametrize("name", COMPILED)
def test_engines_with_other_tables_are_refused(name: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(name)
    monkeypatch.setattr(engine, "TABLES", OTHER_TABLES[other])
    problem_of.cache_clear()
    try:
        assert load_engine(name) == (None, "built for other tables of formats: install fused_optim again")
    finally:
        problem_of.cache_clear()


def test_engines_without_tables_are_refused() -> None:
    """Those of earlier versions."""
    assert "install fused_optim again" in problem_of(ModuleType("_engine_cpu"))


@pytest.mark.parametrize(("name", "lost"), [("cpu", "quantize_encode"), ("cpu", "crc32"), ("cuda", "cuda_versions")])
def test_engines_that_lack_a_function_are_refused(name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were built before it came: without a word of it, the first call would fail."""
    names = {each for each in dir(CudaEngine if name == "cuda" else CpuEngine) if not each.startswith("_")}
    engine = ModuleType(f"fused_optim._engine_{name}")
    engine.__dict__.update(dict.fromkeys(names), TABLES=tables())
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    assert load_engine(name) == (engine, "")
    delattr(engine, lost)
    problem_of.cache_clear()
    assert load_engine(name) == (None, f"built from other sources, without {lost}: install fused_optim again")


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("recipe", [*(cls() for cls in RECIPES.values()), Float8BlockScaling(block=(1, 128))], ids=repr)
def test_updates_write_the_blocks_of_the_recipe(name: str, recipe: Recipe) -> None:
    kernel = recipe.kernel
    assert kernel is not None
    assert kernel.block is None or kernel.block == load(name).WRITTEN_BLOCKS[kernel.format.name]
