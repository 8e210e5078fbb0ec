"""What saves cost training, and how long loads take: Checkpointer and ``dcp.async_save`` with torch's stagers.

A model with the shapes of Llama 3.2 1B is trained in BF16, eagerly or compiled; every way of saving saves several times
while training goes on. Loads are measured first. ``python benchmarks/checkpoint.py --output DIR`` writes
DIR/checkpoint.json, after every save again, and prints the tables. ``--device cpu --small`` is a trial.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.fsdp import fully_shard

from fused_optim import FusedAdamW, load_optimizer_checkpoint
from fused_optim.checkpoint import Checkpointer, PinnedStager
from llama import llama_1b, small_llama
from step import machine, synchronize, write

FORMATS: dict[str, Any] = {
    "exp_avg_dtype": torch.int8,
    "exp_avg_sq_dtype": torch.int8,
}
WARMUP = 4  # steps
PASSES = ("eager", "compiled")
GB = 1e9


@dataclass
class Save:
    """Seconds and bytes of one save. ``lost``: what training lost to it in all, the call included.

    ``step``: the mean of the steps before and after it.
    """

    way: str
    form: str
    passes: str  # "eager" or "compiled"
    number: int  # of the saves by this way; 0: allocating memory before the first
    call_s: float
    lost_s: float
    step_s: float  # without a save
    steps: int  # that were made meanwhile, all of them counted in ``lost``
    written_after_s: float
    gpu_bytes_above_training: int
    host_bytes_above_before: int
    written_bytes: int
    each_step_s: list[float]  # from the call on


@dataclass
class Load:
    way: str
    form: str
    seconds: float
    gpu_bytes_above_resident: int


# --- training ---------------------------------------------------------------------------------------------------


class Training:
    """A model and its optimizer, and steps over random text."""

    def __init__(self, args: argparse.Namespace, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.device = device
        with device:
            self.model: nn.Module = (small_llama if args.small else llama_1b)().bfloat16()
        if args.fsdp:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        if "compiled" in args.passes:
            self.model.compile()
        self.optimizer = FusedAdamW(self.model.parameters(), lr=1e-5, **FORMATS)
        shape = (1, 129) if args.small else (args.batch, 2049)
        vocabulary = self.model.embedding.num_embeddings
        self.tokens = torch.randint(vocabulary, shape, device=device)

    def steps(
        self,
        steps: int,
        first: Callable[[], Any] = lambda: None,
        between: Callable[[], Any] = lambda: None,
        is_done: Callable[[], bool] = lambda: True,
    ) -> list[float]:
        """The seconds that each of so many steps takes, and of more until ``is_done``.

        The first one takes what comes ``first``, too, for which the device has nothing left to do. Afterwards the host
        queues a step while the device makes the one before: it waits for that, as loops do that print the loss.
        """
        synchronize(self.device)
        marks = [self._mark()]
        first()
        while len(marks) <= steps or not is_done():
            self.model(self.tokens).backward()
            between()
            self.optimizer.step()
            self.optimizer.zero_grad()
            marks.append(self._mark())
            if isinstance(marks[-2], torch.cuda.Event):
                marks[-2].synchronize()
        synchronize(self.device)
        return [_between(earlier, later) for earlier, later in pairwise(marks)]

    def _mark(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(earlier: torch.cuda.Event | float, later: torch.cuda.Event | float) -> float:
    if isinstance(earlier, float) or isinstance(later, float):
        return float(later) - float(earlier)
    return earlier.elapsed_time(later) / 1e3


def passes_that_are(passes: str) -> AbstractContextManager[Any]:
    """Of a model that was compiled, or not."""
    return torch.compiler.set_stance("force_eager") if passes == "eager" else nullcontext()


class HostMemory:
    """The most that this process has in memory while it is entered."""

    def __enter__(self) -> HostMemory:
        self.before = self.peak = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- ways to save -------------------------------------------------------------------------------------------------


class AsyncSave:
    """``dcp.async_save`` with a stager; what is copied in the background is waited for before the next step."""

    def __init__(self, stager: Callable[[Training], Any] | None, device: str | None = None) -> None:
        self._make_stager, self._device = stager, device
        self.first = 1
        self.pending: Any = None

    def open(self, training: Training, form: str, folder: Path) -> None:
        training.optimizer.checkpoint_format, training.optimizer.checkpoint_device = form, self._device
        self._training, self._folder, self._number = training, folder, 0
        self._stager = self._make_stager(training) if self._make_stager else None

    def save(self) -> None:
        self._number += 1
        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        writer = dcp.FileSystemWriter(self._folder / str(self._number), thread_count=8, sync_files=False)
        state = {"model": model, "optimizer": optimizer}
        if self._stager is not None and torch.__version__ < "2.13" and isinstance(self._stager, DefaultStager):
            self._stager = self._make_stager(self._training)  # torch 2.11 has closed it
        self.pending = dcp.async_save(state, storage_writer=writer, async_stager=self._stager)

    def before_step(self) -> None:
        if isinstance(self.pending, AsyncSaveResponse) and not isinstance(self._stager, PinnedStager):
            self.pending.staging_completion.result()

    @property
    def future(self) -> Future[Any]:
        return self.pending.upload_completion if isinstance(self.pending, AsyncSaveResponse) else self.pending

    def done(self) -> bool:
        return self.future.done()

    def close(self) -> None:
        self.future.result()
        self.pending = self._stager = None
        self._training.optimizer.checkpoint_device = None


class Checkpoints:
    """Checkpointer; if ``prepares``, there is a "save" before the first that only allocates memory."""

    def __init__(self, prepares: bool) -> None:
        self.first = 0 if prepares else 1
        self._number = self.first - 1

    def open(self, training: Training, form: str, folder: Path) -> None:
        options: dict[str, Any] = {"keep": 1, "format": form, "sigterm": False}
        self._checkpointer = Checkpointer(training.model, training.optimizer, folder, **options)
        self._preparing: Future[None] | None = None

    def save(self) -> None:
        self._number += 1
        if self._number:
            self._checkpointer.save(self._number)
        else:
            self._preparing = self._checkpointer.prepare()

    def before_step(self) -> None:
        pass

    def done(self) -> bool:
        prepared = self._preparing is None or self._preparing.done()
        return prepared and all(save.done() for _, save in self._checkpointer._saves)

    def close(self) -> None:
        self._checkpointer.close()


def pinned(in_background: bool) -> Callable[[Training], DefaultStager]:
    return lambda _: DefaultStager(StagingOptions(True, False, in_background, True))


WAYS: dict[str, Callable[[], Any]] = {
    "Checkpointer": lambda: Checkpoints(prepares=False),
    "Checkpointer, prepared": lambda: Checkpoints(prepares=True),
    "async_save, PinnedStager": lambda: AsyncSave(lambda t: PinnedStager(t.optimizer), "stager"),
    "async_save": lambda: AsyncSave(None),
    "async_save, torch's pinned": lambda: AsyncSave(pinned(in_background=False)),
    "async_save, torch's in background": lambda: AsyncSave(pinned(in_background=True)),
}
ON_GPUS = {"async_save, torch's pinned", "async_save, torch's in background"}


# --- measuring --------------------------------------------------------------------------------------------------


def measure_saves(
    name: str, form: str, passes: str, training: Training, args: argparse.Namespace, folder: Path
) -> Iterator[Save]:
    way = WAYS[name]()
    on_gpu = training.device.type == "cuda"
    training.steps(WARMUP)
    gc.collect()  # torch.compile leaves what Python would look through later: a second, in whatever step that comes
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = mean(training.steps(args.steps))
    usual = torch.cuda.max_memory_allocated() if on_gpu else 0
    way.open(training, form, folder)
    for number in range(way.first, args.saves + 1):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        call = 0.0

        def save() -> None:
            nonlocal call
            started = time.perf_counter()
            way.save()
            call = time.perf_counter() - started

        with HostMemory() as host:
            taken = training.steps(args.steps, save, way.before_step, way.done)  # slower as long as files are written
        above = torch.cuda.max_memory_allocated() - usual if on_gpu else 0
        after = mean(training.steps(args.steps))
        step = (before + after) / 2
        lost = sum(taken) - len(taken) * step
        sizes = above, host.peak - host.before, bytes_in(folder)
        yield Save(name, form, passes, number, call, lost, step, len(taken), sum(taken), *sizes, taken)
        before = after
    way.close()


def bytes_in(folder: Path) -> int:
    """Of the newest checkpoint, if there is one."""
    folders = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    if not folders:
        return 0
    newest = folders[-1]
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())


def load_verified(training: Training, form: str, folder: Path, verify: bool = True) -> None:
    options: Any = {"format": form, "sigterm": False}
    checkpointer = Checkpointer(training.model, training.optimizer, folder, **options)
    assert checkpointer.load_latest(verify=verify) is not None


def load_unverified(training: Training, form: str, folder: Path) -> None:
    load_verified(training, form, folder, verify=False)


def load_optimizer_alone(training: Training, form: str, folder: Path) -> None:
    state, path = {"model": training.model.state_dict()}, next(folder.iterdir())
    dcp.load(state, checkpoint_id=path)
    load_optimizer_checkpoint(training.model, training.optimizer, path, verify=False)


def load_as_documented(training: Training, form: str, folder: Path) -> None:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=next(folder.iterdir()))
    set_state_dict(
        training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


LOADS: dict[str, Callable[[Training, str, Path], None]] = {
    "Checkpointer, every byte verified": load_verified,
    "Checkpointer, every byte verified, again": load_verified,
    "Checkpointer": load_unverified,
    "Checkpointer, again": load_unverified,
    "dcp.load, load_optimizer_checkpoint": load_optimizer_alone,
    "dcp.load, set_state_dict": load_as_documented,
}


def measure_loads(form: str, args: argparse.Namespace, device: torch.device, folder: Path) -> Iterator[Load]:
    """Of the checkpoint that is there, into objects that were just built."""
    for name in args.loads:
        training = Training(args, device, seed=1)
        training.optimizer.checkpoint_format = form
        training.optimizer.initialize_state()
        synchronize(device)
        resident = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        LOADS[name](training, form, folder)
        synchronize(device)
        taken = time.perf_counter() - started
        above = torch.cuda.max_memory_allocated() - resident if device.type == "cuda" else 0
        yield Load(name, form, taken, above)
        del training
        free(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- reporting --------------------------------------------------------------------------------------------------


def title(save: Save) -> str:
    return f"{save.way}, {save.passes}, {save.form}, {save.number}"


def save_table(saves: list[Save]) -> str:
    lines = [f"{'':<46}{'call':>9}{'lost':>9}{'written':>10}{'GPU':>9}{'host':>9}{'steps of':>11}"]
    for s in saves:
        sizes = f"{s.gpu_bytes_above_training / GB:>6.2f} GB{s.host_bytes_above_before / GB:>6.2f} GB"
        times = f"{s.call_s:>7.3f} s{s.lost_s:>7.3f} s{s.written_after_s:>8.2f} s"
        lines.append(f"{title(s):<46}{times}{sizes}{1e3 * s.step_s:>8.1f} ms")
    return "\n".join(lines)


def load_table(loads: list[Load]) -> str:
    lines = [f"{'':<56}{'load':>9}{'GPU':>9}"]
    for each in loads:
        name = f"{each.way}, {each.form}"
        lines.append(f"{name:<56}{each.seconds:>7.2f} s{each.gpu_bytes_above_resident / GB:>6.2f} GB")
    return "\n".join(lines)


@contextmanager
def empty_folder(parent: Path) -> Iterator[Path]:
    """A folder that is deleted at once: the checkpoints are large."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def roomy_folder(needed: int) -> Path:
    """Memory, so that the disk is not what is measured; else where temporary files go."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > needed:
        return memory
    return Path(tempfile.gettempdir())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a model of 3 M parameters")
    parser.add_argument("--fsdp", action="store_true", help="parameters are DTensors, on a mesh of one rank")
    parser.add_argument("--passes", nargs="*", choices=PASSES, default=["eager"], help="forward and backward")
    parser.add_argument("--batch", type=int, default=4, help="texts of 2048 tokens")
    parser.add_argument("--steps", type=int, default=10, help="after each save, at least")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--forms", nargs="*", choices=("native", "unscaled"), default=["native", "unscaled"])
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS), help="none without names")
    parser.add_argument("--folder", type=Path, help="to write into; default: memory, if it has room")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path, help="folder for checkpoint.json")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # asynchronous saves need one for CPUs
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    report: dict[str, Any] = {"machine": machine(device, args.commit), "fsdp": args.fsdp, "loads": [], "saves": []}
    output = args.output and args.output / "checkpoint.json"
    training = Training(args, device)
    elements = sum(param.numel() for param in training.model.parameters())
    parent = args.folder or roomy_folder(needed=3 * 15 * elements)
    report |= {"elements": elements, "folder": str(parent)}
    print(f"{report['machine']}\n{elements:,} elements; files in {parent}", flush=True)
    if args.loads:
        loads = []
        for each in loads_of_all_forms(training, args, parent):
            loads.append(each)
            print(f"{each.way}, {each.form}: {each.seconds:.2f} s", file=sys.stderr)
            report["loads"].append(asdict(each))
            write(report, output)
        print(load_table(loads), flush=True)
    saves = []
    for save in saves_of_all_ways(training, args, parent):
        saves.append(save)
        print(f"{title(save)}: call {save.call_s:.3f} s, lost {save.lost_s:.3f} s", file=sys.stderr)
        report["saves"].append(asdict(save))
        write(report, output)
    print(save_table(saves), flush=True)
    dist.destroy_process_group()


def saves_of_all_ways(training: Training, args: argparse.Namespace, parent: Path) -> Iterator[Save]:
    ways = [name for name in args.ways if name not in ON_GPUS or training.device.type == "cuda"]
    for passes, name, form in product(args.passes, ways, args.forms):
        with passes_that_are(passes), empty_folder(parent) as folder:
            yield from measure_saves(name, form, passes, training, args, folder)
        free(training.device)


def loads_of_all_forms(training: Training, args: argparse.Namespace, parent: Path) -> Iterator[Load]:
    with passes_that_are("eager"):
        training.steps(1)  # there are states
    for form in args.forms:
        with empty_folder(parent) as folder:
            with Checkpointer(training.model, training.optimizer, folder, format=form, sigterm=False) as checkpointer:
                checkpointer.save(1)
            del checkpointer
            yield from measure_loads(form, args, training.device, folder)


if __name__ == "__main__":
    main()
