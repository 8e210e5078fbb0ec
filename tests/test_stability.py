"""``benchmarks/stability.py``: what disturbs a run, and a trial of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import stability
from fused_optim import FusedAdamW
from quality import Run, Task, loss_runs
from stability import SCENARIOS, parts, rare, rate, silent, spikes, table, train

TEXT = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8)


def task(steps: int) -> Task:
    return Task(torch.device("cpu"), steps, 64, 1, 2, 16, TEXT, TEXT)


def model_with_gradients() -> torch.nn.Module:
    model = task(1).model(0, torch.float32)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model


@pytest.mark.parametrize(
    "disturb, name, disturbed, usual",
    [(rare, "embed", [1, 199, 201], [0, 200]), (silent, "blocks.0.", [400, 599], [399, 600])],
)
def test_gradients_that_are_missing(
    disturb: stability.Gradients, name: str, disturbed: list[int], usual: list[int]
) -> None:
    for step in (*disturbed, *usual):
        model = model_with_gradients()
        disturb(model, step, 1000)
        chosen = {id(param) for param in parts(model, name)}
        assert 0 < len(chosen) < len([*model.parameters()])
        for param in model.parameters():
            assert bool(param.grad.any()) == (step in usual or id(param) not in chosen)


def test_spikes() -> None:
    assert [step for step in range(1100) if rate(step, True) != 1] == [497, 498, 499, 997, 998, 999]
    assert {rate(step, False) for step in range(1100)} == {1.0}
    for step, expected in {498: 1.0, 499: 1e4, 500: 1.0}.items():
        model = model_with_gradients()
        spikes(model, step, 1000)
        assert {float(param.grad.max()) for param in model.parameters()} == {expected}


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
