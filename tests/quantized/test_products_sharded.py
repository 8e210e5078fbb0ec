"""FP8 products of sharded models: FSDP2, HSDP, tensor parallelism and DDP, compared with one process."""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import distributed
from distributed import on_each_device
from fused_optim import FusedAdam
from fused_optim.quantized import Recipe, quantize_model_
from fused_optim.quantized.fp8 import casts, products
from fused_optim.quantized.fp8.linear import QuantizedLinear
from pairwise import each_once_with, pairwise
from product_cases import RECIPES, matrix

TOKENS, WIDTH, HIDDEN = 128, 128, 768  # 768 rows are whole tiles on 1, 2 and 3 ranks; 128 are one
NAMES = ["tensor", "delayed", "row", "row, FP8 weight gradients", "block"]


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16, outputs: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=dtype)
        self.down = nn.Linear(HIDDEN, outputs, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def model_of(recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    # The last layer of the first block has as many rows as the ranks can share out in tiles, too.
    model = nn.Sequential(Block(dtype, HIDDEN), nn.Linear(HIDDEN, WIDTH, dtype=dtype), Block(dtype, HIDDEN))
    model = model.to(distributed.device())
    chosen = lambda module, name: isinstance(module, nn.Linear) and name != "1"  # noqa: E731
    return quantize_model_(model, recipe, chosen)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return matrix(TOKENS, WIDTH, seed).to(distributed.device()), matrix(TOKENS, HIDDEN, seed + 50).to(
        distributed.device()
    )


def whole(value: Tensor) -> Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().cpu()


def train(model: nn.Module, batches: list[list[tuple[Tensor, Tensor]]], wrap: Any = None) -> dict[str, Tensor]:
    """Steps of an optimizer, each of gradients added up over some batches; what comes out, and the last gradients."""
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    found: dict[str, Tensor] = {}
    for step, micro_batches in enumerate(batches):
        optimizer.zero_grad()
        for number, (x, gradient) in enumerate(micro_batches):
            out = (wrap or model)(x)
            out.backward(gradient)
            found[f"output {step}.{number}"] = out.detach().cpu()
        found |= {f"gradient {step} {name}": whole(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
    return found


WAYS: dict[str, dict[str, Any]] = {
    "usual": {},
    "kept": {"reshard_after_forward": False},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())},
    "checkpointed": {},
    "reentrant": {},
}


def train_sharded(names: list[str], way: str, how: str) -> dict[str, dict[str, Tensor]]:
    """Of the same batch on every rank, whose mean gradient is that of one of them, bit for bit in FP32."""
    found = {}
    for name in names:
        dtype = torch.float32 if way == "mixed" else torch.bfloat16
        model = model_of(RECIPES[name], dtype)
        ranks = dist.get_world_size()
        mesh = distributed.mesh(ranks // 2, 2, names=("replicate", "shard")) if how == "hsdp" else distributed.mesh()
        options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32), **WAYS[way]}
        for layer in model:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

        def checkpointed(x: Tensor, model: nn.Module = model) -> Tensor:
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=way == "reentrant")
            return x

        wrap = checkpointed if way in ("checkpointed", "reentrant") else None
        batches = [[batch(1)], [batch(2), batch(3)]]
        if way == "reentrant":
            batches = [[(x.requires_grad_(), gradient) for x, gradient in micro] for micro in batches]
        found[name] = train(model, batches, wrap)
        assert type(model[0].up).__mro__.count(QuantizedLinear) == 1
    return found


def expected_of(names: list[str], way: str) -> dict[str, dict[str, Tensor]]:
    """One process. FSDP2 keeps gradients in the parameters' dtype, and adds those of batches up in it, or in FP32."""
    found = {}
    for name in names:
        model = model_of(RECIPES[name], torch.float32 if way == "mixed" else torch.bfloat16)

        def mixed(x: Tensor, model: nn.Module = model) -> Tensor:
            with torch.autocast(distributed.device().type, torch.bfloat16):
                return model(x)

        found[name] = train(model, [[batch(1)], [batch(2), batch(3)]], mixed if way == "mixed" else None)
    return found


@functools.cache  # the same for all ways, and all numbers of ranks
def of_one_process(name: str) -> dict[str, Tensor]:
    (found,) = distributed.run(1, expected_of, [name], "usual")
    return found[name]


