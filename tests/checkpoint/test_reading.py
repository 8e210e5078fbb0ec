"""The reader of checkpoints: every tensor that torch writes, only the bytes that are wanted, straight into place."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import distributed
from distributed import same_bits
from fused_optim.checkpoint import folders
from fused_optim.checkpoint import read as reading
from fused_optim.checkpoint.folders import LocalFolder, done_by, folder_at
from fused_optim.checkpoint.metadata import read_metadata
from fused_optim.memory import host_memory

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.save in one process

NORMAL = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
TENSORS: dict[str, Tensor] = {
    **{str(dtype): NORMAL.mul(50).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64)},
    **{str(dtype): NORMAL.abs().mul(50).to(dtype) for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)},
    **{"float8": NORMAL.to(torch.float8_e4m3fn), "bool": NORMAL > 0, "double": NORMAL.double(), "complex": NORMAL * 1j},
    **{"transposed": NORMAL.t(), "view": NORMAL[3:5, 2:], "expanded": NORMAL[:1].expand(5, 8), "scalar": NORMAL.sum()},
    **{"empty": NORMAL[:0], "long": torch.arange(5000.0), "conjugate": (NORMAL * 1j).conj()},
}


def load(state: dict[str, Any], path: str | Path) -> None:
    folder = folder_at(path)
    reading.load(state, folder, read_metadata(folder))


def target_of(tensor: Tensor) -> Tensor:
    return torch.full(tensor.shape, 7, dtype=torch.float32).to(tensor.dtype)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is read into place, and how much of it."""
    found: list[tuple[str, int]] = []
    original = LocalFolder.read_into

    def note(self: LocalFolder, name: str, start: int, memory: memoryview) -> None:
        found.append((name, len(memory)))
        original(self, name, start, memory)

    monkeypatch.setattr(LocalFolder, "read_into", note)
    return found


def test_every_tensor(tmp_path: Path, read: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE", 3000)
    dcp.save(dict(TENSORS), checkpoint_id=tmp_path)
    state: dict[str, Any] = {name: target_of(tensor) for name, tensor in TENSORS.items()}
    load(state, tmp_path)
    for name, tensor in TENSORS.items():
        expected = tensor.resolve_conj() if tensor.is_complex() else tensor
        assert torch.equal(state[name], expected) if expected.is_complex() else same_bits(state[name], expected), name
    plain = {"torch.float32", "torch.int8", "double", "bool", "long", "expanded", "view"}
    assert sum(size for _, size in read) >= sum(TENSORS[name].numel() * TENSORS[name].element_size() for name in plain)
    assert max(size for _, size in read) == 3000  # several threads read a large one


def test_casts_and_other_layouts(tmp_path: Path, read: list[tuple[str, int]]) -> None:
    """As dcp.load does."""
    dcp.save({"x": NORMAL, "y": NORMAL}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"x": torch.zeros(12, 8, dtype=torch.bfloat16), "y": torch.zeros(8, 12).t()}
    load(state, tmp_path)
    assert torch.equal(state["x"], NORMAL.bfloat16()) and torch.equal(state["y"], NORMAL) and not read


def save_shards(path: str) -> None:
    full = torch.arange(40.0 * 64).view(40, 64)
    mesh = distributed.mesh()
    state = {
        "rows": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(full, mesh, [Shard(1)], src_data_rank=None),
        "whole": distribute_tensor(full, mesh, [Replicate()], src_data_rank=None),
    }
    dcp.save(state, checkpoint_id=path)


def counting(sizes: list[int]) -> Any:
    original = LocalFolder.read_into

    def read_into(self: LocalFolder, name: str, start: int, memory: memoryview) -> None:
        sizes.append(len(memory))
        original(self, name, start, memory)

    return read_into


def load_shards(path: str) -> dict[str, int]:
    """The bytes read into place, by name; everything else is read as a whole and cut."""
    full, mesh, sizes = torch.arange(40.0 * 64).view(40, 64), distributed.mesh(), {}
    for name in ("rows", "columns", "whole"):
        for placement in (Shard(0), Shard(1), Replicate()):
            expected = distribute_tensor(full, mesh, [placement], src_data_rank=None)
            target: DTensor = torch.zeros_like(expected)
            counted: list[int] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LocalFolder, "read_into", counting(counted))
                load({name: target}, path)
            assert torch.equal(target._local_tensor, expected._local_tensor), (name, placement)
            sizes[f"{name} {placement}"] = sum(counted)
    return sizes


