"""Checkpoints from elsewhere: opening one runs no code that it might hold, and reads no file outside of its folder."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

import cases
from fused_optim import load_optimizer_checkpoint, verify_checksums, write_checksums
from fused_optim.checkpoint.folders import folder_at
from fused_optim.checkpoint.metadata import read_metadata
from native_cases import build, trained

REM16 = cases.MASTER["bfloat16+rem16"]


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    model, optimizer = trained(REM16, torch.int8)
    names = {i: name for i, name in enumerate(model)}
    state = optimizer.state_dict()
    state["state"] = {names[i]: states for i, states in state["state"].items()}
    state["param_groups"][0]["params"] = list(names.values())
    dcp.save({"optimizer": state}, checkpoint_id=path)
    return path


ENTRIES: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: load_optimizer_checkpoint(*build(REM16, torch.int8), path),
    "write_checksums": write_checksums,
    "verify_checksums": verify_checksums,
    "read_metadata": lambda path: read_metadata(folder_at(path)),
}


def test_what_torch_writes_is_read(checkpoint: Path) -> None:
    """In full, as torch itself does."""
    with (checkpoint / ".metadata").open("rb") as stream:
        expected: Metadata = pickle.load(stream)
    found = read_metadata(folder_at(checkpoint))
    assert found.state_dict_metadata == expected.state_dict_metadata and found.planner_data == expected.planner_data
    assert {k: vars(v) for k, v in found.storage_data.items()} == {k: vars(v) for k, v in expected.storage_data.items()}
    assert all(
        torch.Size(key.offset or ()) == (other.offset or ())
        for key, other in zip(found.storage_data, expected.storage_data, strict=True)
    )


@pytest.mark.parametrize("entry", ENTRIES)
def test_metadata_runs_no_code(entry: str, checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    write_checksums(checkpoint)
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data["bomb"] = Bomb(mark)
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"it names posix.mkdir|expected CRC-32"):
        ENTRIES[entry](checkpoint)
    assert not mark.exists()
    pickle.loads(file.read_bytes())  # which would have
    assert mark.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("hostile", [eval, os.system, getattr, torch.load, PosixPath.unlink, io.open, nn.Linear])
def test_names_that_metadata_has_no_use_for(hostile: Any, protocol: int, checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps({"x": hostile}, protocol))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read \(it names "):
        read_metadata(folder_at(checkpoint))


def test_dotted_names_reach_nothing(checkpoint: Path) -> None:
    """Protocol 4 looks names up attribute by attribute."""
    for module, name in (("torch", "serialization.os.system"), ("torch.distributed.checkpoint.metadata", "os.system")):
        text = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
        (checkpoint / ".metadata").write_bytes(text + b"\x93.")
        with pytest.raises(ValueError, match="it names"):
            read_metadata(folder_at(checkpoint))


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "a/../../secret"])
def test_files_outside_of_the_folder_are_not_read(path: str, checkpoint: Path) -> None:
    write_checksums(checkpoint)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = path
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    for entry in ENTRIES.values():
        with pytest.raises(ValueError, match=r"outside of its folder|expected CRC-32"):
            entry(checkpoint)


@pytest.mark.parametrize("content", [b"", pickle.dumps({}), pickle.dumps(Metadata({}))])
def test_what_is_no_metadata(content: bytes, checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read"):
        read_metadata(folder_at(checkpoint))


def test_objects_run_no_code(checkpoint: Path, tmp_path: Path) -> None:
    """Of what is no tensor torch unpickles all that it names, too."""
    mark, path = tmp_path / "mark", tmp_path / "hostile"
    model, optimizer = build(REM16, torch.int8)
    state = {"state": {}, "param_groups": [{"params": list(model), "lr": Bomb(mark), "step": 0}]}
    dcp.save({"optimizer": state}, checkpoint_id=path)
    with pytest.raises(ValueError, match=r"param_groups.*\.lr names posix.mkdir.*add_safe_globals"):
        load_optimizer_checkpoint(model, optimizer, path)
    assert not mark.exists()


def test_tensors_run_no_code(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    metadata = read_metadata(folder_at(checkpoint))
    index = next(index for index in metadata.storage_data if index.fqn.endswith("exp_avg.bits"))
    info = metadata.storage_data[index]
    bomb = io.BytesIO()
    torch.save(Bomb(mark), bomb)
    with (checkpoint / info.relative_path).open("r+b") as stream:
        stream.seek(info.offset)
        stream.write(bomb.getvalue()[: info.length])
    with pytest.raises(ValueError, match=r"exp_avg\.bits.*cannot be read"):
        load_optimizer_checkpoint(*build(REM16, torch.int8), checkpoint)
    assert not mark.exists()
