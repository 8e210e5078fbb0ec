"""Tensors are written as torch.save writes them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fused_optim import FusedAdamW
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint.archives import Archives

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.complex64, torch.float64]


def saved(archives: Archives, tensor: Tensor) -> tuple[bytes, int]:
    """The archive, and in how many pieces it came."""
    pieces: list[bytes] = []
    archives.save(tensor, lambda content: pieces.append(bytes(content)))
    return b"".join(pieces), len(pieces)


def files_of(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        assert found.testzip() is None  # every CRC-32 is right
        return {name: found.read(name) for name in found.namelist() if not name.endswith("serialization_id")}


def saved_by_torch(tensor: Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def check(archives: Archives, tensor: Tensor) -> int:
    archive, pieces = saved(archives, tensor)
    expected = saved_by_torch(tensor)
    assert len(archive) == len(expected)
    assert files_of(archive) == files_of(expected)
    loaded = torch.load(io.BytesIO(archive), weights_only=True)
    assert (type(loaded), loaded.dtype, loaded.stride()) == (type(tensor), tensor.dtype, tensor.stride())
    assert torch.equal(flat_bytes(loaded), flat_bytes(tensor))
    return pieces


def flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


@settings(deadline=None, max_examples=100)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=4),
    seeds=st.lists(st.integers(0, 2**31), min_size=1, max_size=3),
)
def test_archives_are_those_of_torch(dtype: torch.dtype, shape: list[int], seeds: list[int]) -> None:
    archives = Archives()
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        content = torch.randint(0, 2, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        pieces = check(archives, content.reshape(-1).view(dtype).view(shape))
    assert pieces == 3 or len(seeds) == 1 or 0 in shape


def test_large_tensors() -> None:
    archives = Archives()
    for seed in range(3):
        pieces = check(archives, torch.randn(1 << 21, generator=torch.Generator().manual_seed(seed)))
    assert pieces == 3


OTHERS: dict[str, Any] = {
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "a parameter": lambda: nn.Parameter(torch.arange(12.0).view(3, 4)),
    "with a gradient": lambda: torch.arange(12.0).view(3, 4).requires_grad_(),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tensors_of_the_same_shape(kind: str) -> None:
    archives = Archives()
    tensor = OTHERS[kind]()
    for _ in range(2):
        check(archives, torch.ones(tensor.shape))
        assert check(archives, tensor) > 3


def test_parts_of_a_storage() -> None:
    """What they show alone, with and without another one of the shape before."""
    archives = Archives()
    for tensor in (torch.arange(12.0)[2:8], torch.arange(12.0)[3:9], torch.arange(12.0).view(3, 4).t()[1:3]):
        archive, _ = saved(archives, tensor)
        found = torch.load(io.BytesIO(archive), weights_only=True)
        assert torch.equal(found, tensor) and found.untyped_storage().nbytes() == tensor.nbytes


def test_archives_without_checks() -> None:
    """torch can be told to leave the CRC-32 out: its files are written as it writes them."""
    torch.serialization.set_crc32_options(False)
    try:
        archives = Archives()
        for value in (1.0, 2.0):
            archive, pieces = saved(archives, torch.full((3,), value))
            assert pieces > 3
            assert torch.equal(torch.load(io.BytesIO(archive), weights_only=True), torch.full((3,), value))
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("dtype, shape", [(torch.float32, (3, 700_001)), (torch.int8, (7,)), (torch.bool, ())])
def test_what_was_prepared_is_not_shown_again(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    archives = Archives()
    archives.prepare(dtype, torch.Size(shape))
    assert check(archives, torch.ones(shape, dtype=dtype)) == 3
    archives.prepare(dtype, torch.Size((0, 3)))  # nothing to be shown
    check(archives, torch.ones(0, 3, dtype=dtype))


@pytest.mark.parametrize("prepares, form", [(False, "native"), (True, "native"), (True, "unscaled")])
def test_later_saves_leave_the_interpreter_alone(
    prepares: bool, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor is pickled again, whatever layer it belongs to; by the first save neither, where it was prepared."""
    layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))).bfloat16()
    optimizer = FusedAdamW(layers.parameters(), exp_avg_dtype="int8", exp_avg_sq_dtype="int8")
    pickled: list[type] = []
    original = torch.save

    def save(value: Any, stream: Any) -> None:
        pickled.append(type(value))
        original(value, stream)

    monkeypatch.setattr(torch, "save", save)
    optimizer.initialize_state()
    with Checkpointer(layers, optimizer, tmp_path, format=form) as checkpointer:
        if prepares:
            checkpointer.prepare().result()
        counts = [pickled.count(Tensor)]
        for step in range(2):
            for param in layers.parameters():
                param.grad = torch.full_like(param, step + 1)
            optimizer.step()
            checkpointer.save(step)
            checkpointer.wait()
            counts.append(pickled.count(Tensor))
    assert 0 < counts[1] < 12 and counts[2] == counts[1]
    assert counts[0] == (counts[1] if prepares else 0)
