"""The compiled casts for products, and the operators that they are: bit for bit what PyTorch's operations give."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fused_optim.backends import load_engine
from fused_optim.backends.compiled import run_on
from fused_optim.quantized.fp8 import casts, delayed

DTYPES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
SIZES = [16, 32, 48, 112, 128, 144, 256, 272, 400]
SPECIAL = [0.0, -0.0, 1e-40, -1e-40, 2.0**-126, 3e38, -3e38, 1.0, 448.0, 57344.0]
MAGNITUDES = {torch.bfloat16: [-140, -126, -100, -20, 0, 90, 120], torch.float16: [-26, -14, 0, 12]}  # powers of 2
NOT_FINITE = [math.inf, -math.inf, math.nan]


@st.composite
def matrices(draw: st.DrawFn, rows: list[int], columns: list[int]) -> Tensor:
    """BF16 or FP16 values of many magnitudes, with special ones strewn in, and sometimes rows that are not finite."""
    dtype, magnitudes = draw(st.sampled_from(list(MAGNITUDES.items())))
    shape = draw(st.sampled_from(rows)), draw(st.sampled_from(columns))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal(shape) * 2.0 ** draw(st.sampled_from(magnitudes))
    x *= 2.0 ** rng.integers(-30, 4, shape) if draw(st.booleans()) else 1.0
    strewn = draw(st.sampled_from([[], SPECIAL, SPECIAL + NOT_FINITE, NOT_FINITE, [0.0]]))
    if strewn:
        x = np.where(rng.random(shape) < draw(st.sampled_from([0.001, 0.3, 1.0])), rng.choice(strewn, shape), x)
    if draw(st.booleans()):
        x[rng.integers(shape[0])] = draw(st.sampled_from([*NOT_FINITE, 0.0, 1e-40]))
    with np.errstate(over="ignore"):
        return torch.from_numpy(x.astype(np.float32)).to(dtype)


def bits(x: Tensor) -> Tensor:
    """As integers, with all NaN alike."""
    x = x.cpu()
    nan = torch.full((), math.nan).to(x.dtype)
    x = torch.where(x.float().isnan(), nan, x)
    return x.view({4: torch.int32, 1: torch.uint8}[x.element_size()])


def assert_same(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual is None) == (wanted is None)
        if wanted is None:
            continue
        assert actual.dtype == wanted.dtype and actual.is_contiguous()
        assert torch.equal(bits(actual), bits(wanted))


@pytest.fixture
def engine_alone(engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reference raises: what passes was done by the compiled engine."""
    for name in ("_cast_tensor", "_cast_rows", "_cast_blocks", "_columns_of_blocks", "_cast_delayed"):
        reference = getattr(casts, name)
        monkeypatch.setattr(casts, f"expected_{name.strip('_')}", reference, raising=False)
        monkeypatch.setattr(casts, name, None)
    return engine


@DTYPES
@given(data=st.data())
def test_one_scale(dtype: torch.dtype, engine_alone: str, data: st.DataObject) -> None:
    x = data.draw(matrices(SIZES, SIZES))
    codes, scale = casts.expected_cast_tensor(x, None, dtype)
    transposed, empty = codes.t().contiguous(), None
    x = x.to(engine_alone)
    assert_same(casts.cast_tensor(x, None, dtype, True, True), (codes, transposed, scale))
    assert_same(casts.cast_tensor(x, None, dtype, True, False), (codes, empty, scale))
    assert_same(casts.cast_tensor(x, None, dtype, False, True), (empty, transposed, scale))
    assert_same(casts.cast_tensor(x, casts.absmax_of(x), dtype, True, True), (codes, transposed, scale))


@DTYPES
@given(data=st.data())
def test_scales_of_rows(dtype: torch.dtype, engine_alone: str, data: st.DataObject) -> None:
    x = data.draw(matrices(SIZES, [*SIZES, 16400]))
    empty = None, None
    rows, columns = casts.expected_cast_rows(x, dtype), casts.expected_cast_rows(x.t().contiguous(), dtype)
    x = x.to(engine_alone)
    assert_same(casts.cast_rows(x, dtype, True, False), (*rows, *empty))
    assert_same(casts.cast_rows(x, dtype, False, True), (*empty, *columns))
    assert_same(casts.cast_rows(x, dtype, True, True), (*rows, *columns))


@DTYPES
@given(data=st.data())
def test_delayed_scales(dtype: torch.dtype, engine_alone: str, data: st.DataObject) -> None:
    """Codes, scale, and the history; which may be empty, or have seen less than there is."""
    x = data.draw(matrices(SIZES, SIZES))
    history = torch.zeros(1 + delayed.HISTORY)
    largest = float(torch.where(x.isfinite(), x, 0).abs().amax())
    for i in range(1, 1 + data.draw(st.integers(0, delayed.HISTORY))):
        history[i] = min(largest * data.draw(st.sampled_from([0.0, 1e-3, 0.5, 1.0, 2.0])), 3e38)
    if data.draw(st.booleans()):
        history[:1] = casts.delayed_scale(history[1:], dtype)
    rows, columns = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    moved = history.to(engine_alone, copy=True)
    codes, scale = casts.expected_cast_delayed(x, history, dtype)
    found = casts.cast_delayed(x.to(engine_alone), moved, dtype, rows, columns)
    assert_same(found, (codes if rows else None, codes.t().contiguous() if columns else None, scale))
    assert torch.equal(moved.cpu(), history)


