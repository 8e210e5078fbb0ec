"""Newton-Schulz steps on Gram matrices: the polynomials of double precision, the bits of a matrix alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fused_optim.backends.products import EngineProducts, Product, Products, TorchProducts, products_on
from fused_optim.matrices.gram import _cuts, orthogonalized_together
from fused_optim.matrices.newton_schulz import coefficients_of, orthogonalized
from fused_optim.matrices.orthogonalize import orthogonalize
from fused_optim.rules import Orthogonalization

JORDAN = (3.4445, -4.7750, 2.0315)
SHAPES = [(64, 160), (160, 64), (64, 64), (64, 72), (8, 8), (64, 160)]
BF16, F16 = torch.bfloat16, torch.float16


def one(rows: int, columns: int) -> float:
    return 1.0


def how(coefficients: Any = JORDAN, steps: int = 5, dtype: torch.dtype = BF16, **options: Any) -> Orthogonalization:
    return Orthogonalization(
        coefficients_of(coefficients, steps), **{"eps": 1e-7, "scale": one, "dtype": dtype, **options}
    )


def normal(shape: tuple[int, ...], device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def decaying(shape: tuple[int, int], decades: int, device: str = "cpu") -> Tensor:
    """Singular values that fall off."""
    rank = min(shape)
    left, right = (np.linalg.qr(normal((size, rank), seed=size).numpy())[0] for size in shape)
    return torch.from_numpy(left * np.logspace(0, -decades, rank) @ right.T).float().to(device)


def exact(x: Tensor, steps: Any) -> np.ndarray[Any, Any]:
    u, s, vt = np.linalg.svd(x.double().cpu().numpy(), full_matrices=False)
    s /= math.sqrt(float((s**2).sum()))
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return u @ np.diag(s) @ vt


def error(found: Tensor, expected: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(found.double().cpu().numpy() - expected) / np.linalg.norm(expected))


def products_of(device: str) -> Products:
    found = products_on(torch.device(device, 0)) if device == "cuda" else TorchProducts()
    assert found is not None
    return found


def test_parts_of_the_steps() -> None:
    assert [_cuts(steps) for steps in (1, 3, 4, 5, 6)] == [[0, 1], [0, 3], [0, 2, 4], [0, 3, 5], [0, 3, 6]]
    assert _cuts(10) == [0, 3, 6, 8, 10]


@pytest.mark.parametrize(
    ("name", "steps"),
    [(JORDAN, 5), (JORDAN, 1), ("polar_express", 5), ("polar_express", 6), ("deepseek_v4", 10)],
)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_it_is_the_polynomial_of_the_singular_values(name: Any, steps: int, dtype: torch.dtype, device: str) -> None:
    """Off by less than the plain form with BF16 products is, and on the CPU FP16 ones round more often."""
    kind = how(name, steps, dtype)
    for shape in SHAPES[:3]:
        x = normal(shape, device)
        found = orthogonalized_together([x], kind, products_of(device))[0]
        assert found.dtype == dtype and found.shape == x.shape and found.is_contiguous()
        expected = exact(x, kind.coefficients)
        plain = error(orthogonalized(x, how(name, steps, BF16)), expected)
        assert error(found, expected) < max(plain, 0.004), (shape, plain)


def test_errors_do_not_grow_with_the_size(device: str) -> None:
    """Of square matrices, whose small singular values rounding moves most: an R of three steps must not be the last."""
    kind = how("polar_express", 5)
    x = normal((256, 256), device)
    expected = exact(x, kind.coefficients)
    found = error(orthogonalized_together([x], kind, products_of(device))[0], expected)
    assert found < 0.006 and found < error(orthogonalized(x, kind), expected)


@pytest.mark.parametrize("decades", [2, 6])
@pytest.mark.parametrize(("name", "steps"), [(JORDAN, 5), ("polar_express", 6), ("deepseek_v4", 10)])
def test_small_singular_values(decades: int, name: Any, steps: int, device: str) -> None:
    """Eigenvalues of R that rounding has made negative do not grow: no singular value beyond the polynomial's range,
    and all of them nearer to it than BF16 products in the plain form bring them."""
    for shape in [(64, 192), (192, 64), (96, 96)]:
        x = decaying(shape, decades, device)
        found = orthogonalized_together([x], how(name, steps), products_of(device))[0]
        expected = torch.from_numpy(np.linalg.svd(exact(x, how(name, steps).coefficients), compute_uv=False))
        sigma, of_plain = (
            torch.linalg.svdvals(made.double().cpu()) for made in (found, orthogonalized(x, how(name, steps)))
        )
        assert sigma.max() < 1.3
        assert (sigma - expected).abs().mean() < (of_plain - expected).abs().mean() + 0.002


LOW_RANK = {
    "zeros": torch.zeros(16, 32),
    "identity": torch.eye(16, 32),
    "ones": torch.ones(16, 32),
    "one row": torch.eye(16)[:, :1] @ torch.ones(1, 32),
}


@pytest.mark.parametrize("x", LOW_RANK.values(), ids=LOW_RANK)
def test_matrices_of_low_rank(x: Tensor, device: str) -> None:
    """Steps make what rounding has left where there is nothing larger, in all forms."""
    found = orthogonalized_together([x.to(device)], how(), products_of(device))[0]
    expected = orthogonalized(x, how(dtype=torch.float32)).double().numpy()
    if x.any():
        assert error(found, expected) < error(orthogonalized(x, how()), expected) + 0.01
    else:
        assert not found.any()


def test_bits_do_not_depend_on_the_others(device: str) -> None:
    kind = how(scale=lambda rows, columns: math.sqrt(max(1.0, rows / columns)))
    values = [normal(shape, device, seed) for seed, shape in enumerate(SHAPES)]
    together = orthogonalize(values, [kind] * len(values))
    for x, found in zip(values, together, strict=True):
        assert torch.equal(orthogonalize([x], [kind])[0], found)
    stacked = orthogonalized_together([values[i] for i in (0, 1, 2, 3, 5)], kind, products_of(device))
    for i, found in zip((0, 1, 2, 3, 5), stacked, strict=True):
        assert torch.equal(orthogonalized_together([values[i]], kind, products_of(device))[0], found)


def test_the_scale_and_the_least_norm(device: str) -> None:
    x = normal((64, 160), device)
    scales = one, lambda rows, columns: 2.0
    once, twice = (orthogonalized_together([x], how(scale=scale), products_of(device))[0].float() for scale in scales)
    if device == "cuda":
        assert torch.equal(2.0 * once, twice)
    assert torch.allclose(2.0 * once, twice, rtol=0.02, atol=1e-3)  # FP16 sums of CPUs are rounded in between
    tiny = orthogonalized_together([1e-9 * x], how(steps=1, eps=1e-3), products_of(device))[0]
    assert torch.allclose(tiny.float(), 3.4445 * 1e-6 * x, rtol=0.02, atol=1e-7)


def test_what_is_left_to_plain_products() -> None:
    """CPUs, FP32, no steps: the bits of the plain form."""
    x = normal((16, 64))
    for kind in (how(), how(dtype=torch.float32), how(steps=0)):
        assert torch.equal(orthogonalize([x], [kind])[0], orthogonalized(x, kind))


# --- the engine's products --------------------------------------------------------------------------------------------


def engine_products() -> EngineProducts:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    found = products_on(torch.device("cuda", 0))
    return found if isinstance(found, EngineProducts) else pytest.skip("no Hopper GPU, or no engine for it")


FORMS = [  # left and right transposed, symmetric, left one added
    *((left, right, False, False) for left, right in ((False, False), (True, False), (False, True))),
    (True, False, True, False),
    (False, True, True, False),
    (False, False, True, False),
    (False, False, True, True),
    (False, False, False, True),
]


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("batch", "rows", "columns", "inner"),
    [
        (1, 8, 8, 8),
        (3, 256, 256, 64),
        (2, 136, 264, 72),
        (2, 520, 520, 328),
        (5, 776, 776, 64),
        (40, 256, 512, 128),
        (70, 256, 256, 136),
        (2, 1024, 768, 1024),
        (16, 1024, 1024, 128),  # of whose blocks clusters make different numbers
    ],
)
def test_products(form: tuple[bool, bool, bool, bool], batch: int, rows: int, columns: int, inner: int) -> None:
    products = engine_products()
    left_transposed, right_transposed, symmetric, adds_left = form
    if symmetric:
        columns = rows
    if adds_left:
        inner = columns
    left, right = normal((batch, rows, inner)), normal((batch, inner, columns), seed=1)
    if symmetric and (left_transposed or right_transposed):
        right = left.mT
    elif symmetric:  # two polynomials of one matrix commute
        inner = rows
        left = normal((batch, rows, rows)) / math.sqrt(rows)
        left = left + left.mT
        left, right = left.to(F16).float(), left.to(F16).float()
    given = [
        (left.mT if left_transposed else left).contiguous().to("cuda", F16),
        (right.mT if right_transposed else right).contiguous().to("cuda", F16),
    ]
    result_type = F16 if symmetric else BF16
    result = torch.full((batch, rows, columns), math.nan, device="cuda", dtype=result_type)
    options = {"left_transposed": left_transposed, "right_transposed": right_transposed, "symmetric": symmetric}
    factors = {"alpha": 1.0 / math.sqrt(inner), "beta": 0.5 if adds_left else 0.0, "gamma": 2.0}
    products.multiply([Product(*given, result, **factors, **options)])
    whole = left.to("cuda", F16).double() @ right.to("cuda", F16).double()
    expected = factors["alpha"] * whole.cpu() + 2.0 * torch.eye(rows, columns)
    if adds_left:
        expected += 0.5 * left.to(F16).double()
    assert error(result, expected.numpy()) < (3e-4 if result_type == F16 else 2.5e-3)
    for one in (slice(0, 1), slice(batch - 1, batch)):
        alone = torch.full_like(result[:1], math.nan)
        own = [each[one].contiguous() for each in given]
        products.multiply([Product(*own, alone, **factors, **options)])
        assert torch.equal(alone, result[one])
    if symmetric:
        place = torch.arange(rows, device="cuda") // 64
        assert torch.equal(*(each.masked_fill(place[:, None] == place, 0.0) for each in (result, result.mT)))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(8, 1), (40, 1000), (2048, 1032)], ids=str)
def test_normalized_values(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Of small, large and zero matrices; bits do not depend on how many there are, 256 of them are a launch."""
    products = engine_products()
    count = 3 if shape[0] == 2048 else 300
    values = [(normal(shape, "cuda") * 2.0 ** -(i % 30)).to(dtype) for i in range(count)]
    values[1].zero_()
    found = torch.full((count, *shape), math.nan, dtype=F16, device="cuda")
    products.normalize(values, found, 32.0, 1e-5)
    for i in {0, 1, 2, count - 1}:
        norm = torch.linalg.vector_norm(values[i].double()).clamp(min=1e-5)
        expected = values[i].double() / norm * 32.0
        assert torch.allclose(found[i].double(), expected, rtol=6e-4, atol=3e-8)
        alone = torch.full_like(found[:1], math.nan)
        products.normalize([values[i]], alone, 32.0, 1e-5)
        assert torch.equal(alone[0], found[i])


@pytest.mark.cuda
def test_products_refuse_what_they_cannot_read() -> None:
    products = engine_products()
    x = torch.zeros(1, 16, 16, dtype=F16, device="cuda")
    with pytest.raises(ValueError, match="multiples of 8"):
        products.multiply([Product(x[:, :, :12].contiguous(), x[:, :12].contiguous(), x.clone())])
    with pytest.raises(ValueError, match="multiples of 16"):
        odd = torch.zeros(257, dtype=F16, device="cuda")[1:].view(1, 16, 16)
        products.multiply([Product(odd, x, x.clone())])
    for form in ({"right_transposed": True}, {"beta": 1.0}):
        with pytest.raises(ValueError, match="no such form"):
            products.multiply([Product(x, x, x.clone(), left_transposed=True, **form)])
    with pytest.raises(ValueError, match="a square right factor"):
        products.multiply([Product(x[:, :, :8].contiguous(), x[:, :8].contiguous(), x.clone(), beta=1.0)])
