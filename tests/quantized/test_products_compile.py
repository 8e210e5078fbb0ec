"""torch.compile of layers with FP8 products: one graph, no breaks, and what eager mode computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import distributed
from distributed import long, on_each_device
from fused_optim import FusedAdam
from fused_optim.quantized import dequantize_model_, quantize_model_
from fused_optim.quantized.fp8 import casts, products
from product_cases import RECIPES, matrix, results

NAMES = ["tensor", "row", "row, FP8 weight gradients", "block"]


pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.long]  # slow compilations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.up = nn.Linear(128, 256)
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def model_of(name: str, device: torch.device | str, count: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(count))).to(device).bfloat16()
    return quantize_model_(model, RECIPES[name], keep_initial=False)


def compiled(model: nn.Sequential, backend: str = "aot_eager") -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend(backend)
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    return counter


@pytest.mark.parametrize("name", [*NAMES, "mxfp8", "nvfp4"])
def test_graphs_compute_as_eager_mode_does(name: str) -> None:
    """Bit for bit where nothing is fused; twelve layers of the same shapes share a graph."""
    model = model_of(name, "cpu", 6)
    x, gradient = matrix(128, 128), matrix(128, 128, 2)
    expected = results(copy.deepcopy(model), x, gradient)
    counter = compiled(model)
    for key, value in results(model, x, gradient).items():
        assert torch.equal(value, expected[key]), key
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "name, device",
    [
        pytest.param("tensor", "cpu", marks=pytest.mark.long),
        *(pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in NAMES),
    ],
)
def test_fused_graphs_are_as_exact_as_eager_mode(name: str, device: str) -> None:
    """A compiler rounds less often and divides less exactly, so elements may fall to the code beside theirs.

    Measured is how far both are from the same layers in float64, with the decoded weights and without codes.
    """
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if products.device_unsupported_reason(torch.device(device), RECIPES[name].products) is not None:
        pytest.skip("not on this GPU")
    model = model_of(name, device)
    x, gradient = matrix(256, 128), matrix(256, 128, 2)
    eager = results(copy.deepcopy(model), x, gradient)
    exact = results(dequantize_model_(copy.deepcopy(model)).double(), x.double(), gradient.double())
    compiled(model, "inductor")
    for key, value in results(model, x, gradient).items():
        errors = [float((each.double() - exact[key]).norm() / exact[key].norm()) for each in (value, eager[key])]
        assert errors[0] < 1.1 * errors[1], (key, errors)


@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_graphs_keep_no_transposed_weights(name: str) -> None:
    """Forward would make them just as well, and keep those of all layers, which FSDP2 cannot free, for backward."""
    made: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        transposes = graph.graph.find_nodes(op="call_function", target=torch.ops.fused_optim.fp8_transpose.default)
        made.append([str(tuple(node.args[0].meta["val"].shape)) for node in transposes])
        return graph

    model = model_of(name, "cpu")
    partition = min_cut_rematerialization_partition  # which inductor takes
    backend = aot_autograd(fw_compiler=backend, bw_compiler=backend, partition_fn=partition)
    model[0].compile(backend=backend, fullgraph=True)
    results(model, matrix(384, 128), matrix(384, 128, 2))
    weights = {"(256, 128)", "(128, 256)"}
    forward, backward = made
    assert not weights & set(forward) and weights <= set(backward)


def test_checkpoints_within_graphs() -> None:
    model = model_of("tensor", "cpu")
    x, gradient = matrix(128, 128), matrix(128, 128, 2)
    expected = results(model, x, gradient)
    wrapped = nn.Module()
    wrapped.model = model
    wrapped.forward = torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager", fullgraph=True
    )
    for key, value in results(wrapped, x, gradient).items():
        assert torch.equal(value, expected[key.removeprefix("model.")])


def test_autocast_around_graphs() -> None:
    torch.manual_seed(0)
    model = quantize_model_(Block(), RECIPES["tensor"], keep_initial=False)
    x = matrix(128, 128).float()
    around = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(around(x), model(x))


def test_rows_that_change_in_number() -> None:
    """Also to one that weight gradients in FP8 cannot take."""
    model = model_of("tensor", "cpu")
    expected = {rows: results(model, matrix(rows, 128), matrix(rows, 128, 2)) for rows in (32, 48, 64, 40)}
    compiled(model)
    for rows, wanted in expected.items():
        found = results(model, matrix(rows, 128), matrix(rows, 128, 2))
        assert all(torch.equal(value, wanted[key]) for key, value in found.items()), rows


def train_sharded(name: str, compile_blocks: bool) -> list[Tensor]:
    torch._dynamo.reset()
    model = model_of(name, distributed.device(), 2)
    counter = compiled(model) if compile_blocks else None
    for block in model:
        fully_shard(block, mesh=distributed.mesh())
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    found = []
    for _ in range(2):
        x = matrix(128, 128).to(distributed.device()).requires_grad_()
        out = model(x)
        out.backward(x.detach())
        found += [out.detach().cpu(), *(param.grad.full_tensor().cpu() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    assert counter is None or counter.frame_count == 1
    return found


@pytest.mark.parametrize("ranks, on", on_each_device(long(1), (2,)))
def test_sharded_blocks(ranks: int, on: str) -> None:
    (expected,) = distributed.run(1, train_sharded, "tensor", False, on=on)
    for found in distributed.run(ranks, train_sharded, "tensor", True, on=on, timeout=200):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_absmaxes_that_are_measured_elsewhere_are_used() -> None:
    x = matrix(32, 64)
    codes, _, scale = casts.cast_tensor(x, torch.tensor([896.0]), torch.float8_e4m3fn, True, False)
    assert scale.item() == 2.0 and torch.equal(codes.float(), (x.float() / 2).to(torch.float8_e4m3fn).float())
