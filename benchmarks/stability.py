"""Trains a small byte-level GPT for long, under disturbances, with every state format: does any of them end elsewhere?

Held-out losses of each format, compared with those of FP32 AdamW's seeds, which go through the same:

* undisturbed;
* learning-rate spikes: ten times the rate for three steps, every 500 steps;
* gradient spikes: gradients times 1e4 in one step, every 500 steps, without clipping;
* rare gradients: the embedding has gradients in one step of 200;
* no gradients: the first layer's are zero for a fifth of the run, and come back.

    python benchmarks/stability.py --output FILE
    python benchmarks/stability.py --steps 20 --corpus-bytes 100000    # a trial
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quality import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Run,
    Task,
    held_out_loss,
    loss_runs,
    mean_loss,
    read_sources,
    scheduler,
    training_batch,
)
from step import machine

BETA2 = 0.95
EVERY, RARE = 500, 200
Gradients = Callable[[nn.Module, int, int], None]  # of a model, in a step, of so many


def spikes(model: nn.Module, step: int, steps: int) -> None:
    if step % EVERY == EVERY - 1:
        for param in model.parameters():
            param.grad.mul_(1e4)


def rare(model: nn.Module, step: int, steps: int) -> None:
    if step % RARE:
        for param in parts(model, "embed"):
            param.grad.zero_()


def silent(model: nn.Module, step: int, steps: int) -> None:
    if 2 * steps <= 5 * step < 3 * steps:
        for param in parts(model, "blocks.0."):
            param.grad.zero_()


def parts(model: nn.Module, name: str) -> list[nn.Parameter]:
    found = [param for key, param in model.named_parameters() if name in key]
    assert found, f"the model has no {name}"
    return found


def rate(step: int, spiked: bool) -> float:
    return 10.0 if spiked and step % EVERY >= EVERY - 3 else 1.0


# Name: what happens to gradients, and whether the learning rate has spikes.
SCENARIOS: dict[str, tuple[Gradients | None, bool]] = {
    "undisturbed": (None, False),
    "learning-rate spikes": (None, True),
    "gradient spikes": (spikes, False),
    "rare gradients": (rare, False),
    "no gradients": (silent, False),
}


def train(task: Task, run: Run, disturb: Gradients | None, spiked: bool) -> dict[str, Any]:
    model = task.model(run.seed, run.dtype)
    optimizer = run.optimizer(model.parameters(), lr=LEARNING_RATE, betas=(0.9, BETA2), weight_decay=WEIGHT_DECAY)
    schedule = scheduler(optimizer, task.steps)
    for step in range(task.steps):
        windows = training_batch(task.corpus, run.seed, step, task.batch, task.context + 1).to(task.device)
        model.zero_grad()
        mean_loss(model, windows).backward()
        if disturb is not None:
            disturb(model, step, task.steps)
        usual = [group["lr"] for group in optimizer.param_groups]
        for group, lr in zip(optimizer.param_groups, usual):
            group["lr"] = lr * rate(step, spiked)
        optimizer.step()
        for group, lr in zip(optimizer.param_groups, usual):
            group["lr"] = lr
        schedule.step()
    finite = all(bool(param.isfinite().all()) for param in model.parameters())
    return {"format": run.name, "seed": run.seed, "held_out_loss": held_out_loss(task, model), "finite": finite}


def table(rows: Sequence[dict[str, Any]]) -> str:
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    lines = [f"{'held-out loss, nats per byte':<46}" + "".join(f"{name:>22}" for name in scenarios)]
    for name in dict.fromkeys(row["format"] for row in rows):
        cells = []
        for scenario in scenarios:
            losses = [row["held_out_loss"] for row in rows if (row["format"], row["scenario"]) == (name, scenario)]
            cells.append(" to ".join(dict.fromkeys(f"{loss:.3f}" for loss in (min(losses), max(losses)))))
        lines.append(f"{name:<46}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--corpus-bytes", type=int, default=20_000_000)
    parser.add_argument("--seeds", type=int, default=3, help="of FP32")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    corpus, held_out = read_sources(args.corpus_bytes)
    task = Task(device, args.steps, args.width, args.layers, args.batch, args.context, corpus, held_out)
    ours = [run for run in loss_runs(args.seeds) if run.name.startswith(("FP32", "FusedAdamW"))]
    report: dict[str, Any] = {
        "machine": machine(torch.device(args.device, 0) if args.device == "cuda" else device, args.commit),
        "options": {key: value for key, value in vars(args).items() if key not in ("output", "commit")},
        "parameters": sum(param.numel() for param in task.model(0, torch.float32).parameters()),
        "losses": [],
    }
    for scenario in args.scenarios:
        started, one = time.perf_counter(), partial(train, task)
        report["losses"] += [{"scenario": scenario, **one(run, *SCENARIOS[scenario])} for run in ours]
        print(f"{scenario}: {time.perf_counter() - started:.0f} s", flush=True)
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report["losses"]))


if __name__ == "__main__":
    main()
