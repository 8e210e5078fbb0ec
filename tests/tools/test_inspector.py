"""``inspect``: what it says of checkpoints is what is in them; what pretends is refused, and no code is run."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict

import distributed
from checkpoint_cases import FORMATS, SHAPES_OF, WAYS, Run
from distributed import Part, join_all
from foreign_cases import SETTINGS, build, groups_of, train
from fused_optim import FusedAdam, FusedAdamW, write_checksums
from fused_optim.__main__ import main
from fused_optim.checkpoint import Checkpointer
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from fused_optim.tools.comparison import compare_checkpoints
from fused_optim.tools.inspector import inspect_checkpoint
from native_cases import REM16, SAVED_AT, SHAPES, NativeRun, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.save in one process
INT8 = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.float8_e4m3fn}


# --- checkpoints of several ranks ---------------------------------------------------------------------------------


def save_both(folder: str, way: str) -> dict[str, Part]:
    """A run with every format, saved in both forms."""
    run = NativeRun("fsdp", "remainder16")
    run.train(0, 2)
    for form in ("native", "unscaled"):
        run.optimizer.checkpoint_format = form
        WAYS[way][0](run, f"{folder}/{form}")
    run.optimizer.checkpoint_format = "unscaled"
    return Run.snapshot(run)


@pytest.mark.parametrize("way", ["nested", "flat", "plain"])
def test_everything_that_ranks_have_saved(way: str, tmp_path: Path) -> None:
    expected = join_all(distributed.run(2, save_both, str(tmp_path), way))
    write_checksums(tmp_path / "native")
    for form in ("native", "unscaled"):
        report = inspect_checkpoint(tmp_path / form)
        assert (report["layout"], report["ranks"], report["steps"]) == (f"fused_optim, {form} form", 2, [2])
        assert report["checksums"] == ("compared: all bytes as written" if form == "native" else "none")
        check_values(report, expected)
        check_formats(report, form)
        assert report["bytes"] == sum(file.stat().st_size for file in (tmp_path / form).glob("*.distcp"))
        assert json.loads(json.dumps(report)) == report
    comparison = compare_checkpoints(tmp_path / "native", tmp_path / "unscaled")
    assert comparison["same"] and comparison["tensors"] == len(expected) - 3 * len(FORMATS)


def check_values(report: dict[str, Any], expected: dict[str, Tensor]) -> None:
    """Counts and ranges of all tensors against those of the gathered ones."""
    checked = 0
    for name, value in expected.items():
        owner, _, state = name.partition(": ")
        found = report["parameters"].get(owner, report["others"].get(f"model.{owner}", {}))
        if state in found:
            assert found["shape"] == list(value.shape)
            counted = found[state]["values"]
            assert (counted["elements"], counted["zero"]) == (value.numel(), int((value == 0).sum())), name
            assert (counted["least"], counted["largest"]) == (float(value.min()), float(value.max())), name
            assert counted["nan"] == counted["infinite"] == 0
            checked += 1
    trained = [name for name in expected if name.endswith(": exp_avg") and "frozen" not in name]
    assert (
        len(trained) >= sum(map(len, SHAPES_OF.values())) - 4
        and checked >= 3 * len(trained)
        and not report["not_finite"]
    )


def check_formats(report: dict[str, Any], form: str) -> None:
    for fmt in FORMATS:
        name = str(fmt).removeprefix("torch.")
        for shape, scaled in {"even": True, "unblocked": False, "vector": False}.items():
            found = report["parameters"][f"{name}_{shape}"]
            kept = name if form == "native" and (scaled or name == "bfloat16") else "float32"
            assert (found["exp_avg"]["format"], found["exp_avg_sq"]["format"]) == (kept, kept)
            packed = form == "native" and shape != "vector"
            assert found["master_param"]["format"] == ("16-bit remainder" if packed else "float32")


# --- one process --------------------------------------------------------------------------------------------------


def save(path: Path, seed: int = 0, **options: Any) -> tuple[nn.Module, FusedAdam]:
    model = build(torch.bfloat16, seed)
    optimizer = FusedAdam(groups_of(model), **{**INT8, **SETTINGS, **options}, decoupled_weight_decay=True)
    train(model, optimizer, 0, 2)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    save(path, checkpoint_format="native")
    return path


@pytest.fixture
def spoilt(saved: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    model = build(torch.float32)
    optimizer = FusedAdamW(model.parameters(), exp_avg_dtype="int8")
    train(model, optimizer, 0, 1)
    optimizer.state[model.first.odd]["exp_avg"][1, 2:5] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    optimizer.set_scaled_state(model.second.weight, "exp_avg", torch.full((7, 256), torch.nan))
    with torch.no_grad():
        model.first.bias[3] = torch.nan
    torch.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, tmp_path / "x.pt"
    )
    report = inspect_checkpoint(tmp_path / "x.pt")
    assert report["not_finite"] == ["exp_avg of first.odd", "parameter of first.bias", "exp_avg of second.weight"]
    found = report["parameters"]["first.odd"]["exp_avg"]["values"]
    assert (found["nan"], found["infinite"], found["elements"]) == (1, 2, 35)
    assert report["parameters"]["second.weight"]["exp_avg"]["values"]["nan"] == 7 * 256
    assert "NOT FINITE: exp_avg of first.odd, parameter of first.bias, exp_avg of second.weight" in str(report)
    assert "1 NaN, 2 infinite" in str(report)


def test_parameters_without_elements_are_described(tmp_path: Path) -> None:
    """With remainders, too, whose bytes are joined to others."""
    model, optimizer = trained(REM16, torch.int8)
    with Checkpointer(model, optimizer, tmp_path, format="native", sigterm=False) as checkpointer:
        checkpointer.save(SAVED_AT)
    found = inspect_checkpoint(tmp_path / f"step-{SAVED_AT:08}")["parameters"]
    for name in ("void", "vacant"):
        assert found[name]["shape"] == list(SHAPES[name])
        states = [state for key, state in found[name].items() if key != "shape"]
        assert len(states) == 4 and all(state["values"]["elements"] == 0 for state in states)


def test_numbered_parameters_have_the_names_that_the_param_groups_know(tmp_path: Path) -> None:
    """State dicts of the optimizer itself. Without names, remainders cannot be joined, and all else is read."""
    for named in (True, False):
        model = build(torch.bfloat16)
        params = list(model.named_parameters()) if named else list(model.parameters())
        optimizer = FusedAdam(params, checkpoint_format="native", **INT8)
        train(model, optimizer, 0, 1)
        path = tmp_path / str(named)
        dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=path)
        report = inspect_checkpoint(path)
        if named:
            master = optimizer.master_state_dict(model)["first.weight"]
            assert report["parameters"]["first.weight"]["master_param"]["values"]["largest"] == float(master.max())
        else:
            assert set(report["parameters"]) == set("012345")
            assert "values" not in report["parameters"]["0"]["master_param"]
            assert "values" in report["parameters"]["0"]["exp_avg"]
            with pytest.raises(ValueError, match="remainders complete BF16 parameters, and 0 itself is not there"):
                compare_checkpoints(path, path)


def test_other_optimizers_checkpoints(tmp_path: Path) -> None:
    model = build(torch.float32)
    for kind, layout in ((torch.optim.AdamW, "torch.optim.AdamW"), (torch.optim.Adam, "torch.optim.Adam")):
        optimizer = kind(model.parameters(), lr=0.01)
        train(model, optimizer, 0, 3)
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        torch.save(state, tmp_path / "optimizer.pt")
        report = inspect_checkpoint(tmp_path / "optimizer.pt")
        assert (report["kind"], report["layout"], report["steps"]) == ("torch.save", layout, [3])
        largest = report["parameters"]["first.weight"]["exp_avg_sq"]["values"]["largest"]
        assert largest == float(optimizer.state[model.first.weight]["exp_avg_sq"].max())
        assert not report["others"]


def test_models_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 64)).bfloat16()
    quantize_model_(model, MXFP8BlockScaling(), lambda _, name: name == "0")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    report = inspect_checkpoint(tmp_path / "dcp")
    assert report["layout"] == "no states of an optimizer" and not report["parameters"]
    weight = report["others"]["model.0.weight"]
    assert weight["format"] == "QuantizedTensor" and report["others"]["model.1.weight"]["format"] == "bfloat16"
    assert weight["values"]["largest"] == float(model[0].weight.dequantize().max())
    safetensors.torch.save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    for path in (tmp_path / "model.safetensors", tmp_path):
        assert inspect_checkpoint(path)["others"]["a"]["values"]["largest"] == 5.0


@pytest.mark.long
def test_only_one_tensor_is_in_memory(tmp_path: Path) -> None:
    """Six matrices of 4 MB in FP32, with two states each: many times what reading, comparing and converting may take.

    By the kernel's count of the most that a process ever had, which starts anew with a program; ``ru_maxrss`` does not.
    Freed memory goes back to the system at once: otherwise what is kept depends on how it was cut up.
    """
    for count, width in ((6, 1024), (1, 8)):
        model = nn.ParameterList([nn.Parameter(torch.zeros(width, width)) for _ in range(count)])
        optimizer = FusedAdamW(model.parameters())
        optimizer.initialize_state()
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=tmp_path / str(count))
    script = f"""
