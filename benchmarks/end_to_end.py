"""Tokens per second, peak memory and loss of whole training steps with each optimizer, and the largest batch that fits.

    python benchmarks/end_to_end.py --output end_to_end.json                               # 1.2 B parameters, one GPU
    python benchmarks/end_to_end.py --model 8b --torchrun 2 --output end_to_end_8b.json    # FSDP2 on two
    python benchmarks/end_to_end.py --device cpu --model small --steps 4 --length 64       # a trial
    python benchmarks/end_to_end.py --merge part0.json part1.json --output end_to_end.json # one report of several

A Llama with random weights learns the bytes of Python's standard library. Initial weights and batches are the same for
all. With ``--compile`` blocks are compiled, else nothing is; activations are kept, logits are computed again in the
backward pass. ``--repeats 3`` times three stretches of steps with each of ``--batch``, in the same process. What is not
installed is skipped, and the JSON says why.

Each optimizer has a process of its own, so that peaks are its own, and its result is written as soon as it is there.
With ``--only``, several GPUs can each run some of them; ``--merge`` puts their reports together.

The largest batch is searched on one GPU, by doubling and bisection: a batch fits if two whole steps do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from contenders import Contender, obstacle
from end_to_end_runs import RUNS, WARMUP, build_optimizer, set_lr
from gradient_release import give_back
from llama import SIZES, LeanLlama
from step import machine, write

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from byte_gpt import evaluation_batches, load_corpus, training_batch

INITIAL = 0.02  # standard deviation of matrices
LARGEST_NORM = 1.0
HELD_OUT = 4  # batches
LAST = 10  # steps, whose losses are averaged
UNTIMED = 3  # first steps: allocations, and what torchao compiles
LARGEST_BATCH = 1024


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="1b")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, nargs="+", default=[4], help="sequences per step and rank")
    parser.add_argument("--repeats", type=int, default=1, help="stretches of --steps steps with each batch")
    parser.add_argument("--compile", action="store_true", help="compile the model's blocks")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--only", default="", help="regular expression: the optimizers to run")
    parser.add_argument("--no-largest", action="store_true", help="leave out the search for the largest batch")
    parser.add_argument("--torchrun", type=int, default=0, metavar="RANKS", help="FSDP2 on so many devices")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one optimizer")
    parser.add_argument("--commit", default="", help="where there is no git")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+", metavar="REPORT", help="run nothing, merge reports")
    parser.add_argument("--contender", help=argparse.SUPPRESS)  # what a process of its own is to run
    args = parser.parse_args()
    if min(args.steps, args.repeats, *args.batch) < 1 or args.length < 2:
        parser.error("--steps, --repeats and --batch must be at least 1, --length at least 2")
    return args


# --- one optimizer, in this process ---------------------------------------------------------------------------------


class Training:
    """A model, its optimizer and the batches that it learns."""

    def __init__(self, args: argparse.Namespace, contender: Contender, device: torch.device) -> None:
        self.args, self.device = args, device
        self.ranks, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.corpus, self.held_out = load_corpus()
        self.model = initial_model(args.model, device)
        self.model, self.optimizer = build_optimizer(contender, self.model, lambda model: self.shard(model))
        # FSDP2 computes in BF16 by its policy; one device does so by autocast, where parameters are FP32.
        self.autocast = contender.dtype is torch.float32 and not self.sharded
        for block in self.model.blocks if args.compile else ():
            block.compile(dynamic=False)
        self.marks: list[torch.cuda.Event] = []  # before and after each step of the optimizer
        give_back(device)

    @property
    def sharded(self) -> bool:
        return bool(self.args.torchrun)

    def shard(self, model: LeanLlama) -> LeanLlama:
        if self.sharded:
            mesh = init_device_mesh(self.device.type, (self.ranks,))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(tokens.to(self.device))
        return loss

    def step(self, number: int, batch: int) -> Tensor:
        """One training step with ``batch`` sequences on each rank. Returns its loss on this rank."""
        tokens = training_batch(self.corpus, 0, number, batch * self.ranks, self.args.length + 1)
        loss = self.loss(tokens.chunk(self.ranks)[self.rank])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        set_lr(self.optimizer, min(1.0, (number + 1) / WARMUP))
        self.mark()
        self.optimizer.step()
        self.mark()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def mark(self) -> None:
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()

    def optimizer_seconds(self) -> float | None:
        """The median time of the GPU between the two marks of a step, since this was last asked."""
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        times = sorted(1e-3 * before.elapsed_time(after) for before, after in pairs)
        self.marks.clear()
        return times[len(times) // 2] if times else None

    @torch.no_grad()
    def held_out_loss(self) -> Tensor:
        batches = evaluation_batches(self.held_out, HELD_OUT, self.ranks, self.args.length + 1)
        return torch.stack([self.loss(batch.chunk(self.ranks)[self.rank]) for batch in batches]).mean()

    def fits(self, batch: int) -> bool:
        """Whether two steps do; the gradients and activations of a batch that does not are given back."""
        try:
            for number in range(2):
                self.step(number, batch)
            torch.cuda.synchronize(self.device)
            found = True
        except torch.OutOfMemoryError:
            found = False
        self.model.zero_grad(set_to_none=True)
        give_back(self.device)
        return found


def initial_model(size: str, device: torch.device) -> LeanLlama:
    """In FP32, with the same weights for every optimizer."""
    torch.manual_seed(0)
    with device:
        model = LeanLlama(*SIZES[size])
        for param in model.parameters():
            if param.dim() > 1:
                torch.nn.init.normal_(param, std=INITIAL)
    return model


def largest(fits: Callable[[int], bool], start: int, limit: int = LARGEST_BATCH) -> int:
    """The largest number up to ``limit`` that fits, 0 if 1 does not, where all below one that fits do."""
    good, bad, tried = 0, limit + 1, min(start, limit)
    while bad - good > 1:
        if fits(tried):
            good = tried
        else:
            bad = tried
        tried = min(2 * good, limit) if bad > limit and good else (good + bad) // 2
    return good


def measure(args: argparse.Namespace, contender: Contender, device: torch.device) -> dict[str, Any]:
    training = Training(args, contender, device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    losses: list[Tensor] = []
    stretches: list[dict[str, Any]] = []
    for batch in args.batch:
        for _ in range(args.repeats):
            times = []
            for _ in range(args.steps):
                started = time.perf_counter()
                losses.append(training.step(len(losses), batch))
                if cuda:
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - started)
            timed = sorted(times[UNTIMED:] or times)
            seconds = timed[len(timed) // 2]
            tokens = batch * args.length * training.ranks
            stretch = {"batch": batch, "step_s": seconds, "tokens_per_second": tokens / seconds, "steps_s": times}
            stretches.append({**stretch, "optimizer_s": training.optimizer_seconds()})
    found: dict[str, Any] = {
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
        "stretches": stretches,
    }
    found["by_batch"] = {str(batch): medians(stretches, batch) for batch in args.batch}
    found |= found["by_batch"][str(args.batch[0])]
    found["steps_s"] = stretches[0]["steps_s"]
    found["losses"] = over_ranks(torch.stack(losses)).tolist()
    found["loss"] = sum(found["losses"][-LAST:]) / len(found["losses"][-LAST:])
    found["held_out_loss"] = over_ranks(training.held_out_loss()).item()
    if cuda and not training.sharded and not args.no_largest:
        found["largest_batch"] = largest(training.fits, args.batch[0])
    return found


def medians(stretches: Sequence[dict[str, Any]], batch: int) -> dict[str, float | None]:
    """Of the stretches with a batch, by key."""
    own = [each for each in stretches if each["batch"] == batch]
    found: dict[str, float | None] = {}
    for key in ("step_s", "tokens_per_second", "optimizer_s"):
        values = sorted(each[key] for each in own if each[key] is not None)
        found[key] = values[len(values) // 2] if values else None
    return found


def over_ranks(losses: Tensor) -> Tensor:
    total = losses.float().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total


@contextmanager
def on_device(args: argparse.Namespace) -> Iterator[torch.device]:
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", "0")) if args.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.torchrun:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield device
    if args.torchrun:
        dist.destroy_process_group()


def error_in(output: str) -> str:
    """The last one that a traceback ends with: of a rank rather than what torchrun says of it."""
    found = [match["text"] for match in re.finditer(r"(?m)^(\[rank\d+\]: )?(?P<text>\S*(Error|Exception)\b.*)", output)]
    own = [text for text in found if "ChildFailedError" not in text]
    return (own or found or output.splitlines() or ["no output"])[-1][:300]


# --- all of them ----------------------------------------------------------------------------------------------------


def in_a_process(args: argparse.Namespace, name: str, result: Path) -> dict[str, Any]:
    """What a process for this optimizer alone finds, or its error: one that fails must not hide the others."""
    passed = [f"--{key}={getattr(args, key)}" for key in ("model", "steps", "repeats", "length", "device")]
    passed += ["--batch", *map(str, args.batch), *["--compile"] * args.compile]
    passed += ["--no-largest"] * args.no_largest + [f"--torchrun={args.torchrun}"] * bool(args.torchrun)
    run = ["-m", "torch.distributed.run", "--standalone"]  # on a port that is free
    ranks = [*run, f"--nproc-per-node={args.torchrun}"] if args.torchrun else []
    command = [sys.executable, *ranks, __file__, *passed, f"--contender={name}", f"--output={result}"]
    # The same for all: searching for the largest batch must not fail for fragments.
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {args.timeout:.0f} s"}
    if done.returncode or not result.exists():
        return {"error": error_in(done.stderr)}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def chosen(args: argparse.Namespace) -> dict[str, str]:
    """By name: why an optimizer cannot run here; empty if it can."""
    device = torch.device(args.device)
    names = [name for name in RUNS if re.search(args.only, name)]
    if not names:
        sys.exit(f"--only {args.only}: fits none of {', '.join(RUNS)}")
    return {name: obstacle(RUNS[name], device, bool(args.torchrun)) for name in names}


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        key: getattr(args, key) for key in ("model", "steps", "batch", "length", "repeats", "compile", "torchrun")
    }
    report: dict[str, Any] = {"machine": machine(torch.device(args.device), args.commit), **settings, "results": {}}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, reason) in enumerate(chosen(args).items()):
            started = time.perf_counter()
            result = Path(folder, f"{number}.json")
            found = {"skipped": reason} if reason else in_a_process(args, name, result)
            report["results"][name] = found
            outcome = found.get("skipped") or found.get("error") or f"{found['tokens_per_second']:,.0f} tokens/s"
            print(f"{name}: {outcome} ({time.perf_counter() - started:.0f} s)", flush=True)
            write(report, args.output)
    return report


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """One report of those that were made with the same settings, of different optimizers on machines of one kind.

    Raises ValueError for others. An optimizer that ran in one of them only may have failed in others.
    """
    reports = [json.loads(path.read_text()) for path in paths]
    results: dict[str, Any] = {}
    for path, report in zip(paths, reports, strict=True):
        for key in report.keys() - {"results"}:
            if report[key] != reports[0].get(key):
                raise ValueError(f"{path}: {key} is {report[key]!r}, but {reports[0].get(key)!r} in {paths[0]}")
        for name, found in report["results"].items():
            if "loss" in found and "loss" in results.get(name, {}):
                raise ValueError(f"{path}: {name} is in another report, too")
            if "loss" in found or name not in results:
                results[name] = found
    return {**reports[0], "results": {name: results[name] for name in RUNS if name in results}}


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = ["| optimizer | tokens/s | peak | loss | held-out loss | largest batch |", "|---|---|---|---|---|---|"]
    for name, found in results.items():
        if "loss" not in found:
            rows.append(f"| {name} | {found.get('skipped') or found['error']} |  |  |  |  |")
            continue
        peak = f"{found['peak_bytes'] / 1e9:.1f} GB" if found["peak_bytes"] else "-"
        cells = [f"{found['tokens_per_second']:,.0f}", peak, f"{found['loss']:.3f}", f"{found['held_out_loss']:.3f}"]
        rows.append(f"| {' | '.join([name, *cells, str(found.get('largest_batch', '-'))])} |")
    return "\n".join(rows)


def main() -> None:
    args = parse_args()
    if args.merge:
        report = merged(args.merge)
        write(report, args.output)
        print(table(report["results"]))
        return
    if args.contender is None:
        print(table(run_all(args)["results"]))
        return
    with on_device(args) as device:
        found = measure(args, RUNS[args.contender], device)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write(found, args.output)


if __name__ == "__main__":
    main()
