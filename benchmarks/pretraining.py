"""Trains a GPT of 124 M parameters on 200 M tokens of the text that a machine holds, with each optimizer in turn.

    python benchmarks/pretraining.py prepare --cache DIR                        # text, tokenizer, tokens
    python benchmarks/pretraining.py queue --gpus 4 --seconds 560 --cache DIR --output DIR --runs fp32 int8 ...
    python benchmarks/pretraining.py train int8 --cache DIR --output DIR        # one run; goes on where it was stopped
    python benchmarks/pretraining.py train fp32 muon-torch muon-bf16 muon-int8 --steps 200 --batch 32 --seconds 100 ...
    python benchmarks/pretraining.py errors --cache DIR --output DIR            # of the updates, by type of weight
    python benchmarks/pretraining.py report DIR --output DIR/summary.json       # a table of all runs

A trial of a few seconds:

    python benchmarks/pretraining.py queue --gpus 0 --device cpu --text examples benchmarks --vocabulary 384 \\
        --layers 2 --width 64 --batch 4 --context 64 --steps 20 --evaluations 2 --runs fp32 int8

Text, initial values and order of the windows are the same in every run of a seed. On GPUs sums of attention's backward
pass have no fixed order, so losses of two equal runs differ in their last digits.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corpus import SAMPLE_BYTES, Source, Text, machine_folders, prepare, stopwatch
from fused_optim import FusedAdamW
from peer_formats import PEER_FORMATS, RoundedAdamW
from pretraining_runs import RUNS, Trainee, type_of
from quality import STATE_DTYPES, UNMEASURED, Scratch, rate_share
from step import machine, synchronize

ERROR_BETA2S = (0.95, 0.99, 0.999)
ERRORS = "errors"  # in the place of a run's name
STOPPED = 75  # exit status of a run that was stopped and can go on
WARM_STEPS = 3  # that are not timed: they compile

# --- text on the device -------------------------------------------------------------------------------------------


class Windows:
    """Windows of ``length + 1`` tokens. Each epoch cuts the text at another offset and shuffles the windows."""

    def __init__(self, tokens: np.ndarray, length: int, batch: int, seed: int, device: torch.device) -> None:
        self.length, self.batch, self.seed, self.device = length, batch, seed, device
        self.count = (len(tokens) - length) // length
        self.steps = self.count // batch  # of an epoch
        if not self.steps:
            raise SystemExit(f"{len(tokens)} tokens are too few for a batch of {batch} windows of {length + 1}")
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.epoch, self.starts = -1, torch.empty(0)

    def __getitem__(self, step: int) -> Tensor:
        epoch, at = divmod(step, self.steps)
        if epoch != self.epoch:
            random = np.random.default_rng((self.seed, epoch))
            offset = random.integers(self.length)
            self.epoch = epoch
            self.starts = torch.from_numpy(offset + self.length * random.permutation(self.count)).to(self.device)
        return self._at(self.starts[at * self.batch : (at + 1) * self.batch])

    def spread(self, batches: int) -> Iterator[Tensor]:
        """Spread evenly over the text."""
        starts = np.linspace(0, len(self.tokens) - self.length - 1, batches * self.batch, dtype=np.int64)
        for part in torch.from_numpy(starts).to(self.device).split(self.batch):
            yield self._at(part)

    def _at(self, starts: Tensor) -> Tensor:
        return self.tokens[starts[:, None] + torch.arange(self.length + 1, device=self.device)].long()


# --- training -----------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Of a run. ``losses``: of every step so far; ``held_out``: pairs of steps done and a loss."""

    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # tokens per second between two evaluations
    seconds: dict[str, float] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)  # after how many steps

    def add(self, what: str, seconds: float) -> None:
        self.seconds[what] = round(self.seconds.get(what, 0.0) + seconds, 2)


