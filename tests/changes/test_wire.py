"""Changes as a file: what is written is read, damaged and wrong files change nothing, and who can apply them."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from change_cases import PARTS, RECIPES, Expected, Model, bits, copy_of, set_gradients
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize_model_,
)
from fused_optim.wire import Box, Changes, apply_changes, fused_rows, read_changes, write_changes
from fused_optim.wire.form import PackedChanges, decode_indices, encode_indices
from fused_optim.wire.safetensors import DamagedFile
from peers import FusedAdamW

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn]


def test_changes_for_other_processes_are_few_tensors() -> None:
    """Of which each has its own memory, as pickles need; whole tensors have no indices."""
    memory = torch.arange(100)
    changes = {
        "a": Changes(memory[3:5], torch.randn(50)[2:4].bfloat16(), (4, 2)),
        "whole": Changes(memory[:6], torch.randn(6), (2, 3)),
        "one": Changes(memory[:1], torch.ones(1), ()),
        "b": Changes(memory[90:93], torch.randn(3).bfloat16(), (100,)),
    }
    packed = PackedChanges.pack(changes)
    assert packed.indices.tolist() == [3, 4, 90, 91, 92]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in (packed.indices, *packed.values.values()))
    found = packed.unpacked()
    assert list(found) == list(changes)
    for name, (indices, values, shape) in changes.items():
        assert torch.equal(found[name].indices, indices) and found[name].shape == shape
        assert torch.equal(found[name].values, values) and found[name].values.dtype == values.dtype
    assert PackedChanges.pack({}).unpacked() == {}


def test_changes_on_several_devices_are_packed() -> None:
    """Parameters may lie on a GPU and in host memory; no GPU is needed to see that they are brought together."""
    with FakeTensorMode():
        devices = "cuda", "cpu", "cuda"
        changes = {
            f"{i}": Changes(torch.zeros(3, dtype=torch.int64, device=on), torch.zeros(3, device=on), (10,))
            for i, on in enumerate(devices)
        }
        packed = PackedChanges.pack(changes)
        for tensor in (packed.indices, packed.values[torch.float32]):
            assert tensor.device.type == "cpu" and tensor.shape == (9,)


@st.composite
def indices_in(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Ascending elements of some tensor: scattered, in runs, far apart, all or none."""
    numel = draw(st.sampled_from([1, 7, 8, 9, 255, 256, 1000, 70_000, 300_000]))
    kind = draw(st.sampled_from(["scattered", "runs", "edges", "all"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if kind == "scattered":
        density = draw(st.sampled_from([0.0001, 0.003, 0.05, 0.5, 0.95]))
        return (torch.rand(numel, generator=generator) < density).nonzero().view(-1), numel
    if kind == "runs":
        starts = torch.randint(0, numel, (draw(st.integers(1, 5)),), generator=generator)
        ends = (starts + draw(st.integers(1, 400))).clamp(max=numel)
        return torch.cat([torch.arange(*ab) for ab in zip(starts.tolist(), ends.tolist(), strict=True)]).unique(), numel
    if kind == "edges":
        return torch.tensor([0, numel - 1]).unique(), numel
    return torch.arange(numel), numel


@settings(max_examples=150, deadline=None)
@given(indices_in())
def test_indices_come_back_in_the_fewest_bytes(case: tuple[Tensor, int]) -> None:
    indices, numel = case
    if not indices.numel():
        return
    encoding, encoded = encode_indices(indices, numel)
    assert torch.equal(decode_indices(encoding, encoded, numel, indices.numel()), indices)
    if encoded is not None:
        assert encoded.numel() * encoded.element_size() <= min(-(-numel // 8), 8 * indices.numel())


@settings(max_examples=40, deadline=None)
@given(st.lists(indices_in(), min_size=0, max_size=4), st.integers(0, 2**31), st.integers(0, 10**12))
def test_files_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, cases: list, seed: int, base: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for at, (indices, numel) in enumerate(cases):
        dtype = DTYPES[(seed + at) % len(DTYPES)]
        raw = torch.randint(0, 256, (indices.numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        changes[f"layer.{at}.weight"] = Changes(indices, raw.view(dtype), (numel,))
    file = tmp_path_factory.mktemp("changes") / "file.safetensors"
    assert write_changes(changes, file, base=base, step=base + 3) == file.stat().st_size
    read = read_changes(file)
    assert (read.base, read.step) == (base, base + 3)
    assert set(read.changes) == {name for name, each in changes.items() if each.indices.numel()}
    for name, (indices, values, shape) in read.changes.items():
        assert torch.equal(indices, changes[name].indices) and shape == changes[name].shape
        assert values.dtype == changes[name].values.dtype
        assert torch.equal(values.view(torch.uint8), changes[name].values.view(torch.uint8))


def _published(tmp_path: Path) -> tuple[Model, Model, Path]:
    """A model of which a step was published, its replica from before, and the file."""
    model, replica = Model(torch.bfloat16), Model(torch.bfloat16)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    optimizer.track_changes()
    set_gradients(model, 0)
    optimizer.step()
    file = tmp_path / "1.safetensors"
    write_changes(optimizer.take_changes(model), file, base=0, step=1)
    return model, replica, file


def test_a_replica_follows(tmp_path: Path) -> None:
    model, replica = Model(torch.bfloat16), Model(torch.bfloat16)
    optimizer = FusedAdamW(model.parameters(), lr=1e-4, state_dtype="int8")
    optimizer.track_changes()
    expected = Expected(model)
    for step in range(1, 6):
        set_gradients(model, step)
        optimizer.step()
        taken = optimizer.take_changes(model)
        expected.check(taken)
        write_changes(taken, tmp_path / "file", base=step - 1, step=step)
        assert apply_changes(replica, tmp_path / "file", base=0 if step == 1 else None) == step
        assert all(torch.equal(a, b) for a, b in zip(copy_of(model).values(), copy_of(replica).values(), strict=True))


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_torn_files_change_nothing(tmp_path: Path, cut: int) -> None:
    _, replica, file = _published(tmp_path)
    before, content = copy_of(replica), file.read_bytes()
    for damaged in (content[:cut], content + b"\0"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="no whole safetensors file"):
            apply_changes(replica, file, base=0)
    assert all(torch.equal(value, before[name]) for name, value in copy_of(replica).items())


def test_any_other_bit_is_noticed(tmp_path: Path) -> None:
    _, replica, file = _published(tmp_path)
    before, content = copy_of(replica), bytearray(file.read_bytes())
    for at in [*range(8, len(content), 97), len(content) - 1]:
        changed = bytearray(content)
        changed[at] ^= 0x04
        file.write_bytes(changed)
        with pytest.raises(ValueError):
            apply_changes(replica, file, base=0)
    assert all(torch.equal(value, before[name]) for name, value in copy_of(replica).items())


def test_wrong_bases_versions_names_shapes_and_dtypes_change_nothing(tmp_path: Path) -> None:
    model, replica, file = _published(tmp_path)
    before = copy_of(replica)
    with pytest.raises(ValueError, match="say base="):
        apply_changes(replica, file)
    with pytest.raises(ValueError, match="changes the weights of step 0, and the model has those of 7"):
        apply_changes(replica, file, base=7)
    with pytest.raises(KeyError, match="in the file, and not in the model"):
        apply_changes({"weight": replica.weight.data}, file, base=0)
    state = {name: param.data.clone() for name, param in replica.named_parameters()}
    with pytest.raises(ValueError, match="expected shape"):
        apply_changes({**state, "odd": torch.zeros(2, 2, dtype=torch.bfloat16)}, file, base=0)
    with pytest.raises(ValueError, match="'odd': expected"):
        apply_changes({**state, "odd": state["odd"].half()}, file, base=0)
    assert all(torch.equal(bits(value), before[name]) for name, value in state.items())
    content = file.read_bytes()
    for old, new, error in [
        (b'"version": "1"', b'"version": "2"', "version '2'"),
        (b"fused_optim.changes", b"fused_optim.another", "no changes"),
    ]:
        file.write_bytes(content.replace(old, new))
        with pytest.raises(ValueError, match=error):
            apply_changes(replica, file, base=0)
    file.write_bytes(content)
    apply_changes(replica, file, base=0)
    with pytest.raises(ValueError, match="step 0, and the model has those of 1"):
        apply_changes(replica, file)  # twice
    assert all(torch.equal(a, b) for a, b in zip(copy_of(model).values(), copy_of(replica).values(), strict=True))


def test_names_and_indices_that_are_refused(tmp_path: Path) -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="::"):
        write_changes({"a::b": Changes(torch.tensor([0]), one, (3,))}, tmp_path / "file", base=0, step=1)
    with pytest.raises(ValueError, match="2 indices and 1 values"):
        write_changes({"a": Changes(torch.tensor([0, 1]), one, (3,))}, tmp_path / "file", base=0, step=1)
    for indices in ([1, 0], [2, 2], [-1, 2], [2, 3]):
        with pytest.raises(ValueError, match="'a': expected ascending and distinct indices of 3 elements"):
            write_changes(
                {"a": Changes(torch.tensor(indices), torch.zeros(2), (3,))}, tmp_path / "file", base=0, step=1
            )


INT32, MANY = torch.int32, 2**40  # elements that no test could take memory for


@pytest.mark.parametrize(
    ("encoding", "encoded", "numel", "error"),
    [
        ("gaps8", torch.tensor([255], dtype=torch.uint8), 5, "within a gap"),
        ("gaps8", torch.tensor([9], dtype=torch.uint8), 5, "element 9 of 5"),
        ("gaps8", torch.tensor([0, 0], dtype=torch.uint8), 5, "2 indices and 1 values"),
        ("gaps16", torch.tensor([0.0]), 5, "gaps16 of torch.float32"),
        ("runs", torch.tensor([[-1], [1]], dtype=INT32), 5, "without elements"),
        ("runs", torch.tensor([[0], [2**31 - 1]], dtype=INT32), MANY, "2147483647 indices and 1 values"),
        ("runs", torch.tensor([0, 1], dtype=INT32), 5, r"runs of torch.int32 and shape \(2,\)"),
        ("bits", torch.tensor([255], dtype=torch.uint8), 8, "8 indices and 1 values"),
        ("bits", torch.tensor([1], dtype=torch.uint8), MANY, "1 bytes of bits for 1099511627776"),
        ("bits", torch.tensor([16], dtype=torch.uint8), 3, "element 4 of 3"),
        ("all", None, MANY, "1099511627776 indices and 1 values"),
        ("runs", None, 5, "unknown encoding"),
        ("zigzag", torch.tensor([1]), 5, "unknown encoding 'zigzag'"),
    ],
)
def test_indices_that_are_refused(encoding: str, encoded: Tensor | None, numel: int, error: str) -> None:
    """Before memory is taken for as many as they say they are."""
    with pytest.raises(ValueError, match=error):
        decode_indices(encoding, encoded, numel, 1)


def _safetensors(file: Path, header: Any, data: bytes) -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def _entry(shape: Any, first: Any, end: Any, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"__metadata__": []},
        {"a": 1},
        {"a": {"shape": [4], "data_offsets": [0, 4]}},
        {"a": _entry([4], 0, 4, "U9")},
        {"a": _entry([4.0], 0, 4)},
        {"a": _entry([4, True], 0, 4)},
        {"a": _entry([-2, -2], 0, 4)},
        {"a": _entry("4", 0, 4)},
        {"a": _entry([4], False, 4)},
        {"a": _entry([4], 0.0, 4)},
        {"a": _entry([3], 0, 4)},
        {"a": _entry([4], 0, 8)},
        {"a": _entry([2**62, 4], 0, 4)},
        {"a": _entry([1] * 65 + [4], 0, 4)},
        {"a": _entry([4], 0, 4), "b": _entry([MANY], 4, 4)},
        {"a": _entry([2], 0, 2)},
        {"a": _entry([2], 2, 4)},
        {"a": _entry([1], 0, 1), "b": _entry([2], 2, 4)},
        {"a": _entry([3], 0, 3), "b": _entry([3], 1, 4)},
        {"a": _entry([4], 0, 4), "b": _entry([4], 0, 4)},
    ],
)
def test_headers_that_are_refused(header: Any, tmp_path: Path) -> None:
    file = _safetensors(tmp_path / "file", header, bytes(4))
    with pytest.raises(DamagedFile, match="no whole safetensors file"):
        read_changes(file)


WHOLE = {"a": {"shape": [2], "encoding": "all"}}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        *(({key: None}, f"KeyError: '{key}'") for key in ("base", "step", "tensors")),
        *(({key: "1.5"}, f"TypeError: {key}: expected an integer, got 1.5") for key in ("base", "step")),
        ({"base": "true"}, "base: expected an integer, got True"),
        ({"base": "one"}, "its metadata"),
        ({"tensors": "[]"}, "its metadata"),
        ({"tensors": "{"}, "its metadata"),
        ({"tensors": json.dumps({"b": WHOLE["a"]})}, "'b'"),
        ({"tensors": json.dumps({"\x1b[2Ja\n": WHOLE["a"]})}, r"'\\x1b\[2Ja\\n'"),
        ({"tensors": json.dumps({"a": []})}, "'a'"),
        *(({"tensors": json.dumps({"a": {**WHOLE["a"], "shape": shape}})}, "'a'") for shape in ([2.0], [2, True], 2)),
        ({"tensors": json.dumps({"a": {**WHOLE["a"], "shape": [MANY]}})}, "1099511627776 indices and 2 values"),
        ({"tensors": json.dumps({"a": {"shape": [2]}})}, "'a'.*'encoding'"),
        ({"tensors": json.dumps({"a": {"encoding": "all"}})}, "'a'.*'shape'"),
    ],
)
def test_metadata_that_are_refused(change: dict[str, str | None], error: str, tmp_path: Path) -> None:
    """Although the checksum is right."""
    metadata = {"format": "fused_optim.changes", "version": "1", "base": "0", "step": "1", "tensors": json.dumps(WHOLE)}
    metadata = {key: value for key, value in {**metadata, **change}.items() if value is not None}
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    digest.update(json.dumps(["a", "torch.uint8", [2]]).encode() + b"\1\2")
    header = {"__metadata__": {**metadata, "checksum": digest.hexdigest()}, "a": _entry([2], 0, 2)}
    file = _safetensors(tmp_path / "file", header, b"\1\2")
    with pytest.raises(DamagedFile, match=error):
        read_changes(file)


@pytest.mark.parametrize(
    ("published", "served", "fits"),
    [
        ((2, 3), (2, 3), True),
        ((6, 4), (2, 3, 4), True),  # experts, published as a matrix
        ((2, 3, 4), (6, 4), True),
        ((2, 3), (3, 2), False),
        ((6,), (2, 3), True),
        ((4, 6), (2, 3, 4), False),
        ((1,), (3, 4), False),
        ((1,), (), True),
    ],
)
def test_shapes_of_targets(tmp_path: Path, published: tuple[int, ...], served: tuple[int, ...], fits: bool) -> None:
    numel = math.prod(published)
    values = torch.arange(1.0, numel + 1)
    write_changes({"a": Changes(torch.arange(numel), values, published)}, tmp_path / "file", base=0, step=1)
    target = torch.zeros(served)
    if not fits:
        with pytest.raises(ValueError, match="expected shape"):
            apply_changes({"a": target}, tmp_path / "file", base=0)
    else:
        apply_changes({"a": target}, tmp_path / "file", base=0)
    assert torch.equal(target.view(-1), values if fits else torch.zeros(target.numel()))


class _WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: object) -> None: ...


def test_modules_with_extra_state(tmp_path: Path) -> None:
    model = _WithExtraState(2, 1, bias=False)
    write_changes({"weight": Changes(torch.tensor([1]), torch.tensor([9.0]), (1, 2))}, tmp_path / "f", base=0, step=1)
    apply_changes(model, tmp_path / "f", base=0, names=fused_rows(model, {}))
    assert model.weight[0, 1] == 9.0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_scales_of_whole_weights_in_fused_layers(tmp_path: Path, place: int) -> None:
    part = ("q_proj", "k_proj", "v_proj")[place]
    file = tmp_path / "file"
    changes = {f"{part}.weight_tensor_scale": Changes(torch.tensor([0]), torch.tensor([5.0]), (1,))}
    write_changes(changes, file, base=0, step=1)
    target = {"qkv_proj.weight_scale": torch.zeros(3)}
    apply_changes(target, file, base=0, names=fused_rows(target, {"qkv_proj": {"q_proj": 4, "k_proj": 1, "v_proj": 1}}))
    assert target["qkv_proj.weight_scale"].tolist() == [5.0 * (i == place) for i in range(3)]
    for other in (torch.zeros(()), torch.zeros(6)):
        target = {"qkv_proj.weight_scale": other}
        with pytest.raises(ValueError, match="not a scale for each of 3 layers"):
            names = fused_rows(target, {"qkv_proj": {"q_proj": 4, "k_proj": 1, "v_proj": 1}})
            apply_changes(target, file, base=0, names=names)


class _Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "gate_proj": 384, "up_proj": 384}
        self.layers = nn.ModuleList([nn.ModuleDict({n: nn.Linear(256, r) for n, r in sizes.items()}) for _ in range(2)])
        self.norm = nn.LayerNorm(256)


