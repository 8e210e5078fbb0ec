"""``benchmarks/end_to_end.py``: the search for the largest batch, and a trial in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import end_to_end
from end_to_end_runs import RUNS


@pytest.mark.parametrize("start", [1, 4, 7, 64])
@pytest.mark.parametrize("fitting", [0, 1, 3, 4, 5, 21, 63, 64])
def test_the_largest_that_fits_is_found(start: int, fitting: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= fitting

    assert end_to_end.largest(fits, start, limit=64) == fitting
    assert len(tried) <= 13 and len(set(tried)) == len(tried) and all(1 <= batch <= 64 for batch in tried)


def trial(report: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, end_to_end.__file__, "--device=cpu", "--model=small", "--length=32", *options]
    done = subprocess.run([*command, f"--output={report}"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(report.read_text())["results"]
    assert all(f"| {name} |" in done.stdout for name in results)
    return results


@pytest.mark.long
@pytest.mark.usefixtures("forked_python")
def test_a_trial(tmp_path: Path) -> None:
    """What cannot run is named with its reason; what runs has learned."""
    name = "FusedAdamW, BF16, int8 states, 24-bit masters"
    results = trial(tmp_path / "report.json", "--steps=30", "--batch=8", f"--only={name}|bitsandbytes.*FP32")
    assert results.keys() == {name, "bitsandbytes AdamW8bit, FP32 parameters"}
    assert "skipped" in results["bitsandbytes AdamW8bit, FP32 parameters"]
    found = results[name]
    assert len(found["losses"]) == len(found["steps_s"]) == 30 and found["peak_bytes"] is None
    assert found["losses"][0] == pytest.approx(8.3, abs=0.3) and found["loss"] < 6.5  # of 4,096 tokens; of bytes
    assert found["held_out_loss"] < 6.5 and "largest_batch" not in found


@pytest.mark.long
@pytest.mark.usefixtures("forked_python")
def test_ranks_share_a_batch(tmp_path: Path) -> None:
    """Two ranks of FSDP2 learn what one process does of twice the batch, but for the rounding of activations."""
    name = "torch AdamW fused, FP32 parameters"
    alone = trial(tmp_path / "alone.json", "--steps=3", "--batch=4", f"--only={name}")[name]
    ranks = trial(tmp_path / "ranks.json", "--steps=3", "--batch=2", "--torchrun=2", f"--only={name}")[name]
    assert ranks["losses"] == pytest.approx(alone["losses"], abs=0.02)
    skipped = end_to_end.chosen(SimpleNamespace(device="cpu", torchrun=2, only="around"))  # type: ignore[arg-type]
    assert [*skipped.values()] == ["takes no DTensors"] and skipped.keys() <= RUNS.keys()