def check_sharded_training(ranks: int, way: str, how: str, on: str, names: list[str]) -> None:
    results = distributed.run(ranks, train_sharded, names, way, how, on=on, timeout=200)
    for name in names:
        expected = results[0][name] if on == "cuda" else of_one_process(name)
        for result in results:
            assert list(result[name]) == list(expected)
            for key, value in result[name].items():
                assert torch.equal(value, expected[key]), (name, key)


# First those that a way could meet differently; others have the same scales.
IN_ORDER = ["tensor", "row", "block", "delayed", "row, FP8 weight gradients"]


@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_sharded_training_is_that_of_one_process(ranks: int, on: str) -> None:
    """Bit for bit, with gradients that accumulate."""
    check_sharded_training(ranks, "usual", "fsdp", on, [*NAMES, "mxfp8", "nvfp4"])


@pytest.mark.parametrize(
    "ranks, how, names, on", on_each_device(*each_once_with([(1, "fsdp"), (3, "fsdp"), (4, "hsdp")], IN_ORDER)), ids=str
)
def test_sharded_training_on_any_ranks_is_that_of_one_process(ranks: int, how: str, names: list[str], on: str) -> None:
    """On uneven shards as well."""
    check_sharded_training(ranks, "usual", how, on, names)


@pytest.mark.parametrize(
    "ranks, way, names, on",
    on_each_device(*each_once_with([(2, "kept"), (2, "checkpointed"), (3, "reentrant"), (2, "offloaded")], IN_ORDER)),
    ids=str,
)
def test_sharded_training_each_way_is_that_of_one_process(ranks: int, way: str, names: list[str], on: str) -> None:
    check_sharded_training(ranks, way, "fsdp", on, names)


@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_mixed_precision_is_that_of_one_process(ranks: int, on: str) -> None:
    """FP32 parameters that compute in BF16: gradients come in FP32."""
    names = ["tensor", "row", "block"]
    (expected,) = distributed.run(1, train_sharded, names, "mixed", "fsdp", on=on, timeout=200)
    for result in distributed.run(ranks, train_sharded, names, "mixed", "fsdp", on=on, timeout=200):
        for name in names:
            assert all(torch.equal(value, expected[name][key]) for key, value in result[name].items()), name
            assert result[name]["gradient 1 0.up.weight"].dtype == torch.float32


def gradients(model: nn.Module, micro_batches: int = 1) -> dict[str, Tensor]:
    """Of the same batch, added up; FSDP2 reduces them in the last backward pass alone."""
    x, gradient = batch(1)
    for number in range(micro_batches):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == micro_batches - 1)
        model(x).backward(gradient)
    found = {name: whole(param.grad) for name, param in model.named_parameters()}
    model.zero_grad()
    return found


def check_modes(name: str) -> None:
    model = model_of(RECIPES[name])
    for layer in (*model, model):
        fully_shard(layer, mesh=distributed.mesh())
    x, _ = batch(1)
    expected, once = model(x), gradients(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), count() as seen:
            assert torch.equal(model(x), expected)
        assert seen == ["output"] * 4
    assert all(torch.equal(value, once[key]) for key, value in gradients(model).items())
    assert all(torch.equal(value, 2 * once[key]) for key, value in gradients(model, 2).items())


def check_autocast(name: str) -> None:
    """FSDP2 keeps and gathers FP32 weights; sums over two ranks are exact."""
    plain, sharded = (model_of(RECIPES[name], torch.float32) for _ in range(2))
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=distributed.mesh())
    with torch.autocast(distributed.device().type, torch.bfloat16), count() as seen:
        expected, found = gradients(plain), gradients(sharded)
    assert seen.count("output") == seen.count("input gradient") == 8
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def check_all(check: Any, names: list[str]) -> None:
    for name in names:
        check(name)


@pytest.mark.parametrize("check", [check_modes, check_autocast])
@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_modes_of_sharded_models(check: Any, ranks: int, on: str) -> None:
    """Without gradients, without reducing these, and within autocast."""
    distributed.run(ranks, check_all, check, ["tensor", "row", "block"], on=on)


