"""Checkpoints from elsewhere: opening one runs no code that it might hold, and reads no file outside of its folder."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)

import cases
from fused_optim import (
    FusedAdam,
    export_optimizer_checkpoint,
    load_optimizer_checkpoint,
    verify_checksums,
    write_checksums,
)
from fused_optim.checkpoint import publish as manifest
from fused_optim.checkpoint.folders import folder_at
from fused_optim.checkpoint.metadata import read_metadata
from fused_optim.checkpoint.open import open_checked
from fused_optim.quantized import load_quantized_safetensors, save_quantized_safetensors
from fused_optim.sharding.model_files import INDEX, SINGLE, numbered_files
from native_cases import build, trained

REM16 = cases.MASTER["bfloat16+rem16"]


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    model, optimizer = trained(REM16, torch.int8)
    names = {i: name for i, name in enumerate(model)}
    state = optimizer.state_dict()
    state["state"] = {names[i]: states for i, states in state["state"].items()}
    state["param_groups"][0]["params"] = list(names.values())
    dcp.save({"optimizer": state}, checkpoint_id=path)
    return path


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


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
    assert found.storage_data == expected.storage_data and found.version == expected.version
    assert [index.index for index in found.storage_data] == [index.index for index in expected.storage_data]
    assert isinstance(found.storage_meta, StorageMeta)


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


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("hostile", [eval, os.system, torch.load, PosixPath.unlink])
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


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "a/../../secret", "..\\secret", "C:\\secret", ""])
def test_files_outside_of_the_folder_are_not_read(path: str, checkpoint: Path) -> None:
    write_checksums(checkpoint)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = path
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    for entry in ENTRIES.values():
        with pytest.raises(ValueError, match=r"outside of its folder|expected CRC-32"):
            entry(checkpoint)


# --- pickles that call, build and refer to what they may name --------------------------------------------------------


class Call:
    """Pickled as the call of ``what``, and the state that it then takes."""

    def __init__(self, what: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (what, args) if state is None else (what, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def huge(metadata: Any) -> None:
    """A tensor of a petabyte, which the file does not hold."""
    entry = tensor_of(metadata)
    entry.size = entry.chunks[0].sizes = torch.Size([10**15, *entry.size[1:]])


def tensor_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata["optimizer.state.conv.exp_avg.bits"]


def place_of(metadata: Any) -> Any:
    index = next(index for index in metadata.storage_data if index.fqn.endswith("conv.exp_avg.bits"))
    return metadata.storage_data[index]


CONTIGUOUS = _MEM_FORMAT_ENCODING(0)


def stated_properties(strides: Any, encoding: Any = CONTIGUOUS) -> Call:
    """As torch 2.15 writes them."""
    layout = Call(torch.serialization._get_layout, "torch.strided")
    return Call(TensorProperties, state=(torch.int8, layout, False, encoding, False, strides))


# What is changed in the metadata, and what is said of it. Integers are as large as pickles make them with few bytes.
HOSTILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a size of objects": (lambda m: setattr(tensor_of(m), "size", Call(torch.Size, (1, "2"))), "item 1 is 'str'"),
    "a size of a size": (
        lambda m: setattr(tensor_of(m), "size", Call(torch.Size, (place_of(m),))),
        "item 0 is '_StorageInfo'",
    ),
    "an attribute of a class": (
        lambda m: setattr(tensor_of(m), "properties", stated_properties(None, Call(getattr, Metadata, "__init__"))),
        "it reads an attribute",
    ),
    "an attribute that is no member": (
        lambda m: setattr(
            tensor_of(m), "properties", stated_properties(None, Call(getattr, _MEM_FORMAT_ENCODING, "mro"))
        ),
        "memory format mro is unknown",
    ),
    "a negative size": (lambda m: setattr(tensor_of(m), "size", torch.Size([-1, 256])), "from 0 to 2"),
    "a size beyond 64 bits": (lambda m: setattr(tensor_of(m), "size", Call(torch.Size, (2**63, 1))), "from 0 to 2"),
    "an integer of a kilobyte": (lambda m: setattr(place_of(m), "offset", 1 << 8000), "from 0 to 2"),
    "a bool as a number": (lambda m: setattr(place_of(m), "length", True), "found bool"),
    "a negative offset": (lambda m: setattr(place_of(m), "offset", -5), "from 0 to 2"),
    "an offset beyond the file": (lambda m: setattr(place_of(m), "offset", 1 << 40), "is truncated: expected at"),
    "a length beyond the file": (lambda m: setattr(place_of(m), "length", 1 << 60), "is truncated: expected at"),
    "a tensor beyond its bytes": (huge, "cannot hold"),
    "a part outside": (
        lambda m: setattr(tensor_of(m).chunks[0], "sizes", torch.Size([999, 1, 1, 1])),
        "is outside of the",
    ),
    "a part of other dims": (lambda m: setattr(tensor_of(m).chunks[0], "offsets", torch.Size([0])), "a part has"),
    "no parts": (lambda m: tensor_of(m).chunks.clear(), "is stored, but not described"),
    "another layout": (
        lambda m: vars(tensor_of(m)).update(properties=Call(TensorProperties, state=(1, 2, 3, 4, 5))),
        "expected a torch.dtype, found int",
    ),
    "a layout that is none": (
        lambda m: vars(tensor_of(m)).update(
            properties=Call(
                TensorProperties, state=(torch.int8, Call(torch.serialization._get_layout, "os"), False, None, False)
            )
        ),
        "layout os is unknown",
    ),
    "a key that is none": (lambda m: m.state_dict_metadata.update({5: BytesStorageMetadata()}), "a key: expected str"),
    "a path that is none": (lambda m: m.planner_data.update(x=(place_of(m),)), "expected names and numbers"),
    "places of what is not there": (
        lambda m: m.storage_data.update({MetadataIndex("nothing"): place_of(m)}),
        "it says where nothing is stored",
    ),
}


@pytest.mark.parametrize("change, message", HOSTILE.values(), ids=HOSTILE)
def test_hostile_metadata_is_refused(change: Callable[[Any], Any], message: str, checkpoint: Path) -> None:
    """By all that opens a folder, before anything is reserved or called."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    for entry in (ENTRIES["load"], open_checked):
        with pytest.raises(ValueError, match=message):
            entry(checkpoint)


