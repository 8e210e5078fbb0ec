"""Runs test bodies on several processes: one pool of workers per world size, started once and kept to the end.

``run(4, body, *args)`` calls ``body(*args)`` on four ranks and returns their results in rank order. A body is a
module-level function; its arguments and results are pickled. It may use ``mesh()``, ``device()`` and collectives. A
body that raises fails the caller on any rank's error; one that hangs fails it after ``timeout`` seconds, with every
rank's stack. The workers are then replaced. Every body begins with one thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import math
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

import fresh
import seeds


def needs_gpus(count: int) -> list[pytest.MarkDecorator]:
    """The marks of a case that runs a body over NCCL on so many ranks."""
    missing = torch.cuda.device_count() < count
    return [pytest.mark.cuda, pytest.mark.skipif(missing, reason=f"GPUs needed: {count}")]


def two_gpus(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs two GPUs, as those do that run a body over NCCL."""
    for mark in needs_gpus(2):
        test = mark(test)
    return test


def on_each_device(*gloo: Any, nccl: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
    """Cases that begin with a number of ranks, or with several, and end with where bodies run: "cpu", then "cuda".

    ``gloo``: tuples, or what ``pytest.param`` makes, such as ``each_once``: its marks are those of the case on CPUs.
    ``nccl``: the cases of GPUs. Default: those of ``gloo`` that need no more than two.
    """
    marked = [case if isinstance(case, type(pytest.param())) else pytest.param(*case) for case in gloo]
    if nccl is None:
        nccl = [case.values for case in marked if _most_ranks(case.values) <= 2]
    on_gpus = (pytest.param(*case, "cuda", marks=needs_gpus(_most_ranks(case))) for case in nccl)
    return [*(pytest.param(*case.values, "cpu", marks=case.marks) for case in marked), *on_gpus]


def long(*case: Any) -> Any:
    """A case that only ``make test-long`` has: the usual run has more ranks, and fewer."""
    return pytest.param(*case, marks=pytest.mark.long)


def _most_ranks(case: Sequence[Any]) -> int:
    return max(case[0]) if isinstance(case[0], tuple) else case[0]


class RemoteError(AssertionError):
    """A body raised or hung on some rank."""


# --- in a worker ------------------------------------------------------------------------------------------------

_device_type = "cpu"


def device() -> torch.device:
    """This rank's device."""
    return torch.device("cpu") if _device_type == "cpu" else torch.device("cuda", dist.get_rank())


_kept_groups: set[dist.ProcessGroup] = set()


def _groups() -> set[dist.ProcessGroup]:
    """All process groups of this process but the default one."""
    return {group for group in dist.distributed_c10d._world.pg_names if group is not dist.group.WORLD}


@functools.cache
def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The mesh of this shape; without a shape that of all ranks. It stays for all bodies."""
    before = _groups()
    made = init_device_mesh(_device_type, shape or (dist.get_world_size(),), mesh_dim_names=names)
    _kept_groups.update(_groups() - before)
    return made


@functools.cache
def _gloo_device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()


class _OneDevice(type):
    """Calls make groups of gloo that share this process's device, and their instances are all groups of gloo.

    A device is a thread that wakes up 100 times a second. With one of its own for each group, ten idle workers took a
    tenth of a core, and groups took twice as long to make, and four times as long to end. torch 2.15 has more options,
    which only its own constructor knows: there each group keeps a device of its own.
    """

    def __call__(
        cls, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: Any
    ) -> dist.ProcessGroupGloo:
        if others:
            return dist.ProcessGroupGloo(store, rank, size, timeout=timeout, **others)
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_gloo_device()], timeout
        return dist.ProcessGroupGloo(store, rank, size, options)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, dist.ProcessGroupGloo)


class _Gloo(metaclass=_OneDevice):
    pass


def _end_groups(keep: bool) -> None:
    """End the process groups that bodies have left behind, with their connections and threads.

    ``keep``: real packages may keep theirs for later bodies.
    """
    if keep:
        _kept_groups.update(_groups())
    for group in _groups() - _kept_groups:
        dist.destroy_process_group(group)


def shard(full: Tensor, on: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of a global tensor that every rank has; no communication."""
    return distribute_tensor(full.to(device()), on, placements, src_data_rank=None)


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """``full`` placed as ``like`` is, on the device of its local tensor."""
    if not isinstance(like, DTensor):
        return full.to(like.device)
    cut = distribute_tensor(full.cpu(), like.device_mesh, like.placements, src_data_rank=None)
    if cut._local_tensor.device == like._local_tensor.device:
        return cut
    local = cut._local_tensor.to(like._local_tensor.device)
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=full.shape, stride=full.stride())


Part = tuple[torch.Size, Tensor, Tensor]  # global shape, global indices of the local elements, their values


@functools.cache
def _local_indices(shape: torch.Size, on: DeviceMesh | None, placements: tuple[Placement, ...]) -> Tensor:
    indices = torch.arange(math.prod(shape)).view(shape)
    if on is not None:
        indices = distribute_tensor(indices, on, placements, src_data_rank=None)._local_tensor.cpu()
    return indices.flatten()


def part(tensor: Tensor) -> Part:
    """A copy of this rank's elements, and where they lie globally; :func:`join` puts the ranks' parts together."""
    on, placements, local = None, (), tensor
    if isinstance(tensor, DTensor):
        on, placements, local = tensor.device_mesh, tuple(tensor.placements), tensor._local_tensor
    return tensor.shape, _local_indices(tensor.shape, on, placements), local.detach().cpu().flatten().clone()


