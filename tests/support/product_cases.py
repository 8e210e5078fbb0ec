"""What the tests of FP8 products share: recipes, layers, results of a pass, references in float64 and their bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Recipe,
    quantize_model_,
)
from fused_optim.quantized.recipes import Scaling
from fused_optim.sharding.dtensor import local_tensor

# Of torch.compile: what traces graphs and cuts them in two as inductor does, and inductor itself, which runs a C++
# compiler for half a minute.
BACKENDS = ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.long)]
RECIPES: dict[str, Recipe] = {
    "tensor": Float8CurrentScaling(compute="fp8"),
    "tensor, E4M3 gradients": Float8CurrentScaling(compute="fp8", gradient_format="e4m3"),
    "delayed": Float8DelayedScaling(compute="fp8"),
    "row": Float8CurrentScaling(compute="fp8", activation_scaling="row"),
    "row, FP8 weight gradients": Float8CurrentScaling(
        compute="fp8", activation_scaling="row", weight_gradients="fp8", gradient_format="e5m2"
    ),
    "block": Float8BlockScaling(compute="fp8"),
    "block, powers of two": Float8BlockScaling(compute="fp8", power_of_two=True),
    "block (1, 128)": Float8BlockScaling((1, 128), compute="fp8"),
    "mxfp8": MXFP8BlockScaling(compute="fp8"),
    "nvfp4": NVFP4BlockScaling(compute="fp4"),
}
DECODED: dict[str, Recipe] = {
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "tensor": Float8CurrentScaling(),
    "delayed": Float8DelayedScaling(),
    "block": Float8BlockScaling(),
    "block (1, 128)": Float8BlockScaling((1, 128)),
}


def decoded_recipe(name: str) -> Recipe:
    """The same format, with products of decoded weights."""
    recipe = RECIPES[name]
    return type(recipe)(**{"block": recipe.block, "power_of_two": recipe.power_of_two} if "block" in name else {})


def matrix(rows: int, columns: int, seed: int = 1) -> Tensor:
    """BF16 rows of very different sizes."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return (x * torch.logspace(1, -1, rows)[:, None]).bfloat16()


