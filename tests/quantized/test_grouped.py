"""Experts: grouped products with quantized weights, and a small layer of experts that trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import distributed
from distributed import on_each_device
from fused_optim import FusedAdam
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    GroupedLinear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Recipe,
    grouped_linear,
    quantize_model_,
)
from fused_optim.quantized.fp8 import products
from fused_optim.sharding.dtensor import local_tensor
from product_cases import matrix, rounded

EXPERTS: dict[str, Recipe] = {
    "tensor": Float8CurrentScaling(compute="fp8"),
    "row": Float8CurrentScaling(compute="fp8", activation_scaling="row"),
    "row, FP8": Float8CurrentScaling(compute="fp8", activation_scaling="row", weight_gradients="fp8"),
    "delayed": Float8DelayedScaling(compute="fp8", activation_scaling="row"),
}
FP8, DECODED = Float8CurrentScaling(compute="fp8"), Float8CurrentScaling(compute="decode")
ENDS = [[32, 48, 48, 128], [0, 0, 128, 128], [16, 32, 64, 80], [1, 8, 25, 100]]


@pytest.fixture
def grouped_device(device: str) -> str:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU with grouped FP8 products")
    return device


def layer_of(recipe: Recipe, device: str) -> GroupedLinear:
    torch.manual_seed(0)
    layer = GroupedLinear(4, 64, 96, device, torch.bfloat16)
    return quantize_model_(layer, recipe, lambda module, _: isinstance(module, GroupedLinear))


def is_near(found: Tensor, a: Tensor, b: Tensor, adding_up: float) -> None:
    """``a @ b`` in float64, but for adding up and rounding."""
    exact, magnitudes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (found.detach().cpu().double() - exact).abs()
    assert (error <= 2.0**-8 * exact.abs() + adding_up * magnitudes).all()


@pytest.mark.parametrize("multiple_of", [1, 8, 16])
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("ends", ENDS)
def test_products_of_groups(ends: list[int], name: str, multiple_of: int, grouped_device: str) -> None:
    """Those of the codes, in float64, but for adding up and rounding. Rows of no expert do not matter."""
    if any(end % multiple_of for end in ends) or (multiple_of == 16 and ends[-1] < 128):
        return
    layer = layer_of(EXPERTS[name], grouped_device)
    layer.multiple_of = multiple_of
    offsets = torch.tensor(ends, dtype=torch.int32, device=grouped_device)
    x, gradient = matrix(128, 64), matrix(128, 96, 2)
    x[ends[-1] :] = torch.nan
    gradient[ends[-1] :] = torch.nan
    given = x.to(grouped_device).requires_grad_()
    out = layer(given, offsets)
    out.backward(gradient.to(grouped_device))
    weight: QuantizedTensor = layer.weight
    values = weight.values().cpu()
    rows, gradient_rows = (rounded(each, torch.float8_e4m3fn, "row") for each in (x, gradient))
    of_weight = [x[: ends[-1]], gradient[: ends[-1]]]
    if EXPERTS[name].products.weight_gradients:
        of_weight = [rounded(each.t().contiguous(), torch.float8_e4m3fn, "row").t() for each in of_weight]
    adding_up = 2.0**-10 if grouped_device == "cuda" else 2.0**-20
    start = 0
    for expert, end in enumerate(ends):
        part = slice(start, end)
        is_near(out[part], rows[part], values[expert].t(), adding_up)
        is_near(given.grad[part], gradient_rows[part], values[expert], adding_up)
        is_near(layer.weight.grad[expert], of_weight[1][part].t(), of_weight[0][part], adding_up)
        start = end


def test_no_rows_and_pickles_of_earlier_releases(device: str) -> None:
    layer = layer_of(FP8, device)
    del layer.multiple_of
    x = torch.zeros(0, 64, dtype=torch.bfloat16, device=device).requires_grad_()
    out = layer(x, torch.zeros(4, dtype=torch.int32, device=device))
    assert out.shape == (0, 96)


ONE_BY_ONE: dict[str, Recipe] = {
    "blocks": Float8BlockScaling(compute="fp8"),
    "blocks, tiles": Float8BlockScaling(compute="fp8", activation_tiles=True, power_of_two=True),
    "blocks (1, 128)": Float8BlockScaling((1, 128), compute="fp8"),
    "mxfp8": MXFP8BlockScaling(compute="fp8"),
    "nvfp4": NVFP4BlockScaling(compute="fp4"),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("ends", [[128, 128, 384], [130, 256, 304]])
def test_experts_one_by_one_are_linear_layers(ends: list[int], name: str, device: str) -> None:
    """Of the same bits, whatever their numbers of rows allow; rows of no expert give and take nothing."""
    recipe = ONE_BY_ONE[name]
    if device == "cuda" and products.device_unsupported_reason(torch.device("cuda", 0), recipe.products) is not None:
        pytest.skip("no GPU with these products")
    torch.manual_seed(0)
    layer = GroupedLinear(3, 256, 128, device, torch.bfloat16)
    plain = layer.weight.detach().clone()
    quantize_model_(layer, recipe, lambda *_: True)
    x, gradient = matrix(400, 256).to(device).requires_grad_(), matrix(400, 128, 2).to(device)
    out = layer(x, torch.tensor(ends, dtype=torch.int32, device=device))
    of_x, of_weight = torch.autograd.grad(out, (x, layer.weight), gradient)
    start = 0
    for expert, end in enumerate(ends):
        alone = nn.Linear(256, 128, bias=False, device=device, dtype=torch.bfloat16)
        alone.weight.data.copy_(plain[expert])
        quantize_model_(alone, recipe, lambda *_: True)
        if recipe.scales_whole_tensor:  # that of all experts
            values = layer.weight.values()[expert]
            alone.weight.components.update(
                {
                    key: part[expert].view(alone.weight.components[key].shape) if len(part) == 3 else part.clone()
                    for key, part in layer.weight.components.items()
                    if key != "initial"
                }
            )
            assert torch.equal(alone.weight.values(), values)
        rows = x.detach()[start:end].requires_grad_()
        expected = alone(rows)
        found_x, found_weight = torch.autograd.grad(expected, (rows, alone.weight), gradient[start:end])
        assert torch.equal(out[start:end], expected) and torch.equal(of_x[start:end], found_x)
        assert torch.equal(of_weight[expert], found_weight)
        start = end
    assert not out[start:].any() and not of_x[start:].any()


@pytest.mark.parametrize("recipe", [DECODED, MXFP8BlockScaling(), NVFP4BlockScaling()], ids=lambda each: each.name)
def test_groups_are_decoded_without_fp8(recipe: Recipe, device: str) -> None:
    """As MXFP8 and NVFP4 are, on GPUs that have no such products."""
    layer = layer_of(recipe, device)
    offsets = torch.tensor(ENDS[0], dtype=torch.int32, device=device)
    x = matrix(128, 64).to(device).requires_grad_()
    plain = layer.weight.dequantize().requires_grad_()
    gradient = matrix(128, 96, 2).to(device)
    expected = torch._grouped_mm(x, plain.transpose(-2, -1), offs=offsets)
    of_x, of_weight = torch.autograd.grad(expected, (x, plain), gradient)
    out = layer(x, offsets)
    found = torch.autograd.grad(out, (x, layer.weight), gradient)
    assert torch.equal(out, expected) and torch.equal(found[0], of_x) and torch.equal(found[1], of_weight)


def test_experts_without_gradients_and_with_frozen_weights(grouped_device: str) -> None:
    layer = layer_of(EXPERTS["row"], grouped_device)
    offsets = torch.tensor(ENDS[0], dtype=torch.int32, device=grouped_device)
    x, gradient = matrix(128, 64).to(grouped_device).requires_grad_(), matrix(128, 96, 2).to(grouped_device)
    out = layer(x, offsets)
    of_x, _ = torch.autograd.grad(out, (x, layer.weight), gradient)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(layer(x, offsets), out)
    layer.requires_grad_(False)
    (found,) = torch.autograd.grad(layer(x, offsets), x, gradient)
    assert torch.equal(found, of_x)
    for reentrant in (False, True):
        layer.requires_grad_(True)
        again = checkpoint(layer, x, offsets, use_reentrant=reentrant)
        again.backward(gradient)
        assert torch.equal(again, out) and torch.equal(x.grad, of_x)
        x.grad = None


class Experts(nn.Module):
    """Each token goes to the expert that its router likes best."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        options = {"device": device, "dtype": torch.bfloat16}
        self.router = nn.Linear(64, 4, bias=False, **options)
        self.up, self.down = GroupedLinear(4, 64, 96, **options), GroupedLinear(4, 96, 64, **options)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        offsets = torch.bincount(chosen, minlength=4).cumsum(0).int()
        y = self.down(torch.relu(self.up(x[order], offsets)), offsets)
        return x + torch.zeros_like(y).index_copy(0, order, y) * best[:, None]