FUSED = {
    "qkv_proj": {"q_proj": 256, "k_proj": 128, "v_proj": 128},
    "gate_up_proj": {"gate_proj": 384, "up_proj": 384},
}


class _Fused(nn.Module):
    """As vLLM and SGLang keep these layers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {name: sum(parts.values()) for name, parts in FUSED.items()}
        self.layers = nn.ModuleList([nn.ModuleDict({n: nn.Linear(256, r) for n, r in sizes.items()}) for _ in range(2)])
        self.norm = nn.LayerNorm(256)


def _fuse(separate: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for name, value in separate.items():
        for layer, parts in FUSED.items():
            name = next((name.replace(part, layer) for part in parts if part in name), name)
        found.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in found.items()}


def test_servers_that_fuse_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, server = _Separate().to(torch.bfloat16), _Fused().to(torch.bfloat16)
    server.load_state_dict(_fuse(model.state_dict()))
    optimizer = FusedAdamW(model.parameters(), lr=1e-4)
    optimizer.track_changes()
    names = fused_rows(server, FUSED)
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
        write_changes(optimizer.take_changes(model), tmp_path / "file", base=step, step=step + 1)
        apply_changes(server, tmp_path / "file", base=step, names=names)
        for name, value in _fuse(model.state_dict()).items():
            assert torch.equal(server.state_dict()[name], value), name


def _experts(**names: tuple[int, int]) -> nn.Module:
    """Weights of 4 experts each, by name, with their rows and columns."""
    model = nn.Module()
    model.experts = nn.ParameterDict({name: nn.Parameter(torch.randn(4, *shape)) for name, shape in names.items()})
    return model.to(torch.bfloat16)


def test_servers_that_fuse_rows_of_each_expert(tmp_path: Path) -> None:
    """As vLLM does with ``w13_weight``."""
    torch.manual_seed(0)
    model = _experts(w1=(6, 8), w2=(8, 6), w3=(6, 8))
    server = _experts(w13_weight=(12, 8), w2=(8, 6))
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    optimizer.track_changes()
    optimizer.mark_changed()
    names = fused_rows(server, {"w13_weight": {"w1": 6, "w3": 6}})
    for step in range(3):
        write_changes(optimizer.take_changes(model), tmp_path / "file", base=step, step=step + 1)
        apply_changes(server, tmp_path / "file", base=step, names=names)
        assert torch.equal(server.experts["w13_weight"][:, :6], model.experts["w1"])
        assert torch.equal(server.experts["w13_weight"][:, 6:], model.experts["w3"])
        assert torch.equal(server.experts["w2"], model.experts["w2"])
        set_gradients(model, step)
        optimizer.step()


MISFITS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # what is published, and the server's
    "spare experts": ((4, 6, 8), (8, 12, 8)),
    "spare experts of that many rows": ((4, 6, 8), (8, 6, 8)),
    "fewer experts": ((4, 6, 8), (2, 12, 8)),
    "padded rows": ((4, 6, 8), (4, 16, 8)),
    "other columns": ((6, 8), (12, 16)),
    "some of the rows": ((3, 8), (12, 8)),
    "other rows": ((3, 8), (6, 8)),
    "matrices of experts": ((4, 48), (4, 12, 8)),
    "matrices of experts, on both sides": ((4, 48), (8, 48)),
}


@pytest.mark.parametrize("published, here", MISFITS.values(), ids=MISFITS)
def test_fused_rows_that_do_not_fit(published: tuple[int, ...], here: tuple[int, ...], tmp_path: Path) -> None:
    file, server = tmp_path / "file", {"w13": torch.zeros(here)}
    for name in ("w1", "w3"):
        count = math.prod(published)
        write_changes({name: Changes(torch.arange(count), torch.ones(count), published)}, file, base=0, step=1)
        names = fused_rows(server, {"w13": {"w1": 6, "w3": 6}})
        with pytest.raises(ValueError, match=rf"'{name}' of shape .* is not 6 of the 12 rows of 'w13'"):
            apply_changes(server, file, base=0, names=names)
    assert not server["w13"].any()


def test_servers_that_fuse_fp8_layers(tmp_path: Path) -> None:
    """Codes and scales of blocks, under the names of transformers' fine-grained FP8; transposed in memory."""
    torch.manual_seed(0)
    model = _Separate().to(torch.bfloat16)
    quantize_model_(model, Float8BlockScaling())
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    optimizer.track_changes()
    optimizer.mark_changed()  # all of it is the first publication
    shapes = {name: param.shape for name, param in _Fused().named_parameters()}
    server: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if "proj.weight" in name:
            server[name] = torch.zeros(shape[1], shape[0], dtype=torch.uint8).view(torch.float8_e4m3fn).t()
            server[f"{name}_scale_inv"] = torch.zeros(shape[0] // 128, shape[1] // 128)
        else:
            server[name] = torch.zeros(shape, dtype=torch.bfloat16)
    names = fused_rows(server, FUSED)
    for step in range(3):
        write_changes(optimizer.take_changes(model), tmp_path / "file", base=step, step=step + 1)
        apply_changes(server, tmp_path / "file", base=step, names=names)
        expected = {name: value.clone() for name, value in _components(model).items()}
        for name, value in _fuse(expected).items():
            found = server[name.replace("_scale", "_scale_inv")]
            assert torch.equal(found.contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), name
        set_gradients(model, step)
        optimizer.step()


def _components(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        parts = getattr(param, "components", {"data": param.detach()})
        found |= {name if part == "data" else f"{name}_{part}": parts[part] for part in parts if part in PARTS}
    return found


def test_parts_of_tensors_go_where_a_rank_keeps_them(tmp_path: Path) -> None:
    """A server under tensor parallelism: rows and columns 2 to 5 of the whole, in the corner of its own tensor."""
    whole = torch.randn(8, 8)
    indices = torch.arange(0, 64, 3)
    write_changes({"weight": Changes(indices, whole.view(-1)[indices], (8, 8))}, tmp_path / "file", base=0, step=1)
    own = {"mine": torch.zeros(4, 6)}
    apply_changes(own, tmp_path / "file", base=0, names=lambda *_: [Box("mine", (2, 2), (1, 0), (3, 3))])
    expected = torch.zeros(64)
    expected[indices] = whole.view(-1)[indices]
    assert torch.equal(own["mine"][1:, :3], expected.view(8, 8)[2:5, 2:5]) and not own["mine"][:, 3:].any()
    with pytest.raises(ValueError, match="does not fit"):
        apply_changes(own, tmp_path / "file", base=0, names=lambda *_: [Box("mine", (2, 2), (2, 0), (3, 3))])
    with pytest.raises(KeyError, match="yours"):
        apply_changes(own, tmp_path / "file", base=0, names=lambda *_: [Box("yours", (2, 2), (1, 0), (3, 3))])


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling(), NVFP4BlockScaling()], ids=str)
def test_quantized_replicas_follow(tmp_path: Path, recipe: object) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(256, 256)).to(torch.bfloat16))
        quantize_model_(models[-1], recipe)
    model, replica = models
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    optimizer.track_changes()
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
        write_changes(optimizer.take_changes(model), tmp_path / "file", base=step, step=step + 1)
        apply_changes(replica, tmp_path / "file", base=step)
        assert all(torch.equal(a, b) for a, b in zip(copy_of(model).values(), copy_of(replica).values(), strict=True))
        assert torch.equal(model[0].weight.dequantize(), replica[0].weight.dequantize())