class Training:
    """One run: its trainee, its text, and what it leaves in ``args.output``."""

    def __init__(self, name: str, args: argparse.Namespace, text: Text) -> None:
        self.name, self.args, self.text, self.run = name, args, text, RUNS[name]
        self.device = device_of(args)
        self.train = Windows(text.train, args.context, args.batch, self.run.seed, self.device)
        self.held_out = Windows(text.held_out, args.context, args.batch, 0, self.device)
        self.empty = allocated(self.device)
        self.trainee = Trainee(self.run, self.device, (args.layers, args.width, args.vocabulary), args.learning_rate)
        if self.device.type == "cuda":
            self.trainee.model.compile_parts()
        self.progress, self.held_bytes, self.stopped = Progress(), 0, False
        self.result, self.partial = args.output / f"{name}.json", args.output / f"{name}.partial.json"
        self.checkpoint = (args.checkpoints or args.output) / f"{name}.checkpoint"
        self.evaluated = set(np.linspace(0, args.steps, args.evaluations + 1, dtype=int)[1:].tolist())
        self.load()
        self.step, self.losses = len(self.progress.losses), []  # the losses since the last pause, on the device
        self.timed_from, self.saved = self.step + WARM_STEPS, time.monotonic()

    def go(self) -> bool:
        """Whether it came to its end."""
        self.lap = stopwatch()
        while self.step < self.args.steps and not self.stopped:
            self.advance()
            if self.step in self.evaluated or self.due() or self.stopped:
                self.pause()
        if self.stopped:
            self.write(self.partial, held_out_loss=None)
            return False
        self.write(self.result, held_out_loss=self.held_out_loss(self.args.final_batches))
        for file in (self.partial, self.checkpoint):
            file.unlink(missing_ok=True)
        return True

    def advance(self) -> None:
        self.losses.append(self.trainee.backward(self.train[self.step]))
        self.trainee.step(rate_share(self.step, self.args.steps))
        self.step += 1
        if self.step == self.timed_from:
            synchronize(self.device)
            self.held_bytes = allocated(self.device) - self.empty
            self.progress.add("first steps", self.lap())

    def due(self) -> bool:
        return bool(self.args.save_every) and time.monotonic() - self.saved > self.args.save_every

    def pause(self) -> None:
        """Waits for the device; evaluates and saves where that is due."""
        self.progress.losses += torch.stack(self.losses).tolist()
        seconds, self.losses = self.lap(), []
        self.progress.add("training", seconds)
        if self.step > self.timed_from and self.step in self.evaluated:
            tokens = (self.step - self.timed_from) * self.args.batch * self.args.context
            self.progress.rates.append(tokens / seconds)
        if self.step in self.evaluated:
            self.progress.held_out.append((self.step, self.held_out_loss(self.args.evaluation_batches)))
            print(f"{self.name}: step {self.step}, {self.state()}", flush=True)
            self.progress.add("evaluating", self.lap())
        if self.args.save_every and (self.stopped or self.due()):
            self.save()
            self.saved = time.monotonic()
            self.progress.add("saving", self.lap())
        self.timed_from = max(self.timed_from, self.step)

    def held_out_loss(self, batches: int) -> float:
        """With gradients on, so that the graphs which training compiled serve here, too."""
        return (
            torch.stack([self.trainee.model(batch).detach() for batch in self.held_out.spread(batches)]).mean().item()
        )

    def state(self) -> str:
        progress = self.progress
        rate = f", {progress.rates[-1]:,.0f} tokens/s" if progress.rates else ""
        return f"loss {progress.losses[-1]:.4f}, held out {progress.held_out[-1][1]:.4f}{rate}"

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state = {"options": options_of(self.args), "text": self.text.facts["fingerprint"]}
        state |= {"trainee": self.trainee.state_dict(), "progress": vars(self.progress)}
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)

    def load(self) -> None:
        """What an earlier process left, if it left anything."""
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if (state["options"], state["text"]) != (options_of(self.args), self.text.facts["fingerprint"]):
            raise SystemExit(
                f"{self.checkpoint} is of other options or another text: remove it, or choose another --output"
            )
        self.trainee.load_state_dict(state["trainee"])
        self.progress = Progress(**state["progress"])
        self.progress.resumed.append(len(self.progress.losses))
        print(f"{self.name}: goes on at step {len(self.progress.losses)}", flush=True)

    def write(self, file: Path, held_out_loss: float | None) -> None:
        args, progress, run = self.args, self.progress, self.run
        per_step, parameters = args.batch * args.context, sum(weight.numel() for weight in self.trainee.weights)
        facts: dict[str, Any] = {
            "name": self.name,
            "label": run.label,
            "seed": run.seed,
            "machine": {**machine(self.device, args.commit), "cores": len(os.sched_getaffinity(0))},
            "options": options_of(args),
            "text": self.text.facts,
            "parameters": parameters,
            "steps": len(progress.losses),
            "trained_tokens": len(progress.losses) * per_step,
            "distinct_tokens": len(self.text.train),
            "epochs": len(progress.losses) / self.train.steps,
            "held_out_loss": held_out_loss,
            "training": thinned(progress.losses, args.points),
            "held_out": progress.held_out,
            "tokens_per_s": statistics.median(progress.rates) if progress.rates else None,
            "seconds": progress.seconds,
            "resumed": progress.resumed,
            "held_bytes_per_param": self.held_bytes / parameters,
            "finite": all(bool(param.isfinite().all()) for param in plain(self.trainee.params)),
        }
        if self.device.type == "cuda":
            facts["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        write_json(file, facts)


def plain(params: Sequence[Tensor]) -> list[Tensor]:
    return [param.dequantize() if hasattr(param, "recipe") else param for param in params]


def thinned(losses: Sequence[float], points: int) -> list[tuple[int, float]]:
    """Means of as many runs of steps: pairs of the last of these steps, and a loss."""
    ends = sorted({*np.linspace(0, len(losses), min(points, len(losses)) + 1, dtype=int).tolist()})
    return [(end, statistics.fmean(losses[start:end])) for start, end in itertools.pairwise(ends)]


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def device_of(args: argparse.Namespace) -> torch.device:
    return torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)