def train(recipe: Float8CurrentScaling | None, sharded: bool) -> list[float]:
    torch.manual_seed(0)
    model = Experts(distributed.device())
    if recipe is not None:
        quantize_model_(model, recipe, lambda module, _: isinstance(module, GroupedLinear))
        assert type(local_tensor(model.router.weight)) is nn.Parameter
    if sharded:
        fully_shard(model, mesh=distributed.mesh())
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(distributed.device())
    target = x.roll(1, 1) * 2
    losses = []
    for _ in range(12):
        loss = (model(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_offsets_of_other_numbers_of_experts_are_refused() -> None:
    x, weight = torch.ones(64, 128).bfloat16(), torch.ones(3, 128, 128).bfloat16()
    for ends in ([32, 64], [16, 32, 48, 64], 64, [[16, 32, 64]]):
        for each in (weight, QuantizedTensor.from_values(weight, Float8CurrentScaling(compute="fp8"))):
            with pytest.raises(ValueError, match=r"offsets: expected shape \(3,\), .* got"):
                grouped_linear(x, each, torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_sharded_experts(ranks: int, on: str) -> None:
    (expected,) = distributed.run(1, train, FP8, True, on=on)
    for losses in distributed.run(ranks, train, FP8, True, on=on):
        assert losses == expected
