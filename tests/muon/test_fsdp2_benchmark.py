"""``benchmarks/muon_fsdp2.py``: a trial on two ranks, and what is counted as not hidden."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fresh
import muon_fsdp2
from muon_fsdp2 import ALONE, CONTENDERS, covered

TRIAL = ["--models", "tiny", "--repeats", "1", "--only", "FusedMuon"]


def test_overlapping_spans_are_counted_once() -> None:
    assert covered([]) == 0.0
    assert covered([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (7.0, 8.0)]) == 6.0


@pytest.mark.parametrize("missing", ["muon_fsdp2_has_no_such_package", "muon_fsdp2_has_no_such_package.part"])
def test_what_is_missing_is_found_out(missing: str) -> None:
    assert not muon_fsdp2.can_import(missing)
    assert muon_fsdp2.can_import("torch.optim")


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
