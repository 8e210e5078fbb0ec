"""FSDP2 and tensor parallelism with quantized weights: what is gathered, in how many bytes, and what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import distributed
from distributed import Part, assert_same, join_all, shard_like
from fused_optim import FusedAdam
from fused_optim.dtensor import local_tensor
from fused_optim.quantized import QuantizedTensor, quantize_model_
from quantized_cases import (
    RECIPES,
    Layers,
    Run,
    mesh_of,
    parameter_parts,
    perceptron,
    plain_model,
    tensor_parallel,
    values,
)

WAYS: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": {"reshard_after_forward": False},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
MIXED_WAYS = ("mixed",)  # of FP32 weights


def dtype_of(way: str) -> torch.dtype:
    return torch.float32 if way in MIXED_WAYS else torch.bfloat16


def sharded(model: Layers, way: str, how: str = "fsdp") -> Layers:
    """Some layers in groups of their own, the others with the root."""
    options = {"mesh": mesh_of(how), **WAYS[way]}
    for layer in (model.uneven, model.frozen):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


# --- what is gathered -------------------------------------------------------------------------------------------


def gather_each(recipes: list[str], how: str) -> dict[str, tuple[dict[str, Part], dict[str, Tensor]]]:
    """The shards, and the whole weights as FSDP2 gives them to the layers."""
    found = {}
    for recipe in recipes:
        model = sharded(quantize_model_(plain_model(recipe), RECIPES[recipe]), "resharded", how)
        shards = parameter_parts(model)
        gathered = {}
        for layer in (model, model.uneven, model.frozen):
            layer.unshard()
        for name, param in model.named_parameters():
            if isinstance(param, QuantizedTensor):
                gathered |= {
                    f"{name}: {part.name}": param.components[part.name].clone()
                    for part in param.recipe.components
                    if part.name != "amax_history"
                }
        found[recipe] = shards, gathered
    return found


@pytest.mark.parametrize("ranks, how", [(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp"), (4, "hsdp")])
def test_gathered_weights_are_the_shards_bit_for_bit(ranks: int, how: str) -> None:
    results = distributed.run(ranks, gather_each, list(RECIPES), how)
    for recipe in RECIPES:
        whole = parameter_parts(quantize_model_(plain_model(recipe), RECIPES[recipe]))
        joined = join_all([result[recipe][0] for result in results])
        assert_same(joined, join_all([whole]))
        for _, gathered in (result[recipe] for result in results):
            assert len(gathered) >= 6
            assert_same(gathered, {name: joined[name] for name in gathered})


class CountGathered(TorchDispatchMode):
    """Counts the bytes that this rank gives to all-gathers."""

    sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.sent += args[1].nbytes
        return func(*args, **(kwargs or {}))


def count_bytes(recipes: list[str]) -> dict[str, float]:
    """Bytes that are gathered per element of a weight."""
    found = {}
    for recipe in recipes:
        layer = nn.Linear(256, 1024, bias=False, dtype=torch.bfloat16)
        if recipe != "plain":
            quantize_model_(layer, RECIPES[recipe])
        fully_shard(layer, mesh=distributed.mesh())
        with CountGathered() as counter:
            layer(torch.ones(1, 256, dtype=torch.bfloat16))
        found[recipe] = counter.sent * dist.get_world_size() / (256 * 1024)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_that_are_gathered(ranks: int) -> None:
    for counted in distributed.run(ranks, count_bytes, ["plain", *RECIPES]):
        assert counted["plain"] == 2
        expected = {"mxfp8": 33 / 32, "mxfp8up": 33 / 32, "rows": 132 / 128, "nvfp4": 9 / 16}
        for recipe in RECIPES:
            assert 0 <= counted[recipe] - expected.get(recipe, 1.0) < 0.001, recipe


# --- what is computed -------------------------------------------------------------------------------------------


def compare_each(cases: list[tuple[str, str]], how: str) -> list[str]:
    """Trains quantized models and plain ones that are given their decoded weights; where the two differ."""
    return [text for recipe, way in cases for text in compare(recipe, way, how)]


def compare(recipe: str, way: str, how: str) -> list[str]:
    dtype = dtype_of(way)
    model = sharded(quantize_model_(plain_model(recipe, dtype), RECIPES[recipe]), way, how)
    plain = sharded(plain_model(recipe, dtype), way, how)
    optimizer = FusedAdam([param for param in model.parameters() if param.requires_grad], lr=0.01)
    different = []
    for step in range(2):
        for name, param in plain.named_parameters():
            local = local_tensor(model.get_parameter(name).detach())
            given = local.dequantize() if isinstance(local, QuantizedTensor) else local
            local_tensor(param.detach()).copy_(given)
        results = [train(each, step, way) for each in (model, plain)]
        if not torch.equal(*results):
            different.append(f"{recipe} {way}: outputs of step {step}")
        for name, param in plain.named_parameters():
            grad, expected = model.get_parameter(name).grad, param.grad
            if (grad is None) != (expected is None):
                different.append(f"{recipe} {way}: whether {name} has a gradient")
            elif grad is not None and not torch.equal(local_tensor(grad), local_tensor(expected)):
                different.append(f"{recipe} {way}: gradient of {name} in step {step}")
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
    return different


def train(model: Layers, step: int, way: str) -> Tensor:
    """The outputs of two micro-batches, whose gradients are accumulated and reduced once."""
    outputs = []
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        x = values((3, 144), 9, step, micro, dist.get_rank()).to(dtype_of(way))
        outputs.append(model(x))
        outputs[-1].float().square().mean().backward()
    return torch.cat(outputs).detach()


@pytest.mark.parametrize(
    "number, ranks, how", [(0, 1, "fsdp"), (1, 2, "fsdp"), (2, 3, "fsdp"), (3, 4, "fsdp"), (1, 4, "hsdp")]
)
def test_losses_and_gradients_are_those_of_the_decoded_weights(number: int, ranks: int, how: str) -> None:
    ways = list(WAYS)  # each recipe meets each way on some number of ranks
    cases = [(recipe, ways[(index + number) % len(ways)]) for index, recipe in enumerate(RECIPES)]
    for different in distributed.run(ranks, compare_each, cases, how):
        assert not different


def compare_tensor_parallel(recipes: list[str]) -> dict[str, list[float]]:
    """How far outputs and gradients of quantized weights are from those of the plain decoded ones."""
    found = {}
    for recipe in recipes:
        run = Run(recipe, "tp", build=perceptron)
        plain = tensor_parallel(perceptron(recipe))
        for name, param in plain.named_parameters():  # cut as the quantized ones are before FSDP2
            whole = quantize_model_(perceptron(recipe), RECIPES[recipe]).get_parameter(name).dequantize()
            local_tensor(param.detach()).copy_(local_tensor(shard_like(whole, param)))
        fully_shard(plain, mesh=mesh_of("tp")["dp"])
        x = values((3, run.model.up.in_features), 9, mesh_of("tp")["dp"].get_local_rank()).bfloat16()
        outputs = []
        for model in (run.model, plain):
            outputs.append(model(x))
            outputs[-1].float().square().mean().backward()
        pairs = [outputs, *([run.model.get_parameter(n).grad, p.grad] for n, p in plain.named_parameters())]
        found[recipe] = [float((local_tensor(a) - local_tensor(b)).abs().sum()) for a, b in pairs]
    return found


def test_tensor_parallel_weights_compute_as_decoded_ones() -> None:
    for result in distributed.run(4, compare_tensor_parallel, list(RECIPES)):
        assert list(result) == list(RECIPES)
        for recipe, differences in result.items():
            assert differences == [0.0, 0.0, 0.0], recipe


# --- what cannot be sharded -------------------------------------------------------------------------------------


def refuse(rows: int) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 128), nn.Linear(128, rows))
    quantize_model_(model, RECIPES["tiles"])
    errors = []
    with pytest.raises(ValueError) as error:
        fully_shard(model[1], mesh=distributed.mesh())
    errors.append(str(error.value))
    fully_shard(quantized := nn.Linear(256, 128), mesh=distributed.mesh())
    with pytest.raises(ValueError) as error:
        quantize_model_(quantized, RECIPES["mxfp8"])
    errors.append(str(error.value))
    return errors


def test_what_cannot_be_sharded_is_named_on_every_rank() -> None:
    for cut, order in distributed.run(2, refuse, 384):
        assert cut.startswith("1.weight: Float8BlockScaling cannot be cut to rows 0 to 192 of 384: its blocks have 128")
        assert "after fully_shard: the order is tensor parallelism, quantization, FSDP" in order
