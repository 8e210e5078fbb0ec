"""The examples with other packages, by the commands of the pages that show them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distributed
from walkthrough import follow

pytestmark = pytest.mark.timeout(900)  # many processes, each of which imports torch


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def test_hugging_face_trainer(tmp_path: Path) -> None:
    need("transformers", "accelerate")
    follow("how_to/trainer.md", tmp_path)


def one_rank(environment: dict[str, str], script: Path, arguments: list[str], output: Path) -> None:
    """As torchrun starts it, in a process that has imported torch already."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    with output.open("w") as stream, contextlib.redirect_stdout(stream):
        runpy.run_path(str(script), run_name="__main__")


def losses_on(ranks: int, folder: Path) -> str:
    """What the example of FSDP2 prints, on CPUs."""
    script = Path(__file__).parents[2] / "examples" / "fsdp2.py"
    arguments = ["--steps", "10", "--checkpoints", str(folder / str(ranks))]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    outputs = [folder / f"{ranks}-{rank}" for rank in range(ranks)]
    processes = [
        distributed.processes().Process(
            target=one_rank, args=(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, script, arguments, output)
        )
        for rank, output in enumerate(outputs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks
    assert not any(output.read_text() for output in outputs[1:])
    return outputs[0].read_text()


def test_fsdp2_on_ranks_that_do_not_divide_the_batch(tmp_path: Path) -> None:
    """Twelve sequences on five ranks: the losses of one rank."""
    alone = losses_on(1, tmp_path)
    assert alone.startswith("step 1: loss 5.") and alone.count("step") == 2
    assert losses_on(5, tmp_path) == alone


def test_torchtitan(tmp_path: Path) -> None:
    need("torchtitan", "tokenizers", "triton")
    follow("how_to/torchtitan.md", tmp_path, {"torchtitan.train": "titan_on_cpu"})
    assert list(tmp_path.glob("titan/outputs/checkpoint/step-10/*.distcp"))
