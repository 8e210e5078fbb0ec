"""``benchmarks/muon_fsdp2.py``: a trial on two ranks, and what is counted as not hidden."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fresh
import muon_fsdp2
from muon_fsdp2 import ALONE, CONTENDERS

TRIAL = ["--models", "tiny", "--repeats", "1", "--only", "FusedMuon"]


@pytest.mark.long
def test_a_trial(tmp_path: Path) -> None:
    """Two ranks make the bits that one makes, in every format."""
    report = tmp_path / "report.json"
    fresh.torchrun(2, muon_fsdp2.__file__, *TRIAL, f"--output={report}", folder=tmp_path)
    rows = json.loads(report.read_text())["models"]["tiny"]
    names = [contender.name for contender in CONTENDERS if contender.name.startswith("FusedMuon")]
    assert [*rows] == names and len(names) == 4
    for name in names:
        assert rows[name]["ms"] > 0
        if not name.endswith(ALONE):
            assert rows[name]["same_bits_as_one_gpu"]
            assert rows[name]["share_of_one_gpu"] == rows[name]["ms"] / rows[name + ALONE]["ms"]
            assert rows[name]["sent_bytes"] == 4 * sum(a * b for a, b in muon_fsdp2.MODELS["tiny"]) // 4
    assert all(rows[name]["difference_of_first_update"] < 0.01 for name in names[1:])
