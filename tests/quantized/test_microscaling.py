"""What ``scaled_mm`` is given of MXFP8 and NVFP4 matrices, for GPUs that nobody here has: an emulation reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType
from torch.utils._python_dispatch import TorchDispatchMode

from fused_optim.quantized import QuantizedTensor
from fused_optim.quantized.fp8 import casts, microscaling, products
from product_cases import RECIPES, layer_of, matrix, results

FORMATS = pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def as_it_was(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The layout of cuBLAS undone, element by element as its documentation has it."""
    across = -(-columns // 4)
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
    tile = row // 128 * across + column // 4
    return scales.float()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]


def elements_of(x: Tensor) -> Tensor:
    """FP32, of FP4 the first of a byte in its low half."""
    if x.dtype != torch.float4_e2m1fn_x2:
        return x.float()
    codes = x.view(torch.uint8).int()
    codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1)
    return torch.tensor(LEVELS + [-level for level in LEVELS])[codes]


def values_of(x: Tensor, scales: list[Tensor], types: list[int], swizzles: list[int]) -> Tensor:
    """Of a matrix whose rows are summed over."""
    assert x.is_contiguous() and scales[0].is_contiguous() and scales[0].dim() == 1
    x = elements_of(x)
    two = len(types) == 2
    block = {ScalingType.BlockWise1x32: 32, ScalingType.BlockWise1x16: 16}[ScalingType(types[0])]
    wanted = [SwizzleType.SWIZZLE_32_4_4, *([SwizzleType.NO_SWIZZLE] if two else [])]
    assert [SwizzleType(each) for each in swizzles] == wanted
    assert not two or (ScalingType(types[1]) == ScalingType.TensorWise and scales[1].numel() == 1)
    rows, columns = x.shape[0], x.shape[1] // block
    assert scales[0].numel() == -(-rows // 128) * 128 * (-(-columns // 4) * 4)
    scale = as_it_was(scales[0], rows, columns) * (scales[1] if two else 1.0)
    return x * scale.repeat_interleave(block, 1)


def emulated(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    types_a: list[int],
    swizzles_a: list[int],
    scale_b: list[Tensor],
    types_b: list[int],
    swizzles_b: list[int],
    bias: None,
    dtype: torch.dtype,
    *_: Any,
) -> Tensor:
    """``torch._scaled_mm_v2``, whose fake implementation checks the arguments, too."""
    assert bias is None and {a.dtype, b.dtype} in ({torch.float8_e4m3fn}, {torch.float4_e2m1fn_x2})
    left, right = values_of(a, scale_a, types_a, swizzles_a), values_of(b.t(), scale_b, types_b, swizzles_b)
    return (left @ right.t()).to(dtype)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The CPU takes the way of GPUs; of each product the dtype of its elements."""
    found: list[torch.dtype] = []

    def run(a: Tensor, *args: Any) -> Tensor:
        found.append(a.dtype)
        return emulated(a, *args)

    monkeypatch.setattr(torch, "_scaled_mm_v2", run)
    monkeypatch.setattr(products, "_emulated", lambda a, b, bias, dtype: microscaling.product(a, b).to(dtype))
    return found


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 12)])
def test_scales_lie_as_documented(shape: tuple[int, int]) -> None:
    scale = torch.randint(1, 255, shape, dtype=torch.uint8)
    found = microscaling.swizzled(scale)
    assert torch.equal(as_it_was(found, *shape), scale.float())
    assert found.float().sum() == scale.float().sum()  # zeros around them


@FORMATS
def test_products_are_those_of_the_values(name: str, request: pytest.FixtureRequest) -> None:
    """All three as far as they run so; of sizes that fill no tile of scales."""
    layer = layer_of(RECIPES[name], "cpu", 192, 96, bias=False)
    x, gradient = matrix(160, 192), matrix(160, 96, seed=2)
    expected = results(layer, x, gradient)
    seen = request.getfixturevalue("seen")
    found = results(layer, x, gradient)
    assert seen == {"mxfp8": 3 * [torch.float8_e4m3fn], "nvfp4": [torch.float4_e2m1fn_x2]}[name]
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    for cached in (products._capability, products._known_products_in_fp8):
        cached.cache_clear()
    yield
    for cached in (products._capability, products._known_products_in_fp8):
        cached.cache_clear()


@FORMATS
def test_torch_takes_the_arguments_on_such_gpus(name: str, blackwell: None) -> None:
    """Its fake implementation checks dtypes, sizes, strides and types of scales."""
    device = torch.device("cuda", 0)
    in_fp8 = products.products_in_fp8(RECIPES[name], device, 160, (96, 192))
    assert in_fp8 == {"mxfp8": (True, True, True), "nvfp4": (True, False, False)}[name]
    with FakeTensorMode(), Operators() as operators:
        weight = QuantizedTensor.empty(RECIPES[name], (96, 192), torch.bfloat16, device)
        like_x = QuantizedTensor.empty(RECIPES[name], (160, 192), torch.bfloat16, device)
        bias = torch.empty(96, dtype=torch.bfloat16, device=device)
        out = products.output(products.weight_codes(like_x), weight, bias)
    assert out.shape == (160, 96) and out.dtype == torch.bfloat16 and out.device == device
    assert operators.count == 1


class Operators(TorchDispatchMode):
    """Counts products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._scaled_mm_v2.default
        return func(*args, **(kwargs or {}))


@pytest.mark.long
@FORMATS
def test_graphs_compute_as_eager_mode_does(name: str, monkeypatch: pytest.MonkeyPatch, nothing_compiled: None) -> None:
    """Forward and backward without breaks; their products are run by the emulation."""
    monkeypatch.setattr(products, "_emulated", lambda a, b, bias, dtype: microscaling.product(a, b).to(dtype))
    layer = layer_of(RECIPES[name], "cpu", 192, 96, bias=False)
    x, gradient = matrix(160, 192), matrix(160, 96, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm_v2", emulated)
        expected = results(layer, x, gradient)
    made: list[tuple[int, int]] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm_v2.default)
        transposed = graph.graph.find_nodes(op="call_function", target=torch.ops.fused_optim.mxfp8_transpose.default)
        made.append((len(nodes), len(transposed)))
        for node in nodes:
            node.target = emulated
        graph.recompile()
        return graph

    partition = min_cut_rematerialization_partition
    layer.compile(
        backend=aot_autograd(fw_compiler=backend, bw_compiler=backend, partition_fn=partition), fullgraph=True
    )
    found = results(layer, x, gradient)
    assert made == {"mxfp8": [(1, 0), (2, 1)], "nvfp4": [(1, 0), (0, 0)]}[name]  # forward keeps no transposed weight
    assert all(torch.equal(found[key], value) for key, value in expected.items())


# --- MXFP8 weights along their other dim --------------------------------------------------------------------------


def test_transposed_weights_keep_their_values() -> None:
    """But small ones beside large ones, which lose what they are below the smallest codes."""
    torch.manual_seed(0)
    values = torch.randn(256, 192) * 2.0 ** torch.randint(-9, 4, (256, 192))
    weight = QuantizedTensor.from_values(values, RECIPES["mxfp8"])
    transposed = casts.transposed(products.weight_codes(weight))
    assert transposed.data.shape == (192, 256) and transposed.scale.shape == (192, 8)
    before, after = weight.values().t(), transposed.values()
    largest = before.abs().unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1)
    small = before.abs() < 2.0**-13 * largest
    assert torch.equal(before[~small], after[~small])
    torch.library.opcheck(torch.ops.fused_optim.mxfp8_cast_columns, (values,))
    torch.library.opcheck(torch.ops.fused_optim.mxfp8_transpose, tuple(products.weight_codes(weight)[:2]))
    assert ((before - after).abs() <= 2.0**-17 * largest).all() and not torch.equal(before, after)
