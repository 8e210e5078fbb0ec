"""Starts the ranks of a script as torchrun does, but in processes that have imported torch already."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

import distributed


def _rank(environment: Mapping[str, str], script: str, arguments: list[str], folder: Path, output: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    with output.open("w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        runpy.run_path(script, run_name="__main__")


def launch(ranks: int, script: str, arguments: list[str], folder: Path) -> list[str]:
    """What each rank prints, on CPUs. ``folder``: where the processes run. Raises if one fails."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(store.port), "CUDA_VISIBLE_DEVICES": ""}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    outputs = [folder / f".output-{store.port}-{rank}" for rank in range(ranks)]
    processes = []
    for rank, output in enumerate(outputs):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        args = (environment, script, arguments, folder, output)
        processes.append(distributed.processes().Process(target=_rank, args=args))
        processes[-1].start()
    for process in processes:
        process.join()
    printed = [output.read_text() for output in outputs]
    assert [process.exitcode for process in processes] == [0] * ranks, "\n".join(printed)
    return printed
