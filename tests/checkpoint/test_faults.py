"""Damaged, foreign and wrong checkpoints: refused on every rank, by name, and nothing has been changed then."""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import distributed
import fresh
from distributed import assert_same, one_thread
from foreign_cases import SETTINGS, build, groups_of, train
from fused_optim import (
    FusedAdam,
    export_optimizer_checkpoint,
    load_optimizer_checkpoint,
    verify_checksums,
    write_checksums,
)
from fused_optim.__main__ import main
from fused_optim.checkpoint import folders
from fused_optim.checkpoint import verify as checksums
from fused_optim.sharding.dtensor import local_tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.save in one process
MASTERS: dict[str, dict[str, Any]] = {"unscaled": {}, "native": {}}
FORMS = list(MASTERS)
WEIGHT = "optim.state.second.weight"
STEPS = 2
Built = tuple[nn.Module, FusedAdam]


def built(form: str, seed: int = 0) -> Built:
    """A model with every kind of stored state in the form, its matrices sharded where there are ranks."""
    model = build(torch.bfloat16, seed)
    options = {**MASTERS[form], "exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.float8_e4m3fn}
    return model, FusedAdam(
        groups_of(model), checkpoint_format=form, **options, **SETTINGS, decoupled_weight_decay=True
    )


def trained(form: str, seed: int = 0, steps: int = STEPS) -> Built:
    model, optimizer = built(form, seed)
    train(model, optimizer, 0, steps)
    return model, optimizer


def bits(model: nn.Module, optimizer: FusedAdam) -> dict[str, Tensor]:
    """This rank's part of all that a load may change, as it is kept."""
    found = {}
    for name, param in model.named_parameters():
        states = optimizer.state[param] | {"parameter": param, "scales": optimizer.store.layouts[param].scales}
        found |= {f"{name}: {key}": local_tensor(value.detach()).clone() for key, value in states.items()}
    for i, group in enumerate(optimizer.param_groups):
        numbers = [group[key] for key in ("step", "lr", "eps", "weight_decay")] + list(group["betas"])
        found[f"group {i}"] = torch.tensor(numbers, dtype=torch.float64)
    return found


def save(form: str, path: str) -> None:
    model, optimizer = trained(form)
    state = {"optim": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}
    dcp.save(state, checkpoint_id=path)
    write_checksums(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints with checksums, written by two ranks."""

    @functools.cache
    def of(form: str) -> Path:
        path = tmp_path_factory.mktemp(form) / "checkpoint"
        distributed.run(2, save, form, str(path))
        return path

    return of


@pytest.fixture
def spoilt(saved: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy to be spoilt."""
    return lambda form: Path(shutil.copytree(saved(form), tmp_path / "checkpoint"))


def flip(path: Path, key: str) -> None:
    """Change one bit of the last stored part of a tensor, in its values, or in the middle of another object."""
    stored = pickle.loads((path / ".metadata").read_bytes()).storage_data
    _, info = max((index.offset or (), info) for index, info in stored.items() if index.fqn == key)
    file = path / info.relative_path
    content = bytearray(file.read_bytes())
    at = info.offset + info.length // 2
    value = torch.load(io.BytesIO(content[info.offset : info.offset + info.length]), weights_only=True)
    if isinstance(value, Tensor):
        at = content.index(value.view(torch.uint8).numpy().tobytes(), info.offset) + (
            value.nbytes // 2 | 3
        )  # a sign of FP32
    content[at] ^= 0x80
    file.write_bytes(content)


# --- on the ranks -----------------------------------------------------------------------------------------------


def refuse(form: str, path: str, verify: bool | None = None) -> str:
    """The error of loading into a trained optimizer, of which nothing changes."""
    model, optimizer = trained(form, seed=7, steps=1)
    if MASTERS[form]:  # the parameters that the remainders belong to
        for param, source in zip(model.parameters(), trained(form)[0].parameters(), strict=True):
            local_tensor(param.data).copy_(local_tensor(source.data))
    before = bits(model, optimizer)
    with pytest.raises((OSError, KeyError, RuntimeError, TypeError, ValueError)) as error:
        load_optimizer_checkpoint(model, optimizer, path, verify=verify)
    assert_same(bits(model, optimizer), before)
    return str(error.value)


def refuse_one_rank(form: str, path: str) -> str:
    return refuse(form, f"{path}.{dist.get_rank()}")


def check_refused(ranks: int, form: str, path: Path, message: str, verify: bool | None = None) -> None:
    errors = distributed.run(ranks, refuse, form, str(path), verify, timeout=30)
    assert len(errors) == ranks and all(re.search(message, error) for error in errors), errors


def load(form: str, path: str, verify: bool | None) -> dict[str, Tensor]:
    model, optimizer = built(form, seed=7)
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    load_optimizer_checkpoint(model, optimizer, path, verify=verify)
    return bits(model, optimizer)


# --- checksums --------------------------------------------------------------------------------------------------

STORED = [
    *[("unscaled", key) for key in ("exp_avg", "exp_avg_sq", "master_param")],
    *[("native", f"{moment}.{part}") for moment in ("exp_avg", "exp_avg_sq") for part in ("bits", "scale", "block")],
    *[("native", f"master_param.{part}") for part in ("rem16", "check")],
]


def verify_fails(path: str) -> str:
    with pytest.raises(ValueError) as error:
        verify_checksums(path)
    return str(error.value)


@pytest.mark.parametrize("form, key", STORED)
def test_a_flipped_bit_is_refused(form: str, key: str, spoilt: Callable[[str], Path]) -> None:
    path = spoilt(form)
    flip(path, f"{WEIGHT}.{key}")
    at = "" if key.endswith("block") else r" at offsets \((4, 0|4,)\)"
    message = (
        rf"{re.escape(f'{WEIGHT}.{key}')}{at} \(bytes \d+ to \d+ of __\d_0.distcp\): "
        r"expected CRC-32 [0-9a-f]{8}, found [0-9a-f]{8}$"
    )
    check_refused(3, form, path, message)
    errors = distributed.run(3, verify_fails, str(path), timeout=20)
    assert len(set(errors)) == 1 and re.search(message, errors[0])


def test_torch_alone_does_not_see_a_flipped_bit(spoilt: Callable[[str], Path]) -> None:
    """So the tests above are of the checksums; ``verify=False`` skips them."""
    path = spoilt("unscaled")
    before = distributed.run(1, load, "unscaled", str(path), True)[0]
    flip(path, f"{WEIGHT}.exp_avg")
    loaded = distributed.run(1, load, "unscaled", str(path), False)[0]
    changed = {name for name in loaded if not torch.equal(loaded[name], before[name])}
    assert changed == {"second.weight: exp_avg"}


def test_only_the_optimizer_is_verified_when_it_is_loaded(spoilt: Callable[[str], Path]) -> None:
    path = spoilt("unscaled")
    flip(path, "model.first.weight")
    with one_thread():
        load_optimizer_checkpoint(*built("unscaled"), path)
    (error,) = set(distributed.run(2, verify_fails, str(path), timeout=20))
    assert "damaged: model.first.weight at offsets (4, 0)" in error


@pytest.mark.parametrize("form", FORMS)
def test_intact_checkpoints_are_loaded(form: str, saved: Callable[[str], Path]) -> None:
    path = saved(form)
    for ranks in (1, 2, 3):
        distributed.run(ranks, verify_checksums, str(path))
    loaded = distributed.run(1, load, form, str(path), True)[0]
    assert_same(loaded, bits(*trained(form)))


def test_the_file_of_checksums(spoilt: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It covers every stored byte and depends neither on the number of ranks nor on how files are read."""
    path = spoilt("native")
    file = path / checksums.FILE
    expected = json.loads(file.read_text())
    assert expected["version"] == 1 and sorted(expected["files"]) == ["__0_0.distcp", "__1_0.distcp"]
    for name, rows in expected["files"].items():
        content, at = (path / name).read_bytes(), 0
        for start, length, crc in rows:
            assert start == at and crc == f"{zlib.crc32(content[start : start + length]):08x}"
            at += length
        assert at == len(content)
    for ranks in (1, 3):
        file.unlink()
        distributed.run(ranks, write_checksums, str(path))
        assert json.loads(file.read_text()) == expected
    monkeypatch.setattr(folders, "_NEAR", 1000)
    monkeypatch.setattr(folders, "crc32_of_file", lambda *_: None)
    write_checksums(path)
    assert json.loads(file.read_text()) == expected


def fail_on_rank_0(path: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", raise_disk_full)
        return write_fails(path)


def raise_disk_full(_: int) -> None:
    raise OSError("disk full")


def test_checksums_are_replaced_at_once_or_not_at_all(spoilt: Callable[[str], Path]) -> None:
    path = spoilt("native")
    names, content = sorted(os.listdir(path)), (path / checksums.FILE).read_bytes()
    errors = distributed.run(2, fail_on_rank_0, str(path), timeout=20)
    assert all("disk full" in error for error in errors)
    assert sorted(os.listdir(path)) == names and (path / checksums.FILE).read_bytes() == content


def write_alone(path: str) -> None:
    if dist.get_rank() == 1:
        write_checksums(path, no_dist=True)
        verify_checksums(path, no_dist=True)


def test_one_rank_alone_may_write_them(spoilt: Callable[[str], Path]) -> None:
    path = spoilt("native")
    content = (path / checksums.FILE).read_bytes()
    (path / checksums.FILE).unlink()
    distributed.run(2, write_alone, str(path), timeout=20)
    assert (path / checksums.FILE).read_bytes() == content


def export(path: str) -> None:
    export_optimizer_checkpoint(*trained("unscaled"), path)


def test_exports_have_checksums(tmp_path: Path) -> None:
    distributed.run(2, export, str(tmp_path / "optimizer"))
    verify_checksums(tmp_path / "optimizer")
    flip(tmp_path / "optimizer", "optimizer.state.first.odd.exp_avg_sq")
    check_refused(2, "unscaled", tmp_path / "optimizer", r"first\.odd\.exp_avg_sq at offsets .* expected CRC-32")


def break_checksums(path: Path, fault: str) -> None:
    file, metadata = path / checksums.FILE, path / ".metadata"
    content = json.loads(file.read_text())
    if fault == "none":
        file.unlink()
    elif fault == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif fault == "newer":
        file.write_text(json.dumps({**content, "version": 2}))
    elif fault == "list":
        file.write_text("[]")
    elif fault == "another save":
        metadata.write_bytes(pickle.dumps(pickle.loads(metadata.read_bytes()), protocol=5))
    elif fault in ("../secret", "\ud800"):
        content["files"][fault] = [[0, 5, "00000000"]]
        file.write_text(json.dumps(content))
    elif fault == "overlapping":
        _, rows = content["files"].popitem()
        start, length, crc = rows[0]
        content["files"]["__1_0.distcp"] = [*rows, *([start + i, length, crc] for i in range(1, 1000))]
        file.write_text(json.dumps(content))
    elif fault == "incomplete":
        del content["files"]["__1_0.distcp"]
        file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "fault, message",
    [
        ("none", f"has no checksums: expected {checksums.FILE}"),
        ("truncated", "cannot be read .*; it is truncated or damaged"),
        ("newer", "expected version 1 at most, found 2"),
        ("list", "cannot be read .*; it is truncated or damaged"),
        ("another save", r"\.metadata: expected CRC-32 \w{8}, found \w{8}: .* saved again"),
        ("../secret", r"json cannot be read \(ValueError\)"),
        ("\ud800", r"json cannot be read \(UnicodeEncodeError\)"),
        ("overlapping", r"json gives bytes \d+ to \d+ of __1_0\.distcp to several tensors; it is damaged"),
        ("incomplete", "expected CRC-32 none, found"),
    ],
)
def test_checksums_that_do_not_fit_are_refused(fault: str, message: str, spoilt: Callable[[str], Path]) -> None:
    path = spoilt("native")
    break_checksums(path, fault)
    check_refused(2, "native", path, message, True)
    if fault == "none":
        distributed.run(2, load, "native", str(path), None)
    else:
        check_refused(2, "native", path, message)


def test_files_of_torch_save_have_no_checksums(tmp_path: Path) -> None:
    model, optimizer = trained("unscaled")
    file = tmp_path / "optimizer.pt"
    export_optimizer_checkpoint(model, optimizer, file)
    load_optimizer_checkpoint(model, optimizer, file)
    with pytest.raises(FileNotFoundError, match="has no checksums"):
        load_optimizer_checkpoint(model, optimizer, file, verify=True)


def write_fails(path: str) -> str:
    with pytest.raises((OSError, RuntimeError, ValueError)) as error:
        write_checksums(path)
    return str(error.value)


@pytest.mark.parametrize(
    "fault, message",
    [
        ("missing", r"expected \d+ bytes, found none: No such file"),
        ("truncated", r"expected \d+ bytes, found \d+: the file is truncated"),
        ("unfinished", r"\.metadata, which is written last"),
        ("metadata", r"\.metadata cannot be read"),
    ],
)
def test_damaged_folders_get_no_checksums(fault: str, message: str, spoilt: Callable[[str], Path]) -> None:
    path = spoilt("unscaled")
    (path / checksums.FILE).unlink()
    damage(path, fault)
    errors = distributed.run(2, write_fails, str(path), timeout=20)
    assert all(re.search(message, error) for error in errors), errors
    assert not (path / checksums.FILE).exists()


def test_commands(
    spoilt: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = spoilt("native")
    content = (path / checksums.FILE).read_bytes()
    (path / checksums.FILE).unlink()
    for command, said in [("checksum", "checksums written"), ("verify", "all bytes as written")]:
        monkeypatch.setattr(sys, "argv", ["fused_optim", command, str(path)])
        main()
        assert capsys.readouterr().out == f"{path}: {said}\n"
        assert (path / checksums.FILE).read_bytes() == content
    flip(path, f"{WEIGHT}.exp_avg.scale")
    failed = subprocess.run([fresh.python(), "-m", "fused_optim", "verify", path], capture_output=True, text=True)
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (1, "", 1)
    assert f"{WEIGHT}.exp_avg.scale at offsets (4, 0)" in failed.stderr
    (path / ".metadata").write_bytes(b"?")
    for command in ("checksum", "verify"):
        monkeypatch.setattr(sys, "argv", ["fused_optim", command, str(path)])
        with pytest.raises(SystemExit, match=r"error: .*\.metadata"):
            main()


# --- damaged folders --------------------------------------------------------------------------------------------


def damage(path: Path, fault: str) -> None:
    shard, metadata = path / "__1_0.distcp", path / ".metadata"
    if fault == "missing":
        shard.unlink()
    elif fault == "truncated":
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    elif fault == "unfinished":
        metadata.unlink()
    elif fault == "metadata":
        metadata.write_bytes(metadata.read_bytes()[:200])


DAMAGES = {
    "missing": r"optim\.(state|param_groups)\S* .*__1_0.distcp( is missing|\): expected \d+ bytes, found none)",
    "truncated": r"optim\.(state|param_groups)\S* .*__1_0.distcp.* expected .*\d+ bytes, found \d+",
    "unfinished": r"expected a folder .* with a file \.metadata",
    "metadata": r"\.metadata cannot be read",
}


@pytest.mark.parametrize("summed", [True, False], ids=["checksums", "none"])
@pytest.mark.parametrize("fault", DAMAGES)
@pytest.mark.parametrize("form", FORMS)
def test_damaged_folders_are_refused(form: str, fault: str, summed: bool, spoilt: Callable[[str], Path]) -> None:
    path = spoilt(form)
    damage(path, fault)
    if not summed:
        (path / checksums.FILE).unlink()
    check_refused(3, form, path, DAMAGES[fault])


@pytest.mark.parametrize("summed", [True, False], ids=["checksums", "none"])
@pytest.mark.parametrize("fault", DAMAGES)
def test_what_one_rank_finds_damaged_is_refused_on_all(
    fault: str, summed: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rank 1 has a folder of its own."""
    for rank in range(2):
        shutil.copytree(saved("native"), tmp_path / f"checkpoint.{rank}")
        if not summed:
            (tmp_path / f"checkpoint.{rank}" / checksums.FILE).unlink()
    damage(tmp_path / "checkpoint.1", fault)
    errors = distributed.run(2, refuse_one_rank, "native", str(tmp_path / "checkpoint"), timeout=30)
    assert all(re.search(DAMAGES[fault], error) for error in errors), errors


# --- wrong contents ---------------------------------------------------------------------------------------------


def spoil(state: dict[str, Any], fault: str) -> None:
    """Make a state dict, nested and by names, one that must be refused."""
    states, groups = state["state"], state["param_groups"]
    whole, native = states["second.weight"], isinstance(states["second.weight"]["exp_avg"], dict)
    if fault == "names":
        for key in list(states):
            states[f"other.{key}"] = states.pop(key)
        for group in groups:
            group["params"] = [f"other.{name}" for name in group["params"]]
    elif fault == "version":
        for group in groups:
            group["fused_optim_version"] = 99
    elif fault == "step":
        for group in groups:
            del group["step"]
    elif fault == "moment":
        del whole["exp_avg_sq"]
    else:
        kind, name, part = fault.split()
        holder, key = (whole[name], part) if native else (whole, name)
        holder[key] = holder[key].int() if kind == "dtype" else holder[key][:-1].clone()


SHAPE = r"'second\.weight'.*: {state}.*expected shape \(\d+.*\), (found|the state dict has) \(\d+.*\)"
DTYPE = r"'second\.weight'.*: {state}.*expected .*, (found|got) torch\.int32"
WRONG = [
    ("names", r"another model: .*lacks .* 6 of 6 .*'first\.weight'.*lacks 6 of its .*other\.first\.weight"),
    ("version", "version 99, .*up to 1"),
    ("step", r"'(first|second)\.weight'.*states but no step"),
    ("moment", r"'second\.weight'.* lacks exp_avg_sq"),
    *[(f"shape {state} whole", SHAPE.format(state=state)) for state in ("exp_avg", "exp_avg_sq", "master_param")],
    *[(f"dtype {state} whole", DTYPE.format(state=state)) for state in ("exp_avg", "exp_avg_sq", "master_param")],
]
PARTS = [("exp_avg", "bits"), ("exp_avg", "scale"), ("exp_avg_sq", "bits"), ("exp_avg_sq", "scale")]
PARTS += [("master_param", "rem16")]
NATIVE_WRONG = [
    *WRONG[:4],
    *[(f"shape {state} {part}", SHAPE.format(state=f"{state}: {part}")) for state, part in PARTS],
    ("shape master_param check", SHAPE.format(state="master_param: check")),
    *[(f"dtype {state} {part}", DTYPE.format(state=f"{state}: {part}")) for state, part in PARTS],
]


@pytest.mark.parametrize(
    "form, fault, message",
    [("unscaled", *wrong) for wrong in WRONG] + [("native", *wrong) for wrong in NATIVE_WRONG],
)
def test_wrong_contents_are_refused(form: str, fault: str, message: str, tmp_path: Path) -> None:
    with one_thread():
        state = copy.deepcopy(get_optimizer_state_dict(*trained(form)))
    spoil(state, fault)
    dcp.save({"optim": state}, checkpoint_id=tmp_path, no_dist=True)
    write_checksums(tmp_path)
    check_refused(2, form, tmp_path, message)


@pytest.mark.parametrize("fault, message", [("format", "unknown state format 77"), ("block", "blocks of 5 elements")])
def test_what_one_rank_reads_otherwise_is_refused_on_all(fault: str, message: str, tmp_path: Path) -> None:
    """Where the collective that compares parameters and remainders would wait for the rank that has failed."""
    for rank in range(2):
        state = copy.deepcopy(get_optimizer_state_dict(*trained("native")))
        if rank == 1:
            state["state"]["second.weight"]["exp_avg"].update({"format": {"format": 77}, "block": {"block": 5}}[fault])
        dcp.save({"optim": state}, checkpoint_id=f"{tmp_path}/checkpoint.{rank}", no_dist=True)
    errors = distributed.run(2, refuse_one_rank, "native", str(tmp_path / "checkpoint"), timeout=30)
    assert all(re.search(f"'second.weight'.*: exp_avg: {message}", error) for error in errors), errors


def refuse_other_parameter(path: str) -> str:
    """Only rank 1's part of a parameter is not the one that the remainders belong to."""
    model, optimizer = trained("native")
    if dist.get_rank() == 1:
        local_tensor(model.second.weight.data)[0, 0] += 1
    with pytest.raises((RuntimeError, ValueError)) as error:
        load_optimizer_checkpoint(model, optimizer, path)
    return str(error.value)


def test_the_parameter_of_another_rank_is_named(saved: Callable[[str], Path]) -> None:
    errors = distributed.run(2, refuse_other_parameter, str(saved("native")), timeout=30)
    assert all("'second.weight'" in error and "low bits of its master" in error for error in errors), errors


def refuse_one_state_dict() -> tuple[type[Exception], str]:
    """Without files: only rank 1's state dict is wrong."""
    model, optimizer = trained("native")
    state = optimizer.state_dict()
    if dist.get_rank() == 1:
        state["state"][3]["exp_avg"]["format"] = 77
    before = bits(model, optimizer)
    with pytest.raises(ValueError) as error:
        optimizer.load_state_dict(state)
    assert_same(bits(model, optimizer), before)
    return str(error.value)


def test_a_state_dict_that_one_rank_refuses_is_loaded_on_none() -> None:
    errors = distributed.run(2, refuse_one_state_dict, timeout=20)
    assert "another rank cannot load" in errors[0] and "parameter 3 " in errors[1] and "format 77" in errors[1]


# --- NaN and infinity -------------------------------------------------------------------------------------------

SPECIAL = [float("nan"), float("inf"), -float("inf")]
SPECIAL_FORMATS = [torch.float32, torch.bfloat16, torch.int8]


def with_special_values(form: str, fmt: torch.dtype) -> Built:
    """Parameters, gradients and so moments and masters that are not finite: one in each row of a matrix."""
    model = build(torch.bfloat16)
    optimizer = FusedAdam(
        groups_of(model),
        exp_avg_dtype=fmt,
        exp_avg_sq_dtype=fmt,
        checkpoint_format=form,
        **MASTERS[form],
        **SETTINGS,
        decoupled_weight_decay=True,
    )
    for param in model.parameters():
        grad = torch.ones(param.shape)
        rows = grad.view(grad.shape[0], -1)
        rows[0, 0], rows[1, 0], rows[2, 0] = SPECIAL
        param.grad = distributed.shard_like(grad.bfloat16(), param)
        values = torch.ones(param.shape)
        values.view(grad.shape[0], -1)[3, 0] = float("inf")
        local_tensor(param.data).copy_(local_tensor(distributed.shard_like(values, param)))
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_special(form: str, fmt: torch.dtype, path: str) -> dict[str, distributed.Part]:
    model, optimizer = with_special_values(form, fmt)
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}, checkpoint_id=path)
    return special_parts(model, optimizer)


def load_special(form: str, fmt: torch.dtype, path: str) -> dict[str, distributed.Part]:
    model = build(torch.bfloat16, seed=7)
    optimizer = FusedAdam(
        groups_of(model), exp_avg_dtype=fmt, exp_avg_sq_dtype=fmt, **MASTERS[form], decoupled_weight_decay=True
    )
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    load_optimizer_checkpoint(model, optimizer, path)
    return special_parts(model, optimizer)


def special_parts(model: nn.Module, optimizer: FusedAdam) -> dict[str, distributed.Part]:
    optimizer.checkpoint_format = "unscaled"
    names, states = [name for name, _ in model.named_parameters()], optimizer.state_dict()["state"]
    found = {f"{names[i]}: {key}": distributed.part(value) for i, s in states.items() for key, value in s.items()}
    return found | {name: distributed.part(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("fmt", SPECIAL_FORMATS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinity_come_back_as_they_are(form: str, fmt: torch.dtype, tmp_path: Path) -> None:
    saved = distributed.join_all(distributed.run(2, save_special, form, fmt, str(tmp_path)))
    loaded = distributed.join_all(distributed.run(3, load_special, form, fmt, str(tmp_path)))
    assert_same(loaded, saved)
    for name, value in loaded.items():
        whole = ".weight: exp_avg" in name and fmt == torch.int8  # a block of 128 has one scale
        expected = (384, 0) if whole else (1, 2) if "exp_avg" in name else (3, 1)
        assert (int(value.isnan().sum()), int(value.isinf().sum())) == expected, name
