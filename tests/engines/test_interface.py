"""The engines have the functions that ``backends/engine.py`` says they have, with these parameters in this order."""

from __future__ import annotations

import inspect
import re

import pytest

from fused_optim.backends import load_engine
from fused_optim.backends.engine import (
    CudaEngine,
    Engine,
    EngineGradients,
    EngineShardTable,
)

OWN = {"device", "stream", "workspace", "workspace_size", "threads"}  # where an engine runs: *where or **where


def declared(protocol: type) -> dict[str, list[str]]:
    methods = {name: method for name, method in vars(protocol).items() if inspect.isfunction(method)}
    parameters = {name: inspect.signature(method).parameters for name, method in methods.items()}
    return {
        name: [key for key in found if key not in ("self", "where")]
        for name, found in parameters.items()
        if not name.startswith("_")
    }


def has(holder: object, name: str) -> list[str]:
    """The parameters that pybind11 writes into a function's documentation, or into that of a class's constructor."""
    function = getattr(holder, name)
    text = (function.__init__ if isinstance(function, type) else function).__doc__
    return [key for key in re.findall(r"[(,]\s*(\w+):", text.splitlines()[0]) if key not in {"self", *OWN}]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_engines_take_what_their_protocol_says(name: str) -> None:
    engine, reason = load_engine(name)
    if engine is None:
        pytest.skip(reason)
    holders = {Engine: engine, EngineShardTable: engine.ShardTable, EngineGradients: engine.Gradients}
    found = {protocol: {key: has(holder, key) for key in declared(protocol)} for protocol, holder in holders.items()}
    assert found == {protocol: declared(protocol) for protocol in holders}
    assert len(found[EngineShardTable]["set_group"]) == 13 and len(found[Engine]["quantize_rescale"]) == 9


def test_the_cuda_engine_has_more() -> None:
    engine, reason = load_engine("cuda")
    if engine is None:
        pytest.skip(reason)
    own = declared(CudaEngine)
    products = {"has_products", "matrix_products", "normalize"}
    assert set(own) == {"load_kernels", "cuda_versions", "norm_workspace_bytes", "mark_differences", *products}
    for key, parameters in own.items():
        assert callable(getattr(engine, key))
        if key in products - {"has_products"}:
            assert has(engine, key) == parameters
