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
    Float8CurrentScaling,
    Float8DelayedScaling,
    GroupedLinear,
    QuantizedTensor,
    Recipe,
    quantize_model_,
)
from fused_optim.sharding.dtensor import local_tensor
from product_cases import matrix, rounded

EXPERTS = {
    "tensor": Float8CurrentScaling(compute="fp8"),
    "row": Float8CurrentScaling(compute="fp8", activation_scaling="row"),
    "delayed": Float8DelayedScaling(compute="fp8", activation_scaling="row"),
}
FP8, DECODED = Float8CurrentScaling(compute="fp8"), Float8CurrentScaling()
ENDS = [[32, 48, 48, 128], [0, 0, 128, 128], [16, 32, 64, 80]]


@pytest.fixture
def grouped_device(device: str) -> str:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU with grouped FP8 products")
    return device


def layer_of(recipe: Recipe, device: str) -> GroupedLinear:
    torch.manual_seed(0)
    layer = GroupedLinear(4, 64, 96, device, torch.bfloat16)
    return quantize_model_(layer, recipe, lambda module, _: isinstance(module, GroupedLinear))


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("ends", ENDS[:2])
def test_products_of_groups(ends: list[int], name: str, grouped_device: str) -> None:
    """Those of the codes, in float64, but for adding up and rounding; weight gradients are those of BF16 values."""
    layer = layer_of(EXPERTS[name], grouped_device)
    offsets = torch.tensor(ends, dtype=torch.int32, device=grouped_device)
    x, gradient = matrix(128, 64), matrix(128, 96, 2)
    given = x.to(grouped_device).requires_grad_()
    out = layer(given, offsets)
    out.backward(gradient.to(grouped_device))
    weight: QuantizedTensor = layer.weight
    values = weight.values().cpu().double()
    rows, gradient_rows = (rounded(each, torch.float8_e4m3fn, "row") for each in (x, gradient))
    adding_up = 2.0**-10 if grouped_device == "cuda" else 2.0**-20
    start = 0
    for expert, end in enumerate(ends):
        part = slice(start, end)
        pairs = [
            (out, rows[part] @ values[expert].t(), rows[part].abs() @ values[expert].abs().t()),
            (given.grad, gradient_rows[part] @ values[expert], gradient_rows[part].abs() @ values[expert].abs()),
        ]
        for found, exact, magnitudes in pairs:
            error = (found.detach().cpu()[part].double() - exact).abs()
            assert (error <= 2.0**-8 * exact.abs() + adding_up * magnitudes).all(), expert
        exact = gradient[part].double().t() @ x[part].double()
        bound = 2.0**-8 * exact.abs() + 2.0**-20 * (gradient[part].double().abs().t() @ x[part].double().abs())
        assert ((weight.grad[expert].cpu().double() - exact).abs() <= bound).all()
        start = end


def test_groups_are_decoded_without_fp8(device: str) -> None:
    layer = layer_of(DECODED, device)
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


def test_experts_learn_as_bf16_ones_do(grouped_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_device_type", grouped_device)
    monkeypatch.setattr(distributed, "device", lambda: torch.device(grouped_device))
    plain, decoded, fp8 = (train(recipe, False) for recipe in (None, DECODED, FP8))
    assert plain[-1] < 0.7 * plain[0] and decoded != fp8
    for losses in (decoded, fp8):
        assert abs(losses[-1] - plain[-1]) < 0.05 * plain[-1]


@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_sharded_experts(ranks: int, on: str) -> None:
    (expected,) = distributed.run(1, train, FP8, True, on=on)
    for losses in distributed.run(ranks, train, FP8, True, on=on):
        assert losses == expected
