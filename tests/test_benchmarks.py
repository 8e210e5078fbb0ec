"""``benchmarks/step.py``: which optimizer is given which parameters, and a trial of it; trials of ``fsdp_host.py`` and
``silent_inputs.py``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import contenders
import silent_inputs
import step
from contenders import OURS, PEERS, obstacle

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
QUANTIZED = {contender.name for contender in OURS if "weights" in contender.name}
APEX = {contender.name for contender in PEERS if "Apex" in contender.name}


@pytest.fixture
def _everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))


@pytest.mark.usefixtures("_everything_is_installed")
@pytest.mark.parametrize("workload", step.WORKLOADS)
def test_kernels_that_take_addresses_are_given_no_dtensors(workload: str) -> None:
    there = {contender.name for contender in step.able([*OURS, *PEERS], GPU, workload)}
    assert len(QUANTIZED) == 7 and len(APEX) == 2
    assert there.issuperset(QUANTIZED | APEX) != (workload in step.SHARDED)
    assert there.isdisjoint(QUANTIZED | APEX) == (workload in step.SHARDED)
    assert there >= {contender.name for contender in OURS} - QUANTIZED


@pytest.mark.usefixtures("_everything_is_installed")
def test_obstacles() -> None:
    by_name = {contender.name: contender for contender in (*OURS, *PEERS)}
    assert len(by_name) == len(OURS) + len(PEERS)
    apex = by_name["Apex FusedAdam, FP32"]
    assert obstacle(apex, GPU, dtensors=False) == ""
    assert obstacle(apex, GPU, dtensors=True) == "takes no DTensors"
    assert obstacle(apex, CPU, dtensors=False) == "runs on GPUs only"
    deepspeed = by_name["DeepSpeed CPUAdam FP32"]
    assert obstacle(deepspeed, CPU, dtensors=False) == ""
    assert obstacle(deepspeed, CPU, dtensors=True) == "takes no DTensors"
    assert obstacle(deepspeed, GPU, dtensors=False) == "runs on CPUs only"
    assert all(not obstacle(contender, CPU, dtensors=False) for contender in OURS)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    (apex,) = (contender for contender in PEERS if contender.name == "Apex FusedAdam, FP32")
    assert step.able([apex], GPU, "tiny") == []
    assert capsys.readouterr().out == "tiny: skipped Apex FusedAdam, FP32: needs apex and amp_C\n"


@pytest.mark.usefixtures("forked_python")
def test_a_trial(tmp_path: Path) -> None:
    """All of ours and torch's, on both kinds of parameters; nothing fails."""
    report = tmp_path / "step.json"
    options = ["--device", "cpu", "--workloads", "tiny", "tiny-dtensors", "--rounds", "1", "--repeats", "1"]
    command = [sys.executable, str(Path(step.__file__)), *options, "--threads", "1", "--output", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    workloads = json.loads(report.read_text())["workloads"]
    named = {workload: {row["name"] for row in rows} for workload, rows in workloads.items()}
    assert not [row for rows in workloads.values() for row in rows if "error" in row]
    assert named["tiny"] - named["tiny-dtensors"] == {*QUANTIZED, "torch AdamW fused around FP32 masters"}
    for name in QUANTIZED:
        assert f"tiny-dtensors: skipped {name}: takes no DTensors\n" in done.stdout


@pytest.mark.long
def test_host_time_of_gathered_weights_is_measured(tmp_path: Path) -> None:
    """With stand-ins for products, which must take what products take."""
    output = tmp_path / "host.json"
    script = Path(step.__file__).with_name("fsdp_host.py")
    command = [sys.executable, str(script), "--weights", "1", "--repeats", "2", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert len(report["gather"]) == 7 and len(report["training"]) == 5
    assert all(row["min_us"] > 0 for part in ("gather", "training") for row in report[part].values())


def test_silent_inputs_are_measured() -> None:
    """What is said of torch's optimizer is exact, and of ours what pages say."""
    exact, ours = silent_inputs.STATES["torch AdamW, FP32"], silent_inputs.STATES["FusedAdamW, int8 states"]
    assert silent_inputs.silent_halves(exact, CPU) == 0.0 and silent_inputs.silent_halves(ours, CPU) <= 0.0007
    largest, error = silent_inputs.wide_range(ours, 10_000, CPU)
    assert 1.0 < largest < 1.6 and 0.1 < error < 0.3
    assert silent_inputs.rare_rows(exact, CPU) == 0.0 and 0.0 < silent_inputs.rare_rows(ours, CPU) < 0.03
    lost, kept = (silent_inputs.MASTERS[name] for name in ("torch AdamW, BF16, no master", "FusedAdamW, master_bits=0"))
    assert silent_inputs.small_updates(lost, 5e-6, CPU) == pytest.approx(1.0)
    assert silent_inputs.small_updates(kept, 5e-6, CPU) < 0.02
