"""What the CPU engine decodes for checkpoints, compared with the reference: every code, any scale, any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_optim.backends import decoding
from fused_optim.formats.masters import join_remainder
from fused_optim.formats.states import STATE_FORMATS, Kind, decode_state
from fused_optim.state.values import Joined, LazyTensor, Stored

pytestmark = pytest.mark.usefixtures("cpu_engine")
FORMATS = [torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16]
SCALES = [1.0, 0.0, 2.0**-126, 2.0**-140, 3.7e-5, 2.0**120, float("inf"), float("nan")]


@pytest.fixture
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSED_OPTIM_BACKEND", raising=False)


def codes(dtype: torch.dtype) -> Tensor:
    """All that a format has, but those that no encoder writes."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    every = torch.arange(-128, 128, dtype=torch.int8)
    return every if dtype == torch.int8 else every.view(torch.uint8)


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(0.5).view(torch.int32), expected.nan_to_num(0.5).view(torch.int32)
    )


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", [Kind.SIGNED, Kind.SQUARE, Kind.MASTER])
def test_every_code(dtype: torch.dtype, kind: Kind) -> None:
    if kind is Kind.MASTER and dtype != torch.float16:
        pytest.skip("masters have no such format")
    fmt = STATE_FORMATS[dtype]
    bits = codes(fmt.dtype(kind))
    if dtype == torch.float8_e4m3fn:
        bits = bits[(bits & 0x7F) != 0x7F]  # NaN
    for scale in SCALES:
        scales = None if fmt.codec is None else torch.full((-(-bits.numel() // 32),), scale)
        out = torch.full((bits.numel(),), 7.0)
        assert decoding.decode_state(bits, scales, kind, fmt, 32, out)
        assert same(out, decode_state(bits, scales, kind, fmt, 32)), scale


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("numel", [1, 31, 32, 33, 100, 2**20 + 5])
def test_lengths(dtype: torch.dtype, numel: int) -> None:
    """Blocks of their own, the last one short; nothing is written beyond the end."""
    fmt = STATE_FORMATS[dtype]
    generator = torch.Generator().manual_seed(numel)
    bits = torch.randint(0, 100, (numel,), generator=generator, dtype=torch.uint8)
    bits = bits.to(torch.int16).view(dtype) if dtype.itemsize == 2 else bits.view(fmt.dtype(Kind.SQUARE))
    scales = None if fmt.codec is None else torch.rand(-(-numel // 32), generator=generator)
    stored = Stored(bits, scales, Kind.SQUARE, fmt, 32)
    memory = torch.full((numel + 8,), -3.0)
    stored.read_into(memory[:numel])
    assert same(memory[:numel], decode_state(bits, scales, Kind.SQUARE, fmt, 32)) and (memory[numel:] == -3).all()
    assert same(stored.read(), memory[:numel]) and same(LazyTensor(stored).cpu(), memory[:numel])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
def test_every_remainder(dtype: torch.dtype) -> None:
    low = torch.arange(torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1).to(dtype)
    for high in (0, 0x8000, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0x7FC0, 1):
        param = torch.tensor([high]).to(torch.int16).view(torch.bfloat16).repeat(low.numel())
        found = Joined(low, param).read()
        assert same(found, join_remainder(param, low)), hex(high)
        out = torch.zeros(low.numel())
        assert decoding.join_remainder(param, low, out) and same(out, found)


@pytest.mark.parametrize("what", ["forced", "strided", "float32", "empty"])
def test_what_is_left_to_the_reference(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt: Any = STATE_FORMATS[torch.float32 if what == "float32" else torch.int8]
    bits = torch.ones((0 if what == "empty" else 64,), dtype=fmt.dtype(Kind.SIGNED))
    if what == "strided":
        bits = bits[::2]
    if what == "forced":
        monkeypatch.setenv("FUSED_OPTIM_BACKEND", "torch")
    scales = None if fmt.codec is None else torch.ones(-(-bits.numel() // 32))
    assert not decoding.decode_state(bits, scales, Kind.SIGNED, fmt, 32, torch.empty(bits.numel()))
    stored = Stored(bits, scales, Kind.SIGNED, fmt, 32)
    assert same(stored.read(), decode_state(bits, scales, Kind.SIGNED, fmt, 32))
