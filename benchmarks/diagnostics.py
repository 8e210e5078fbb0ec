"""Time of ``optimizer.diagnostics()``, in milliseconds and in steps of the same parameters.

    python benchmarks/diagnostics.py [--device cuda] [--output diagnostics.json]

On a GPU the parameters are those of a 1.2 B model, on a CPU two layers of it and a small vocabulary. The time is that
of the whole call, the report on the host included. ``ns_per_element``: per element that is read.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fused_optim import FusedAdamW
from fused_optim.step.diagnostics import LIMIT
from step import WORKLOADS, Shapes, machine, write

CHOICES = {
    "FP32 parameters and states": {"dtype": torch.float32},
    "16-bit remainder, int8 states": {"state_dtype": "int8"},
    "8-bit remainder, FP8 states": {"state_dtype": "fp8", "master_bits": 24},
    "no masters, BF16 states": {"state_dtype": "bf16", "master_bits": 0},
}


def timed(work: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds, and those of all CPU threads together."""
    if device == "cuda":
        torch.cuda.synchronize()
    start, cpu = time.perf_counter(), time.process_time()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - cpu


def measure(shapes: Shapes, device: str, repeats: int, choice: dict[str, object]) -> dict[str, float]:
    """Medians of steps and diagnostics that take turns, after one of each that warms up.

    Ratios: by the time of CPU threads on a CPU, which other processes lengthen less, else by the clock.
    """
    options = {"dtype": torch.bfloat16, **choice}
    dtype = options.pop("dtype")
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    optimizer = FusedAdamW(params, lr=1e-4, **options)
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    pairs = [(timed(optimizer.step, device), timed(optimizer.diagnostics, device)) for _ in range(repeats + 1)]
    steps, looks = zip(*pairs[1:], strict=True)
    (step, step_cpu), (look, look_cpu) = (map(statistics.median, zip(*each, strict=True)) for each in (steps, looks))
    found = {"step_ms": 1e3 * step, "diagnostics_ms": 1e3 * look}
    if device == "cuda":
        return {**found, "steps": look / step, "ns_per_element": 1e9 * look / elements_read(shapes)}
    found |= {"step_cpu_ms": 1e3 * step_cpu, "diagnostics_cpu_ms": 1e3 * look_cpu, "steps": look_cpu / step_cpu}
    return {**found, "ns_per_element": 1e9 * look_cpu / elements_read(shapes)}


def elements_read(shapes: Shapes) -> int:
    return sum(min(math.prod(shape), LIMIT) for shape in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    options = parser.parse_args()
    shapes = WORKLOADS["llama-1b"](torch.device(options.device))
    report = {
        "machine": machine(torch.device(options.device), options.commit),
        "device": options.device,
        "parameters": len(shapes),
        "elements": sum(map(math.prod, shapes)),
        "elements_read": elements_read(shapes),
        "choices": {},
    }
    for name, choice in CHOICES.items():
        report["choices"][name] = measure(shapes, options.device, options.repeats, choice)
        print(name, report["choices"][name], flush=True)
        write(report, options.output)


if __name__ == "__main__":
    main()