import re
from fused_optim.tools import comparison, conversion, inspector
def work(path):
    inspector.inspect_checkpoint(path)
    yield
    comparison.compare_checkpoints(path, path)
    yield
    for layout in ("unscaled", "torch", "native", "masters", "safetensors"):
        conversion.convert_checkpoint(path, path + "." + layout, layout)
        yield
    conversion.convert_checkpoint(path, path + ".int8", "native", exp_avg_dtype="int8", exp_avg_sq_dtype="int8")
    conversion.convert_checkpoint(path + ".int8", path + ".again", "unscaled")
    yield
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
for _ in work({str(tmp_path / "1")!r}): pass
before = peak()
for _ in work({str(tmp_path / "6")!r}): print(peak() - before)
"""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "500000"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=250, env=environment
    )
    assert done.returncode == 0, done.stderr
    total = sum(file.stat().st_size for file in (tmp_path / "6").iterdir()) / 2**20
    *peaks, int8 = map(float, done.stdout.split())
    assert total > 71 and len(peaks) == 7 and peaks[0] > 3
    assert max(peaks) < 6 * 4 and int8 < 150, (peaks, int8)  # encoding takes about 100 bytes for each of 2^20 elements


# --- what pretends ------------------------------------------------------------------------------------------------


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def metadata_of(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    metadata = metadata_of(path)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def replace_stored(path: Path, key: str, value: Any) -> None:
    """Another object under a key, at the end of its file."""
    stream = io.BytesIO()
    torch.save(value, stream)

    def change(metadata: Any) -> None:
        (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == key)
        file = path / info.relative_path
        info.offset, info.length = file.stat().st_size, len(stream.getvalue())
        file.write_bytes(file.read_bytes() + stream.getvalue())

    rewrite(path, change)


def refused(path: Path, message: str) -> None:
    """By every command, on one line, and nothing is written."""
    for command in (["inspect", str(path)], ["convert", str(path), f"{path}.out", "--to", "unscaled"]):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match=message) as error:
            patch.setattr(sys, "argv", ["fused_optim", *command])
            main()
        assert str(error.value).startswith("error: ") and str(error.value).count("\n") == 0
        assert not [other for other in path.parent.iterdir() if ".out" in other.name]


WEIGHT = "optim.state.first.weight.exp_avg"


@pytest.mark.parametrize("where", ["metadata", "planner_data", "object", "tensor", "file"])
def test_hostile_files_run_no_code(where: str, spoilt: Path, tmp_path: Path) -> None:
    hostile = Hostile(tmp_path / "ran")
    pickle.loads(pickle.dumps(hostile))
    assert hostile.path.exists(), "it would run"
    hostile.path.unlink()
    path = spoilt
    if where == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(hostile))
    elif where == "planner_data":
        rewrite(path, lambda metadata: metadata.planner_data.update(x=hostile))
    elif where == "object":
        replace_stored(path, "optim.param_groups.0.lr", hostile)
    elif where == "tensor":
        replace_stored(path, f"{WEIGHT}.bits", hostile)
    else:
        path = tmp_path / "hostile.pt"
        torch.save({"state": {0: {"exp_avg": hostile}}}, path)
    refused(path, "system")
    assert not hostile.path.exists()


def truncate(path: Path, left: int) -> None:
    path.write_bytes(path.read_bytes()[:left])


def lie(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Spoil the description of a moment's bits."""

    def spoil(path: Path) -> None:
        rewrite(path, lambda metadata: change(metadata.state_dict_metadata[f"{WEIGHT}.bits"]))

    return spoil


