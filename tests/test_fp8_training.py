"""``benchmarks/fp8_training.py`` and ``fp8_transposes.py``: the table of peers, and trials on tiny layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8_training
import fp8_transposes
from fused_optim.quantized.fp8 import casts

TINY = ("--device", "cpu", "--width", "128", "--hidden", "256", "--tokens", "128", "--blocks", "1", "--steps", "1")


def run(module: object, *options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *TINY, *options])
    module.main()


def test_transposes_are_measured_in_each_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "transposes.json"
    run(fp8_transposes, "--output", str(path), monkeypatch=monkeypatch)
    rows = json.loads(path.read_text())["transposes"]
    assert rows[0] == {"name": "weights", "count": 5, "codes_bytes": 2 * 128 * 128 + 3 * 128 * 256}
    assert all(row["ms"] > 0 for row in rows[1:]) and len(rows) == 14


def test_kept_transposes_change_no_bit_and_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    transpose = casts.transpose
    monkeypatch.setattr(casts, "transpose", lambda *args: (counted.append(1), transpose(*args))[1])
    monkeypatch.setattr(sys, "argv", ["benchmark", *TINY])
    args = fp8_training.parse_args()
    model = fp8_training.ours(fp8_training.RECIPES["FP8, one scale"])(args)
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    kept, found = fp8_transposes.KeptTransposes(fp8_transposes.weights_of(model)), []
    kept.make()
    counted.clear()
    for used in (False, True):
        found.append(gradient_of(model, x, kept if used else None))
        assert len(counted) == 5
    assert torch.equal(*found)


def gradient_of(model: nn.Module, x: torch.Tensor, kept: fp8_transposes.KeptTransposes | None) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    if kept is None:
        model(leaf).sum().backward()
    else:
        with kept.used():
            model(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad
