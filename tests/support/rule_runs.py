"""Runs of an optimizer, whatever its rule is: small parameters with given gradients, on one process and sharded.

``kind``: the optimizer's class. ``options``: its keyword arguments. Both are pickled for other processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import distributed
from cases import values
from distributed import join_all, part, same_bits

BF16 = torch.bfloat16
SHAPES = [(6, 128), (10,), (3, 5), (5, 256)]


@contextmanager
def backend(name: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"FUSED_OPTIM_BACKEND": name}):
        yield


def params(dtype: torch.dtype, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(values(shape, dtype, device, seed=i)) for i, shape in enumerate(SHAPES)]


def gradient(param: Tensor, number: int, index: int) -> Tensor:
    return values(tuple(param.shape), param.dtype, param.device.type, seed=100 * number + index)


def steps(optimizer: Any, numbers: range) -> None:
    for number in numbers:
        for i, param in enumerate(optimizer.store.params):
            param.grad = gradient(param, number, i)
        optimizer.step()


def contents(optimizer: Any) -> list[Tensor]:
    """All that steps change: parameters, states and scales."""
    found = []
    for param in optimizer.store.params:
        found += [param.detach(), *optimizer.state[param].values(), optimizer.store.layouts[param].scales]
    return found


# --- sharded ----------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(values((7, 256), BF16, "cpu", seed=1))
        self.narrow = nn.Parameter(values((5, 50), BF16, "cpu", seed=2))
        self.bias = nn.Parameter(values((10,), BF16, "cpu", seed=3))


def build(kind: Any, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    model = Layers()
    if dist.is_initialized():
        fully_shard(model, mesh=distributed.mesh())
    return model, kind(model.named_parameters(), lr=1e-2, weight_decay=0.1, **options)


def train(model: nn.Module, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        for i, param in enumerate(model.parameters()):
            full = values(tuple(param.shape), BF16, "cpu", seed=50 * number + i)
            param.grad = distributed.shard_like(full, param) if dist.is_initialized() else full
        optimizer.step()


def gathered(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """This rank's part of parameters and states, by name."""
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        found[name] = part(param.detach())
        found |= {f"{name}: {key}": part(value) for key, value in optimizer.state[param].items()}
    return found


def trained(kind: Any, options: Mapping[str, Any], count: int) -> dict[str, Any]:
    model, optimizer = build(kind, options)
    train(model, optimizer, range(count))
    return gathered(model, optimizer)


def trained_and_saved(kind: Any, options: Mapping[str, Any], folder: Path, form: str) -> None:
    model, optimizer = build(kind, options)
    optimizer.checkpoint_format = form
    train(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def loaded_and_gone_on(kind: Any, options: Mapping[str, Any], folder: Path, form: str) -> dict[str, Any]:
    model, optimizer = build(kind, options)
    for param in model.parameters():
        nn.init.zeros_(param)
    optimizer.checkpoint_format = form
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert optimizer.param_groups[0]["step"] == 3
    train(model, optimizer, range(3, 5))
    return gathered(model, optimizer)


def assert_same_on_ranks(kind: Any, options: Mapping[str, Any], ranks: int) -> None:
    """Neither states nor parameters depend on the sharding by a bit."""
    expected = join_all([trained(kind, options, 4)])
    found = join_all(distributed.run(ranks, trained, kind, options, 4))
    assert found.keys() == expected.keys() and all(same_bits(found[key], expected[key]) for key in expected)


def assert_goes_on_on_other_ranks(
    kind: Any, options: Mapping[str, Any], folder: Path, form: str, saving: int, loading: int
) -> None:
    """A checkpoint that ``saving`` ranks wrote goes on on ``loading`` ranks as if nothing had happened."""
    distributed.run(saving, trained_and_saved, kind, options, folder, form)
    expected = join_all([trained(kind, options, 5)])
    found = join_all(distributed.run(loading, loaded_and_gone_on, kind, options, folder, form))
    assert found.keys() == expected.keys() and all(same_bits(found[key], expected[key]) for key in expected)
