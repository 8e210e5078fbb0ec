"""What others let go of is free at once, as torch's optimizers have it: without another step, without a collection.

And ``nn.Module.to`` and the like work, which swap DTensors and quantized weights: these are free at the next step."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import distributed
from fused_optim import enable_gradient_release
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize_model_,
)
from fused_optim.state import host_states
from pairwise import each_once, pairwise
from peers import FusedAdamW, FusedLion, FusedMuon

Kept = list[weakref.ref[Tensor]]
BF16 = torch.bfloat16
OPTIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "remainder 16": (BF16, {}),
    "remainder 8": (BF16, {"master_bits": 24}),
    "separate FP32": (BF16, {"store_param_remainders": False}),
    "separate FP16": (torch.float16, {"master_weight_dtype": torch.float16}),
    "no master": (BF16, {"master_bits": 0}),
    "int8": (torch.float32, {"state_dtype": "int8"}),
    "fp8, separate": (BF16, {"state_dtype": "fp8", "store_param_remainders": False}),
    "capturable": (torch.float32, {"capturable": True}),
    "torch's form": (torch.float32, {"checkpoint_format": "torch"}),
    "skips": (torch.float32, {"skip_nonfinite": True}),
    "decoupled": (BF16, {"use_decoupled_grad": True}),
}
RECIPES = [
    MXFP8BlockScaling(),
    Float8CurrentScaling(),
    Float8DelayedScaling(),
    Float8BlockScaling(),
    Float8BlockScaling(block=(1, 128)),
    NVFP4BlockScaling(),
]


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(values(8, 128, seed=seed).to(dtype))


def gradient(param: Tensor) -> Tensor:
    is_shard = isinstance(param, DTensor)
    return torch.ones_like(param) if is_shard else torch.ones(param.shape).to(param.dtype)


def train(optimizer: ShardedOptimizer, steps: int = 2) -> None:
    name = optimizer.store.grad_attribute
    for _ in range(steps):
        for param in optimizer.store.params:
            setattr(param, name, gradient(param))
        optimizer.step()
        optimizer.zero_grad()


def references(optimizer: ShardedOptimizer, param: Tensor) -> Kept:
    """The parameter, its states, and the memory of both."""
    states = (each for each in optimizer.state[param].values() if isinstance(each, Tensor) and each.dim())
    tensors = [param, *states]
    local = [tensor.to_local() for tensor in tensors if isinstance(tensor, DTensor)]
    quantized = [each for each in [param, *local] if isinstance(each, QuantizedTensor)]
    parts = [component for each in quantized for component in each.components.values()]
    return [weakref.ref(tensor) for tensor in [*tensors, *local, *parts]]


def first(optimizer: ShardedOptimizer) -> Tensor:
    param: Tensor = optimizer.param_groups[0]["params"][0]
    return param


def set_by_hand(optimizer: ShardedOptimizer, new: Tensor) -> Kept:
    """As pruning does."""
    old = first(optimizer)
    kept = references(optimizer, old)
    del optimizer.state[old]
    optimizer.param_groups[0]["params"][0] = new
    return kept


def move_states(optimizer: ShardedOptimizer, new: Tensor) -> Kept:
    """As Gaussian splatting does: some rows stay, of the states, too."""
    old = first(optimizer)
    kept = references(optimizer, old)
    states = optimizer.state.pop(old)
    for name, state in states.items():
        if isinstance(state, Tensor) and state.dim():
            states[name] = state.clone()
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = states
    return kept


def call(optimizer: ShardedOptimizer, new: Tensor) -> Kept:
    kept = references(optimizer, first(optimizer))
    optimizer.replace_parameters({first(optimizer): new})
    return kept


def remove(optimizer: ShardedOptimizer, new: Tensor) -> Kept:
    kept = references(optimizer, first(optimizer))
    del optimizer.state[first(optimizer)]
    del optimizer.param_groups[0]["params"][0]
    optimizer.add_param_group({"params": [new]})
    return kept


WAYS = {"by hand": set_by_hand, "states move": move_states, "replace_parameters": call, "removed": remove}


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check(optimizer: ShardedOptimizer, way: Callable[[ShardedOptimizer, Tensor], Kept], new: Tensor) -> None:
    """At once; what torch may have to swap, which it does not where there are weak references, at the next step."""
    at_once = not is_traceable_wrapper_subclass(first(optimizer))
    with without_collector():
        kept = way(optimizer, new)
        assert kept
        if not at_once:
            train(optimizer, 1)
        assert [ref() for ref in kept] == [None] * len(kept)
    train(optimizer, 1)  # and goes on
    assert {*optimizer.state} == {*optimizer.store.params}


# Not all options x ways x backends here, nor recipes x ways x formats below: each two.
@pytest.mark.parametrize("case, way, backend", pairwise([*OPTIONS], [*WAYS], ["cpu", "torch"]))
def test_replaced_parameters(case: str, way: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, options = OPTIONS[case]
    if way == "states move" and case in ("int8", "fp8, separate", "separate FP16"):
        pytest.skip("codes without their scales are refused by the next step")
    monkeypatch.setenv("FUSED_OPTIM_BACKEND", backend)
    optimizer = FusedAdamW([plain(dtype), plain(dtype, 1)], lr=0.1, **options)
    train(optimizer)
    check(optimizer, WAYS[way], plain(dtype, 2))


@pytest.mark.parametrize(
    "recipe, way, dtype",
    pairwise(RECIPES, ["by hand", "replace_parameters", "removed"], [torch.float32, "int8"]),
    ids=str,
)
def test_quantized_weights(recipe: Any, way: str, dtype: Any) -> None:
    def weight(seed: int) -> nn.Parameter:
        return nn.Parameter(QuantizedTensor.from_values(values(128, 128, seed=seed).to(BF16), recipe))

    optimizer = FusedAdamW([weight(0), weight(1), plain()], lr=0.1, state_dtype=dtype)
    train(optimizer)
    check(optimizer, WAYS[way], weight(2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [FusedLion, FusedMuon])
def test_other_rules(make: Any, way: str) -> None:
    optimizer = make([plain(), plain(seed=1)], lr=0.1)
    train(optimizer)
    check(optimizer, WAYS[way], plain(seed=2))


@pytest.mark.parametrize("way", ["by hand", "replace_parameters", "removed"])
def test_offloaded_states(way: str) -> None:
    with mock.patch.object(host_states, "OFFLOADED_FROM", ("cuda", "cpu")):
        for fraction in (1.0, 0.5):
            optimizer = FusedAdamW(
                [plain(), plain(seed=1)], lr=0.1, state_dtype="int8", offload_states=True, offload_fraction=fraction
            )
            train(optimizer)
            check(optimizer, WAYS[way], plain(seed=2))


BETWEEN: dict[str, Callable[[ShardedOptimizer], object]] = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "masters are followed": lambda optimizer: optimizer.sync_masters_from_params(),
    "summary": lambda optimizer: optimizer.summary(),
    "clipped": lambda optimizer: clipped(optimizer),
    "refused": lambda optimizer: refused(optimizer),
    "another group": lambda optimizer: optimizer.add_param_group({"params": [plain(seed=5)]}),
    "frozen": lambda optimizer: optimizer.store.params[1].requires_grad_(False),
    "no step": lambda optimizer: optimizer.initialize_state(),
    "remainders wait": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


def clipped(optimizer: ShardedOptimizer) -> None:
    first(optimizer).grad = torch.ones_like(first(optimizer))
    optimizer.clip_grad_norm_(0.1)
    optimizer.zero_grad()


def refused(optimizer: ShardedOptimizer) -> None:
    for param in optimizer.store.params:
        param.grad = torch.ones_like(param)
    states = optimizer.state[optimizer.store.params[1]]
    states["exp_avg"], former = states["exp_avg"].int(), states["exp_avg"]
    with pytest.raises(TypeError, match="exp_avg"):
        optimizer.step()
    states["exp_avg"] = former


@pytest.mark.parametrize(
    "between, steps, way", pairwise([*BETWEEN], [0, 2], ["by hand", "replace_parameters", "removed"])
)
def test_whatever_was_called(between: str, steps: int, way: str) -> None:
    options: dict[str, Any] = {"store_param_remainders": False}
    if between == "remainders wait":
        options = {"checkpoint_format": "native"}
    optimizer = FusedAdamW([plain(BF16), plain(BF16, 1)], lr=0.1, **options)
    train(optimizer, steps)
    optimizer.initialize_state()
    BETWEEN[between](optimizer)
    check(optimizer, WAYS[way], plain(BF16, 2))


def test_an_address_that_comes_back() -> None:
    """A new parameter at the address of the old one is not taken for it: its states begin anew."""
    optimizer = FusedAdamW([plain(), plain(seed=1)], lr=0.1)
    train(optimizer)
    for seed in range(2, 40):
        address, step = id(first(optimizer)), optimizer.param_groups[0]["step"]
        optimizer.state.pop(first(optimizer))
        optimizer.param_groups[0]["params"].pop(0)
        new = plain(seed=seed)
        optimizer.param_groups[0]["params"].insert(0, new)
        before = new.detach().clone()
        train(optimizer, 1)
        assert {*optimizer.state} == {*optimizer.param_groups[0]["params"]}
        assert optimizer.state[new]["exp_avg"].allclose(torch.full((8, 128), 0.1)), seed
        assert not torch.equal(new, before) and optimizer.param_groups[0]["step"] == step + 1
        if id(new) == address:
            return
        del new
    pytest.skip("no address came back")


def test_the_optimizer_itself() -> None:
    with without_collector():
        param = plain(BF16)
        optimizer = FusedAdamW([param], lr=0.1, store_param_remainders=False)
        train(optimizer)
        kept = [*references(optimizer, param)[1:], weakref.ref(optimizer.store.layouts[param].scales)]
        del optimizer
        assert [ref() for ref in kept] == [None] * len(kept)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bucket_bytes", [0, None])
def test_gradient_release(way: str, bucket_bytes: int | None) -> None:
    model = nn.Sequential(nn.Linear(128, 8, bias=False), nn.Linear(8, 8, bias=False))
    optimizer = FusedAdamW(model.parameters(), lr=0.1)
    enable_gradient_release(model, optimizer, bucket_bytes=bucket_bytes)

    def pass_through() -> None:
        model(torch.ones(2, 128)).sum().backward()
        optimizer.step()

    pass_through()
    pass_through()
    with without_collector():
        kept = references(optimizer, first(optimizer))
        new = nn.Parameter(torch.ones(8, 128))
        WAYS[way](optimizer, new)
        model[0].weight = new
        assert [ref() for ref in kept] == [None] * len(kept)
    before = new.detach().clone()
    pass_through()
    assert not torch.equal(new, before) and new.grad is None


def dtensor(mesh: Any, dtype: torch.dtype, seed: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(values(9, 128, seed=seed).to(dtype), mesh, [Shard(0)]))


def quantized_shard(mesh: Any, recipe: Any, seed: int) -> nn.Parameter:
    whole = QuantizedTensor.from_values(values(256, 128, seed=seed).to(BF16), recipe)
    return nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))


def replace_shards(way: str) -> None:
    mesh = init_device_mesh(distributed.device().type, (torch.distributed.get_world_size(),))
    for dtype, options in OPTIONS.values():
        if way == "states move" and ("state_dtype" in options or "master_weight_dtype" in options):
            continue
        if options.get("skip_nonfinite"):
            continue
        optimizer = FusedAdamW([dtensor(mesh, dtype, 0), dtensor(mesh, dtype, 1)], lr=0.1, **options)
        train(optimizer)
        check(optimizer, WAYS[way], dtensor(mesh, dtype, 2))


def replace_quantized_shards(way: str) -> None:
    mesh = init_device_mesh(distributed.device().type, (torch.distributed.get_world_size(),))
    for recipe in RECIPES:
        optimizer = FusedAdamW([quantized_shard(mesh, recipe, seed) for seed in range(2)], lr=0.1)
        train(optimizer)
        check(optimizer, WAYS[way], quantized_shard(mesh, recipe, 2))


def shard_later() -> None:
    """As Accelerate does: the optimizer was made, and has trained, before the model was sharded."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False, dtype=BF16) for _ in range(2)))
    optimizer = FusedAdamW(model.parameters(), lr=0.1, store_param_remainders=False)
    train(optimizer)
    with without_collector():
        kept = [ref for param in model.parameters() for ref in references(optimizer, param)]
        for layer in model:
            fully_shard(layer)
        optimizer.state.clear()
        optimizer.param_groups[0]["params"][:] = list(model.parameters())
        assert [ref() for ref in kept] == [None] * len(kept)
    model(torch.ones(2, 128, dtype=BF16)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("world_size, way", each_once(product([1, 2, 3], WAYS)))
def test_shards(world_size: int, way: str) -> None:
    distributed.run(world_size, replace_shards, way)


@pytest.mark.parametrize("world_size, way", each_once(product([1, 2], ["by hand", "replace_parameters"])))
def test_quantized_shards(world_size: int, way: str) -> None:
    distributed.run(world_size, replace_quantized_shards, way)


def test_models_that_are_sharded_later() -> None:
    distributed.run(2, shard_later)


def swapped_in_place(model: nn.Module, optimizer: ShardedOptimizer, change: str) -> None:
    """Steps, a change of all of the model's parameters, more steps: as without the change."""
    others = copy.deepcopy([local_of(param) for param in model.parameters()])
    getattr(model, change)()
    for param, before in zip(model.parameters(), others, strict=True):
        assert torch.equal(local_of(param), before)
    assert {*optimizer.store.params} == {*model.parameters()}
    train(optimizer, 2)
    assert all(int(group["step"]) == 4 for group in optimizer.param_groups)


def local_of(param: Tensor) -> Tensor:
    local = param.to_local() if isinstance(param, DTensor) else param
    return local.dequantize() if isinstance(local, QuantizedTensor) else local.detach()


def swap_shards(change: str, options: dict[str, Any], release: bool) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Sequential(nn.Linear(128, 6), nn.Linear(6, 4))
    fully_shard(model, mesh=mesh)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, **options)
    optimizer.track_changes()
    train(optimizer)
    if release:
        enable_gradient_release(model, optimizer).disable()
    swapped_in_place(model, optimizer, change)


@pytest.mark.parametrize(
    "ranks, change, options, release",
    pairwise([1, 2], ["cpu", "float"], [{}, {"state_dtype": "int8"}], [False, True]),
    ids=str,
)
def test_modules_of_shards_can_be_moved(ranks: int, change: str, options: dict[str, Any], release: bool) -> None:
    distributed.run(ranks, swap_shards, change, options, release)


@pytest.mark.parametrize("recipe", RECIPES)
def test_modules_of_quantized_weights_can_be_moved(recipe: Any) -> None:
    model = quantize_model_(nn.Sequential(nn.Linear(128, 128, dtype=BF16)), recipe)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    optimizer.track_changes()
    train(optimizer)
    swapped_in_place(model, optimizer, "cpu")