@pytest.mark.parametrize("power_of_two", [False, True])
@DTYPES
@given(data=st.data())
def test_scales_of_blocks(dtype: torch.dtype, power_of_two: bool, engine_alone: str, data: st.DataObject) -> None:
    x = data.draw(matrices([128, 256], [128, 256, 384]))
    empty = None, None
    rows = casts.expected_cast_blocks(x, dtype, power_of_two)
    columns = casts.expected_cast_blocks(x.t().contiguous(), dtype, power_of_two)
    y = x.to(engine_alone)
    assert_same(casts.cast_blocks(y, dtype, power_of_two, False, True, True), (*rows, *columns))
    assert_same(casts.cast_blocks(y[:48], dtype, power_of_two, False, True, False)[:2],
                casts.expected_cast_blocks(x[:48], dtype, power_of_two))  # fmt: skip
    narrow = y[:, :48].contiguous()
    found = casts.cast_blocks(narrow, dtype, power_of_two, False, False, True)
    assert_same(found, (*empty, *casts.expected_cast_blocks(narrow.cpu().t().contiguous(), dtype, power_of_two)))
    for each in (y, narrow):
        tiles = casts.expected_columns_of_blocks(each.cpu(), dtype, power_of_two, True)
        assert_same(casts.cast_blocks(each, dtype, power_of_two, True, False, True), (*empty, *tiles))
    assert_same(casts.cast_blocks(y, dtype, power_of_two, True, True, True)[:2], rows)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("columns", SIZES)
def test_transposes(rows: int, columns: int, engine: str) -> None:
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8).to(engine)
    found = casts.transpose(codes.view(torch.float8_e4m3fn))
    assert found.is_contiguous() and torch.equal(found.view(torch.uint8), codes.t())


@DTYPES
def test_every_code_decodes_to_itself(dtype: torch.dtype, engine: str) -> None:
    """All finite values of the format, with the largest one among them, so that the scale is 1."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].repeat(16)[: 16 * 240]
    x = values.bfloat16().view(16, -1).to(engine)
    for codes, scale in (
        casts.cast_tensor(x, None, dtype, True, False)[::2],
        casts.cast_rows(x, dtype, True, False)[:2],
    ):
        assert torch.equal((codes.float() * scale).cpu(), x.float().cpu())


def test_what_the_engines_cannot_take_is_left_to_pytorch(device: str) -> None:
    for shape in ((7, 64), (32, 63), (0, 64)):
        x = torch.randn(shape).bfloat16().to(device)
        if x.numel():
            codes, transposed, scale = casts.cast_tensor(x, None, torch.float8_e4m3fn, True, True)
            expected, expected_scale = casts._cast_tensor(x, None, torch.float8_e4m3fn)
            assert_same((codes, transposed, scale), (expected, expected.t().contiguous(), expected_scale))
        data = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device)
        assert casts.transpose(data).shape == shape[::-1]


@pytest.mark.parametrize("change, message", [
    ({"rows": 8}, "multiples of 16"),
    ({"values": 8}, "addresses that are multiples of 16"),
    ({"scale": 0}, "addresses of all tensors"),
    ({"format": 2}, "a known format"),
])  # fmt: skip
def test_engines_refuse_what_they_cannot_take(change: dict[str, int], message: str, engine: str) -> None:
    module, _ = load_engine(engine)
    arguments: dict[str, Any] = dict.fromkeys(("values", "codes", "scale", "rows", "columns"), 16)
    arguments |= dict.fromkeys(("transposed", "transposed_scale", "absmax", "half", "format"), 0)
    with pytest.raises(ValueError, match=message):
        module.cast_rows(**arguments | change, **run_on(torch.device(engine, 0)))


@pytest.mark.long
@DTYPES
def test_operators_are_what_compilers_expect(dtype: torch.dtype, device: str) -> None:
    """Schemas, fake implementations, and tracing; also of what is not wanted."""
    x = torch.randn(128, 256).bfloat16().to(device)
    ops = torch.ops.fused_optim
    for rows, columns in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(ops.fp8_cast_tensor, (x, None, dtype, rows, columns))
        torch.library.opcheck(ops.fp8_cast_rows, (x, dtype, rows, columns))
        for tiles in (False, True):
            torch.library.opcheck(ops.fp8_cast_blocks, (x, dtype, True, tiles, rows, columns))
        torch.library.opcheck(ops.fp8_cast_delayed, (x, torch.zeros(17, device=device), dtype, rows, columns))
    torch.library.opcheck(ops.fp8_transpose, (casts.cast_rows(x, dtype, True, False)[0].view(torch.uint8),))