def layer_of(recipe: Recipe, device: str, inputs: int = 256, outputs: int = 128, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return quantize_model_(nn.Linear(inputs, outputs, bias, dtype=torch.bfloat16).to(device), recipe)


def results(layer: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of parameters, on the CPU."""
    device = next(layer.parameters()).device
    x = x.detach().to(device).requires_grad_()
    out = layer(x)
    out.backward(gradient.to(device))
    grads = {name: param.grad.cpu() for name, param in layer.named_parameters() if param.grad is not None}
    layer.zero_grad()
    return {"output": out.detach().cpu(), "input": x.grad.cpu(), **grads}


# --- references, written from the formats' definitions ------------------------------------------------------------

# Half a step of a code: relative, and of the smallest codes in units of the scale; the largest code.
HALF_STEPS = {torch.float8_e4m3fn: (2.0**-4, 2.0**-10, 448.0), torch.float8_e5m2: (2.0**-3, 2.0**-17, 57344.0)}


def scales(x: Tensor, dtype: torch.dtype, scaling: Scaling, power_of_two: bool = False) -> Tensor:
    """FP32 scales, spread over the elements that share them."""
    magnitude = x.float().abs()
    if scaling == "mxfp8":
        absmax, power_of_two = magnitude.unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1), True
    elif scaling == "nvfp4":
        return four_bit_scales(magnitude)
    elif scaling == "tensor":
        absmax = magnitude.amax().expand(x.shape)
    elif scaling == "row":
        absmax = magnitude.amax(1, keepdim=True).expand(x.shape)
    else:
        absmax = magnitude.unflatten(1, (-1, 128)).amax(2).repeat_interleave(128, 1)
    largest = torch.tensor(HALF_STEPS[dtype][2])
    scale = (absmax / largest).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.exp2(scale.log2().ceil()) if power_of_two else scale


def four_bit_scales(magnitude: Tensor) -> Tensor:
    """Of 16 elements: E4M3, times an FP32 one of the whole."""
    whole = magnitude.amax() / torch.tensor(6.0 * 448.0)
    of_blocks = magnitude.unflatten(1, (-1, 16)).amax(2) / torch.tensor(6.0) / whole
    return (of_blocks.to(torch.float8_e4m3fn).float() * whole).repeat_interleave(16, 1)


def four_bits(x: Tensor) -> Tensor:
    """The nearest of the format's values; of two, that with the even code."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distance = (x.abs()[..., None] - levels).abs()
    near = distance == distance.amin(-1, keepdim=True)
    even = near & (torch.arange(8) % 2 == 0)
    code = torch.where(even.any(-1), even.int().argmax(-1), near.int().argmax(-1))
    return levels[code].copysign(x)


def rounded(x: Tensor, dtype: torch.dtype, scaling: Scaling, power_of_two: bool = False) -> Tensor:
    """What the codes of a matrix stand for, in float64."""
    scale = scales(x, dtype, scaling, power_of_two)
    if scaling == "nvfp4":
        return four_bits(x.float() * (1.0 / scale)).double() * scale.double()
    return (x.float() * (1.0 / scale)).to(dtype).double() * scale.double()


def code_error(x: Tensor, dtype: torch.dtype, scaling: Scaling, power_of_two: bool = False) -> Tensor:
    """The most that an element may differ from its code's value, in float64."""
    relative, absolute, _ = HALF_STEPS[dtype]
    scale = scales(x, dtype, scaling, power_of_two).double()
    if scaling == "nvfp4":  # steps of 0.5 up to 2, then of half the magnitude at most
        return torch.maximum(x.double().abs() * 0.25, 0.25 * scale) * (1 + 2.0**-20)
    return torch.maximum(x.double().abs() * relative, absolute * scale) * (1 + 2.0**-20)


class Reference:
    """A linear layer's products in float64, of codes and of values, and how far codes may be from values."""

    def __init__(self, layer: nn.Linear, recipe: Recipe, x: Tensor, gradient: Tensor) -> None:
        format = recipe.products
        assert format is not None
        weight: QuantizedTensor = local_tensor(layer.weight)
        self.weight = weight.values().cpu().double()
        self.bias = 0.0 if layer.bias is None else layer.bias.detach().cpu().double()
        options: dict[str, Any] = {"scaling": format.scaling, "power_of_two": format.power_of_two}
        e4m3 = torch.float8_e4m3fn
        input_gradient = format.no_input_gradients is None
        as_is = {"scaling": None}
        self.rows = self._pair(x, e4m3, options)
        self.columns = self._pair(x.t(), e4m3, options if format.weight_gradients else as_is)
        self.gradient_rows = self._pair(gradient, format.gradients, options if input_gradient else as_is)
        self.gradient_columns = self._pair(
            gradient.t(), format.gradients, options if format.weight_gradients else as_is
        )

    @staticmethod
    def _pair(x: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Values, what their codes stand for, and the bound of the difference."""
        if options["scaling"] is None:
            return x.double(), x.double(), torch.zeros(x.shape, dtype=torch.float64)
        return x.double(), rounded(x, dtype, **options), code_error(x, dtype, **options)

    def of_codes(self) -> dict[str, Tensor]:
        return self._products(1)

    def of_values(self) -> dict[str, Tensor]:
        return self._products(0)

    def _products(self, which: int) -> dict[str, Tensor]:
        return {
            "output": self.rows[which] @ self.weight.t() + self.bias,
            "input": self.gradient_rows[which] @ self.weight,
            "weight": self.gradient_columns[which] @ self.columns[which].t(),
        }

    def bounds(self) -> dict[str, Tensor]:
        """Of the difference between the two."""
        values, _, errors = zip(self.gradient_columns, self.columns, strict=True)
        (a, b), (of_a, of_b) = (each.abs() for each in values), errors
        weight = self.weight.abs()
        return {
            "output": self.rows[2] @ weight.t(),
            "input": self.gradient_rows[2] @ weight,
            "weight": of_a @ b.t() + a @ of_b.t() + of_a @ of_b.t(),
        }


def sums(reference: Reference) -> dict[str, Tensor]:
    """Of magnitudes: what errors of adding up, and of rounding the result, are relative to."""
    weight = reference.weight.abs()
    return {
        "output": reference.rows[1].abs() @ weight.t(),
        "input": reference.gradient_rows[1].abs() @ weight,
        "weight": reference.gradient_columns[1].abs() @ reference.columns[1].abs().t(),
    }
