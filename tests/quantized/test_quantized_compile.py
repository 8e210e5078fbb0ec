"""torch.compile of models with quantized weights: without graph breaks, and with the results of eager ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard

import distributed
from fused_optim import FusedAdam
from fused_optim.quantized import Float8CurrentScaling, QuantizedTensor, quantize_model_
from fused_optim.sharding.dtensor import local_tensor
from quantized_cases import RECIPES, values

EACH = pytest.mark.parametrize("recipe", RECIPES)


pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256)
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def blocks(recipe: str, count: int = 2, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block() for _ in range(count))).bfloat16()
    return quantize_model_(model, RECIPES[recipe])


def activations() -> Tensor:
    return values((4, 128), 1).bfloat16().requires_grad_()


def compiled(model: nn.Sequential) -> CompileCounterWithBackend:
    """Compile each block, as is usual with FSDP2. aot_eager traces as inductor does, in a fraction of the time."""
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    return counter


def train(model: nn.Sequential, steps: int = 3) -> list[Tensor]:
    """Outputs and gradients of steps with an optimizer."""
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        x = activations()
        out = model(x)
        out.float().square().sum().backward()
        grads = [local_tensor(param.grad) for param in model.parameters()]
        found += [out.detach(), x.grad, *grads]
        optimizer.step()
        optimizer.zero_grad()
    return found


@EACH
def test_training_equals_eager_training(recipe: str) -> None:
    """Bit for bit. Steps compile nothing anew, though the first frees initial values and each writes weights."""
    model = blocks(recipe)
    expected = train(copy.deepcopy(model))
    counter = compiled(model)
    assert all(torch.equal(*pair) for pair in zip(train(model), expected, strict=True))
    assert counter.frame_count == 1


def test_graphs_are_shared_by_weights_of_different_names() -> None:
    model = blocks("mxfp8", count=12)
    counter = compiled(model)
    x = activations().detach()
    expected = x
    for block in model:
        expected = nn.functional.linear(expected, block.up.weight.dequantize(), block.up.bias).relu()
        expected = expected @ block.down.weight.dequantize().t()
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert counter.frame_count == 1


def test_graphs_are_not_shared_by_other_recipes_and_ways_to_compute() -> None:
    ways = [RECIPES["mxfp8"], Float8CurrentScaling(), Float8CurrentScaling(compute="fp8")]
    model = nn.Sequential(*(quantize_model_(Block().bfloat16(), recipe) for recipe in ways))
    model.load_state_dict({f"{i}.{name}": value for i in range(3) for name, value in plain_state().items()})
    x = activations().detach()
    with torch.no_grad():
        expected = [block(x) for block in model]
        compiled(model)
        found = [block(x) for block in model]
    for actual, each in zip(found, expected, strict=True):
        assert torch.equal(actual, each)
    assert len({tuple(each.flatten().tolist()) for each in found}) == 3


def plain_state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Block().bfloat16().state_dict()


def test_stale_weights_raise() -> None:
    model = blocks("current", count=1)
    compiled(model)
    model(activations())
    nn.init.normal_(model[0].up.weight)
    with pytest.raises(RuntimeError, match=r"(?s)up\.weight: plain values were written .*finish_initialization"):
        model(activations())


@pytest.mark.long
def test_autocast_within_and_around() -> None:
    model = quantize_model_(Block(), RECIPES["mxfp8"])
    x = values((4, 128), 1)

    def within(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    expected = within(x)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(torch.compile(within, backend="aot_eager", fullgraph=True)(x), expected)
    around = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(around(x), expected)


def train_sharded(recipe: str, compile_blocks: bool) -> list[Tensor]:
    torch._dynamo.reset()
    model = blocks(recipe)
    counter = compiled(model) if compile_blocks else None
    for block in model:
        fully_shard(block, mesh=distributed.mesh())
    fully_shard(model, mesh=distributed.mesh())
    found = train(model)
    assert counter is None or counter.frame_count == 1
    return found


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_sharded_training_equals_eager_training(recipe: str) -> None:
    expected = distributed.run(2, train_sharded, recipe, False)
    for actual, wanted in zip(distributed.run(2, train_sharded, recipe, True), expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(actual, wanted, strict=True))


def test_flattened_weights_have_no_initial_values() -> None:
    weight = blocks("nvfp4")[0].up.weight
    names, context = weight.__tensor_flatten__()
    assert weight.has_initial and names == ["_data", "_scale", "_tensor_scale"]
    again = QuantizedTensor.__tensor_unflatten__({name: getattr(weight, name) for name in names}, context, None, None)
    assert torch.equal(again.dequantize(), weight.dequantize())
