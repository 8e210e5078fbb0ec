"""What saving an optimizer costs: GPU memory, the time of a save, the stall of one that goes on in the background.

Writes JSON with the machine, versions and commit, and prints the table:
``python benchmarks/checkpoint.py --output FILE``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fused_optim import FusedAdamW
from step import Shapes, llama_shapes, machine, make_params, synchronize, write

MASTERS: dict[str, dict[str, Any]] = {
    "16-bit remainders": {"store_param_remainders": True},
    "FP32 masters": {},
}
WRITERS = 8  # threads, each with a file of its own
WARMUP, STEPS = 3, 20
GB = 1e9


@dataclass(frozen=True)
class Form:
    name: str
    checkpoint_format: str
    checkpoint_device: str | None = None


FORMS = [
    Form("unscaled", "unscaled"),
    Form("unscaled, cpu", "unscaled", "cpu"),
    Form("native", "native"),
]


@dataclass
class Result:
    """Seconds and bytes. "lost" is what training lost to the save that goes on in the background, stall included."""

    name: str
    written_bytes: int
    gpu_bytes_above_resident: int
    state_dict_s: float
    save_s: float
    stall_s: float
    background_s: float
    step_ms: float
    step_ms_during_save: float
    steps_during_save: int
    lost_s: float


# --- measuring --------------------------------------------------------------------------------------------------


def first_shapes(params: int) -> Shapes:
    """Those of Llama 3.2 1B of which not more than ``params`` elements come together."""
    taken: Shapes = []
    for shape in llama_shapes():
        if sum(map(numel, taken)) + numel(shape) <= params:
            taken.append(shape)
    return taken


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


@contextmanager
def empty_folder(parent: Path) -> Iterator[Path]:
    """A folder that is deleted at once: the checkpoints are large."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def seconds(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    synchronize(device)
    start = time.perf_counter()
    value = function()
    synchronize(device)
    return time.perf_counter() - start, value


def measure_sync(optimizer: FusedAdamW, device: torch.device, folder: Path) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    resident = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    converting, state = seconds(optimizer.state_dict, device)
    writing, _ = seconds(lambda: dcp.save({"optimizer": state}, storage_writer=writer(folder)), device)
    return {
        "gpu_bytes_above_resident": torch.cuda.max_memory_allocated(device) - resident if on_gpu else 0,
        "state_dict_s": converting,
        "save_s": converting + writing,
        "written_bytes": sum(file.stat().st_size for file in folder.iterdir()),
    }


def writer(folder: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(folder, thread_count=WRITERS, sync_files=False)


def measure_async(optimizer: FusedAdamW, device: torch.device, folder: Path) -> dict[str, Any]:
    before = statistics.median(seconds(optimizer.step, device)[0] for _ in range(STEPS))

    def start_save() -> Future[Any]:
        return dcp.async_save({"optimizer": optimizer.state_dict()}, storage_writer=writer(folder))

    stall, pending = seconds(start_save, device)
    start, during = time.perf_counter(), []
    while not pending.done():
        during.append(seconds(optimizer.step, device)[0])
    background = time.perf_counter() - start
    pending.result()
    return {
        "stall_s": stall,
        "background_s": background,
        "step_ms": 1e3 * before,
        "step_ms_during_save": 1e3 * statistics.median(during) if during else float("nan"),
        "steps_during_save": len(during),
        "lost_s": stall + sum(during) - before * len(during),
    }


def measure(masters: str, form: Form, state: torch.dtype, shapes: Shapes, device: torch.device, parent: Path) -> Result:
    params = make_params(shapes, torch.bfloat16, device, sharded=False)
    where = {"checkpoint_format": form.checkpoint_format, "checkpoint_device": form.checkpoint_device}
    optimizer = FusedAdamW(params, exp_avg_dtype=state, exp_avg_sq_dtype=state, **MASTERS[masters], **where)
    for _ in range(WARMUP):
        optimizer.step()
    found: dict[str, Any] = {"name": f"{masters}, {form.name}"}
    for part in (measure_sync, measure_async):
        with empty_folder(parent) as folder:
            found |= part(optimizer, device, folder)
        gc.collect()
    return Result(**found)


# --- reporting --------------------------------------------------------------------------------------------------


def table(results: list[Result]) -> str:
    head = f"{'':<34}{'written':>10}{'GPU peak':>10}{'save':>9}{'stall':>9}{'lost':>9}{'step':>10}{'during':>10}"
    lines = [head]
    for r in results:
        sizes = f"{r.written_bytes / GB:>7.2f} GB{r.gpu_bytes_above_resident / GB:>7.2f} GB"
        times = f"{r.save_s:>7.2f} s{r.stall_s:>7.2f} s{r.lost_s:>7.2f} s"
        lines.append(f"{r.name:<34}{sizes}{times}{r.step_ms:>7.2f} ms{r.step_ms_during_save:>7.2f} ms")
    return "\n".join(lines)


def roomy_folder(needed: int) -> Path:
    """Memory, so that the disk is not what is measured; else where temporary files go."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > needed:
        return memory
    return Path(tempfile.gettempdir())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--params", type=int, default=2**31, help="elements at most")
    parser.add_argument("--state-dtype", choices=("int8", "float8_e4m3fn"), default="int8")
    parser.add_argument("--folder", type=Path, help="to write into; default: memory, if it has room")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    shapes = first_shapes(args.params)
    elements = sum(map(numel, shapes))
    if not elements:
        sys.exit(f"--params {args.params}: no tensor is that small")
    folder = args.folder or roomy_folder(needed=13 * elements)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # asynchronous saves need one for CPUs
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    report = {"machine": machine(device, args.commit), "elements": elements, "folder": str(folder), "results": []}
    print(f"{report['machine']}\n{len(shapes)} tensors, {elements:,} elements, {args.state_dtype}; files in {folder}")
    measure("FP32 masters", FORMS[0], torch.int8, [(128, 256)], device, folder)  # what only a first save does
    results = []
    for masters, form in itertools.product(MASTERS, FORMS):
        results.append(measure(masters, form, getattr(torch, args.state_dtype), shapes, device, folder))
        print(f"{results[-1].name}: {results[-1].save_s:.2f} s", file=sys.stderr, flush=True)
        report["results"] = [asdict(result) for result in results]
        write(report, args.output)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(table(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