def newer_states(path: Path) -> None:
    replace_stored(path, "optim.param_groups.0.fused_optim_version", 2)


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "file truncated": (lambda path: truncate(path / "__0_0.distcp", 9000), "__0_0.distcp is truncated: expected at l"),
    "newer states": (newer_states, "has version 2, this fused_optim reads versions up to 1"),
    "another dtype": (
        lie(lambda entry: setattr(entry.properties, "dtype", torch.int16)),
        r"expected torch.int16 \(7, 256\), found torch.int8 \(7, 256\)",
    ),
    "unknown format": (lambda path: replace_stored(path, f"{WEIGHT}.format", 77), "unknown state format 77: update"),
    "another block": (
        lambda path: replace_stored(path, f"{WEIGHT}.block", 96),
        "blocks of 96 elements do not divide rows of 256",
    ),
    "another parameter": (
        lambda path: replace_stored(path, "model.first.weight", torch.zeros(7, 256, dtype=torch.bfloat16)),
        "model.first.weight in .* is not what it was split from",
    ),
}


@pytest.mark.parametrize("spoil, message", SPOILT.values(), ids=SPOILT)
def test_folders_that_pretend_are_refused(spoil: Callable[[Path], None], message: str, spoilt: Path) -> None:
    spoil(spoilt)
    refused(spoilt, message)


