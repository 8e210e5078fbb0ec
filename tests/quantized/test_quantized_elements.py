"""The encodings of quantized weights, held to their definitions by an independent decoder in NumPy."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fused_optim.formats.rounding import rounding_bits
from fused_optim.quantized import Float8BlockScaling, Float8DelayedScaling, QuantizedTensor
from fused_optim.quantized.recipes import elements
from quantized_cases import RECIPES, encoded, matrices, values
from recipe_checks import check_not_finite, check_zeros

EACH = pytest.mark.parametrize("recipe", RECIPES)


# --- an independent decoder -------------------------------------------------------------------------------------


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Sign, exponent, mantissa, as the formats' definitions say; without special values."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    return sign * (math.ldexp(mantissa, 1 - bias) if exponent == 0 else math.ldexp(1 + mantissa, exponent - bias))


E4M3 = np.array([math.nan if code & 0x7F == 0x7F else minifloat(code, 4, 3, 7) for code in range(256)])
E2M1 = np.array([minifloat(code, 2, 1, 1) for code in range(16)])
E8M0 = np.array([math.nan if code == 255 else math.ldexp(1.0, code - 127) for code in range(256)])


def numpy_decode(weight: QuantizedTensor) -> np.ndarray:
    """Element by element, in double precision."""
    parts = {name: part.numpy() for name, part in weight.components.items()}
    rows, columns = weight.shape
    kind = type(weight.recipe).__name__
    scale = np.full((1, 1), 1.0)
    tile = next((part.tile for part in weight.recipe.components if part.name == "scale"), (rows, columns))
    if "scale" in parts:
        codes = {"NVFP4BlockScaling": E4M3, "MXFP8BlockScaling": E8M0}.get(kind)
        scale = parts["scale"] if codes is None else codes[parts["scale"]]
    scale = scale * np.float64(parts.get("tensor_scale", [1.0])[0])
    out = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            if kind == "NVFP4BlockScaling":
                byte = int(parts["data"][row, column // 2])
                element = E2M1[byte >> 4 if column % 2 else byte & 15]
            else:
                element = E4M3[parts["data"][row, column]]
            out[row, column] = element * scale[row // tile[0], column // tile[1]]
    return out


# --- elements ---------------------------------------------------------------------------------------------------


def test_float8_codes_decode_to_their_definition() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(elements.float8_decode(codes).numpy(), E4M3.astype(np.float32))


def test_float4_codes_decode_to_their_definition() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    np.testing.assert_array_equal(elements.float4_decode(codes).numpy(), E2M1)
    assert np.abs(E2M1).tolist()[:8] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_powers_of_two_decode_to_their_definition() -> None:
    codes = torch.arange(256, dtype=torch.int32)
    decoded = elements.power_of_two(codes)
    np.testing.assert_array_equal(decoded.numpy(), E8M0.astype(np.float32))
    if hasattr(torch, "float8_e8m0fnu"):
        assert torch.equal(decoded[:255], codes.to(torch.uint8).view(torch.float8_e8m0fnu).float()[:255])


@pytest.mark.parametrize("name, table, count", [("float8", E4M3, 127), ("float4", E2M1, 8)])
def test_rounding_is_to_the_nearest_and_to_even_codes_at_ties(name: str, table: np.ndarray, count: int) -> None:
    encode = getattr(elements, f"{name}_encode")
    levels = table[:count]
    ties = (levels[:-1] + levels[1:]) / 2
    assert np.array_equal(ties, ties.astype(np.float32))
    up, down = (np.nextafter(ties.astype(np.float32), np.float32(to)) for to in (np.inf, -np.inf))
    codes = np.arange(count - 1)
    sign = 128 if name == "float8" else 8
    for x, expected in [
        (levels, np.arange(count)), (up, codes + 1), (down, codes), (ties, codes + codes % 2)
    ]:  # fmt: skip
        x = torch.tensor(x, dtype=torch.float32)
        np.testing.assert_array_equal(encode(x, None).numpy(), expected)
        np.testing.assert_array_equal(encode(-x, None).numpy(), expected + sign)


def test_large_values_saturate_and_others_become_nan() -> None:
    x = torch.tensor([448.0, 449.0, 464.0, 465.0, 1e30, torch.inf, -torch.inf, torch.nan])
    assert elements.float8_encode(x, None).tolist() == [126] * 5 + [127] * 3
    assert elements.float8_encode(-x[:5], None).tolist() == [254] * 5
    x = torch.tensor([6.0, 6.5, 7.0, 1e30, torch.inf, torch.nan])  # E2M1 has no NaN: the block's scale tells
    assert elements.float4_encode(x, None).tolist() == [7] * 5 + [0]
    assert elements.float4_encode(-x[:5], None).tolist() == [15] * 5


@pytest.mark.parametrize("name, table, count", [("float8", E4M3, 127), ("float4", E2M1, 8)])
def test_stochastic_rounding_goes_up_as_often_as_it_should(name: str, table: np.ndarray, count: int) -> None:
    encode, decode = (getattr(elements, f"{name}_{what}") for what in ("encode", "decode"))
    levels = torch.tensor(table[:count], dtype=torch.float32)
    samples = 4096
    fractions = rounding_bits(12345, torch.arange(samples), 0)
    for low, high in list(pairwise(levels))[:: max(1, count // 12)]:
        for part in (0.0, 0.25, 0.7):
            x = (low + part * (high - low)).expand(samples)
            decoded = decode(encode(x, fractions))
            assert set(decoded.tolist()) <= {float(low), float(high)}
            assert abs(float((decoded == high).float().mean()) - part) < 0.03
            assert torch.equal(decode(encode(-x, fractions)), -decoded)


# --- recipes ----------------------------------------------------------------------------------------------------


@EACH
@given(x=matrices())
def test_decoding_is_that_of_the_definitions(recipe: str, x: Tensor) -> None:
    weight = encoded(x, RECIPES[recipe])
    expected = numpy_decode(weight)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(weight.values().numpy(), expected.astype(np.float32), rtol=2**-22, atol=1e-44)


def block_absmax(x: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    out = np.empty_like(x)
    for row in range(0, x.shape[0], tile[0]):
        for column in range(0, x.shape[1], tile[1]):
            at = np.s_[row : row + tile[0], column : column + tile[1]]
            out[at] = np.abs(x[at]).max()
    return out


@EACH
@given(x=matrices())
def test_errors_stay_within_half_a_spacing(recipe: str, x: Tensor) -> None:
    weight = encoded(x, RECIPES[recipe])
    exact = x.double().numpy()
    error = np.abs(weight.values().double().numpy() - exact)
    tile = next((part.tile for part in weight.recipe.components if part.name == "scale"), None)
    top = block_absmax(exact, tile or exact.shape)
    tiny = 448 * 2.0**-126  # below, scales do not shrink any more
    if recipe == "nvfp4":  # elements to 1/6 of the block's largest; scales to 1/16, or to their spacing
        step = np.abs(exact).max() / (6 * 448) * 2.0**-9
        bound = top * (1 / 6 + 1 / 16) + 6 * step
    elif recipe == "mxfp8":  # the block's largest elements may saturate, by up to 1/8
        saturated = np.where(np.abs(exact) > 0.8 * top, np.abs(exact) / 8, 0)
        bound = np.maximum(np.maximum(np.abs(exact) / 16, saturated), top * 2.0**-17)
    elif recipe in ("rows", "mxfp8up"):  # scales up to twice as large
        bound = np.maximum(np.abs(exact) / 16, top / 448 * 2.0**-9)
    else:
        margin = 2.0 ** getattr(weight.recipe, "margin", 0)
        bound = np.maximum(np.abs(exact) / 16, top / 448 * margin * 2.0**-10)
    assert (error <= bound * (1 + 1e-5) + tiny).all(), (error / np.maximum(bound, 1e-300)).max()


@EACH
@given(x=matrices())
def test_encoding_decoded_values_changes_none(recipe: str, x: Tensor) -> None:
    once = encoded(x, RECIPES[recipe]).values()
    twice = encoded(once, RECIPES[recipe]).values()
    if recipe.startswith("mxfp8") or recipe == "rows":  # powers of two
        assert torch.equal(once, twice)
    elif recipe != "nvfp4":
        assert torch.allclose(once, twice, rtol=2**-21, atol=1e-44)
    else:  # blocks of the smallest scales may vanish
        small = 3 * 6 * float(once.abs().max()) / (6 * 448) * 2.0**-9
        different = ~torch.isclose(once, twice, rtol=2**-20, atol=1e-44)
        assert (once[different].abs() <= small).all()


@EACH
def test_zeros_stay_zeros(recipe: str) -> None:
    check_zeros(recipe)


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_nan_and_counts_for_no_scale(recipe: str, bad: float) -> None:
    check_not_finite(recipe, bad, slice(32, 48) if recipe == "nvfp4" else slice(40, 41))


@EACH
@given(x=matrices(), seed=st.integers(0, 2**31))
def test_stochastic_rounding_goes_to_a_neighbour(recipe: str, x: Tensor, seed: int) -> None:
    fractions = rounding_bits(seed, torch.arange(x.numel()), 7).view(x.shape)
    nearest, weight = encoded(x, RECIPES[recipe]), encoded(x, RECIPES[recipe], fractions)
    for name, part in weight.components.items():
        assert name == "data" or torch.equal(part, nearest.components[name])
    for low, size in [(0, 8), (4, 8)] if recipe == "nvfp4" else [(0, 128)]:  # magnitudes within a byte
        codes, others = ((each.components["data"].int() >> low) % size for each in (weight, nearest))
        assert ((codes - others).abs() <= 1).all()
    assert torch.equal(encoded(x, RECIPES[recipe], fractions).components["data"], weight.components["data"])


@given(x=matrices())
def test_block_scales_are_those_of_the_definitions(x: Tensor) -> None:
    exact = x.numpy().astype(np.float64)
    top = block_absmax(exact, (1, 32))[:, ::32]
    for recipe, up in (("mxfp8", False), ("mxfp8up", True)):
        scale = encoded(x, RECIPES[recipe]).components["scale"].numpy().astype(int)
        for absmax, code in zip(top.ravel(), scale.ravel(), strict=True):
            if absmax > 2.0**-100:
                exact_code = math.ceil(math.log2(absmax / 448)) if up else math.floor(math.log2(absmax)) - 8
                assert code == exact_code + 127
    scale = encoded(x, RECIPES["rows"]).components["scale"]
    assert torch.equal(scale, scale.log2().round().exp2())


@pytest.mark.parametrize("length, algorithm", [(1, "max"), (4, "max"), (4, "most_recent")])
def test_delayed_scaling_saturates_what_outgrows_its_history(length: int, algorithm: str) -> None:
    recipe = Float8DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm)
    x = values((4, 32), 1)
    weight = encoded(x, recipe)
    recipe.prepare(weight.components, None)
    recipe.encode(4 * x, weight.components)
    recipe.rescale(weight.components, recipe.absmax(4 * x), None, True)
    assert torch.isclose(weight.values().abs().max(), x.abs().max())
    recipe.prepare(weight.components, None)
    recipe.encode(4 * x, weight.components)
    recipe.rescale(weight.components, recipe.absmax(4 * x), None, True)
    assert torch.isclose(weight.values().abs().max(), 4 * x.abs().max())


@pytest.mark.parametrize(
    "option", [{"fp8_format": "e5m2"}, {"amax_compute_algo": "mean"}, {"amax_history_len": 0}], ids=str
)
def test_options_of_delayed_scaling_that_do_not_exist_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        Float8DelayedScaling(**option)


def test_blocks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="block"):
        Float8BlockScaling((64, 64))
    assert hash(Float8BlockScaling([1, 128])) == hash(Float8BlockScaling((1, 128)))
