"""Checkpoints that are written while training goes on hold the values at the save.

Files are written only once training has gone on, in both of torch's ways (a thread, a process) and from all of its
stagers. Every load goes into freshly built objects with other values.
"""

from __future__ import annotations

import pickle
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import distributed
from checkpoint_cases import STAGERS, WAYS, let_write, start_save, trained_states
from distributed import Part, assert_same, join_all
from native_cases import NativeRun
from pairwise import each_once

FORMS = ("unscaled", "native")
MASTER = "remainder16"
SAVES = (2, 4)  # after these steps; training goes on to the next and past the last
STAGERS_SERVE_TWICE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # 2.11 closes them with the save
GPU_STAGERS: dict[str, Callable[[], AsyncStager]] = {
    "pinned": lambda: DefaultStager(StagingOptions(True, False, False, True)),
    "pinned, shared memory": lambda: DefaultStager(StagingOptions(True, True, False, True)),
    "pinned, in background": lambda: DefaultStager(StagingOptions(True, True, True, True)),
    "blocking, pinned, cached": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
}


def build(form: str, device: str | None, *, fresh: bool = False) -> NativeRun:
    run = NativeRun("fsdp", MASTER, fresh=fresh)
    run.optimizer.checkpoint_format, run.optimizer.checkpoint_device = form, device
    return run


def save_twice(
    form: str, device: str | None, kind: AsyncCheckpointerType, make_stager: Callable[[], AsyncStager], path: str
) -> list[dict[str, Part]]:
    """Two saves, through one stager where torch allows that; what the checkpoints must hold."""
    run, stagers, snapshots = build(form, device), [make_stager()], []
    run.train(0, SAVES[0])
    for number, step in enumerate(SAVES):
        snapshots.append(run.snapshot())
        if number and not STAGERS_SERVE_TWICE:
            stagers.append(make_stager())
        pending = start_save(run, f"{path}{number}", kind, stagers[-1])
        run.train(step, step + 2)
        assert not pending.done(), pending.exception()
        let_write(f"{path}{number}")
        pending.result(timeout=60)
    for stager in stagers:
        stager.close()
    return snapshots


def load(form: str, path: str) -> dict[str, Part]:
    run = build(form, None, fresh=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        WAYS["nested"][1](run, path)
    return run.snapshot()


def save_and_load(
    form: str, device: str | None, kind: AsyncCheckpointerType, name: str, path: str
) -> list[list[dict[str, Part]]]:
    saved = save_twice(form, device, kind, (STAGERS | GPU_STAGERS)[name], path)
    return [saved, [load(form, f"{path}{number}") for number in range(len(SAVES))]]


def check(results: list[list[list[dict[str, Part]]]]) -> None:
    joined = [
        [trained_states(join_all([result[i][number] for result in results])) for number in range(len(SAVES))]
        for i in (0, 1)
    ]
    saved, loaded = joined
    for before, after in zip(saved, loaded, strict=True):
        assert_same(after, before)
    changed = [name for name in saved[0] if not torch.equal(saved[0][name], saved[1][name])]
    assert len(changed) > len(saved[0]) // 2  # the two checkpoints differ in what was trained


OURS = [("stager", name) for name in STAGERS if name.startswith("ours")]


@pytest.mark.parametrize("staged, form", each_once(product([*((None, name) for name in STAGERS), *OURS], FORMS)))
def test_in_a_thread(staged: tuple[str | None, str], form: str, tmp_path: Path) -> None:
    device, name = staged
    arguments = (form, device, AsyncCheckpointerType.THREAD, name, str(tmp_path / "checkpoint"))
    check(distributed.run(2, save_and_load, *arguments))


def _gpus(stagers: dict[str, Callable[[], AsyncStager]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    return lambda test: pytest.mark.cuda(missing(pytest.mark.parametrize("name", stagers)(test)))


@_gpus(STAGERS | GPU_STAGERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", [None, "cpu", "stager"])
def test_in_a_thread_from_a_gpu(form: str, device: str | None, name: str, tmp_path: Path) -> None:
    if device == "stager" and not name.startswith("ours"):
        pytest.skip("torch's stagers do not know what to copy")
    ranks = min(torch.cuda.device_count(), 2)
    arguments = (form, device, AsyncCheckpointerType.THREAD, name, str(tmp_path / "checkpoint"))
    check(distributed.run(ranks, save_and_load, *arguments, on="cuda"))


# --- in a process -----------------------------------------------------------------------------------------------


def _serve(rank: int, ranks: int, cases: list[tuple[Any, ...]], folder: str) -> None:
    """As the workers of ``distributed``, which may have no children: they are daemons."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")  # of the writing processes
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
        results = [save_and_load(*case, f"{folder}/{number}-") for number, case in enumerate(cases)]
        Path(folder, f"rank{rank}").write_bytes(pickle.dumps(results))
        dist.destroy_process_group()


@pytest.mark.long
def test_in_a_process() -> None:
    """All at once: starting the processes takes longest. test_quantized_checkpoint.py has a shorter one."""
    kind = AsyncCheckpointerType.PROCESS
    cases = [(form, None, kind, name) for form in FORMS for name in ("default", "shared memory")]
    cases += [("unscaled", "stager", kind, "ours, shared memory"), ("native", "stager", kind, "ours")]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_serve, (2, cases, folder), nprocs=2, start_method="forkserver")
        results = [pickle.loads(Path(folder, f"rank{rank}").read_bytes()) for rank in range(2)]
    for case in zip(*results, strict=True):
        check(list(case))