def _tensor(data: bytearray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


class _Pickler(pickle.Pickler):
    """Writes a plain tensor of the CPU as its bytes: torch's way, one archive for each, takes ten times as long."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.requires_grad or value.is_neg():
            return NotImplemented
        if value.layout != torch.strided or value.is_complex() or value.is_quantized:
            return NotImplemented
        data = value.contiguous().flatten().view(torch.uint8).numpy()
        return _tensor, (bytearray(data), value.dtype, value.shape)


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _serve(rank: int, connection: Connection, world_size: int, device_type: str, folder: str, port: int) -> None:
    global _device_type
    _device_type = device_type
    options: dict[str, Any] = {"backend": "gloo"}
    if device_type == "cuda":
        torch.cuda.set_device(rank)
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", rank)}
    dist.distributed_c10d.ProcessGroupGloo = _Gloo
    seeds.seed_what_is_there()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300), **options)
    gc.freeze()  # what is imported stays: bodies that collect garbage look at their own
    with Path(folder, f"stack{rank}").open("w") as stack, contextlib.suppress(EOFError):
        while True:
            body, args, timeout, keep = pickle.loads(connection.recv_bytes())
            torch.manual_seed(0)  # models that are built without a seed are the same on all ranks
            torch.set_num_threads(1)  # each time: packages set it, and sums of torch's go by it
            _end_groups(keep)  # now that every rank has answered
            faulthandler.dump_traceback_later(timeout, file=stack)
            try:
                answer = _pickled((True, body(*args)))
            except BaseException:
                answer = _pickled((False, traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(answer)


# --- in the test ------------------------------------------------------------------------------------------------


def processes() -> ForkServerContext:
    """Starts processes that have imported what workers need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(fresh.PACKAGE))
    return context


class Workers:
    """The processes of one world size."""

    def __init__(self, world_size: int, device_type: str) -> None:
        context = processes()
        self.folder = tempfile.TemporaryDirectory()
        # A FileStore looks for news every 10 ms; making a process group waits for several.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (rank, theirs, world_size, device_type, self.folder.name, self.store.port)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def start(self, body: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> None:
        keep = "integrations/" in os.environ.get("PYTEST_CURRENT_TEST", "")
        message = _pickled((body, args, timeout, keep))
        for connection in self.connections:
            connection.send_bytes(message)

    def run(self, body: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        __tracebackhide__ = True
        self.start(body, args, timeout)
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout + 1
        while len(answers) + len(errors) < len(self.connections):
            waiting = {c: r for r, c in enumerate(self.connections) if r not in answers and r not in errors}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                stacks = [f"rank {r}:\n" + Path(self.folder.name, f"stack{r}").read_text() for r in waiting.values()]
                hung = f"ranks {sorted(waiting.values())} did not finish in {timeout} s"
                raise RemoteError("\n".join([*_reports(errors), hung, *stacks]))
            for connection in ready:
                rank = waiting[connection]
                try:
                    success, answer = pickle.loads(connection.recv_bytes())
                except EOFError:
                    success, answer = False, f"the process ended: {self.processes[rank].exitcode}"
                (answers if success else errors)[rank] = answer
                if not success:  # the others may wait for this rank for ever
                    deadline = min(deadline, time.monotonic() + 5)
        if errors:
            raise RemoteError("\n".join(_reports(errors)))
        return [answers[rank] for rank in range(len(self.connections))]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _reports(errors: dict[int, str]) -> list[str]:
    return [f"rank {rank} raised:\n{error}" for rank, error in sorted(errors.items())]


_pools: dict[tuple[int, str], Workers] = {}


def run(world_size: int, body: Callable[..., Any], *args: Any, on: str = "cpu", timeout: float = 60) -> list[Any]:
    """The results of ``body(*args)`` on every rank, in rank order. Raises RemoteError if one raises or hangs."""
    __tracebackhide__ = True
    key = (world_size, on)
    if key not in _pools:
        _pools[key] = Workers(world_size, on)
    try:
        return _pools[key].run(body, args, timeout)
    except BaseException:
        _pools.pop(key).stop()
        raise


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small operations on several threads crawl where other processes keep the cores busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def join(parts: Sequence[Part]) -> Tensor:
    """The global tensor of the ranks' parts. Ranks that hold the same element must agree, and none may be missing."""
    shape, _, values = parts[0]
    full = torch.zeros(math.prod(shape), dtype=values.dtype)
    seen = torch.zeros(math.prod(shape), dtype=torch.bool)
    for _, indices, values in parts:
        again = seen[indices]
        assert not again.any() or same_bits(full[indices][again], values[again]), "replicas differ"
        full[indices] = values
        seen[indices] = True
    assert seen.all(), f"{int((~seen).sum())} elements are on no rank"
    return full.view(shape)


@one_thread()
def join_all(results: Sequence[dict[str, Part]]) -> dict[str, Tensor]:
    """:func:`join` by name; every rank must have the same names in the same order."""
    assert all(list(result) == list(results[0]) for result in results), "the ranks hold different states"
    return {name: join([result[name] for result in results]) for name in results[0]}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, all NaNs counting as one."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a_bits, b_bits = a.contiguous().view(integers), b.contiguous().view(integers)
    return torch.equal(a_bits, b_bits) or bool(((a_bits == b_bits) | (a.isnan() & b.isnan())).all())


@one_thread()
def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, and the same bits under each."""
    assert list(actual) == list(expected)
    different = {}
    for name, value in actual.items():
        if not same_bits(value, expected[name]):
            count = int((value != expected[name]).sum()) if value.shape == expected[name].shape else value.shape
            different[name] = f"{count} of {value.numel()} differ"
    assert not different, different