def test_a_flipped_bit_is_refused_where_there_are_checksums(spoilt: Path) -> None:
    write_checksums(spoilt)
    file = spoilt / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged: .* expected CRC-32"):
        inspect_checkpoint(spoilt)


def test_files_that_pretend_are_refused(tmp_path: Path) -> None:
    for name, content in {"a.pt": b"?" * 100, "b.safetensors": b"?" * 100, "c.json": b"{}", "empty.pt": b""}.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "cannot be read")
    whole = tmp_path / "d.safetensors"
    safetensors.torch.save_file({"a": torch.ones(100)}, whole)
    truncate(whole, 300)
    refused(whole, "cannot be read as safetensors .*truncated")
    torch.save({"a": torch.ones(1000)}, tmp_path / "e.pt")
    truncate(tmp_path / "e.pt", 3000)
    refused(tmp_path / "e.pt", "cannot be read by torch.load")
    with zipfile.ZipFile(tmp_path / "f.pt", "w") as archive:
        archive.writestr("readme", "hello")
    refused(tmp_path / "f.pt", "cannot be read by torch.load")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "found none of them")
    refused(tmp_path / "nothing", "found nothing")
    index = {"weight_map": {"a": "../d.safetensors"}}
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path / "folder", "named by model.safetensors.index.json, but not there")


# --- two checkpoints ----------------------------------------------------------------------------------------------