def test_objects_outside_are_not_looked_for(checkpoint: Path) -> None:
    """A pickle may refer to what is beside it, by any key."""
    (checkpoint / ".metadata").write_bytes(b"\x80\x04\x8c\x07storageQ.")
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        read_metadata(folder_at(checkpoint))


def test_a_file_that_is_too_large_is_not_read(checkpoint: Path) -> None:
    os.truncate(checkpoint / ".metadata", 1 << 34)  # of which the disk keeps nothing
    with pytest.raises(ValueError, match=r"expected \d+ bytes at most, found 17179869184"):
        read_metadata(folder_at(checkpoint))


@pytest.mark.parametrize("name", ["Metadata", "MetadataIndex", "TensorProperties"])
def test_classes_stay_as_they_are(name: str, checkpoint: Path) -> None:
    """A pickle can set attributes of any class that it may name; torch's are everybody's in this process."""
    module = b"torch.distributed.checkpoint.metadata"
    named = b"\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"
    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + named + b"N}\x8c\x01xK\x01s\x86b.")
    with pytest.raises(ValueError, match="cannot be read"):
        read_metadata(folder_at(checkpoint))
    assert not hasattr(getattr(of_torch, name), "x")


def test_archives_that_grow_are_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1 << 16)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert torch.load(tmp_path / "packed.pt", weights_only=True)["x"].numel() == 1 << 16  # torch does unpack it
    with pytest.raises(ValueError, match=r"packed\.pt cannot be read .* is compressed"):
        open_checked(tmp_path / "packed.pt")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"files": {"../secret": 5}}, "outside of its folder"),
        ({"files": [1]}, "is damaged"),
        ({"files": {".metadata": "5"}}, "expected numbers"),
        ({"extra": {"loader": [-1]}}, "expected numbers"),
        ({"more": 1}, "is damaged"),
    ],
)
def test_hostile_manifests_are_refused(change: dict[str, Any], message: str, checkpoint: Path) -> None:
    """Their checksum is anybody's to compute."""
    write_checksums(checkpoint)
    folder = folder_at(checkpoint)
    sums, files = (
        manifest.crc_of_checksums(folder),
        {name: size for name, size in folder.sizes().items() if name != manifest.MANIFEST},
    )
    found = manifest.Manifest(1, 1, 1, None, {}, files, sums)
    manifest.write_manifest(folder, found)
    assert manifest.read_manifest(folder) == found
    content = json.loads((checkpoint / manifest.MANIFEST).read_text()) | change
    del content["crc"]
    content["crc"] = f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
    (checkpoint / manifest.MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        manifest.read_manifest(folder)
    (checkpoint / manifest.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(ValueError, match="cannot be read"):
        manifest.read_manifest(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "folder/other.safetensors"])
def test_indexes_name_files_beside_them(name: str, tmp_path: Path) -> None:
    index = tmp_path / "folder" / INDEX
    index.parent.mkdir()
    (tmp_path / "other.safetensors").write_bytes(b"")
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FileNotFoundError, match="named by"):
        load_quantized_safetensors(torch.nn.Linear(2, 2), index.parent)
    with pytest.raises(FileNotFoundError, match="named by"):
        open_checked(index.parent)


