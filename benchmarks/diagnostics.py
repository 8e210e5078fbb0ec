"""Time of ``optimizer.diagnostics()``, in milliseconds and in steps of the same parameters.

    python benchmarks/diagnostics.py [--device cuda] [--output diagnostics.json]

On a GPU the parameters are those of a 1.2 B model, on a CPU two layers of it and a small vocabulary. The time is that
of the whole call, the report on the host included.
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
from step import WORKLOADS, machine, write

CHOICES = {
    "FP32 parameters and states": {"dtype": torch.float32},
    "16-bit remainder, int8 states": {"state_dtype": "int8"},
    "8-bit remainder, FP8 states": {"state_dtype": "fp8", "master_bits": 24},
    "no masters, BF16 states": {"state_dtype": "bf16", "master_bits": 0},
}


def median(work: Callable[[], object], device: str, repeats: int) -> float:
    """Seconds, after one call that warms up."""
    times = []
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure(shapes: list[tuple[int, ...]], device: str, repeats: int, choice: dict[str, object]) -> dict[str, float]:
    options = {"dtype": torch.bfloat16, **choice}
    dtype = options.pop("dtype")
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    optimizer = FusedAdamW(params, lr=1e-4, **options)
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    step = median(optimizer.step, device, repeats)
    looked = median(optimizer.diagnostics, device, repeats)
    return {"step_ms": 1e3 * step, "diagnostics_ms": 1e3 * looked, "steps": looked / step}


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
        "choices": {},
    }
    for name, choice in CHOICES.items():
        report["choices"][name] = measure(shapes, options.device, options.repeats, choice)
        print(name, report["choices"][name])
    write(report, options.output)


if __name__ == "__main__":
    main()
