"""Matrix products with quantized weights in FP8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fused_optim.quantized import Float8CurrentScaling, Float8DelayedScaling, quantize_model_

needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with FP8"
)


def results(recipe: Float8CurrentScaling, x: Tensor, device: str) -> list[Tensor]:
    """The output, and the gradients of weight, bias and input."""
    torch.manual_seed(0)
    layer = quantize_model_(nn.Linear(64, 48).to(device, torch.bfloat16), recipe)
    x = x.detach().to(device).requires_grad_()
    out = layer(x)
    out.backward(torch.ones_like(out))
    return [out, layer.weight.grad, layer.bias.grad, x.grad]


@pytest.mark.cuda
@needs_fp8
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8DelayedScaling])
def test_products_in_fp8(kind: type[Float8CurrentScaling], scaling: str, shape: tuple[int, ...]) -> None:
    """Within FP8's rounding of the activations, and not the decoded product; backward is that of decoded weights."""
    torch.manual_seed(1)
    x = torch.randn(shape).bfloat16() * torch.logspace(-2, 2, shape[-2])[:, None].bfloat16()
    fp8 = results(kind(compute="fp8", activation_scaling=scaling), x, "cuda")
    plain = results(kind(), x, "cuda")
    error = (fp8[0] - plain[0]).float().flatten(0, -2)
    rows = error.norm(dim=1) / plain[0].float().flatten(0, -2).norm(dim=1)
    assert 1e-4 < rows.max() < (0.05 if scaling == "row" else 0.5)
    assert error.norm() / plain[0].float().norm() < 0.05
    for actual, expected in zip(fp8[1:], plain[1:], strict=True):
        torch.testing.assert_close(actual, expected)


def test_products_are_decoded_where_fp8_is_not_at_hand() -> None:
    x = torch.randn(7, 64).bfloat16()
    for actual, expected in zip(
        results(Float8CurrentScaling(compute="fp8"), x, "cpu"), results(Float8CurrentScaling(), x, "cpu"), strict=True
    ):
        assert torch.equal(actual, expected)


def test_compute_is_no_part_of_the_format() -> None:
    assert Float8CurrentScaling(compute="fp8") == Float8CurrentScaling()
    assert Float8DelayedScaling(compute="fp8") != Float8DelayedScaling(amax_history_len=3)
    with pytest.raises(ValueError, match="compute: expected 'dequantize' or 'fp8', got 'int8'"):
        Float8DelayedScaling(compute="int8")
    with pytest.raises(ValueError, match="activation_scaling: expected 'tensor' or 'row', got 'column'"):
        Float8CurrentScaling(activation_scaling="column")
