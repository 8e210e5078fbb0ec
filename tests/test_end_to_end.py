"""``benchmarks/end_to_end.py``: the search for the largest batch, and a trial in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import end_to_end
from end_to_end_runs import LR, RUNS, set_lr


@pytest.mark.parametrize("start", [1, 4, 7, 64])
@pytest.mark.parametrize("fitting", [0, 1, 3, 4, 5, 21, 63, 64])
def test_the_largest_that_fits_is_found(start: int, fitting: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= fitting

    assert end_to_end.largest(fits, start, limit=64) == fitting
    assert len(tried) <= 13 and len(set(tried)) == len(tried) and all(1 <= batch <= 64 for batch in tried)


def test_learning_rates_are_written_as_optimizers_want_them() -> None:
    tensor = torch.tensor(0.0)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}, {"lr": tensor}])
    set_lr(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] == LR / 2 and optimizer.param_groups[1]["lr"] is tensor
    assert tensor.item() == pytest.approx(LR / 2)
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    set_lr(adamw, 1.0)
    assert adamw.param_groups[0]["lr"] == LR


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


def test_the_error_of_a_rank_is_named() -> None:
    """Rather than torchrun's, which says that there was one."""
    rank = "[rank1]: ValueError: expected a matrix\n[rank1]: at line 3\n"
    torchrun = "Traceback:\n  raise ChildFailedError(\ntorch.distributed.elastic.errors.ChildFailedError: \n====\n"
    assert end_to_end.error_in(rank + torchrun) == "ValueError: expected a matrix"
    assert end_to_end.error_in("note\nKeyError: 'x'\n") == "KeyError: 'x'"
    assert end_to_end.error_in(torchrun) == "torch.distributed.elastic.errors.ChildFailedError: "
    assert (end_to_end.error_in("killed\n"), end_to_end.error_in("")) == ("killed", "no output")


@pytest.mark.long
@pytest.mark.usefixtures("forked_python")
def test_reports_are_merged(tmp_path: Path) -> None:
    """In the order of the table; of one that failed somewhere the run that did not."""
    names = [*RUNS][:3]
    found = {"tokens_per_second": 9000.0, "peak_bytes": 2e9, "loss": 2.5, "held_out_loss": 2.25}
    settings = {"machine": {"gpu": "one"}, "steps": 5}
    parts = [{names[2]: {**found, "loss": 3.5}, names[0]: {"error": "no memory"}}, {names[1]: found, names[0]: found}]
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for path, results in zip(paths, [*parts, {names[1]: found}], strict=True):
        path.write_text(json.dumps({**settings, "results": results}))
    assert end_to_end.merged(paths[:2]) == {
        **settings,
        "results": {**dict.fromkeys(names, found), **{names[2]: parts[0][names[2]]}},
    }
    command = [
        sys.executable,
        end_to_end.__file__,
        "--merge",
        *map(str, paths[:2]),
        f"--output={tmp_path / 'all.json'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[2:] == [
        f"| {name} | 9,000 | 2.0 GB | {loss} | 2.250 | - |"
        for name, loss in zip(names, ("2.500", "2.500", "3.500"), strict=True)
    ]
    assert json.loads((tmp_path / "all.json").read_text()) == end_to_end.merged(paths[:2])
    with pytest.raises(ValueError, match="is in another report, too"):
        end_to_end.merged(paths)
    paths[2].write_text(json.dumps({**settings, "steps": 6, "results": {}}))
    with pytest.raises(ValueError, match="steps is 6, but 5 in"):
        end_to_end.merged(paths)