def test_differences_are_named(tmp_path: Path) -> None:
    model, optimizer = save(tmp_path / "first", checkpoint_format="native")
    with torch.no_grad():
        optimizer.state[model.first.odd]["exp_avg"][0, 0] += 2.0
        optimizer.state[model.first.odd]["exp_avg"][0, 1] = torch.nan
    optimizer.param_groups[0]["lr"] = 0.5
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer), "more": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path / "second")
    found = compare_checkpoints(tmp_path / "first", tmp_path / "second")
    assert not found["same"] and found["only_second"] == ["more"] and not found["only_first"]
    assert list(found["different"]) == ["exp_avg of first.odd"] and found["equal"] == found["tensors"] - 1
    assert found["different"]["exp_avg of first.odd"].startswith("2 of 35 elements differ, by 2 at most, ")
    assert found["settings"] == {"lr": ("0.02", "0.5, 0.02")}
    assert "only in" in str(found) and json.loads(json.dumps(found))["equal"] == found["equal"]


def test_commands(saved: Path, spoilt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace_stored(spoilt, "optim.state.first.bias.exp_avg", torch.ones(10))

    def run(*command: str | Path) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["fused_optim", *map(str, command)])
            try:
                main()
            except SystemExit as status:
                return int(status.code or 0)
        return 0

    assert run("inspect", saved, "--json") == 0
    assert json.loads(capsys.readouterr().out) == inspect_checkpoint(saved)
    assert run("inspect", saved, "--compare", saved) == 0
    assert "24 of 24 tensors have the same values" in capsys.readouterr().out
    assert run("inspect", saved, "--compare", spoilt) == 1
    assert "exp_avg of first.bias: 10 of 10 elements differ" in capsys.readouterr().out


def test_the_model_may_be_elsewhere(tmp_path: Path, saved: Path) -> None:
    model, optimizer = save(tmp_path / "both", checkpoint_format="native")
    states, weights = (copy.copy(part) for part in reversed(get_state_dict(model, optimizer)))
    dcp.save({"optim": states}, checkpoint_id=tmp_path / "optimizer")
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "model")
    alone = inspect_checkpoint(tmp_path / "optimizer")
    assert "values" not in alone["parameters"]["first.weight"]["master_param"]
    report = inspect_checkpoint(tmp_path / "optimizer", model=tmp_path / "model")
    whole = inspect_checkpoint(tmp_path / "both")
    for name, found in whole["parameters"].items():
        found.pop("parameter")
        assert report["parameters"][name] == found


def test_wrong_calls_are_one_line(tmp_path: Path) -> None:
    """Of ``inspect``, ``convert``, ``checksum`` and ``verify``, whatever is wrong with a path or with formats."""
    here, text = tmp_path / "checkpoint", tmp_path / "text"
    net = nn.Linear(64, 32, dtype=torch.bfloat16)
    optimizer = FusedAdamW(net.named_parameters(), state_dtype="int8", checkpoint_format="native")
    net(torch.ones(64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=here)
    text.write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    (tmp_path / "zip.pt").write_bytes(b"PK\3\4" + bytes(100))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    new = tmp_path / "new"
    bad = [tmp_path / name for name in ("nothing", "empty", "zip.pt", "model.safetensors", "text")]
    calls = [("inspect", path) for path in bad]
    calls += [("inspect", here, option, path) for option in ("--compare", "--model") for path in bad]
    calls += [("convert", path, new, "--to", "native") for path in bad]
    calls += [("convert", here, target, "--to", "unscaled") for target in (here, text, tmp_path / "empty", text / "x")]
    calls += [("convert", here, new, "--to", "native", "--exp-avg-dtype", name) for name in ("int3", "float64", "")]
    calls += [("convert", here, new, "--to", "torch", "--exp-avg-dtype", "int8")]
    calls += [("convert", here, new, "--to", "native", "--model", here / "nothing")]
    calls += [(command, path) for command in ("verify", "checksum") for path in bad]
    for call in calls:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as raised:
            patch.setattr(sys, "argv", ["fused_optim", *map(str, call)])
            main()
        assert re.fullmatch(r"error: [^\n]+", str(raised.value)), (call, raised.value)
        assert not new.exists(), call
