"""What changes are compared with: full copies of the parameters' bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
)
from fused_optim.wire import Changes

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
PARTS = ("data", "scale", "tensor_scale")
RECIPES = [
    Float8CurrentScaling(),
    Float8DelayedScaling(),
    Float8BlockScaling(),
    Float8BlockScaling((1, 128)),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
]
SHAPES = {"weight": (6, 128), "wide": (3, 1024), "odd": (7, 33), "bias": (37,), "none": (0, 64), "one": ()}


class Model(nn.Module):
    """Parameters of many shapes, among them none that divides anything."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, nn.Parameter(values.to(device)))


def set_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Of their own for each step; some elements have none."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator) * scale
        grad[torch.rand(param.shape, generator=generator) < 0.3] = 0.0
        param.grad = grad.to(param.device, param.dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()]).cpu().clone()


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    """The bits of all that is published."""
    found = {}
    for name, param in model.named_parameters():
        if isinstance(param, QuantizedTensor):
            parts = {part: param.components[part] for part in PARTS if part in param.components}
            found |= {name if part == "data" else f"{name}_{part}": bits(value) for part, value in parts.items()}
        else:
            found[name] = bits(param)
    return found


class Expected:
    """The elements that differ from what they were when they were last taken."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.taken = model, copy_of(model)

    def check(self, taken: Mapping[str, Changes], some: bool = True) -> None:
        """That these are it: no element more, none less, and their values of now."""
        before, now = self.taken, copy_of(self.model)
        differing = {name: (before[name] != value).nonzero().view(-1) for name, value in now.items()}
        expected = {name: indices for name, indices in differing.items() if indices.numel()}
        assert not some or expected, "nothing changes in this test"
        assert set(taken) == set(expected)
        for name, indices in expected.items():
            assert torch.equal(taken[name].indices.cpu(), indices), name
            assert torch.equal(bits(taken[name].values), now[name][indices]), name
        self.taken = now
