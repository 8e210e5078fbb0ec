"""``benchmarks/fp8_training.py`` and ``fp8_transposes.py``: the table of peers, and trials on tiny layers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8_training
import fp8_transposes
from fp8_training import Contender
from fused_optim.quantized.fp8 import casts

TINY = ("--device", "cpu", "--width", "128", "--hidden", "256", "--tokens", "128", "--blocks", "1", "--steps", "1")


def peer(names: list[str], compiled: bool) -> Callable[[], list[Contender]]:
    return lambda: [Contender(name, fp8_training.stack, compiled) for name in names]


def run(module: object, *options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *TINY, *options])
    module.main()


def test_the_table_has_ours_and_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that contenders have, ours first."""
    te = [f"TransformerEngine {name}" for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")]
    ao = [f"torchao {name}" for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]
    monkeypatch.setattr(fp8_training, "PEERS", {"json": peer(ao, True), "sys": peer(te, False)})
    labels = [contender.label for contender in fp8_training.contenders()]
    assert len(labels) == len(set(labels)) and {*fp8_training.TABLE} <= {*labels}
    assert [label.split(",")[0].split()[0] for label in fp8_training.TABLE] == [
        *["FP8"] * 9, *["TransformerEngine"] * 3, *["torchao"] * 3, *["BF16"] * 2
    ]  # fmt: skip
    assert {"FP8, rows, compiled", "BF16, compiled", *(f"{name}, eager" for name in te)} <= {*fp8_training.TABLE}


def test_each_row_is_written_as_it_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A time limit loses no row that was there; a peer that fails, or is not there, loses its own."""
    monkeypatch.setattr(fp8_training, "PEERS", {"json": peer(["TransformerEngine DelayedScaling"], False)})
    measure, made = fp8_training.measure, []

    def stopped(contender: Contender, *args: object) -> dict[str, object]:
        made.append(contender.label)
        if contender.name.startswith("TransformerEngine"):
            raise RuntimeError("its kernel")
        if contender.name == "BF16":
            raise KeyboardInterrupt
        return measure(contender, *args)

    monkeypatch.setattr(fp8_training, "measure", stopped)
    path = tmp_path / "peers.json"
    only = "one scale, all.*eager|Transformer|BF16, eager"
    with pytest.raises(KeyboardInterrupt):
        run(fp8_training, "--parts", "peers", "--only", only, "--output", str(path), monkeypatch=monkeypatch)
    rows = json.loads(path.read_text())["peers"]
    assert made == [f"{fp8_training.DELAYED_NAME}, eager", "TransformerEngine DelayedScaling, eager", "BF16, eager"]
    assert [row["name"] for row in rows] == made[:2]
    assert rows[0]["both_ms"] > 0 and "its kernel" in rows[1]["error"]


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
