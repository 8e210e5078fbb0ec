"""``make demo``: its optimizers, in runs of a few steps. The whole demo takes minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fresh

EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES = {"width": 64, "layers": 1, "heads": 2, "context": 32, "batch": 2, "steps": 6, "warmup": 2}
TINY = [text for name, size in SIZES.items() for text in (f"--{name}", str(size))]


def train(ranks: int, metrics: Path, *flags: str) -> dict[str, Any]:
    fresh.torchrun(ranks, EXAMPLES / "train_fsdp2.py", *TINY, "--metrics", metrics, *flags, folder=metrics.parent)
    record: dict[str, Any] = json.loads(metrics.read_text())
    return record


def test_muon_trains_and_resumes_on_two_ranks(tmp_path: Path) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    flags = ("--optimizer", "muon", "--checkpoints", checkpoints, "--checkpoint-every", "4")
    straight = train(1, tmp_path / "straight.json", *flags)
    resumed = train(2, tmp_path / "resumed.json", "--optimizer", "muon", "--resume", checkpoints, "--init-seed", "1")
    assert straight["train_losses"][-1][1] < straight["train_losses"][0][1]
    after = dict(map(tuple, straight["train_losses"]))
    assert [step for step, _ in resumed["train_losses"]] == [4, 5]
    for step, loss in resumed["train_losses"]:
        assert loss == pytest.approx(after[step], rel=1e-3)