def write_json(file: Path, facts: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(facts, indent=1) + "\n")
    new.replace(file)


def train(args: argparse.Namespace) -> int:
    start, longest = time.monotonic(), 0.0
    for name in args.runs:
        begun = time.monotonic()
        if begun - start + longest > args.seconds:
            print(f"{name}: no time is left")
            continue
        if obstacle := RUNS[name].obstacle(device_of(args)):
            raise SystemExit(f"{name}: {obstacle}")
        if (args.output / f"{name}.json").exists():
            print(f"{name}: is there already")
            continue
        args.output.mkdir(parents=True, exist_ok=True)
        training = Training(name, args, text_of(args))
        before = signal.signal(signal.SIGTERM, lambda *_, training=training: setattr(training, "stopped", True))
        try:
            if not training.go():
                return STOPPED
        finally:
            signal.signal(signal.SIGTERM, before)
        print(f"{name}: {json.loads(training.result.read_text())['held_out_loss']:.4f}", flush=True)
        del training
        gc.collect()
        longest = max(longest, time.monotonic() - begun)
    return 0


# --- errors of the updates ----------------------------------------------------------------------------------------


class Types:
    """Sums and maxima of parameters by their type."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        kinds = [type_of(name) for name, _ in model.named_parameters()]
        self.names = sorted(set(kinds))
        self.numbers = torch.tensor([self.names.index(kind) for kind in kinds], device=device)

    def norms(self, parts: Sequence[Tensor]) -> Tensor:
        squares = torch.stack(torch._foreach_norm(parts)).square()
        return torch.zeros(len(self.names), device=squares.device).index_add_(0, self.numbers, squares).sqrt()

    def largest(self, parts: Sequence[Tensor]) -> Tensor:
        maxima = torch.stack(torch._foreach_norm(parts, float("inf")))
        return torch.zeros(len(self.names), device=maxima.device).scatter_reduce_(0, self.numbers, maxima, "amax")


@dataclass
class Shadow:
    """A format fed the gradients of a run that it has no influence on; errors and largest updates by type."""

    format: str
    beta2: float
    optimizer: torch.optim.Optimizer
    errors: list[Tensor] = field(default_factory=list)
    largest: list[Tensor] = field(default_factory=list)

    def rows(self, types: Sequence[str]) -> Iterator[dict[str, Any]]:
        errors, largest = torch.stack(self.errors).T.tolist(), torch.stack(self.largest).T.tolist()
        for kind, of_kind, updates in zip(types, errors, largest):
            mean = statistics.fmean(of_kind[round(UNMEASURED * len(of_kind)) :])
            row = {"format": self.format, "beta2": self.beta2, "type": kind, "error": mean}
            yield {**row, "largest_update": max(updates)}


def shadows_of(params: list[Tensor]) -> Iterator[Shadow]:
    for beta2 in ERROR_BETA2S:
        common: dict[str, Any] = {"lr": 1.0, "betas": (0.9, beta2), "weight_decay": 0.0}
        for name, dtype in {"FP32": torch.float32, **STATE_DTYPES}.items():
            yield Shadow(name, beta2, FusedAdamW(params, **common, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype))
        for name, (round_m, round_v) in PEER_FORMATS.items():
            yield Shadow(name, beta2, RoundedAdamW(params, **common, round_m=round_m, round_v=round_v))


def measure_errors(args: argparse.Namespace, text: Text) -> list[dict[str, Any]]:
    """Both moments in the format: relative RMS differences to torch's FP32 AdamW, means of all but the first steps."""
    device = device_of(args)
    trainee = Trainee(RUNS["fp32"], device, (args.layers, args.width, args.vocabulary), args.learning_rate)
    if device.type == "cuda":
        trainee.model.compile_parts()
    windows = Windows(text.train, args.context, args.batch, 0, device)
    types, scratch = Types(trainee.model, device), Scratch(trainee.model)
    exact = {b: torch.optim.AdamW(scratch.params, 1.0, (0.9, b), weight_decay=0.0) for b in ERROR_BETA2S}
    shadows = [*shadows_of(scratch.params)]
    parts = [param.detach() for param in scratch.params]
    for step in range(args.error_steps):
        trainee.backward(windows[step])
        for param, source in zip(scratch.params, trainee.params):
            param.grad = source.grad
        references = {b: scratch.update(each).detach().clone() for b, each in exact.items()}
        norms = {b: types.norms(split_like(reference, parts)) for b, reference in references.items()}
        for shadow in shadows:
            flat = scratch.update(shadow.optimizer).detach()
            shadow.largest.append(types.largest(parts))
            difference = types.norms(split_like(flat - references[shadow.beta2], parts))
            shadow.errors.append(difference / norms[shadow.beta2])
        trainee.step(rate_share(step, args.error_steps))
    return [row for shadow in shadows for row in shadow.rows(types.names)]


