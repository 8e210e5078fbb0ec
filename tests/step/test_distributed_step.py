"""The bits of a step do not depend on how parameters are sharded, and errors reach every rank."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import distributed
from distributed import Part, assert_same, join_all, part, shard, shard_like, two_gpus
from pairwise import each_once, pairwise
from peers import FusedAdam, FusedAdamW

STEPS = 3
FORMATS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.int8, torch.int8),
    (torch.int8, torch.bfloat16),
]
MASTERS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16 remainder16": (torch.bfloat16, {"store_param_remainders": True}),
    "bfloat16 remainder8": (torch.bfloat16, {"store_param_remainders": True, "param_remainder_bits": 8}),
    "bfloat16 float16": (torch.bfloat16, {"master_weight_dtype": torch.float16}),
    "bfloat16 no master": (torch.bfloat16, {"master_weights": False}),
}

# Shape, mesh shape (empty: all ranks), placements. Where rows are cut, shards and whole rows have the same blocks.
Layout = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]
LAYOUTS: dict[str, Layout] = {
    "even": ((12, 128), (), (Shard(0),)),
    "uneven": ((7, 64), (), (Shard(0),)),
    "uneven, three dims": ((5, 3, 32), (), (Shard(0),)),
    "fewer rows than ranks": ((2, 256), (), (Shard(0),)),
    "no element": ((0, 64), (), (Shard(0),)),
    "no block": ((6, 50), (), (Shard(0),)),
    "vector": ((10,), (), (Shard(0),)),
    "long vector": ((12288,), (), (Shard(0),)),
    "columns": ((3, 1536), (), (Shard(1),)),
    "uneven columns, no block": ((4, 50), (), (Shard(1),)),
    "middle dim": ((2, 12, 128), (), (Shard(1),)),
    "last of three dims, no block": ((2, 3, 100), (), (Shard(2),)),
    "replicated": ((4, 96), (), (Replicate(),)),
}
LAYOUTS_2X2: dict[str, Layout] = {
    "replicated, rows": ((7, 64), (2, 2), (Replicate(), Shard(0))),
    "rows, replicated": ((3, 128), (2, 2), (Shard(0), Replicate())),
    "rows twice": ((7, 64), (2, 2), (Shard(0), Shard(0))),
    "strided rows": ((8, 64), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "uneven strided rows": ((7, 64), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "fewer strided rows than ranks": ((3, 64), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "rows, columns": ((5, 512), (2, 2), (Shard(0), Shard(1))),
    "columns, rows": ((5, 512), (2, 2), (Shard(1), Shard(0))),
    "strided columns": ((3, 1024), (2, 2), (_StridedShard(1, split_factor=2), Shard(1))),
    "mesh of one row": ((7, 64), (1, 4), (Shard(0), Shard(0))),
    "mesh of one column": ((7, 64), (4, 1), (Shard(0), Shard(0))),
}
# Not all masters x formats x layouts with the reference, which is slow: each two of them.
OF_REFERENCE = pairwise(list(MASTERS), FORMATS, list(LAYOUTS))


def noise(shape: tuple[int, ...] | torch.Size, *seed: int) -> Tensor:
    """Normal values over several magnitudes, the same on every rank."""
    generator = torch.Generator().manual_seed(hash(seed))
    values = torch.randn(shape, generator=generator)
    return values * torch.exp2(torch.randint(-12, 2, shape, generator=generator))


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    if name is not None:
        os.environ["FUSED_OPTIM_BACKEND"] = name
    yield
    os.environ.pop("FUSED_OPTIM_BACKEND", None)


def snapshot(optimizer: FusedAdam, names: list[str]) -> dict[str, Part]:
    """This rank's parts of parameters, stored states, unscaled states and masters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    unscaled = optimizer.state_dict()["state"]
    found = {}
    for index, (name, param) in enumerate(zip(names, params, strict=True)):
        found[f"{name}: parameter"] = part(param)
        for key, stored in optimizer.state.get(param, {}).items():
            found[f"{name}: stored {key}"] = part(stored)
            found[f"{name}: {key}"] = part(unscaled[index][key])
    return found


# --- parameters distributed by hand -----------------------------------------------------------------------------


