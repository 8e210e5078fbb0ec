"""Newton-Schulz steps: against double precision and the singular value decomposition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fused_optim.matrices.newton_schulz import coefficients_of, orthogonalized
from fused_optim.rules import Orthogonalization

JORDAN = (3.4445, -4.7750, 2.0315)
SHAPES = [(1, 1), (1, 40), (40, 1), (32, 32), (24, 100), (100, 24), (65, 63)]
# Of products in each dtype: what an entry of an orthogonalized matrix, which is 1 at most, may be off by.
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def how(coefficients: Any = JORDAN, steps: int = 5, scale: float = 1.0, **options: Any) -> Orthogonalization:
    chosen = {"dtype": torch.float32, "eps": 1e-7, **options}
    return Orthogonalization(coefficients_of(coefficients, steps), scale=lambda rows, columns: scale, **chosen)


def reference(x: Tensor, steps: list[tuple[float, float, float]], eps: float = 1e-7) -> np.ndarray:
    """In double precision, from the polynomial of singular values: U p(S) V^T."""
    u, s, vt = np.linalg.svd(x.double().numpy(), full_matrices=False)
    s /= max(math.sqrt(float((s**2).sum())), eps)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return u @ np.diag(s) @ vt


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_it_is_the_polynomial_of_the_singular_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = matrix(*shape)
    found = orthogonalized(x, how(dtype=dtype))
    assert found.dtype == dtype and found.shape == x.shape and found.is_contiguous()
    assert np.abs(found.double().numpy() - reference(x, [JORDAN] * 5)).max() < BOUNDS[dtype]


def test_the_scale_is_in_the_last_product() -> None:
    """Rounded once: twice as large is twice the same bits."""
    x = matrix(24, 40)
    once, twice = (orthogonalized(x, how(scale=scale, dtype=torch.bfloat16)) for scale in (1.0, 2.0))
    assert torch.equal(2 * once, twice)
    assert torch.allclose(orthogonalized(x, how(scale=0.3)), 0.3 * orthogonalized(x, how()), atol=1e-6)
    assert torch.allclose(orthogonalized(x, how(steps=0, scale=0.3)), 0.3 * x / x.norm())


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not orthogonalized(torch.zeros(8, 4), how()).any()


def test_values_are_divided_by_eps_at_least() -> None:
    x = 1e-9 * matrix(4, 8)
    assert np.allclose(orthogonalized(x, how(steps=1, eps=1e-3)).numpy(), reference(x, [JORDAN], 1e-3), rtol=1e-4)


def test_polar_express_ends_at_one() -> None:
    """For singular values of a thousandth of the largest on, with all of its steps."""
    values = np.geomspace(1e-3, 1.0, 10_001)
    for name, steps, error in (("polar_express", 8, 1e-4), ("polar_express", 6, 0.05), ("deepseek_v4", 10, 0.02)):
        found = values.copy()
        for a, b, c in coefficients_of(name, steps):
            found = a * found + b * found**3 + c * found**5
        assert np.abs(found - 1.0).max() < error, (name, steps)


def test_a_sequence_goes_on_with_its_last_step() -> None:
    assert coefficients_of(JORDAN, 3) == (JORDAN,) * 3 == coefficients_of("original", 3)
    assert coefficients_of([(1, 2, 3), (4, 5, 6)], 3) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (4.0, 5.0, 6.0))
    assert coefficients_of("deepseek_v4", 10)[7:] == (JORDAN, (2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
    assert coefficients_of("polar_express", 2) == coefficients_of("polar_express", 9)[:2]


@pytest.mark.parametrize("given", ["polar", "", (1.0, 2.0), [(1.0, 2.0)], (), 3.0, None], ids=str)
def test_other_coefficients_are_refused(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="ns_coefficients"):
        coefficients_of(given, 5)


def test_settings_of_the_process_change_nothing() -> None:
    """Precision of FP32 products, autocast: they are the model's."""
    x, expected = matrix(40, 64), orthogonalized(matrix(40, 64), how())
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(orthogonalized(x, how()), expected)
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before


def test_layout_in_memory_changes_nothing() -> None:
    x = matrix(24, 40)
    offset = torch.empty(24 * 40 + 3)[3:].view(24, 40).copy_(x)
    assert torch.equal(orthogonalized(x, how()), orthogonalized(offset.clone(), how()))