def test_pipes_in_place_of_safetensors_files_are_not_waited_for(tmp_path: Path) -> None:
    for number, name in enumerate((INDEX, SINGLE, "other.safetensors")):
        folder = tmp_path / str(number)
        folder.mkdir()
        os.mkfifo(folder / name)
        readers = [open_checked] if name == "other.safetensors" else [open_checked, load_into]
        for read in readers:
            with pytest.raises(ValueError, match="expected a file, found something else"):
                read(folder)
        with pytest.raises((ValueError, FileNotFoundError)):
            open_checked(folder / name)


def load_into(folder: Path) -> None:
    load_quantized_safetensors(torch.nn.Linear(2, 2), folder)


def test_writing_safetensors_follows_no_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    name = numbered_files("model", 1)[0]
    for planted in (f".{name}.tmp", f".{INDEX}.tmp", ".exported.pt.tmp"):
        (tmp_path / planted).symlink_to(precious)
    model = torch.nn.Linear(2, 2)
    save_quantized_safetensors(model, tmp_path)
    export_optimizer_checkpoint(model, FusedAdam(model.parameters()), tmp_path / "exported.pt")
    assert precious.read_text() == "mine"
    assert not any((tmp_path / written).is_symlink() for written in (name, INDEX, "exported.pt"))


@pytest.mark.parametrize(("second", "whole"), [(4, True), (2, False), (3, False)])
def test_parts_that_overlap_leave_elements_out(second: int, whole: bool, tmp_path: Path) -> None:
    """However their sizes add up."""
    dcp.save({"a": torch.arange(4), "b": torch.arange(4, 8)}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    described, stored = metadata.state_dict_metadata, metadata.storage_data
    (chunk,) = described.pop("b").chunks
    chunk.offsets = torch.Size([second])
    described["a"].size = torch.Size([8])
    described["a"].chunks.append(chunk)
    stored[MetadataIndex("a", chunk.offsets)] = stored.pop(next(index for index in stored if index.fqn == "b"))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if whole:
        assert torch.equal(open_checked(tmp_path).value("a"), torch.arange(8))
    else:
        with pytest.raises(ValueError, match=r"a in .*: its parts do not hold each of its 8 elements once"):
            open_checked(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", pickle.dumps({}), pickle.dumps(Metadata({}))])
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
