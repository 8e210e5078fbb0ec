"""Measures how well each state format does what FP32 states do, on a byte-level GPT that learns Python source text.

1. Errors: one model trains with FP32 AdamW. Every format is fed its gradients, in an optimizer whose updates are not
   used, and each update is compared with that of FP32 states fed the same: their relative RMS difference, mean over all
   steps but the first 15%, and the largest element of any update. Also each moment alone, the other one in FP32.
2. Losses on held-out text of models trained with each format, and of several seeds of FP32 AdamW.
3. The same with quantized weights whose layers multiply in FP8, forward and backward, eager and compiled, compared with
   layers in BF16 (``--parts products``); FP32 masters and states.

    python benchmarks/quality.py --output FILE
    python benchmarks/quality.py --device cpu --steps 20 --layers 1 --width 64 --batch 4 --context 64    # a trial
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fused_optim import FusedAdamW
from fused_optim.compat import transformer_engine
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    Recipe,
    UsualLayers,
    quantize_model_,
)
from peer_formats import PEER_FORMATS, RoundedAdamW, Rounding
from step import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from byte_gpt import ByteGPT, evaluation_batches, training_batch

BETA2S = (0.999, 0.95)
TRAINING_BETA2 = 0.95  # of the run whose gradients the formats are fed
LEARNING_RATE, WEIGHT_DECAY, LARGEST_NORM = 1e-3, 0.1, 1.0
WARMUP, FINAL_LR_SHARE = 0.1, 0.1
UNMEASURED = 0.15  # share of the steps that the mean error leaves out
EVALUATION_BATCHES = 16
HEAD_WIDTH = 64

STATE_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP8": torch.float8_e4m3fn, "int8": torch.int8}
MOMENTS = ("v", "m", "both")

# --- training ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is trained, on which text and where."""

    device: torch.device
    steps: int
    width: int
    layers: int
    batch: int
    context: int
    corpus: np.ndarray = field(repr=False)
    held_out: np.ndarray = field(repr=False)

    def model(self, seed: int, dtype: torch.dtype) -> ByteGPT:
        torch.manual_seed(seed)
        return ByteGPT(self.width, self.layers, max(1, self.width // HEAD_WIDTH)).to(self.device, dtype)


def read_sources(max_bytes: int, held_out_every: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the installed Python modules to train on, and of every twentieth one, held out."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib")}
    files = sorted({path for folder in folders for path in Path(folder).rglob("*.py") if path.is_file()})
    random.Random(0).shuffle(files)  # no package is only in one of the two, none beyond max_bytes

    def read(some: Sequence[Path], limit: int) -> np.ndarray:
        text = bytearray()
        for file in some:
            if len(text) >= limit:
                break
            text += file.read_bytes()
        return np.frombuffer(bytes(text[:limit]), dtype=np.uint8)

    training = [file for i, file in enumerate(files) if i % held_out_every]
    return read(training, max_bytes), read(files[::held_out_every], max_bytes // held_out_every)


def mean_loss(model: nn.Module, windows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computed as mixed-precision training does: by copies of the parameters in ``dtype`` (default: BF16, FP32 on the
    CPU), whatever they are kept in. So runs differ by what their optimizers keep."""
    dtype = dtype or (torch.bfloat16 if windows.is_cuda else torch.float32)
    copies = {name: param if param.dtype == dtype else param.to(dtype) for name, param in model.named_parameters()}
    return torch.func.functional_call(model, copies, (windows,))


def gradients(task: Task, model: nn.Module, seed: int, dtype: torch.dtype | None = None) -> Iterator[int]:
    """Before every step is yielded, the model's gradients are those of this step's batch, clipped."""
    for step in range(task.steps):
        windows = training_batch(task.corpus, seed, step, task.batch, task.context + 1).to(task.device)
        model.zero_grad()
        mean_loss(model, windows, dtype).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        yield step


def rate_share(step: int, steps: int) -> float:
    """Of the learning rate, in a step of so many: warm-up, then a cosine."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + math.cos(math.pi * progress)) / 2


def scheduler(optimizer: Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, partial(rate_share, steps=steps))


@torch.no_grad()
def held_out_loss(task: Task, model: nn.Module, dtype: torch.dtype | None = None) -> float:
    batches = evaluation_batches(task.held_out, EVALUATION_BATCHES, task.batch, task.context + 1)
    return statistics.fmean(mean_loss(model, batch.to(task.device), dtype).item() for batch in batches)


# --- errors of the updates --------------------------------------------------------------------------------------


@dataclass
class Shadow:
    """A format fed the gradients of a run that it has no influence on. ``optimizer`` updates the scratch parameters."""

    name: str
    moments: str  # which of them have the format; the other one is FP32
    beta2: float
    optimizer: Optimizer
    errors: list[Tensor] = field(default_factory=list)
    largest: list[Tensor] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        errors, largest = torch.stack(self.errors).tolist(), torch.stack(self.largest).tolist()
        return {
            "format": self.name,
            "moments": self.moments,
            "beta2": self.beta2,
            "error": statistics.fmean(errors[round(UNMEASURED * len(errors)) :]),
            "largest_update": max(largest),
            "errors_over_time": errors[:: max(1, len(errors) // 20)],
        }


class Scratch:
    """Zero parameters, shared by all shadows: with a learning rate of 1, a step turns them into minus the update."""

    def __init__(self, model: nn.Module) -> None:
        shapes = [param.shape for param in model.parameters()]
        sizes = [shape.numel() for shape in shapes]
        self.flat = torch.zeros(sum(sizes), device=next(model.parameters()).device)
        self.params = [part.view(shape).requires_grad_() for part, shape in zip(self.flat.split(sizes), shapes)]

    def update(self, optimizer: Optimizer) -> Tensor:
        """Overwritten by the next one."""
        with torch.no_grad():
            self.flat.zero_()
        optimizer.step()
        return self.flat


def make_shadows(params: list[Tensor]) -> list[Shadow]:
    shadows = []
    for beta2 in BETA2S:
        common: dict[str, Any] = {"lr": 1.0, "betas": (0.9, beta2), "weight_decay": 0.0}
        shadows.append(Shadow("FP32", "both", beta2, FusedAdamW(params, **common)))
        for name, moments, options in our_formats():
            shadows.append(Shadow(name, moments, beta2, FusedAdamW(params, **common, **options)))
        for name, roundings in PEER_FORMATS.items():
            for moments in MOMENTS:
                options = peer_options(*roundings, moments)
                shadows.append(Shadow(name, moments, beta2, RoundedAdamW(params, **common, **options)))
    return shadows


def peer_options(round_m: Rounding, round_v: Rounding, moments: str) -> dict[str, Rounding]:
    options = {"m": {"round_m": round_m}, "v": {"round_v": round_v}}
    return options["m"] | options["v"] if moments == "both" else options[moments]


def our_formats() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, moments and options."""
    for name, dtype in STATE_DTYPES.items():
        for rounding in ("rotating", "nearest"):
            m, v = {"exp_avg_dtype": dtype}, {"exp_avg_sq_dtype": dtype}
            for moments, dtypes in zip(MOMENTS, (v, m, m | v)):
                yield f"{name}, {rounding}", moments, {**dtypes, "stochastic_rounding": rounding == "rotating"}


def measure_errors(task: Task, formats: Sequence[str] = ()) -> list[dict[str, Any]]:
    """``formats``: only these, with both moments in them."""
    model = task.model(0, torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, (0.9, TRAINING_BETA2), weight_decay=WEIGHT_DECAY, fused=True
    )
    schedule = scheduler(optimizer, task.steps)
    scratch = Scratch(model)
    exact = {
        beta2: torch.optim.AdamW(scratch.params, 1.0, (0.9, beta2), weight_decay=0.0, fused=True) for beta2 in BETA2S
    }
    shadows = make_shadows(scratch.params)
    if formats:
        shadows = [shadow for shadow in shadows if shadow.name in formats and shadow.moments == "both"]
    for _ in gradients(task, model, seed=0):
        for param, source in zip(scratch.params, model.parameters()):
            param.grad = source.grad
        references = {beta2: scratch.update(each).clone() for beta2, each in exact.items()}
        norms = {beta2: torch.linalg.vector_norm(reference) for beta2, reference in references.items()}
        for shadow in shadows:
            update = scratch.update(shadow.optimizer)
            shadow.largest.append(update.detach().abs().amax())
            difference = torch.linalg.vector_norm(update.detach() - references[shadow.beta2])
            shadow.errors.append(difference / norms[shadow.beta2])
        optimizer.step()
        schedule.step()
    return [shadow.row() for shadow in shadows]


# --- losses -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    name: str
    dtype: torch.dtype  # of the parameters
    optimizer: Callable[..., Optimizer]
    seed: int = 0


def our_run(name: str, states: torch.dtype, **options: Any) -> Run:
    kind = transformer_engine.FusedAdam if "master_weights" in options else FusedAdamW
    optimizer = partial(kind, exp_avg_dtype=states, exp_avg_sq_dtype=states, **options)
    return Run(f"FusedAdamW {name}", torch.bfloat16, optimizer)


def loss_runs(seeds: int) -> list[Run]:
    separate: dict[str, Any] = {"master_weights": True}  # only the drop-in classes have these
    split8: dict[str, Any] = {"master_bits": 24}
    return [
        *(Run("FP32", torch.float32, partial(torch.optim.AdamW, fused=True), seed) for seed in range(seeds)),
        our_run("FP32 master, FP32 states", torch.float32, **separate),
        our_run("FP32 master, BF16 states", torch.bfloat16, **separate),
        our_run("FP32 master, FP16 states", torch.float16, **separate),
        our_run("FP32 master, FP8 states", torch.float8_e4m3fn, **separate),
        our_run("FP32 master, int8 states", torch.int8, **separate),
        our_run("16-bit remainder, int8 states", torch.int8),
        our_run("8-bit remainder, FP8 states", torch.float8_e4m3fn, **split8),
        our_run("8-bit remainder, int8 states", torch.int8, **split8),
        our_run("no master, int8 states", torch.int8, master_bits=0),
        *(
            Run(name, torch.float32, partial(RoundedAdamW, round_m=round_m, round_v=round_v))
            for name, (round_m, round_v) in PEER_FORMATS.items()
        ),
    ]


def final_loss(task: Task, run: Run, beta2: float) -> float:
    model = task.model(run.seed, run.dtype)
    optimizer = run.optimizer(model.parameters(), lr=LEARNING_RATE, betas=(0.9, beta2), weight_decay=WEIGHT_DECAY)
    schedule = scheduler(optimizer, task.steps)
    for _ in gradients(task, model, run.seed):
        optimizer.step()
        schedule.step()
    return held_out_loss(task, model)


def measure_losses(task: Task, seeds: int, beta2s: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {"format": run.name, "seed": run.seed, "beta2": beta2, "held_out_loss": final_loss(task, run, beta2)}
        for run in loss_runs(seeds)
        for beta2 in beta2s
    ]


# --- products in FP8 ----------------------------------------------------------------------------------------------


RECIPES: dict[str, Recipe | None] = {
    "BF16": None,
    "FP8 weights, decoded": Float8CurrentScaling(),
    "FP8, one scale": Float8CurrentScaling(compute="fp8"),
    "FP8, one scale, delayed": Float8DelayedScaling(compute="fp8"),
    "FP8, rows, weight gradients BF16": Float8CurrentScaling(compute="fp8", activation_scaling="row"),
    "FP8, rows": Float8CurrentScaling(compute="fp8", activation_scaling="row", weight_gradients="fp8"),
    "FP8, blocks": Float8BlockScaling(compute="fp8"),
}


def product_loss(task: Task, recipe: Recipe | None, seed: int, compiled: bool) -> float:
    model = task.model(seed, torch.bfloat16)
    if recipe is not None:
        quantize_model_(model, recipe, UsualLayers())
    if compiled:
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(fullgraph=True)
    optimizer = FusedAdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, TRAINING_BETA2), weight_decay=WEIGHT_DECAY)
    schedule = scheduler(optimizer, task.steps)
    for _ in gradients(task, model, seed, torch.bfloat16):
        optimizer.step()
        schedule.step()
    return held_out_loss(task, model, torch.bfloat16)


def measure_products(task: Task, seeds: int) -> list[dict[str, Any]]:
    """Of each recipe eager and compiled; of BF16 with several seeds."""
    runs = [("BF16", seed, False) for seed in range(seeds)]
    runs += [(name, 0, compiled) for name in RECIPES if name != "BF16" for compiled in (False, True)]
    rows = []
    for name, seed, compiled in runs:
        loss = product_loss(task, RECIPES[name], seed, compiled)
        rows.append({"products": name, "seed": seed, "compiled": compiled, "held_out_loss": loss})
        print(f"{name}, seed {seed}, {'compiled' if compiled else 'eager'}: {loss:.4f}", flush=True)
    return rows


def product_table(rows: Sequence[dict[str, Any]]) -> str:
    """Each loss compared with BF16's of the same seed."""
    reference = next(row["held_out_loss"] for row in rows if row["products"] == "BF16" and row["seed"] == 0)
    lines = [f"{'held-out loss, nats per byte':<46}{'loss':>9}{'from BF16':>14}"]
    for row in rows:
        name = f"{row['products']}, {'compiled' if row['compiled'] else 'eager'}, seed {row['seed']}"
        lines.append(f"{name:<46}{row['held_out_loss']:9.4f}{row['held_out_loss'] / reference - 1:+14.2%}")
    return "\n".join(lines)


# --- reporting --------------------------------------------------------------------------------------------------


def error_table(rows: Sequence[dict[str, Any]], moments: str) -> str:
    title = {"v": "second moment (the first in FP32)", "m": "first moment (the second in FP32)", "both": "both"}[
        moments
    ]
    columns = [f"{what} {beta2}" for what in ("error", "largest") for beta2 in BETA2S]
    lines = [f"{title:<46}" + "".join(f"{column:>15}" for column in columns)]
    cells = {(row["format"], row["beta2"]): row for row in rows if row["moments"] == moments}
    for name in dict.fromkeys(name for name, _ in cells):
        values = [cells[name, beta2][key] for key in ("error", "largest_update") for beta2 in BETA2S]
        lines.append(f"{name:<46}" + "".join(f"{value:15.3g}" for value in values))
    return "\n".join(lines)


def loss_table(rows: Sequence[dict[str, Any]]) -> str:
    """One row per format; the seeds of FP32 as their smallest and largest loss."""
    beta2s = dict.fromkeys(row["beta2"] for row in rows)
    lines = [f"{'held-out loss, nats per byte':<46}" + "".join(f"{f'beta2 {beta2}':>18}" for beta2 in beta2s)]
    for name in dict.fromkeys(row["format"] for row in rows):
        cells = []
        for beta2 in beta2s:
            losses = [row["held_out_loss"] for row in rows if (row["format"], row["beta2"]) == (name, beta2)]
            cells.append(" to ".join(dict.fromkeys(f"{loss:.4f}" for loss in (min(losses), max(losses)))))
        lines.append(f"{name:<46}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--corpus-bytes", type=int, default=60_000_000)
    parser.add_argument("--seeds", type=int, default=4, help="of the FP32 runs that the losses are compared with")
    parser.add_argument("--beta2", type=float, nargs="*", default=BETA2S, help="of the runs whose losses are compared")
    parser.add_argument("--parts", nargs="*", choices=("errors", "losses", "products"), default=["errors", "losses"])
    parser.add_argument("--formats", nargs="*", default=(), help="whose errors are measured (default: all)")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    corpus, held_out = read_sources(args.corpus_bytes)
    task = Task(device, args.steps, args.width, args.layers, args.batch, args.context, corpus, held_out)
    parameters = sum(param.numel() for param in task.model(0, torch.float32).parameters())
    report: dict[str, Any] = {
        "machine": machine(torch.device(args.device, 0) if args.device == "cuda" else device, args.commit),
        "options": {key: value for key, value in vars(args).items() if key not in ("output", "commit")},
        "parameters": parameters,
        "bytes": {"training": len(corpus), "held_out": len(held_out)},
    }
    print(f"{report['machine']}\n{parameters:,} parameters, {len(corpus):,} bytes of text, {args.steps} steps")
    measures = {
        "errors": partial(measure_errors, task, args.formats),
        "losses": partial(measure_losses, task, args.seeds, args.beta2),
        "products": partial(measure_products, task, args.seeds),
    }
    for part in args.parts:
        started = time.perf_counter()
        rows = report[part] = measures[part]()
        tables = {
            "errors": lambda rows: [error_table(rows, moments) for moments in MOMENTS],
            "losses": lambda rows: [loss_table(rows)],
            "products": lambda rows: [product_table(rows)],
        }[part](rows)
        print(f"\n{part}, after {time.perf_counter() - started:.0f} s", *tables, sep="\n\n", flush=True)
        if args.output:  # after each part, so that a stopped run keeps what it has
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
