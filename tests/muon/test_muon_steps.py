"""What FusedMuon keeps from step to step: shards that are as they were are not described again, all others are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import distributed
from cases import values
from distributed import same_bits
from fused_optim.backends.compiled import CompiledShards
from fused_optim.matrices import exchange
from peers import FusedMuon

SHAPES = [(64, 256), (272, 128), (3, 32, 64), (6, 128)]


@pytest.fixture
def described() -> Iterator[list[int]]:
    """The numbers of shards that are described."""
    found: list[int] = []
    original = CompiledShards.set

    def noted(self: CompiledShards, shard: int, work: object, cached: object) -> bool:
        found.append(shard)
        return original(self, shard, work, cached)  # type: ignore[arg-type]

    with mock.patch.object(CompiledShards, "set", noted):
        yield found


def make(device: str, **options: object) -> FusedMuon:
    params = [nn.Parameter(values(shape, torch.bfloat16, device, seed=i)) for i, shape in enumerate(SHAPES)]
    return FusedMuon(params, lr=0.02, experts=True, **{"state_dtype": "int8", **options})  # type: ignore[arg-type]


def step(optimizer: FusedMuon, number: int, but: int = -1) -> None:
    for i, param in enumerate(optimizer.store.params):
        grad = values(tuple(param.shape), param.dtype, param.device.type, seed=100 * number + i)
        param.grad = None if i == but else grad
    optimizer.step()


def contents(optimizer: FusedMuon) -> list[Tensor]:
    return [
        part
        for param in optimizer.store.params
        for part in (param.detach().clone(), *(state.clone() for state in optimizer.state[param].values()))
    ]


def replace_parameter(optimizer: FusedMuon) -> None:
    param = optimizer.store.params[1]
    param.data = param.data.clone()


def replace_layout(optimizer: FusedMuon) -> None:
    param = optimizer.store.params[1]
    param.data = param.data.t().contiguous().t()


def replace_momentum(optimizer: FusedMuon) -> None:
    states = optimizer.state[optimizer.store.params[1]]
    states["momentum_buffer"] = states["momentum_buffer"].clone()


# What is done between steps, and which shards are described again.
CHANGES: list[tuple[Callable[[FusedMuon], None], list[int]]] = [
    (lambda optimizer: None, []),
    (replace_parameter, []),
    (replace_layout, [1]),
    (replace_momentum, [1]),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=["nothing", "memory", "layout", "momentum"])
def test_what_has_changed_is_described_again(
    change: Callable[[FusedMuon], None], expected: list[int], device: str, described: list[int]
) -> None:
    found = []
    for do in (change, None):
        optimizer = make(device)
        for number in range(2):
            step(optimizer, number)
        described.clear()
        if do is not None:
            do(optimizer)
        step(optimizer, 2)
        assert described == (expected if do is not None else [])
        step(optimizer, 3, but=2)  # one has no gradient
        step(optimizer, 4)
        found.append(contents(optimizer))
    assert all(map(same_bits, *found))


def described_on_ranks() -> tuple[int, int]:
    mesh = distributed.mesh()
    fulls = [values((48, 64), torch.bfloat16, "cpu", seed=i) for i in range(3)]
    params = [nn.Parameter(distributed.shard(full, mesh, [Shard(0)])) for full in fulls]
    optimizer = FusedMuon(params, lr=0.02)
    counts, routes = [0], []
    original, route = CompiledShards.set, exchange.Route

    def noted(self: CompiledShards, *given: object) -> bool:
        counts[-1] += 1
        return original(self, *given)  # type: ignore[arg-type]

    def planned(*given: object) -> exchange.Route:
        routes.append(given)
        return route(*given)  # type: ignore[arg-type]

    with mock.patch.object(CompiledShards, "set", noted), mock.patch.object(exchange, "Route", planned):
        for number in range(3):
            for i, param in enumerate(params):
                grad = values((48, 64), torch.bfloat16, "cpu", seed=10 * number + i)
                param.grad = distributed.shard(grad, mesh, [Shard(0)])
            optimizer.step()
    return counts[0], len(routes)


def test_sharded_steps_are_planned_once() -> None:
    assert distributed.run(2, described_on_ranks) == [(3, 1)] * 2


def test_the_reference_knows_its_own_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that was edited after a step is where the next one starts: nobody has written the parameter."""
    found = []
    for backend in ("", "torch"):
        monkeypatch.setenv("FUSED_OPTIM_BACKEND", backend)
        optimizer = make("cpu", state_dtype=torch.float32, store_param_remainders=False)
        step(optimizer, 0)
        for param in optimizer.store.params:
            optimizer.state[param]["master_param"].add_(1.0)
        step(optimizer, 1)
        found.append([optimizer.state[param]["master_param"] for param in optimizer.store.params])
    for engine, reference in zip(*found, strict=True):
        torch.testing.assert_close(reference, engine, rtol=0.0, atol=1e-3)
