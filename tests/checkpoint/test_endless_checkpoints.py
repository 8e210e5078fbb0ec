"""Checkpoints of others: what takes all time is refused, what is plain is read, and links and pipes lead nowhere."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fused_optim.checkpoint import lock
from fused_optim.checkpoint import publish as manifest
from fused_optim.checkpoint import verify as checksums
from fused_optim.checkpoint.archives import check_loadable
from fused_optim.checkpoint.folders import folder_at
from fused_optim.checkpoint.metadata import load_object
from fused_optim.checkpoint.open import open_checked
from fused_optim.checkpoint.plan import Naming, find_contents


class Sized:
    """Pickled as a size of any dims."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = dims

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.Size, (self.dims,)


def spoilt(change: Callable[[Any], None]) -> bytes:
    """A usual ``.metadata``, changed."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), [chunk])
    found = Metadata({"state.a.exp_avg": entry}, {"state.a.exp_avg": ("state", "a", "exp_avg")}, {})
    found.version = "1.0.0"
    change(found)
    return pickle.dumps(found)


def many_dims(found: Any) -> None:
    entry = found.state_dict_metadata["state.a.exp_avg"]
    entry.size = entry.chunks[0].offsets = entry.chunks[0].sizes = Sized((1 << 62,) * 100_000)


def shared_parts(found: Any) -> None:
    """Each of many tensors has all of many parts, by two bytes."""
    (entry,) = found.state_dict_metadata.values()
    entry.chunks *= 20_000
    for i in range(20_000):
        found.state_dict_metadata[str(i)] = entry


def many_prefixes(found: Any) -> None:
    (entry,) = found.state_dict_metadata.values()
    found.state_dict_metadata["state." * 200_000] = entry


METADATA = {"many dims": many_dims, "shared parts": shared_parts, "many prefixes": many_prefixes}


@pytest.mark.parametrize("change", METADATA.values(), ids=METADATA)
def test_what_takes_for_ever_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(spoilt(change))
    started = time.process_time()
    with pytest.raises(ValueError, match=str(tmp_path)):
        find_contents(open_checked(tmp_path), Naming())
    assert time.process_time() - started < 15


# --- objects ----------------------------------------------------------------------------------------------------


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 600), 1 << 600) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
    ),
    max_leaves=30,
)


@given(st.lists(PLAIN, max_size=3), st.integers(0, 1500))
@settings(max_examples=50, deadline=None)
def test_what_torch_saves_is_loaded(values: list[Any], count: int) -> None:
    """Extras and param groups hold such values; tuples are shared between groups."""
    shared = (0.9, 0.999, (1, 2))
    state = {"values": values, "groups": [{"betas": shared, "name": f"{i}"} for i in range(count)], shared: 1 << 500}
    stream = io.BytesIO()
    torch.save(state, stream)
    assert load_object(stream, "x") == state


def test_what_torch_saves_of_all_kinds_is_loaded() -> None:
    saved: dict[str, Any] = {
        "bytes": [bytearray(b"abc"), bytearray(), b"x", {1, 2}, 1j],
        "tensors": [nn.Parameter(torch.ones(2)), torch.ones(2).requires_grad_(), torch.eye(2).to_sparse()],
        "modules": nn.BatchNorm1d(3).state_dict(),
        "counted": Counter("aab"),
    }
    stream = io.BytesIO()
    torch.save(saved, stream)
    loaded = load_object(stream, "x")
    assert loaded["bytes"] == saved["bytes"] and loaded["counted"] == saved["counted"]
    assert list(loaded["modules"]) == list(saved["modules"]) and type(loaded["tensors"][0]) is nn.Parameter


def test_extras_that_are_nested_too_deep_are_not_saved(tmp_path: Path) -> None:
    nested: Any = 1
    for _ in range(50):
        nested = {"a": nested}
    check_loadable("extra x", nested)
    load_object(io.BytesIO(saved_bytes([nested] * 2)), "x")
    (tmp_path / "file.pt").write_bytes(saved_bytes(nested))
    assert list(open_checked(tmp_path / "file.pt").entries) == [".".join("a" * 50)]
    with pytest.raises(ValueError, match=r"extra x.*nested too deep"):
        check_loadable("extra x", [nested])


def saved_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


# --- JSON -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"version": Infinity}', "Infinity: expected a finite number"),
        ('{"version": [NaN]}', "NaN: expected a finite number"),
        ('{"version": -Infinity}', "-Infinity: expected a finite number"),
        ('{"version": [[1e999]]}', "1e999: expected a finite number"),
        (f'{{"version": {1 << 63}}}', f"{1 << 63}: expected a number of 64 bits"),
        (f'{{"version": 1, "files": {{"a": [[0, {10**300}, "0"]]}}}}', "1000+: expected a number of 64 bits"),
        (f'{{"version": {"9" * 5000}}}', "cannot be read"),
        ('{"version": "1"}', "version: expected a number of at least 0, found str"),
        ('{"version": 1.0}', "version: expected a number of at least 0, found float"),
        ('{"version": true}', "version: expected a number of at least 0, found bool"),
        ('{"version": -1}', "version: expected a number of at least 0, found int"),
        ("{}", "version: expected a number of at least 0, found NoneType"),
        ('{"a": ' * 50 + "1" + "}" * 50, "nested more than"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "found a list"),
        ("\ud800", "cannot be read"),
    ],
)
def test_json_of_others(content: str, message: str, tmp_path: Path) -> None:
    """Each is damage, of the file that is named."""
    folder = folder_at(tmp_path)
    for name, read in ((manifest.MANIFEST, manifest.read_manifest), (checksums.FILE, checksums._read)):
        (tmp_path / name).write_bytes(content.encode(errors="surrogatepass"))
        with pytest.raises(ValueError, match=rf"{name}.*{message}") as raised:
            read(folder)
        assert type(raised.value).__name__ == "Damaged"


# --- links and pipes --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    path = tmp_path / "run" / "checkpoint"
    dcp.save({"state": {"a": {"exp_avg": torch.arange(4.0)}}}, checkpoint_id=path)
    checksums.write_checksums(path)
    return path


def read_all(path: Path) -> None:
    checksums.verify_checksums(path)
    source = open_checked(path)
    assert torch.equal(source.value("state.a.exp_avg"), torch.arange(4.0))
    wanted = source.read({"state.a.exp_avg": torch.zeros(4)})
    assert torch.equal(wanted["state.a.exp_avg"], torch.arange(4.0))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", checksums.FILE])
@pytest.mark.parametrize("way", ["absolute", "relative", "by a link"])
def test_links_out_of_the_folder_are_not_followed(way: str, name: str, saved: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    shutil.move(saved / name, outside)
    if way == "by a link":
        (saved / "inner").symlink_to(outside)
        outside = saved / "inner"
    (saved / name).symlink_to(os.path.relpath(outside, saved) if way == "relative" else outside)
    with pytest.raises(ValueError, match=rf"{name} is a link to .*secret, outside of its folder|cannot be read"):
        read_all(saved)


def test_links_that_stay_are_followed(saved: Path, tmp_path: Path) -> None:
    """Of a file to another one in the folder, and of the folder, or one above it, to where it really is."""
    (saved / "__0_0.distcp").rename(saved / "data")
    (saved / "__0_0.distcp").symlink_to("data")
    read_all(saved)
    (tmp_path / "linked").symlink_to(saved)
    read_all(tmp_path / "linked")
    (tmp_path / "above").symlink_to(saved.parent)
    read_all(tmp_path / "above" / "checkpoint")


def test_folders_inside_may_not_lead_out(saved: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "inner/__0_0.distcp"
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    (saved / "inner").mkdir()
    (saved / "__0_0.distcp").rename(saved / "inner" / "__0_0.distcp")
    checksums.write_checksums(saved)
    read_all(saved)
    (saved / "inner").rename(tmp_path / "elsewhere")
    (saved / "inner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="outside of its folder"):
        read_all(saved)


@pytest.mark.parametrize("name", [manifest.MANIFEST, lock.FILE])
def test_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="expected a file, found something else"):
        folder_at(tmp_path).read(name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="outside of its folder"):
        folder_at(tmp_path).read(name)


def test_writing_follows_no_link(saved: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (saved / checksums.FILE).unlink()
    for name in (checksums.FILE, f".{checksums.FILE}.tmp"):
        (saved / name).symlink_to(precious)
    checksums.write_checksums(saved)
    assert precious.read_text() == "mine" and not (saved / checksums.FILE).is_symlink()
    read_all(saved)


def test_bytes_are_those_of_one_tensor(saved: Path) -> None:
    """Or a file of a megabyte would hold a tensor of a terabyte, part by part."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    (entry,), (index,) = metadata.state_dict_metadata.values(), metadata.storage_data
    entry.size = torch.Size([4000])
    kind = type(entry.chunks[0])
    entry.chunks = [kind(torch.Size([4 * i]), torch.Size([4])) for i in range(1000)]
    places = [type(index)(index.fqn, torch.Size([4 * i]), i) for i in range(1000)]
    metadata.storage_data = dict.fromkeys(places, metadata.storage_data[index])
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="other tensors have the same bytes"):
        open_checked(saved)