def mean_gradients(names: list[str], sharded: bool) -> dict[str, dict[str, Tensor]]:
    """Of another batch on every rank; or, in one process, of one batch after the other."""
    found = {}
    for name in names:
        model = model_of(RECIPES[name])
        seeds = [dist.get_rank()] if sharded else [0, 1]
        if sharded:
            for layer in (*model, model):
                fully_shard(layer, mesh=distributed.mesh())
        grads: dict[str, Tensor] = {}
        for seed in seeds:
            x, gradient = batch(seed)
            model(x).backward(gradient)
            for key, param in model.named_parameters():
                value = whole(param.grad).float()
                grads[key] = grads[key] + value / 2 if key in grads else value / (1 if sharded else 2)
                param.grad = None
        found[name] = grads
    return found


@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_gradients_are_the_mean_over_ranks(ranks: int, on: str) -> None:
    """Each rank's batch has scales of its own."""
    expected = distributed.run(1, mean_gradients, NAMES, False, on=on)[0]
    for result in distributed.run(ranks, mean_gradients, NAMES, True, on=on):
        for name in NAMES:
            for key, value in result[name].items():
                error = (value - expected[name][key]).norm() / expected[name][key].norm()
                assert error < 2**-8, (name, key)


# --- tensor parallelism -------------------------------------------------------------------------------------------

PLANS: dict[str, Any] = {
    "usual": lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": lambda: {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    },
}


def of_local_parts(block: Block, x: Tensor, gradient: Tensor, ranks: int) -> dict[str, Tensor]:
    """What tensor parallelism of so many ranks computes, in one process and by products of parts."""
    format = block.up.weight.recipe.products
    e4m3 = torch.float8_e4m3fn
    x = x.detach().requires_grad_()
    norm = block.norm(x)
    rows = HIDDEN // ranks
    parts = [slice(rank * rows, (rank + 1) * rows) for rank in range(ranks)]
    up, down = block.up.weight.dequantize(torch.float32), block.down.weight.dequantize(torch.float32)

    def rounded(value: Tensor, dtype: torch.dtype = e4m3) -> Tensor:
        return casts.cast(value.contiguous(), dtype, format.scaling, format.power_of_two).values()

    out, of_norm = 0.0, 0.0
    for part in parts:
        hidden = (rounded(norm) @ up[part].t() + block.up.bias[part].float()).bfloat16()
        active = torch.relu(hidden)
        out = out + (rounded(active) @ down[:, part].t()).bfloat16()
        of_active = (rounded(gradient, format.gradients) @ down[:, part]).bfloat16()
        of_hidden = of_active * (hidden > 0)
        of_norm = of_norm + (rounded(of_hidden, format.gradients) @ up[part]).bfloat16()
    return {"output": out, "input": torch.autograd.grad(norm, x, of_norm)[0]}


def train_tensor_parallel(name: str, plan: str, bias: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    mesh = distributed.mesh(1, dist.get_world_size(), names=("dp", "tp"))
    block = Block().to(distributed.device())
    if bias:
        block.down.bias = nn.Parameter(matrix(1, WIDTH, 7)[0].to(distributed.device()))
    torch.distributed.broadcast(block.up.weight.data, 0)
    parallelize_module(block, mesh["tp"], PLANS[plan]())
    quantize_model_(block, RECIPES[name])
    fully_shard(block, mesh=mesh["dp"])
    assert QuantizedLinear in type(block.up).__mro__
    x, gradient = matrix(TOKENS, WIDTH), matrix(TOKENS, WIDTH, 2)
    x, gradient = x.to(distributed.device()), gradient.to(distributed.device())
    if plan == "sequence":
        place = [Shard(0)]
        x = distributed.shard(x, mesh["tp"], place).to_local()
        gradient = distributed.shard(gradient, mesh["tp"], place).to_local()
    x = x.requires_grad_()
    out = block(x)
    out.backward(gradient)
    found = {"output": out, "input": x.grad}
    if plan == "sequence":
        found = {key: DTensor.from_local(value.detach(), mesh["tp"], [Shard(0)]) for key, value in found.items()}
    for key, param in block.named_parameters():
        found[key] = param.grad
    return {key: whole(value) for key, value in found.items()}


# Not all scales x plans x biases: each two of them.
@pytest.mark.parametrize("name, plan, bias", pairwise(["tensor", "row", "block"], list(PLANS), [False, True]))
@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_tensor_parallelism(name: str, plan: str, bias: bool, ranks: int, on: str) -> None:
    """Each rank scales what it holds, so results are near those of one process; both ranks agree."""
    (expected,) = distributed.run(1, train_tensor_parallel, name, "usual", bias, on=on)
    first, second = distributed.run(ranks, train_tensor_parallel, name, plan, bias, on=on)
    assert list(first) == list(expected)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
        assert relative_error(value, expected[key]) < 2**-3, key  # half a step of E5M2


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value.cpu().float() - expected.cpu().float()).norm() / expected.cpu().float().norm())