def test_only_the_rows_that_are_wanted(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    distributed.run(3, save_shards, path)
    for ranks in (2, 4):
        for rank, sizes in enumerate(distributed.run(ranks, load_shards, path)):
            own = (40 // ranks) * 64 * 4
            assert sizes["rows S(0)"] == sizes["whole S(0)"] == own, (rank, sizes)
            assert sizes["rows R"] == sizes["whole R"] == 40 * 64 * 4 and sizes["whole S(1)"] == 0


def test_errors(tmp_path: Path) -> None:
    dcp.save({"x": NORMAL}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:700])
    with pytest.raises(ValueError, match=r"x: its file .* is truncated: expected at least \d+ bytes, found 700"):
        load({"x": torch.zeros(12, 8)}, tmp_path)


def test_values_in_other_values(tmp_path: Path) -> None:
    dcp.save({"x": NORMAL, "n": {"a": 3, "y": NORMAL + 1}}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"n": {"a": 0, "y": torch.zeros(12, 8)}}
    load(state, tmp_path)
    assert state["n"]["a"] == 3 and torch.equal(state["n"]["y"], NORMAL + 1)


# --- memory that states are read into ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (1024, 1024), (3, 700_001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.float8_e4m3fn])
def test_room_is_a_tensor_like_others(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor, other = host_memory.empty_host(shape, dtype), torch.ones(shape).to(dtype)
    assert (tensor.shape, tensor.dtype, tensor.stride()) == (other.shape, dtype, other.stride())
    assert same_bits(tensor.copy_(other), other)


@pytest.fixture
def lockings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is page-locked and released, of tensors of different addresses."""
    found: list[tuple[str, int]] = []

    def lock(tensor: Tensor) -> None:
        if tensor.dtype == torch.int32:
            raise RuntimeError("cannot be page-locked")
        found.append(("lock", tensor.data_ptr()))

    monkeypatch.setattr(host_memory, "_lock", lock)
    monkeypatch.setattr(host_memory, "_unlock", lambda address: found.append(("unlock", address)))
    return found


class NoStream:
    """Of a GPU that is the CPU, which is done with everything at once."""

    def __init__(self, device: torch.device) -> None:
        self.waited_for: list[str] = []

    def record_event(self) -> str:
        return "what was queued before"

    def wait_event(self, event: str) -> None:
        self.waited_for.append(event)

    def synchronize(self) -> None:
        assert self.waited_for == ["what was queued before"]


def upload_all(path: Path, start: int, target: Tensor) -> None:
    upload = reading._Upload({target.device})
    with ThreadPoolExecutor(4) as pool, folders.kept_open(folder_at(path)) as folder:
        pieces = reading._pieces("file", start, target, target.nbytes)
        done_by(pool, lambda piece: upload.read(folder, piece), pieces)


@pytest.mark.parametrize("start, size, at_once", [(0, 5000, 1000), (3, 4997, 999), (7, 1, 1000), (5, 0, 8)])
def test_uploads_of_any_size(
    start: int, size: int, at_once: int, tmp_path: Path, lockings: list[tuple[str, int]], monkeypatch: Any
) -> None:
    """By several threads, over the borders of what is page-locked, which is released at the end."""
    content = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    (tmp_path / "file").write_bytes(bytes(content.tolist()))
    monkeypatch.setattr(reading, "_PIECE", at_once)
    monkeypatch.setattr(reading, "_UPLOADED", at_once)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    target = torch.zeros(size, dtype=torch.uint8)
    upload_all(tmp_path, start, target)
    assert torch.equal(target, content[start : start + size])
    assert [what for what, _ in lockings] == ["lock", "unlock"]
    assert reading._Upload(set())._parts.empty() and len(lockings) == 2  # nothing for loads into host memory


@pytest.mark.parametrize("most", [64, 2, 0])
def test_files_are_opened_once(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all reads of all threads, as many as may be open; and closed at the end, also after an error."""
    monkeypatch.setattr(folders, "_MOST_OPEN", most)
    contents = {f"file{i}": bytes(range(i, i + 100)) for i in range(4)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    opened: list[str] = []
    original = LocalFolder._opened

    def note(self: LocalFolder, name: str) -> int:
        if self.path == tmp_path:  # runs of earlier tests that still live look at folders of theirs
            opened.append(name)
        return original(self, name)

    monkeypatch.setattr(LocalFolder, "_opened", note)

    def kept_open() -> int:
        links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(link).startswith(str(tmp_path)) for link in links)

    def read(job: int) -> None:
        name, start = f"file{job % 4}", job % 50
        memory = bytearray(20)
        folder.read_into(name, start, memoryview(memory))
        assert bytes(memory) == contents[name][start : start + 20] == folder.read(name, start, 20)
        assert folder.read(name) == contents[name]

    kept = 0
    with (
        pytest.raises(EOFError, match="file1 ends at byte 100"),
        folders.kept_open(LocalFolder(tmp_path)) as folder,
        ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(read, range(40)))
        kept = kept_open()
        assert len(opened) == kept + 40 + (4 - kept) * 20  # reads of all of a file open it, too
        folder.read_into("file1", 90, memoryview(bytearray(11)))
    assert kept == min(most, 4) and not kept_open()
