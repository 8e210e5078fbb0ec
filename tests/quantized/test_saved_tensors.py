"""Hooks of saved tensors, which offload activations: they see weights, too, and may make plain tensors of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    GroupedLinear,
    MXFP8BlockScaling,
    Recipe,
    quantize_model_,
)
from fused_optim.quantized.fp8 import products
from fused_optim.quantized.fp8.casts import Codes
from product_cases import matrix

RECIPES: dict[str, Recipe] = {
    "one scale": Float8CurrentScaling(compute="fp8"),
    "delayed": Float8DelayedScaling(compute="fp8", activation_scaling="delayed"),
    "rows": Float8CurrentScaling(compute="fp8", activation_scaling="row", weight_gradients="fp8"),
    "rows, weight gradients BF16": Float8CurrentScaling(compute="fp8", activation_scaling="row"),
    "blocks": Float8BlockScaling(compute="fp8"),
    "blocks, decoded": Float8BlockScaling(compute="decode"),
    "mxfp8, decoded": MXFP8BlockScaling(compute="decode"),
}
ROWS, WIDTH = 256, 128


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(self.norm(x))))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedLinear(2, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, torch.tensor([ROWS // 2, ROWS], dtype=torch.int32, device=x.device))


MODELS: dict[str, Callable[[], nn.Module]] = {"linear": Linear, "experts": Experts}


def gradients(model: nn.Module, x: Tensor, hooks: AbstractContextManager[object]) -> list[Tensor]:
    """Those of the activations, then of the parameters."""
    with hooks:
        out = model(x)
    return list(torch.autograd.grad(out, [x, *model.parameters()], matrix(ROWS, WIDTH, seed=3).to(out)))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", RECIPES)
def test_offloaded_activations_give_the_same_gradients(name: str, kind: str, fp8_device: str) -> None:
    torch.manual_seed(0)
    model = quantize_model_(
        MODELS[kind]().to(fp8_device).bfloat16(),
        RECIPES[name],
        lambda module, _: isinstance(module, nn.Linear | GroupedLinear),
        keep_initial=False,
    )
    x = matrix(ROWS, WIDTH).to(fp8_device).requires_grad_()
    gradients(model, x, nullcontext())  # delayed scales begin
    before = [buffer.clone() for buffer in model.buffers()]
    expected = gradients(model, x, nullcontext())
    kinds: dict[str, tuple[AbstractContextManager[object], float]] = {
        "copies": (saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t), 0.0),
        "CPU": (save_on_cpu(), 0.0),
        # Makes weights plain, so that input gradients are rounded otherwise, and then gradients in E5M2.
        "pinned": (save_on_cpu(pin_memory=True), 0.05),
    }
    for hooks, bound in kinds.values():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        found = gradients(model, x, hooks)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert float((a.double() - b.double()).norm()) <= bound * float(b.double().norm())


@pytest.mark.parametrize("rows, blocks", [(128, 2), (256, 3), (128, 1)])
def test_copies_of_scales_of_blocks_lie_as_products_want_them(rows: int, blocks: int) -> None:
    """Copies that hooks make are row by row; cuBLAS takes scales column by column."""
    data = torch.zeros(rows, 128 * blocks).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, rows * blocks + 1).view(rows, blocks)
    operand = products._scale_operand(Codes(data, scale, "block"))
    assert torch.equal(operand, scale) and operand.stride(0) == 1
    by_columns = scale.t().contiguous().t()
    assert products._scale_operand(Codes(data, by_columns, "block")) is by_columns


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> None:
        return None


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", RECIPES)
def test_without_a_gradient_there_is_none(name: str, kind: str, fp8_device: str) -> None:
    """As with plain layers: an optimizer would decay weights whose gradients are zeros."""
    model = quantize_model_(
        MODELS[kind]().to(fp8_device).bfloat16(),
        RECIPES[name],
        lambda module, _: isinstance(module, nn.Linear | GroupedLinear),
    )
    x = matrix(ROWS, WIDTH).to(fp8_device).requires_grad_()
    (NoGradient.apply(model(x)).sum() + x.sum()).backward()
    assert all(param.grad is None for param in model.parameters()) and bool((x.grad == 1).all())


@pytest.mark.parametrize("name", RECIPES)
def test_layers_on_the_meta_device(name: str) -> None:
    layer = quantize_model_(nn.Linear(WIDTH, WIDTH).bfloat16(), RECIPES[name], lambda *_: True).to("meta")
    out = layer(torch.empty(3, WIDTH, dtype=torch.bfloat16, device="meta"))
    out.sum().backward()
    assert out.shape == (3, WIDTH) and layer.weight.grad.shape == (WIDTH, WIDTH)