def check_parts(name: str) -> dict[str, tuple[float, float]]:
    """Errors compared with products of each rank's parts, and with products of whole layers, by formulas."""
    found = train_tensor_parallel(name, "usual", False)
    torch.manual_seed(0)
    block = quantize_model_(Block().to(distributed.device()), RECIPES[name])
    device = distributed.device()
    tokens = matrix(TOKENS, WIDTH).to(device), matrix(TOKENS, WIDTH, 2).to(device)
    of_parts, of_whole = (of_local_parts(block, *tokens, ranks) for ranks in (dist.get_world_size(), 1))
    return {
        key: (relative_error(found[key], of_parts[key]), relative_error(found[key], of_whole[key])) for key in of_parts
    }


@pytest.mark.parametrize("name", ["tensor", "row"])
@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_tensor_parallel_ranks_scale_what_they_hold(name: str, ranks: int, on: str) -> None:
    for errors in distributed.run(ranks, check_parts, name, on=on):
        for key, (of_parts, of_whole) in errors.items():
            assert of_parts < of_whole / 4, (key, of_parts, of_whole)


@contextlib.contextmanager
def count() -> Iterator[list[str]]:
    """Which products with weights run on codes."""
    seen: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in products.PRODUCTS:
            attribute = name.replace(" ", "_")
            original = getattr(products, attribute)
            counted = lambda *args, name=name, original=original: (seen.append(name), original(*args))[1]  # noqa: E731
            stack.enter_context(unittest.mock.patch.object(products, attribute, counted))
        yield seen


def count_products(name: str) -> list[str]:
    """The products of a tensor-parallel layer that ran on codes, of which none is left to torch's own operations."""
    seen: list[str] = []
    original = products.product

    def counted(a: Any, b: Any, **options: Any) -> Tensor:
        seen.append(f"{tuple(a.data.shape)} x {tuple(b.data.shape)}")
        return original(a, b, **options)

    products.product = counted
    try:
        train_tensor_parallel(name, "usual", False)
    finally:
        products.product = original
    return seen


def test_all_products_of_tensor_parallel_layers_are_in_fp8() -> None:
    half = HIDDEN // 2
    for seen in distributed.run(2, count_products, "tensor"):
        assert sorted(seen) == sorted([
            f"({TOKENS}, {WIDTH}) x ({half}, {WIDTH})", f"({TOKENS}, {half}) x ({WIDTH}, {half})",  # outputs
            f"({TOKENS}, {WIDTH}) x ({half}, {WIDTH})", f"({TOKENS}, {half}) x ({WIDTH}, {half})",  # of inputs
            f"({WIDTH}, {TOKENS}) x ({half}, {TOKENS})", f"({half}, {TOKENS}) x ({WIDTH}, {TOKENS})",  # of weights
        ])  # fmt: skip


# --- replicas -----------------------------------------------------------------------------------------------------


def train_replicas(name: str) -> dict[str, Tensor]:
    model = model_of(RECIPES[name])
    replica = nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        x, gradient = batch(step)
        replica(x).backward(gradient)
        grads = {key: param.grad.cpu().clone() for key, param in model.named_parameters()}
        model.zero_grad()
    return grads


@pytest.mark.parametrize("name", ["tensor", "block"])
@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_replicas(name: str, ranks: int, on: str) -> None:
    (expected,) = distributed.run(1, train_replicas, name, on=on)
    for found in distributed.run(ranks, train_replicas, name, on=on):
        assert all(torch.equal(value, expected[key]) for key, value in found.items())
        assert all(type(value) is Tensor for value in found.values())
