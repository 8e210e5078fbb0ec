"""Bits of changes: who sets them without copies, how they become indices, and who notices what others write."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fused_optim.backends.changed_bits import MarkedTensor, bit_bytes, collect, set_all

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


@pytest.fixture(params=["engine", "torch"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setenv("FUSED_OPTIM_BACKEND", "torch")
    return str(request.param)


# --- collecting ---------------------------------------------------------------------------------------------------

NUMELS = [0, 1, 7, 32, 33, 4095, 32767, 32768, 32769, 131_073]


def _packed(flags: Tensor) -> Tensor:
    """A bit each, as in the module's description."""
    packed = np.zeros(bit_bytes(flags.numel()), dtype=np.uint8)
    found = np.packbits(flags.numpy(), axis=None, bitorder="little")
    packed[: found.size] = found
    return torch.from_numpy(packed)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 0.7, 1.0])
def test_marked_elements_are_collected(device: str, by: str, share: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors, expected = [], []
    for i, numel in enumerate(NUMELS):
        flags = torch.rand(numel, generator=generator) < share
        values = (100 * torch.rand(numel, generator=generator)).to(dtype)
        packed = torch.zeros(bit_bytes(numel), dtype=torch.uint8)
        if share == 1.0:
            set_all(packed, numel)
        else:
            packed = _packed(flags)
        first = 1000 * (i % 2)
        tensors.append(MarkedTensor(packed.to(device), values.to(device), first))
        expected.append((flags.nonzero().view(-1) + first, values[flags]))
    for (indices, values), (where, what) in zip(collect(tensors), expected, strict=True):
        assert indices.dtype == torch.int64 and torch.equal(indices.cpu(), where)
        assert torch.equal(values.cpu(), what)
    assert collect([]) == []


def test_tensors_of_several_dtypes_at_once(device: str, by: str) -> None:
    """Of which some are marked as a whole, some in part."""
    dtypes = [torch.float32, torch.uint8, torch.bfloat16, torch.float32, torch.uint8]
    shares = [1.0, 0.1, 1.0, 0.5, 1.0]
    generator = torch.Generator().manual_seed(2)
    flags = [torch.rand(1000 + i, generator=generator) < share for i, share in enumerate(shares)]
    values = [torch.arange(each.numel()).to(dtype) for each, dtype in zip(flags, dtypes, strict=True)]
    pairs = zip(flags, values, strict=True)
    taken = collect([MarkedTensor(_packed(each).to(device), value.to(device)) for each, value in pairs])
    for (indices, found), each, value in zip(taken, flags, values, strict=True):
        assert torch.equal(indices.cpu(), each.nonzero().view(-1)) and torch.equal(found.cpu(), value[each])


def test_a_thousand_tensors_whose_bits_lie_together(device: str, by: str) -> None:
    """More than a launch has room for; a stretch that is full, and the rest almost empty."""
    numels = [70_001, *range(1000)]
    flags = [torch.zeros(numel, dtype=torch.bool) for numel in numels]
    for own in flags:
        own[3:7] = True
    flags[0][20_000:40_000] = True
    tensors = [
        MarkedTensor(_packed(own).to(device), torch.arange(own.numel()).to(device, torch.int32)) for own in flags
    ]
    for (indices, values), own in zip(collect(tensors), flags, strict=True):
        assert torch.equal(indices.cpu(), own.nonzero().view(-1))
        assert torch.equal(values.cpu().long(), indices.cpu())
