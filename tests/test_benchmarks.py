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
import step
from contenders import OURS, PEERS

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