def train(layouts: dict[str, Layout], master: str, sharded: bool, engine: str | None) -> dict[str, Part]:
    """Parameters of every layout, in one group per state format, after some steps with given gradients."""
    dtype, options = MASTERS[master]
    groups, names = [], []
    for exp_avg, exp_avg_sq in FORMATS:
        params = []
        for name, (shape, mesh_shape, placements) in layouts.items():
            if engine == "torch" and (master, (exp_avg, exp_avg_sq), name) not in OF_REFERENCE:
                continue
            initial = noise(shape, len(names), -1).to(dtype)
            on_mesh = shard(initial, distributed.mesh(*mesh_shape), placements) if sharded else initial
            params.append(nn.Parameter(on_mesh.to(distributed.device())))
            names.append(f"{exp_avg}, {exp_avg_sq}, {name}")
        groups.append({"params": params, "exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": exp_avg_sq})
    optimizer = FusedAdam(groups, lr=0.01, weight_decay=0.1, seed=5, **options, decoupled_weight_decay=True)
    with backend(engine):
        for step in range(STEPS):
            for index, param in enumerate(p for group in groups for p in group["params"]):
                param.grad = shard_like(noise(param.shape, index, step).to(dtype), param)
            optimizer.step()
    assert all(group["step"] == STEPS for group in optimizer.param_groups)
    return snapshot(optimizer, names)


@functools.cache
def unsharded(two_dims: bool, master: str, on: str = "cpu", engine: str | None = None) -> dict[str, Tensor]:
    layouts = LAYOUTS_2X2 if two_dims else LAYOUTS
    return join_all(distributed.run(1, train, layouts, master, False, engine, on=on))


@pytest.mark.parametrize("world_size, master", [*product([3], MASTERS), *each_once(product([1, 2, 4], MASTERS))])
def test_sharding_does_not_change_bits(world_size: int, master: str) -> None:
    results = distributed.run(world_size, train, LAYOUTS, master, True, None)
    assert_same(join_all(results), unsharded(False, master))


@two_gpus
@pytest.mark.parametrize("master", MASTERS)
def test_sharding_on_two_gpus_does_not_change_bits(master: str) -> None:
    results = distributed.run(2, train, LAYOUTS, master, True, None, on="cuda")
    assert_same(join_all(results), unsharded(False, master, on="cuda"))


@pytest.mark.parametrize("master", MASTERS)
def test_sharding_on_two_mesh_dims_does_not_change_bits(master: str) -> None:
    results = distributed.run(4, train, LAYOUTS_2X2, master, True, None)
    assert_same(join_all(results), unsharded(True, master))


@pytest.mark.parametrize("master", MASTERS)
def test_sharding_does_not_change_bits_of_the_reference(master: str) -> None:
    results = distributed.run(3, train, LAYOUTS, master, True, "torch")
    assert_same(join_all(results), unsharded(False, master, engine="torch"))


def step_uneven_gradients(sharded: bool) -> dict[str, Part]:
    """A parameter without gradients, one with a gradient every other step, a frozen one, a group without any."""
    mesh = distributed.mesh()
    shapes = {"every step": (7, 64), "every other step": (5, 64), "never": (5, 32), "frozen": (6, 64), "group": (3, 64)}
    params = {}
    for index, (name, shape) in enumerate(shapes.items()):
        initial = noise(shape, index, -1).bfloat16()
        params[name] = nn.Parameter(shard(initial, mesh, [Shard(0)]) if sharded else initial)
    params["frozen"].requires_grad_(False)
    last = params.pop("group")
    groups = [{"params": list(params.values())}, {"params": [last], "weight_decay": 0.5}]
    optimizer = FusedAdam(
        groups,
        lr=0.1,
        weight_decay=0.1,
        exp_avg_dtype=torch.int8,
        exp_avg_sq_dtype=torch.int8,
        decoupled_weight_decay=True,
    )
    for step in range(STEPS):
        for name in ("every step", "every other step")[: 1 + step % 2]:
            params[name].grad = shard_like(noise(shapes[name], step).bfloat16(), params[name])
        optimizer.step()
        optimizer.zero_grad()
    assert [group["step"] for group in optimizer.param_groups] == [STEPS, 0]
    assert params["frozen"] not in optimizer.state
    return snapshot(optimizer, list(shapes))


