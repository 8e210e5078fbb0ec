"""Fixtures: devices, backends, reproducible randomness."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import fresh
import seeds
from fused_optim.backends import load_engine

# One thread, as most tensors here are tiny: in fixtures of modules, too.
torch.set_num_threads(1)

# Derandomized: a failure is reproducible, and a run of the tests takes the same time twice. What is random begins alike
# in `make test-long`, and goes twice as far.
settings.register_profile(
    "fused_optim",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=int(os.environ.get("FUSED_OPTIM_TEST_EXAMPLES", "30")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fused_optim")
pytest.register_assert_rewrite("recipe_checks")  # which shows the values that differ, as in tests
seeds.seed_what_is_there()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: garbage is looked for in what tests make."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    _keep()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """And so does what a file's tests have left behind, modules and compiled code above all."""
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            _keep()


def _keep() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn; what needs a GPU is skipped where there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


@pytest.fixture
def engine(device: str) -> str:
    """The name of the device's compiled engine."""
    if load_engine(device)[0] is None:
        pytest.skip(f"no {device} engine")
    return device


@pytest.fixture
def use_backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Chooses the backend of the steps that follow."""
    return lambda name: monkeypatch.setenv("FUSED_OPTIM_BACKEND", name)


@pytest.fixture
def any_backend(request: pytest.FixtureRequest, device: str, use_backend: Callable[[str], None]) -> str:
    """Parametrized with "torch" or "engine": steps on each device by the one or the other."""
    use_backend("torch" if request.param == "torch" else device)
    return device


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started as ``sys.executable`` has imported torch already, and so has what it starts."""
    monkeypatch.setattr(sys, "executable", fresh.python())


@pytest.fixture(autouse=True)
def _defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No backend is forced from outside; random numbers start anew; whatever tests do, the next has one thread."""
    monkeypatch.delenv("FUSED_OPTIM_BACKEND", raising=False)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """torch.compile starts anew, and leaves nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
