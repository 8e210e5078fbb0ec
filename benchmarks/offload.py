"""Steps with states in host memory: against what the link could carry, and during a backward pass.

Measures the link between GPU and host memory, in one direction and in both at once; then steps with resident and with
offloaded states by format, on the parameters of Llama 3.2 1B; then training steps of that model, where gradient release
updates parameters during the backward pass. Takes about a minute on an H200, and 15 GB of host memory:
``python benchmarks/offload.py --output FILE``. A trial: ``python benchmarks/offload.py --device cpu --small``, where
states are in host memory anyway.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_optim import FusedAdamW, enable_gradient_release
from fused_optim.compat import transformer_engine
from fused_optim.memory.host_memory import host_zeros
from llama import llama_1b, small_llama
from step import llama_shapes, machine, make_params, synchronize, timed, write

CHUNK = 32 << 20  # bytes of a copy
WARMUP = 2
INT8 = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
FORMATS: dict[str, dict[str, Any]] = {
    "FP32, FP32 masters": {"master_weights": True},
    "FP32, 16-bit remainders": {},
    "BF16, 16-bit remainders": {
        "exp_avg_dtype": "bfloat16",
        "exp_avg_sq_dtype": "bfloat16",
    },
    "int8, 16-bit remainders": INT8,
}


# --- the link ---------------------------------------------------------------------------------------------------------


def link(device: torch.device, size: int) -> dict[str, float]:
    """Bytes per second and direction of copies in chunks: to the device, from it, and both at once."""
    streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else [None, None]
    host = host_zeros((2, size // CHUNK, CHUNK), torch.uint8)
    staged = [torch.zeros(CHUNK, dtype=torch.uint8, device=device) for _ in range(2)]

    def copy(ways: Sequence[int]) -> None:
        for chunk in range(size // CHUNK):
            for way in ways:
                source, target = (host[way, chunk], staged[way])[:: 1 - 2 * way]
                with torch.cuda.stream(streams[way]):
                    target.copy_(source, non_blocking=True)
        synchronize(device)

    def rate(ways: Sequence[int]) -> float:
        copy(ways)
        return size / (1e-3 * min(timed(lambda: copy(ways), device, 5)[1]))

    return {"to_device_bytes_per_s": rate([0]), "to_host_bytes_per_s": rate([1]), "both_ways_bytes_per_s": rate([0, 1])}


# --- steps alone ------------------------------------------------------------------------------------------------------


def step_of(
    options: dict[str, Any], shapes: Sequence[tuple[int, ...]], device: torch.device, repeats: int
) -> dict[str, Any]:
    params = make_params(list(shapes), torch.bfloat16, device, sharded=False)
    bare = allocated(device)
    optimizer = (transformer_engine.FusedAdam if "master_weights" in options else FusedAdamW)(params, **options)
    for _ in range(WARMUP):
        optimizer.step()
    reset_peak(device)
    device_ms, host_ms = timed(optimizer.step, device, repeats)
    summary = optimizer.summary()
    return {
        "ms": statistics.median(device_ms),
        "host_ms": statistics.median(host_ms),
        "ms_of_steps": device_ms,
        "host_bytes": summary["host_bytes"],
        "device_bytes": summary["device_bytes"],
        "peak_beyond_params_bytes": peak(device) - bare,
    }


def steps(device: torch.device, small: bool, repeats: int, bandwidth: float) -> list[dict[str, Any]]:
    """A row for each format and share; ``bound_ms``: what the link takes for the bytes, both ways at once."""
    shapes = llama_shapes(1, 2048) if small else llama_shapes()
    rows = []
    for name, options in FORMATS.items():
        for fraction in (0.0, 0.5, 1.0) if name.startswith("int8") else (0.0, 1.0):
            offloading = {"offload_states": True, "offload_fraction": fraction} if fraction else {}
            row = {"name": name, "fraction": fraction, **step_of({**options, **offloading}, shapes, device, repeats)}
            if fraction:
                row["bound_ms"] = 1e3 * row["host_bytes"] / bandwidth
                row["times_bound"] = row["ms"] / row["bound_ms"]
            rows.append(row)
            print({key: value for key, value in row.items() if key != "ms_of_steps"}, flush=True)
            free(device)
    return rows


# --- training ---------------------------------------------------------------------------------------------------------


def training(device: torch.device, small: bool, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of forward and backward pass and step; without a step, with resident and with offloaded states."""
    rows = []
    for name, offload, release in (
        ("no step", False, False),
        ("resident", False, False),
        ("offloaded", True, False),
        ("offloaded, gradient release", True, True),
    ):
        torch.manual_seed(0)
        with device:
            model = (small_llama() if small else llama_1b()).to(torch.bfloat16)
            tokens = torch.randint(1000, (1, 65) if small else (4, 2049))
        optimizer = FusedAdamW(model.parameters(), lr=1e-5, offload_states=offload, **INT8)
        if release:
            enable_gradient_release(model, optimizer)
        run = iteration(model, tokens, None if name == "no step" else optimizer)
        for _ in range(WARMUP):
            run()
        reset_peak(device)
        times = timed(run, device, repeats)[0]
        row = {"name": name, "ms": statistics.median(times), "ms_of_steps": times, "peak_bytes": peak(device)}
        rows.append(row)
        print({key: value for key, value in row.items() if key != "ms_of_steps"}, flush=True)
        del model, optimizer, run
        free(device)
    return rows


def iteration(model: torch.nn.Module, tokens: Tensor, optimizer: FusedAdamW | None) -> Callable[[], None]:
    def run() -> None:
        model(tokens).backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()

    return run


# --- memory -----------------------------------------------------------------------------------------------------------


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a trial of a few seconds")
    parser.add_argument("--repeats", type=int, default=6, help="steps timed")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    report: dict[str, Any] = {"machine": machine(device, args.commit), "chunk_bytes": CHUNK}
    report["link"] = link(device, CHUNK * (2 if args.small else 64))
    print(report["machine"], report["link"], flush=True)
    write(report, args.output)
    report["steps"] = steps(device, args.small, args.repeats, report["link"]["both_ways_bytes_per_s"])
    write(report, args.output)
    report["training"] = training(device, args.small, args.repeats)
    write(report, args.output)


if __name__ == "__main__":
    main()