@pytest.mark.parametrize("when", ["before", "stepped", "after", "after, initial values kept"])
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_masters_follow_what_is_applied(tmp_path: Path, recipe: Any, when: str) -> None:
    """``when``: the optimizer of the replica got its states."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128)).to(torch.bfloat16))
        quantize_model_(models[-1], recipe)
    model, replica = models
    optimizer = FusedAdamW(model.parameters(), lr=3e-2)
    optimizer.track_changes()
    set_gradients(model, 1)
    optimizer.step()
    write_changes(optimizer.take_changes(model), tmp_path / "file", base=0, step=1)
    follower = FusedAdamW(replica.parameters(), lr=0.0, weight_decay=0.0)
    if when == "before":
        follower.initialize_state()
    if when == "stepped":
        set_gradients(replica, 2)
        follower.step()
    if when == "after":
        for layer in replica:
            layer.weight.discard_high_precision_init()
    apply_changes(replica, tmp_path / "file", base=0)
    published = copy_of(model)
    assert all(torch.equal(value, published[name]) for name, value in copy_of(replica).items())
    for _ in range(2):  # neither steps without a learning rate nor masters bring back what was there before
        set_gradients(replica, 3)
        follower.step()
    follower.sync_params_from_master()
    # Updates were as large as weights. Decoded values that are quantized again may round, by half a step at most.
    within = {"rtol": 0.3, "atol": 2e-2} if isinstance(recipe, NVFP4BlockScaling) else {"rtol": 0.07, "atol": 1e-3}
    for mine, sent in zip(replica, model, strict=True):
        torch.testing.assert_close(mine.weight.dequantize(), sent.weight.dequantize(), **within)
        assert torch.equal(mine.bias, sent.bias)


def test_plain_values_that_wait_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    quantize_model_(model, MXFP8BlockScaling(), keep_initial=True)
    with torch.no_grad():
        model[0].weight.mul_(2)
    changes = {"0.weight": Changes(torch.tensor([0]), torch.ones(1, dtype=torch.uint8), (128, 128))}
    write_changes(changes, tmp_path / "file", base=0, step=1)
    with pytest.raises(RuntimeError, match="finish_initialization"):
        apply_changes(model, tmp_path / "file", base=0)


@pytest.mark.parametrize("served_kept", [False, True])
def test_kept_weights_follow_as_plain_ones(tmp_path: Path, served_kept: bool) -> None:
    model, served = (nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)).bfloat16() for _ in range(2))
    recipe = Float8CurrentScaling(keep_weights=True)
    quantize_model_(model, recipe)
    if served_kept:
        quantize_model_(served, recipe)
    served.load_state_dict(model.state_dict())
    optimizer = FusedAdamW(model.parameters())
    optimizer.track_changes()
    for param in model.parameters():
        param.grad = torch.ones(param.shape, dtype=param.dtype)
    optimizer.step()
    write_changes(optimizer.take_changes(model), tmp_path / "1.safetensors", base=0, step=1)
    assert not torch.equal(served.state_dict()["0.weight"], model.state_dict()["0.weight"])
    apply_changes(served, tmp_path / "1.safetensors", base=0)
    for name, value in model.state_dict().items():
        assert torch.equal(served.state_dict()[name], value), name


@pytest.mark.parametrize("options", [{}, {"store_param_remainders": False}], ids=str)
def test_masters_follow_kept_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(128, 128)).bfloat16()
    quantize_model_(model, Float8CurrentScaling(keep_weights=True))
    optimizer = FusedAdamW(model.parameters(), lr=0.0, weight_decay=0.0, **options)
    optimizer.initialize_state()
    values = torch.full((2,), 0.75, dtype=torch.bfloat16)
    write_changes({"0.weight": Changes(torch.tensor([5, 9]), values, (128, 128))}, tmp_path / "1", base=0, step=1)
    apply_changes(model, tmp_path / "1", base=0)
    for param in model.parameters():
        param.grad = torch.ones(param.shape, dtype=param.dtype)
    optimizer.step()
    assert model.state_dict()["0.weight"].view(-1)[[5, 9]].tolist() == [0.75, 0.75]


def test_a_scale_of_a_weight_fills_what_has_it_once_per_row(tmp_path: Path) -> None:
    changes = {"w_tensor_scale": Changes(torch.tensor([0]), torch.tensor([0.5]), (1,))}
    write_changes(changes, tmp_path / "file", base=0, step=1)
    server = {"w_scale": torch.ones(6, 1)}
    apply_changes(server, tmp_path / "file", base=0)
    assert torch.equal(server["w_scale"], torch.full((6, 1), 0.5))


def test_targets_that_are_no_plain_tensors(tmp_path: Path) -> None:
    write_changes({"w": Changes(torch.tensor([0]), torch.ones(1), (4,))}, tmp_path / "file", base=0, step=1)
    with pytest.raises(TypeError, match="plain tensor"):
        apply_changes({"w": torch.ones(4).to_sparse()}, tmp_path / "file", base=0)
    for target in (torch.ones(4, device="meta"), torch.ones(1).expand(4)):
        with pytest.raises(TypeError, match="memory for each element"):
            apply_changes({"w": target}, tmp_path / "file", base=0)


def test_the_reader_needs_no_engine_and_no_optimizer(tmp_path: Path) -> None:
    """In a process without numpy and safetensors, and without this package's compiled parts."""
    _, replica, file = _published(tmp_path)
    torch.save({name: param.data for name, param in replica.named_parameters()}, tmp_path / "replica")
    code = f"""
import sys
sys.modules["numpy"] = sys.modules["safetensors"] = None
import torch
from fused_optim.wire import apply_changes
weights = torch.load({str(tmp_path / "replica")!r})
assert apply_changes(weights, {str(file)!r}, base=0) == 1
assert not [name for name in sys.modules if name.startswith("fused_optim._engine")], "engines"
torch.save(weights, {str(tmp_path / "after")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    model, *_ = _published(tmp_path)
    after = torch.load(tmp_path / "after")
    assert all(torch.equal(param, after[name]) for name, param in model.named_parameters())


def test_the_header_is_that_of_safetensors(tmp_path: Path) -> None:
    *_, file = _published(tmp_path)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0 and header["__metadata__"]["format"] == "fused_optim.changes"
    safetensors = pytest.importorskip("safetensors.torch")
    loaded = safetensors.load_file(file)
    read = read_changes(file)
    assert all(torch.equal(loaded[name], each.values) for name, each in read.changes.items())
    assert math.prod(read.changes["weight"].shape) == 6 * 128