@pytest.mark.parametrize("world_size", [2, 4])
def test_parameters_without_gradients_keep_their_bits(world_size: int) -> None:
    final = join_all(distributed.run(world_size, step_uneven_gradients, True))
    assert_same(final, join_all(distributed.run(1, step_uneven_gradients, False)))
    for index, (name, shape) in enumerate([("never", (5, 32)), ("frozen", (6, 64)), ("group", (3, 64))], start=2):
        assert torch.equal(final[f"{name}: parameter"], noise(shape, index, -1).bfloat16())
        if name != "frozen":
            assert not final[f"{name}: exp_avg"].any() and not final[f"{name}: exp_avg_sq"].any()


# --- FSDP2 ------------------------------------------------------------------------------------------------------


def unscale(placement: Placement, backend: str, found_inf: float) -> list[bool]:
    """Whether a step leaves ``gradient / scale`` in gradients placed so, and nothing if it is skipped."""
    os.environ["FUSED_OPTIM_BACKEND"] = backend
    try:
        mesh, right = distributed.mesh(), []
        param = nn.Parameter(shard(torch.ones(5, 128), mesh, [Shard(0)]))
        optimizer = FusedAdam([param])
        for _ in range(2):
            full = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(distributed.device())
            local = full.clone() if placement.is_partial() else shard(full, mesh, [placement]).to_local()
            given = local.clone()
            grad = DTensor.from_local(local, mesh, [placement], shape=full.shape, stride=full.stride())
            param.grad, kept = grad, param.to_local().clone()
            optimizer.grad_scale = torch.tensor(7.0, device=distributed.device())
            optimizer.found_inf = torch.tensor(found_inf, device=distributed.device())
            optimizer.step()
            expected = given if found_inf else given / optimizer.grad_scale
            right += [param.grad is grad, torch.equal(grad.to_local(), expected)]
            right.append(not local.numel() or torch.equal(param.to_local(), kept) == bool(found_inf))
        return right
    finally:
        del os.environ["FUSED_OPTIM_BACKEND"]


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@pytest.mark.parametrize("backend", ["", "torch"], ids=["engine", "torch"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize(("world_size", "on"), distributed.on_each_device((2,), (3,)))
def test_gradients_are_unscaled_where_they_are(
    world_size: int, on: str, placement: Placement, backend: str, found_inf: float
) -> None:
    for right in distributed.run(world_size, unscale, placement, backend, found_inf, on=on):
        assert all(right), right


def build_model(dtype: torch.dtype) -> nn.Sequential:
    """Rows that no number of ranks divides, fewer rows than ranks, rows without blocks, vectors."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 256), nn.LayerNorm(256), nn.Linear(256, 6), nn.Linear(6, 3)]
    return nn.Sequential(*layers).to(dtype)


def apply_fsdp(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp(model: nn.Module) -> nn.Module:
    return apply_fsdp(model, mesh=distributed.mesh())


def offloaded(model: nn.Module) -> nn.Module:
    return apply_fsdp(model, mesh=distributed.mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def mixed_precision(model: nn.Module) -> nn.Module:
    return apply_fsdp(model, mesh=distributed.mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def columns(model: nn.Module) -> nn.Module:
    def placement(param: nn.Parameter) -> Shard:
        return Shard(1) if param.shape == (6, 256) else Shard(0)

    return apply_fsdp(model, mesh=distributed.mesh(), shard_placement_fn=placement)


def hybrid(model: nn.Module) -> nn.Module:
    return apply_fsdp(model, mesh=distributed.mesh(2, 2, names=("replicate", "shard")))


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = distributed.mesh(2, 2, names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plan |= {"4": RowwiseParallel(input_layouts=Replicate()), "5": ColwiseParallel(output_layouts=Replicate())}
    return apply_fsdp(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])


def group_options(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups with formats and hyperparameters of their own."""
    named = list(model.named_parameters())
    int8 = {
        "exp_avg_dtype": torch.int8,
        "exp_avg_sq_dtype": torch.int8,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
    }
    float8 = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e4m3fn, "lr": 0.02}
    matrices = [(name, param) for name, param in named if param.dim() == 2]
    return [
        {"params": matrices[::2], **int8},
        {"params": matrices[1::2], **float8},
        {"params": [(name, param) for name, param in named if param.dim() == 1], "exp_avg_sq_dtype": torch.bfloat16},
    ]


def names_of(optimizer: FusedAdam) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]