def split_like(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    return [*flat.split([part.numel() for part in parts])]


def errors(args: argparse.Namespace) -> int:
    lap, text = stopwatch(), text_of(args)
    rows = measure_errors(args, text)
    facts = {"machine": machine(device_of(args), args.commit), "options": options_of(args), "text": text.facts}
    facts |= {"steps": args.error_steps, "seconds": lap()}
    write_json(args.output / f"{ERRORS}.json", {**facts, "errors": rows})
    print(error_table(rows), flush=True)
    return 0


# --- a queue of runs on several GPUs ------------------------------------------------------------------------------


class Queue:
    """Each worker takes the first run that fits into the time left: as long as the longest one took so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started = args, time.monotonic()
        self.pending, self.lock = list(args.runs), threading.Lock()
        self.longest = {ERRORS: 0.0, "train": args.estimate}
        self.outcomes: dict[str, str] = {}
        self.children: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()

    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.started)

    def take(self) -> str | None:
        with self.lock:
            for name in self.pending:
                if self.left() > 0 and (self.args.begin_all or self.left() >= 1.02 * self.longest[kind(name)]):
                    self.pending.remove(name)
                    return name
        return None

    def work(self, gpu: int) -> None:
        while name := self.take():
            started = time.monotonic()
            self.outcomes[name] = outcome = self.execute(name, gpu)
            seconds = time.monotonic() - started
            with self.lock:
                if outcome == "done":
                    self.longest[kind(name)] = max(seconds, self.longest[kind(name)])
            print(f"{name}: {outcome} after {seconds:.0f} s on GPU {gpu}, {self.left():.0f} s left", flush=True)

    def execute(self, name: str, gpu: int) -> str:
        command = [ERRORS] if name == ERRORS else ["train", name]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        device = visible[gpu] if len(visible) > gpu and visible[gpu] else str(gpu)
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": device} if self.args.gpus else {})
        with (self.args.output / f"{name}.log").open("ab") as log:
            arguments = [sys.executable, __file__, *command, *as_arguments(self.args)]
            child = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment)
            self.children.put(child)
            try:
                code = child.wait(timeout=max(0.0, self.left()))
            except subprocess.TimeoutExpired:
                child.terminate()  # it saves, and says so by its exit status
                code = child.wait()
        return {0: "done", STOPPED: "stopped"}.get(code, f"failed ({code})")

    def stop(self) -> None:
        self.args.seconds = 0.0
        while not self.children.empty():
            self.children.get().terminate()


def kind(name: str) -> str:
    return ERRORS if name == ERRORS else "train"


def run_queue(args: argparse.Namespace) -> int:
    args.output.mkdir(parents=True, exist_ok=True)
    line = Queue(args)
    facts = text_of(args).facts
    print(
        f"text: {facts['tokens']} tokens of {facts['files']} files, {facts['bytes']} bytes, {facts['seconds']} s",
        flush=True,
    )
    before = signal.signal(signal.SIGTERM, lambda *_: line.stop())
    workers = [threading.Thread(target=line.work, args=(gpu,)) for gpu in range(max(1, args.gpus))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    signal.signal(signal.SIGTERM, before)
    print(f"not begun: {', '.join(line.pending) or 'none'}")
    print(report_table(summary_of([args.output])))
    return int(any(outcome.startswith("failed") for outcome in line.outcomes.values()))


# --- reporting ----------------------------------------------------------------------------------------------------

SUMMARIZED = ("name", "label", "seed", "held_out_loss", "tokens_per_s", "held_bytes_per_param", "peak_bytes", "steps")
SUMMARIZED += ("trained_tokens", "distinct_tokens", "epochs", "finite")

# What runs of the same seed are compared with, too, by how their names begin.
REFERENCES = {
    "products": ("int8", "bf16_products"),
    "muon": ("muon-torch", "torch_muon"),
    "remainder8": ("fp32", "fp32_of_its_seed"),
}


def results_in(folders: Sequence[Path], ending: str = "json") -> list[dict[str, Any]]:
    """Of finished runs, or of stopped ones ("partial.json"), in the order of RUNS."""
    files = [folder / f"{name}.{ending}" for folder in folders for name in RUNS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def summary_of(folders: Sequence[Path]) -> dict[str, Any]:
    """All runs of one text, model and number of steps, and how far they end from FP32's first seed."""
    found, stopped = results_in(folders), results_in(folders, "partial.json")
    if not found:
        return {"runs": []}
    first = found[0]
    for other in found:
        refuse_difference("steps", other, first)
    for other in (*found, *stopped):
        refuse_difference("parameters", other, first)
        if other["text"]["fingerprint"] != first["text"]["fingerprint"]:
            raise SystemExit(f"{other['name']} and {first['name']} have learned different texts")
    losses = {run["name"]: run["held_out_loss"] for run in found}
    rows = []
    for run in found:
        row = row_of(run) | percent(run["held_out_loss"], losses.get("fp32"), "fp32")
        for beginning, (reference, what) in REFERENCES.items():
            name = f"{reference}-seed{run['seed']}" if run["seed"] else reference
            if run["name"].startswith(beginning) and run["name"] != name:
                row |= percent(run["held_out_loss"], losses.get(name), what)
        rows.append(row)
    facts = {key: first[key] for key in ("machine", "options", "text", "parameters", "trained_tokens", "epochs")}
    facts |= {"runs": rows, "stopped": stopped_rows(stopped, found)}
    measured = [json.loads((f / f"{ERRORS}.json").read_text()) for f in folders if (f / f"{ERRORS}.json").exists()]
    return facts | ({"errors": measured[0]["errors"]} if measured else {})


def refuse_difference(key: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    if one[key] != other[key]:
        raise SystemExit(f"{one['name']} and {other['name']} differ in {key}: {one[key]}, {other[key]}")


def row_of(run: dict[str, Any]) -> dict[str, Any]:
    return {key: run[key] for key in SUMMARIZED if key in run} | {"commit": run["machine"]["commit"]}


def stopped_rows(stopped: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Their last evaluations, and how far these are from FP32's first seed after as many steps."""
    exact = next((dict(map(tuple, run["held_out"])) for run in found if run["name"] == "fp32"), {})
    rows = []
    for run in stopped:
        if run["held_out"]:
            steps, loss = run["held_out"][-1]
            row = row_of(run) | {"evaluated_steps": steps, "evaluated_loss": loss}
            row |= {"evaluated_loss_fp32": exact[steps]} if steps in exact else {}
            rows.append(row | percent(loss, exact.get(steps), "fp32"))
    return rows


def percent(loss: float, other: float | None, name: str) -> dict[str, float]:
    """By how much a loss is above another one, or below it: figures on pages have no sign."""
    if other is None:
        return {}
    gap = 100 * (loss / other - 1)
    return {f"percent_{'above' if gap > 0 else 'below'}_{name}": abs(gap)}


def report_table(summary: dict[str, Any]) -> str:
    lines = [f"{'run':<64}{'seed':>5}{'held out':>10}{'gap':>9}{'tokens/s':>11}{'bytes/param':>13}{'peak GB':>9}"]
    for row in summary["runs"]:
        rate = f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "-"
        line = f"{row['label']:<64}{row['seed']:>5}{row['held_out_loss']:>10.4f}{signed_gap(row):>9}{rate:>11}"
        lines.append(f"{line}{row['held_bytes_per_param']:>13.2f}{row.get('peak_bytes', 0) / 1e9:>9.1f}")
    for row in summary.get("stopped", ()):
        name = f"{row['label']}, stopped, after {row['evaluated_steps']} steps"
        lines.append(f"{name:<64}{row['seed']:>5}{row['evaluated_loss']:>10.4f}{signed_gap(row):>9}")
    return "\n".join(lines)


def signed_gap(row: dict[str, Any]) -> str:
    below, above = (row.get(f"percent_{side}_fp32", 0.0) for side in ("below", "above"))
    return f"{above - below:+.3f}%"


def error_table(rows: Sequence[dict[str, Any]]) -> str:
    types = list(dict.fromkeys(row["type"] for row in rows))
    lines = [f"{'error of the update':<48}{'beta2':>6}" + "".join(f"{kind:>15}" for kind in types)]
    cells = {(row["format"], row["beta2"], row["type"]): row["error"] for row in rows}
    for name, beta2 in dict.fromkeys((row["format"], row["beta2"]) for row in rows):
        lines.append(f"{name:<48}{beta2:>6}" + "".join(f"{cells[name, beta2, kind]:>15.3g}" for kind in types))
    return "\n".join(lines)


def report(args: argparse.Namespace) -> int:
    summary = summary_of(args.folders)
    print(report_table(summary))
    if "errors" in summary:
        print("", error_table(summary["errors"]), sep="\n")
    if args.output:
        write_json(args.output, summary)
    return 0


# --- the command line ---------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {  # of every command but report
    "device": "cuda" if torch.cuda.is_available() else "cpu",
    "vocabulary": 25_344,
    "max-bytes": 1_500_000_000,
    "sample-bytes": SAMPLE_BYTES,
    "layers": 12,
    "width": 768,
    "context": 1024,
    "batch": 64,
    "steps": 3072,
    "learning-rate": 1e-3,
    "points": 200,
    "evaluations": 20,
    "evaluation-batches": 4,
    "final-batches": 32,
    "error-steps": 400,
    "save-every": 60.0,
    "commit": "",
}
NOT_OF_A_RUN = ("device", "sample-bytes", "save-every", "commit", "error-steps")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Those that decide what a run computes."""
    return {key: getattr(args, key.replace("-", "_")) for key in OPTIONS if key not in NOT_OF_A_RUN}


def as_arguments(args: argparse.Namespace) -> list[str]:
    """The same options for another process."""
    given = [text for key in OPTIONS for text in (f"--{key}", str(getattr(args, key.replace("-", "_"))))]
    folders = ["--text", *map(str, args.text)] if args.text else []
    folders += ["--checkpoints", str(args.checkpoints)] if args.checkpoints else []
    return [*given, *folders, "--cache", str(args.cache), "--output", str(args.output)]


def text_of(args: argparse.Namespace) -> Text:
    folders = args.text or machine_folders()
    return prepare(Source(folders, args.vocabulary, args.max_bytes, args.sample_bytes), args.cache)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    for key, default in OPTIONS.items():
        common.add_argument(f"--{key}", type=type(default), default=default)
    common.add_argument("--text", type=Path, nargs="+", help="folders (default: those of this machine)")
    common.add_argument("--cache", type=Path, default=Path("pretraining_text"), help="folder for the tokens")
    common.add_argument("--output", type=Path, default=Path("pretraining_runs"))
    common.add_argument("--checkpoints", type=Path, help="folder for states of runs (default: that of the output)")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("prepare", parents=[common])
    one.set_defaults(command=lambda args: print(json.dumps(text_of(args).facts)))
    one = commands.add_parser("train", parents=[common])
    one.add_argument("runs", nargs="+", choices=list(RUNS))
    one.add_argument("--seconds", type=float, default=float("inf"), help="no run begins that would end later")
    one.set_defaults(command=train)
    one = commands.add_parser("errors", parents=[common])
    one.set_defaults(command=errors)
    one = commands.add_parser("queue", parents=[common])
    one.add_argument("--runs", nargs="+", choices=[*RUNS, ERRORS], default=list(RUNS))
    one.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="0: one worker, on the CPU")
    one.add_argument("--seconds", type=float, default=float("inf"), help="after which running ones are stopped")
    one.add_argument("--begin-all", action="store_true", help="also runs that will be stopped, and go on another time")
    one.add_argument("--estimate", type=float, default=0.0, help="seconds of a run, until one has been measured")
    one.set_defaults(command=run_queue)
    one = commands.add_parser("report")
    one.add_argument("folders", type=Path, nargs="+")
    one.add_argument("--output", type=Path)
    one.set_defaults(command=report)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse_args()
    sys.exit(args.command(args))
