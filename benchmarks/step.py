"""Times one optimizer step of every contender on the same tensors, in one process, beside the copy bandwidth.

Writes JSON with the machine, versions and commit, and prints the table: ``python benchmarks/step.py --output FILE``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contenders import OURS, PEERS, Contender, available

Shapes = list[tuple[int, ...]]


def llama_shapes(layers: int = 16, vocabulary: int = 128256) -> Shapes:
    """The parameters of Llama 3.2 1B (tied embedding), fewer layers or tokens for slow machines."""
    d, kv, hidden = 2048, 512, 8192
    block = [(d,), (d, d), (kv, d), (kv, d), (d, d), (d,), (hidden, d), (hidden, d), (d, hidden)]
    return [(vocabulary, d), *(block * layers), (d,)]


def shard_of_64(shapes: Shapes) -> Shapes:
    """What rank 0 of 64 holds of them, sharded on dim 0."""
    return [(-(-shape[0] // 64), *shape[1:]) for shape in shapes]


WORKLOADS: dict[str, Callable[[torch.device], Shapes]] = {
    "llama-1b": lambda device: llama_shapes() if device.type == "cuda" else llama_shapes(2, 4096),
    "llama-1b-shard": lambda device: shard_of_64(llama_shapes()),
    "2000-small": lambda device: [(64, 256)] * 2000,
}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], Any], device: torch.device, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each of ``repeats`` calls on the device (on the CPU: wall clock), and on the host until done.

    GPU calls are enqueued one after the other, as in a training loop: the device does not wait for the host unless the
    host is the slower one.
    """
    synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)] if device.type == "cuda" else []
    host = []
    for call in range(repeats):
        if marks:
            marks[call].record()
        start = time.perf_counter()
        function()
        host.append(1e3 * (time.perf_counter() - start))
    if not marks:
        return host, host
    marks[-1].record()
    synchronize(device)
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)], host


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a large device-to-device copy."""
    elements = 2**30 if device.type == "cuda" else 2**26
    source, target = torch.empty(2, elements, device=device).unbind(0)
    times = timed(lambda: target.copy_(source), device, 12)[0]
    return 2 * 4 * elements / (statistics.median(times[2:]) * 1e-3)


def make_params(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    params = [(0.02 * torch.randn(shape, device=device)).to(dtype).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = (1e-3 * torch.randn(param.shape, device=device)).to(dtype)
    return params


def resident_bytes(optimizer: Any) -> int | None:
    return optimizer.state_bytes() if hasattr(optimizer, "state_bytes") else None


def measure(contender: Contender, shapes: Shapes, device: torch.device, repeats: int) -> dict[str, Any]:
    """Medians over ``repeats`` steps after three that warm up."""
    params = make_params(shapes, contender.dtype, device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    optimizer = contender.build(params)
    for _ in range(3):
        optimizer.step()
    synchronize(device)
    memory = {}
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        optimizer.step()
        synchronize(device)
        numel = sum(param.numel() for param in params)
        memory["state_bytes_per_param"] = (held - before) / numel
        memory["temporary_bytes_per_param"] = (torch.cuda.max_memory_allocated(device) - held) / numel
    elif (held := resident_bytes(optimizer)) is not None:
        memory["state_bytes_per_param"] = held / sum(param.numel() for param in params)
    device_ms, host_ms = timed(optimizer.step, device, repeats)
    return {"device_ms": device_ms, "host_ms": host_ms, **memory}


def run_workload(
    shapes: Shapes, contenders: Sequence[Contender], device: torch.device, rounds: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Rounds interleave the contenders, so that drifts of the machine hit all alike."""
    results: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for contender in contenders:
            try:
                sample = measure(contender, shapes, device, repeats)
            except Exception as error:  # a peer that fails must not hide the others' results
                results[contender.name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                continue
            kept = results.setdefault(contender.name, {**sample, "device_ms": [], "host_ms": []})
            kept["device_ms"] += sample["device_ms"]
            kept["host_ms"] += sample["host_ms"]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return results


def summarize(
    samples: dict[str, dict[str, Any]], shapes: Shapes, contenders: Sequence[Contender], bandwidth: float
) -> list[dict[str, Any]]:
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    rows = []
    for contender in contenders:
        sample = samples[contender.name]
        row: dict[str, Any] = {"name": contender.name, "moved_bytes_per_param": contender.moved}
        if "error" in sample:
            rows.append({**row, "error": sample["error"]})
            continue
        row["ms"] = statistics.median(sample["device_ms"])
        row["host_ms"] = statistics.median(sample["host_ms"])
        if contender.moved:
            row["share_of_copy"] = contender.moved * numel / (row["ms"] * 1e-3) / bandwidth
        rows.append({**row, **{k: v for k, v in sample.items() if k.endswith("per_param")}})
    return rows


def machine(device: torch.device, commit: str) -> dict[str, Any]:
    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    facts["commit"] = commit or output("git", "rev-parse", "--short", "HEAD")
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["driver"] = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1]
    else:
        facts["cpu"] = next(
            (line.split(":")[1].strip() for line in output("lscpu").splitlines() if "Model name" in line), ""
        )
        facts["threads"] = torch.get_num_threads()
    return facts


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'optimizer':<56} {'ms':>8} {'host ms':>8} {'of copy':>8} {'state B':>8} {'temp B':>8}"]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['name']:<56} {row['error']}")
            continue
        share = f"{100 * row['share_of_copy']:.1f}%" if "share_of_copy" in row else "-"
        memory = [
            f"{row[k]:8.2f}" if k in row else f"{'-':>8}"
            for k in ("state_bytes_per_param", "temporary_bytes_per_param")
        ]
        lines.append(f"{row['name']:<56} {row['ms']:8.3f} {row['host_ms']:8.3f} {share:>8} {memory[0]} {memory[1]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    contenders = [c for c in (*OURS, *PEERS) if available(c, device) and args.only in c.name]
    report: dict[str, Any] = {
        "machine": machine(device, args.commit),
        "copy_bytes_per_s": copy_bandwidth(device),
        "workloads": {},
    }
    print(f"{report['machine']}\ncopy: {report['copy_bytes_per_s'] / 1e12:.3f} TB/s")
    for name in args.workloads:
        shapes = WORKLOADS[name](device)
        samples = run_workload(shapes, contenders, device, args.rounds, args.repeats)
        report["workloads"][name] = summarize(samples, shapes, contenders, report["copy_bytes_per_s"])
        print(f"\n{name}: {len(shapes)} tensors\n{table(report['workloads'][name])}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