def train_fsdp(parallelize: Callable[[nn.Module], nn.Module], dtype: torch.dtype) -> dict[str, Part]:
    """Real training, every rank on data of its own. Gradients and final states; parameters before the first step."""
    model = parallelize(build_model(dtype).to(distributed.device()))
    optimizer = FusedAdam(group_options(model), lr=0.01, store_param_remainders=dtype == torch.bfloat16)
    found = {f"initial {name}": part(param) for name, param in model.named_parameters()}
    rank = torch.distributed.get_rank() // (2 if parallelize is tensor_parallel else 1)
    for step in range(STEPS):
        model(noise((5, 64), step, rank).to(distributed.device(), dtype)).square().mean().backward()
        found |= {f"gradient {step} {name}": part(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found | snapshot(optimizer, names_of(optimizer))


def replay(recorded: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Part]:
    """The same steps on one process and plain parameters, with the recorded gradients."""
    model = build_model(dtype).to(distributed.device())
    optimizer = FusedAdam(group_options(model), lr=0.01, store_param_remainders=dtype == torch.bfloat16)
    found = {f"initial {name}": part(param) for name, param in model.named_parameters()}
    for step in range(STEPS):
        for name, param in model.named_parameters():
            param.grad = recorded[f"gradient {step} {name}"].to(param.device)
        found |= {f"gradient {step} {name}": part(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
    return found | snapshot(optimizer, names_of(optimizer))


def check_fsdp(world_size: int, parallelize: Callable[[nn.Module], nn.Module], dtype: torch.dtype, on: str) -> None:
    final = join_all(distributed.run(world_size, train_fsdp, parallelize, dtype, on=on))
    gradients = {name: value for name, value in final.items() if name.startswith("gradient")}
    assert all(value.any() for value in gradients.values())
    assert_same(final, join_all(distributed.run(1, replay, gradients, dtype, on=on)))


DTYPES = [torch.float32, torch.bfloat16]
Placed = tuple[int, Callable[[nn.Module], nn.Module]]  # on so many ranks
PLACED: list[Placed] = [
    *[(1, fsdp), (3, fsdp), (4, fsdp), (3, offloaded), (2, mixed_precision), (2, columns)],
    *[(4, hybrid), (4, tensor_parallel)],
]


@pytest.mark.parametrize("placed, dtype", [*product([(2, fsdp)], DTYPES), *each_once(product(PLACED, DTYPES))])
def test_fsdp_training_equals_unsharded_training(placed: Placed, dtype: torch.dtype) -> None:
    check_fsdp(*placed, dtype, "cpu")


@two_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parallelize", [fsdp, mixed_precision, columns])
def test_fsdp_training_on_two_gpus_equals_unsharded_training(
    parallelize: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    check_fsdp(2, parallelize, dtype, "cuda")


# --- errors -----------------------------------------------------------------------------------------------------


def on_meshes_of_others(kind: type[Any], rounds: int) -> list[Tensor]:
    """Each rank has a mesh of its own, as pipeline stages have, and all parameters in its optimizer."""
    meshes = [DeviceMesh("cpu", [rank]) for rank in range(dist.get_world_size())]
    torch.manual_seed(0)
    params = [nn.Parameter(distribute_tensor(torch.randn(8, 64), each, [Shard(0)])) for each in meshes]
    optimizer = kind(params, lr=0.1)
    for _ in range(rounds):
        params[dist.get_rank()].grad = torch.ones_like(params[dist.get_rank()])
        if kind is FusedAdamW:
            optimizer.clip_grad_norm_(1e9)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return [param._local_tensor.detach().clone() for param in params]


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_on_meshes_of_other_ranks_have_no_elements_here(world_size: int) -> None:
    """As in torch.optim: a rank updates what it has."""
    found = distributed.run(world_size, on_meshes_of_others, FusedAdamW, 3)
    usual = distributed.run(world_size, on_meshes_of_others, torch.optim.AdamW, 3)
    for rank, (own, expected) in enumerate(zip(found, usual, strict=True)):
        assert [local.numel() for local in own] == [512 if i == rank else 0 for i in range(world_size)]
        torch.testing.assert_close(own[rank], expected[rank])
