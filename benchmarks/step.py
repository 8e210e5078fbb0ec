"""Times one optimizer step of every contender on the same tensors, in one process, and the copy bandwidth.

Writes JSON with the machine, versions and commit, and prints the table: ``python benchmarks/step.py --output FILE``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from contenders import OURS, PEERS, Contender, obstacle

Shapes = list[tuple[int, ...]]

PACKAGES = ("torch", "triton", "flashoptim", "torchao", "bitsandbytes", "transformer_engine", "deepspeed")
WARMUP = 3  # steps: states are created, kernels tuned and compiled


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
    "2000-dtensors": lambda device: [(64, 256)] * 2000,
    "tiny": lambda device: [(128, 256), (256,)] * 4,
    "tiny-dtensors": lambda device: [(128, 256), (256,)] * 4,
}
# As DTensors on a mesh of one rank: the host's work without any communication.
SHARDED = {"2000-dtensors", "tiny-dtensors"}
TRIALS = {"tiny", "tiny-dtensors"}  # only on request


# --- measuring --------------------------------------------------------------------------------------------------


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
    source, target = torch.ones(2, elements, device=device).unbind(0)
    times = timed(lambda: target.copy_(source), device, 12)[0]
    return 2 * 4 * elements / (statistics.median(times[2:]) * 1e-3)


def make_params(shapes: Shapes, dtype: torch.dtype, device: torch.device, sharded: bool) -> list[Tensor]:
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (1,)) if sharded else None

    def normal(shape: tuple[int, ...], scale: float) -> Tensor:
        values = (scale * torch.randn(shape, device=device)).to(dtype)
        return values if mesh is None else distribute_tensor(values, mesh, [Shard(0)])

    params = [normal(shape, 0.02).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = normal(param.shape, 1e-3)
    return params


def host_bytes(params: Sequence[Tensor], optimizer: Any) -> int:
    """Bytes of parameters, gradients and states, where no allocator counts them."""
    tensors = [*params, *(param.grad for param in params)]
    if hasattr(optimizer, "state_bytes"):
        states = optimizer.state_bytes()
    else:
        tensors += getattr(optimizer, "masters", [])
        kept = (value for state in optimizer.state.values() for value in state.values())
        states = sum(value.nbytes for value in kept if isinstance(value, Tensor))  # steps may be plain numbers
    return states + sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def measure(
    contender: Contender, shapes: Shapes, device: torch.device, repeats: int, sharded: bool = False
) -> dict[str, Any]:
    """Times of ``repeats`` steps, and the bytes held after and taken during one. "state" is all but parameters and
    gradients, "allocated" is everything."""
    on_gpu = device.type == "cuda"
    empty = torch.cuda.memory_allocated(device) if on_gpu else 0
    params = make_params(shapes, contender.dtype, device, sharded)
    numel = sum(param.numel() for param in params)
    bare = torch.cuda.memory_allocated(device) - empty if on_gpu else 2 * numel * contender.dtype.itemsize
    optimizer = contender.build(params)
    for _ in range(WARMUP):
        optimizer.step()
    synchronize(device)
    held = torch.cuda.memory_allocated(device) - empty if on_gpu else host_bytes(params, optimizer)
    sample = {"allocated_bytes_per_param": held / numel, "state_bytes_per_param": (held - bare) / numel}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        optimizer.step()
        synchronize(device)
        sample["temporary_bytes_per_param"] = (torch.cuda.max_memory_allocated(device) - empty - held) / numel
    device_ms, host_ms = timed(optimizer.step, device, repeats)
    return {"device_ms": device_ms, "host_ms": host_ms, **sample}


def run_round(
    contenders: Sequence[Contender], results: dict[str, dict[str, Any]], sample: Callable[[Contender], dict[str, Any]]
) -> None:
    """Adds one sample of each contender. One that fails keeps its error, and is not tried again."""
    for contender in contenders:
        kept = results.setdefault(contender.name, {"rounds": []})
        if "error" in kept:
            continue
        try:
            kept["rounds"].append(sample(contender))
            outcome = f"{statistics.median(kept['rounds'][-1]['device_ms']):.3f} ms"
        except Exception as error:  # a peer that fails must not hide the others' results
            outcome = kept["error"] = f"{type(error).__name__}: {error}"[:300]
        print(f"{contender.name}: {outcome}", file=sys.stderr, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# --- reporting --------------------------------------------------------------------------------------------------


def summarize(contender: Contender, result: dict[str, Any], numel: int, bandwidth: float) -> dict[str, Any]:
    row: dict[str, Any] = {"name": contender.name, "moved_bytes_per_param": contender.moved}
    row["copy_bound_ms"] = 1e3 * contender.moved * numel / bandwidth
    if "error" in result:
        return {**row, "error": result["error"]}
    rounds = result["rounds"]
    for key, source in (("ms", "device_ms"), ("host_ms", "host_ms")):
        row[key] = statistics.median(itertools.chain.from_iterable(each[source] for each in rounds))
    row["ms_of_rounds"] = [statistics.median(each["device_ms"]) for each in rounds]
    row["share_of_copy"] = row["copy_bound_ms"] / row["ms"]
    return row | {key: value for key, value in rounds[-1].items() if key.endswith("per_param")}


def machine(device: torch.device, commit: str) -> dict[str, Any]:
    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    facts["packages"] = dict(filter(lambda item: item[1], ((name, version_of(name)) for name in PACKAGES)))
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


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


COLUMNS = {
    "ms": ("ms", "{:.3f}"),
    "host ms": ("host_ms", "{:.3f}"),
    "of copy": ("share_of_copy", "{:.1%}"),
    "alloc B": ("allocated_bytes_per_param", "{:.2f}"),
    "state B": ("state_bytes_per_param", "{:.2f}"),
    "temp B": ("temporary_bytes_per_param", "{:.2f}"),
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'optimizer':<44}" + "".join(f"{title:>9}" for title in COLUMNS)]
    for row in rows:
        cells = (form.format(row[key]) if key in row else "-" for key, form in COLUMNS.values())
        lines.append(f"{row['name']:<44}" + (row.get("error") or "".join(f"{cell:>9}" for cell in cells)))
    return "\n".join(lines)


def write(report: dict[str, Any], path: Path | None) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def able(contenders: Sequence[Contender], device: torch.device, workload: str) -> list[Contender]:
    """Those that can run a workload. The others are named, with the reason."""
    obstacles = {each.name: obstacle(each, device, workload in SHARDED) for each in contenders}
    for name, reason in obstacles.items():
        if reason:
            print(f"{workload}: skipped {name}: {reason}", flush=True)
    return [each for each in contenders if not obstacles[each.name]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=[w for w in WORKLOADS if w not in TRIALS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10, help="steps timed in each round")
    parser.add_argument("--only", default="", help="contenders whose name this regular expression matches")
    parser.add_argument("--skip", default="$^", help="none whose name this one matches")
    parser.add_argument("--threads", type=int, help="of CPU optimizers")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    if SHARDED.intersection(args.workloads):
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    contenders = [
        contender
        for contender in (*OURS, *PEERS)
        if re.search(args.only, contender.name) and not re.search(args.skip, contender.name)
    ]
    bandwidth = copy_bandwidth(device)
    report: dict[str, Any] = {"machine": machine(device, args.commit), "copy_bytes_per_s": bandwidth, "workloads": {}}
    print(f"{report['machine']}\ncopy: {bandwidth / 1e12:.3f} TB/s")
    for name in args.workloads:
        shapes, sharded = WORKLOADS[name](device), name in SHARDED
        sample = partial(measure, shapes=shapes, device=device, repeats=args.repeats, sharded=sharded)
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        results: dict[str, dict[str, Any]] = {}
        there = able(contenders, device, name)
        for number in range(args.rounds):
            # Every other round backwards, so that drifts of the machine hit all alike.
            run_round(there[:: 1 - 2 * (number % 2)], results, sample)
            rows = [summarize(contender, results[contender.name], numel, bandwidth) for contender in there]
            report["workloads"][name] = rows
            write(report, args.output)  # every time, since a peer may crash the process
        print(f"\n{name}: {len(shapes)} tensors, {numel:,} elements\n{table(rows)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
