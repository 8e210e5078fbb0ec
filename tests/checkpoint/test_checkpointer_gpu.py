"""Checkpointer on a GPU: what is saved is the state at the call, and loads go straight into parameters and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
from distributed import assert_same
from fused_optim import FusedAdam
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint import read as reader
from fused_optim.memory import host_memory
from native_cases import build, tensors_of, train, trained

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

FORMS = ("unscaled", "native")


def contents(model: nn.Module, optimizer: FusedAdam) -> dict[str, Tensor]:
    optimizer.checkpoint_format = "unscaled"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {name: value.cpu().clone() for name, value in sorted(tensors_of(state).items())}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("master", cases.MASTERS, ids=str)
def test_saves_and_loads(master: cases.Master, form: str, tmp_path: Path) -> None:
    """Two saves under way, and steps at once after each."""
    model, optimizer = trained(master, torch.int8, "cuda", form)
    expected = {}
    with Checkpointer(model, optimizer, tmp_path, format=form) as checkpointer:
        checkpointer.prepare().result()
        for step in (2, 3, 4):
            expected[step] = contents(model, optimizer)
            checkpointer.save(step)
            train(model, optimizer, range(step, step + 1))
    for step in (3, 4, 2):
        model, optimizer = build(master, torch.int8, "cuda", fresh=True)
        checkpointer = Checkpointer(model, optimizer, tmp_path, sigterm=False)
        assert checkpointer.load(step) == step
        assert_same(contents(model, optimizer), expected[step])


def large(seed: int, device: str = "cuda") -> tuple[nn.Module, FusedAdam]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(9000, 2048), nn.Linear(2048, 3000), nn.LayerNorm(3000)).to(device).bfloat16()
    options: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8, "lr": 0.01}
    return model, FusedAdam(model.parameters(), **options)


def saved(model: nn.Module, optimizer: FusedAdam, folder: Path, **options: Any) -> Any:
    """What there is after a step, which is saved as step 1."""
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    with Checkpointer(model, optimizer, folder, sigterm=False, **options) as checkpointer:
        checkpointer.save(1)
    return contents(model, optimizer)


@pytest.mark.parametrize("form", FORMS)
def test_large_tensors_are_read_in_pieces(form: str, tmp_path: Path) -> None:
    """No second copy of a state is on the GPU."""
    model, optimizer = large(0)
    expected = saved(model, optimizer, tmp_path, format=form)
    model, optimizer = large(1)
    optimizer.initialize_state()
    checkpointer = Checkpointer(model, optimizer, tmp_path, sigterm=False)
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert checkpointer.load_latest() == 1
    assert torch.cuda.max_memory_allocated() - resident < 300 << 20
    assert_same(contents(model, optimizer), expected)


@pytest.mark.parametrize("at_once", [1000, 4096, 12_000_001])
@pytest.mark.parametrize("can_be_locked", [True, False])
def test_pieces_of_any_size(at_once: int, can_be_locked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over their borders, of empty tensors, and where memory cannot be page-locked."""
    model: Any = nn.ParameterDict({"none": torch.zeros(0, 8), "odd": torch.randn(77, 333), "one": torch.ones(1)})
    model = model.to("cuda", torch.bfloat16)
    optimizer = FusedAdam(model.parameters(), exp_avg_dtype=torch.int8)
    expected = saved(model, optimizer, tmp_path)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9)
    optimizer.step()
    monkeypatch.setattr(reader, "_UPLOADED", at_once)
    if not can_be_locked:
        monkeypatch.setattr(host_memory, "_lock", refuse)
    assert Checkpointer(model, optimizer, tmp_path, sigterm=False).load(1) == 1
    assert_same(contents(model, optimizer), expected)


def refuse(_: Tensor) -> None:
    raise RuntimeError("cannot be page-locked")


def test_a_byte_that_differs_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = large(0)
    expected = saved(model, optimizer, tmp_path)
    model, optimizer = large(1)
    optimizer.initialize_state()
    before = contents(model, optimizer)
    checkpointer = Checkpointer(model, optimizer, tmp_path, sigterm=False)
    for file in sorted((tmp_path / "step-00000001").glob("*.distcp")):
        with file.open("r+b") as stream:
            stream.seek(-5000, 2)
            byte = stream.read(1)
            stream.seek(-5000, 2)
            stream.write(bytes([byte[0] ^ 1]))
        with pytest.raises(ValueError, match="is damaged"):
            checkpointer.load(1)
        assert_same(contents(model, optimizer), before)
        with file.open("r+b") as stream:
            stream.seek(-5000, 2)
            stream.write(byte)
    assert Checkpointer(model, optimizer, tmp_path, sigterm=False).load(1) == 1
    assert_same(contents(model, optimizer), expected)


def test_from_gpu_to_cpu_and_back(tmp_path: Path) -> None:
    model, optimizer = large(0)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    expected = contents(model, optimizer)
    with Checkpointer(model, optimizer, tmp_path / "gpu") as checkpointer:
        checkpointer.save(1)
    model, optimizer = large(1, "cpu")
    with Checkpointer(model, optimizer, tmp_path / "gpu") as checkpointer:
        assert checkpointer.load_latest() == 1
    assert_same(contents(model, optimizer), expected)
    with Checkpointer(model, optimizer, tmp_path / "cpu") as checkpointer:
        checkpointer.save(2)
    model, optimizer = large(2)
    with Checkpointer(model, optimizer, tmp_path / "cpu") as checkpointer:
        assert checkpointer.load_latest() == 2
    assert_same(contents(model, optimizer), expected)
