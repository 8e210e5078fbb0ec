"""``benchmarks/stability.py``: what disturbs a run, and a trial of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import stability
from fused_optim import FusedAdamW
from quality import Run, Task, loss_runs
from stability import SCENARIOS, table, train

TEXT = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8)


def task(steps: int) -> Task:
    return Task(torch.device("cpu"), steps, 64, 1, 2, 16, TEXT, TEXT)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_trial(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP32 states end where torch's do, through every disturbance; all of a run's rates are what the schedule says."""
    monkeypatch.setattr(stability, "EVERY", 4)
    monkeypatch.setattr(stability, "RARE", 3)
    runs = [run for run in loss_runs(1) if run.name in ("FP32", "FusedAdamW 16-bit remainder, int8 states")]
    ours = Run("ours", torch.float32, FusedAdamW)
    rows = [{"scenario": scenario, **train(task(8), run, *SCENARIOS[scenario])} for run in (*runs, ours)]
    assert all(row["finite"] for row in rows)
    torchs, int8, fp32 = (row["held_out_loss"] for row in rows)
    assert fp32 == pytest.approx(torchs, rel=1e-5) and int8 == pytest.approx(torchs, rel=0.02)
    assert f"{torchs:.3f}" in table(rows)
