"""torchtitan's llama3 debug model under FSDP2, trained by FusedAdamW and by torchtitan's own AdamW, saved and resumed.

``python benchmarks/torchtitan_training.py --output titan.json`` starts torchtitan's trainer for each of ``RUNS``, on
two GPUs, with this file as the module of its configurations, and compares the losses with those that they should be.
Text and tokenizer are made here, since torchtitan's wheel has neither.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from step import machine, version_of, write

STEPS, SAVED = 20, 10
SETTINGS = {
    "--training.steps": STEPS,
    "--training.seq_len": 512,
    "--training.local_batch_size": 4,
    "--checkpoint.interval": SAVED,
    "--parallelism.spmd_backend": "partial_dtensor",  # the others need torch 2.12
    "--debug.seed": 1,
}
FLAGS = ("--checkpoint.enable", "--debug.deterministic")
EAGER = ("--training.disable_cuda_graphs",)
COMPILED = (*EAGER, "--compile.enable")
ASYNC, PINNED = (("--checkpoint.async_mode", mode) for mode in ("async", "async_with_pinned_mem"))
RESUMED = ("--checkpoint.load_step", str(SAVED))
OTHER_TEXTS = ("--checkpoint.exclude_from_loading", "dataloader")  # which goes on with as many ranks only


@dataclass(frozen=True)
class Run:
    """``config``: a function below. ``folder``: of checkpoints. ``like``: the run whose losses should be the same."""

    name: str
    config: str
    folder: str
    options: tuple[str, ...] = EAGER
    like: str = ""
    ranks: int = 2


RUNS = [
    Run("AdamW", "adamw", "adamw"),
    Run("FusedAdamW", "fused", "fused", like="AdamW"),
    Run("FusedAdamW resumed", "fused", "fused", (*EAGER, *RESUMED), "FusedAdamW"),
    Run("AdamW changed to FusedAdamW", "like_torch", "adamw", (*EAGER, *RESUMED), "AdamW"),
    Run("int8, asynchronous", "int8", "async", (*EAGER, *PINNED), "AdamW"),
    Run("int8, asynchronous, resumed", "int8", "async", (*EAGER, *ASYNC, *RESUMED), "int8, asynchronous"),
    Run("AdamW compiled", "adamw", "adamw_compiled", COMPILED),
    Run("FusedAdamW compiled", "fused", "compiled", COMPILED, "AdamW compiled"),
    Run("AdamW FP8", "adamw_float8", "adamw_float8", COMPILED),
    Run("FusedAdamW FP8", "fused_float8", "float8", COMPILED, "AdamW FP8"),
    Run("FusedAdamW CUDA graphs", "fused", "graphs", (), "FusedAdamW"),
    Run("FusedAdamW resumed on 1", "fused", "fused", (*EAGER, *RESUMED, *OTHER_TEXTS), ranks=1),
]


# --- configurations, as torchtitan looks for them -------------------------------------------------------------------


def adamw() -> Any:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss

    config = llama3_debugmodel_ce_loss()
    config.activation_checkpoint = None
    return config


def adamw_float8() -> Any:
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.models.llama3 import model_registry

    config = adamw()
    converters = [Float8LinearConverter.Config(model_compile_enabled=True)]
    config.model_spec = model_registry("debugmodel", converters=converters)
    return config


def with_ours(config: Any, **options: Any) -> Any:
    from fused_optim.integrations.torchtitan import default_fused_adamw

    config.optimizer = default_fused_adamw(lr=8e-4, **options)
    return config


def fused() -> Any:
    return with_ours(adamw())


def fused_float8() -> Any:
    return with_ours(adamw_float8())


def int8() -> Any:
    return with_ours(adamw(), exp_avg_dtype="int8", exp_avg_sq_dtype="int8")


def like_torch() -> Any:
    return with_ours(adamw(), checkpoint_format="torch")


# --- one rank -------------------------------------------------------------------------------------------------------


def add_what_torch_lacks() -> None:
    """torchtitan 0.3 asks torch 2.11 for a class that only its other SPMD backends use, for a function that had another
    name, and for an option of masks that is about speed."""
    import torch.distributed.fsdp as fsdp
    from torch.nn.attention import flex_attention

    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout
    create = flex_attention.create_block_mask
    if "separate_full_blocks" not in inspect.signature(create).parameters:

        def create_block_mask(*args: Any, separate_full_blocks: bool = True, **options: Any) -> Any:
            return create(*args, **options)

        flex_attention.create_block_mask = create_block_mask


def train() -> None:
    add_what_torch_lacks()
    from torchtitan.train import main as train_with_torchtitan

    train_with_torchtitan()


# --- all runs -------------------------------------------------------------------------------------------------------


def make_assets(folder: Path) -> None:
    """A tokenizer within the model's 2,048 entries, and texts in which each word has one that follows."""
    words = [f"w{i}" for i in range(2000)]
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["<unk>", "<bos>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "text").mkdir()
    starts = torch.randint(2000, (800,), generator=torch.Generator().manual_seed(0)).tolist()
    lines = (json.dumps({"text": " ".join(words[(start + 7 * i) % 2000] for i in range(300))}) for start in starts)
    (folder / "text" / "data.json").write_text("\n".join(lines) + "\n")


def command(run: Run, folder: Path) -> list[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    settings = {
        **SETTINGS,
        "--hf_assets_path": folder / "tokenizer",
        "--dataloader.dataset_path": folder / "text",
        "--dump_folder": folder / run.folder,
        "--training.global_batch_size": 2 * SETTINGS["--training.local_batch_size"],
    }
    flat = [str(each) for pair in settings.items() for each in pair]
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={run.ranks}", f"--master_port={port}"]
    chosen = ["--module", Path(__file__).stem, "--config", run.config]
    return [sys.executable, *launch, __file__, "--train", *chosen, *flat, *FLAGS, *run.options]


def without_colors(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", output)


def losses_in(output: str) -> dict[int, float]:
    """The last loss printed for each step."""
    plain = without_colors(output)
    return {int(step): float(loss) for step, loss in re.findall(r"step:\s+(\d+)\s+loss:\s+([\d.]+)", plain)}


def perform(run: Run, folder: Path, limit: float) -> dict[str, Any]:
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "4"}
    start = time.perf_counter()
    with (folder / f"{run.name}.txt").open("w+") as output:  # a pipe would wait for compilers that outlive the ranks
        process = subprocess.Popen(
            command(run, folder), env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            end(process)
        output.seek(0)
        text = output.read()
    seconds = time.perf_counter() - start
    return {"exit": process.returncode, "seconds": seconds, "losses": losses_in(text), "output": text}


def end(process: subprocess.Popen[Any]) -> None:
    """torchrun ends its ranks when it is asked to."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def differences(found: dict[int, float], expected: dict[int, float]) -> float | None:
    """The largest of the steps that both have."""
    return max((abs(found[step] - expected[step]) for step in found.keys() & expected.keys()), default=None)


def perform_in_turn(runs: Sequence[Run], folder: Path, limit: float, deadline: float) -> dict[str, dict[str, Any]]:
    results = {}
    for run in runs:
        remaining = deadline - time.perf_counter()
        if remaining < 5:
            print(f"=== {run.name}: no time left", flush=True)
            continue
        result = results[run.name] = perform(run, folder, min(limit, remaining))
        text = excerpt(result.pop("output"), result["exit"] == 0)
        print(f"=== {run.name}\n{text}\n=== {run.name}: exit {result['exit']}", flush=True)
    return results


def excerpt(output: str, went_well: bool) -> str:
    plain = without_colors(output)
    if not went_well:
        return plain[-6000:]
    return "\n".join(line for line in plain.splitlines() if "step:" in line or "heckpoint" in line)


def perform_all(runs: Sequence[Run], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs that share a folder one after the other, some such chains at a time."""
    chains: dict[str, list[Run]] = {}
    for run in runs:
        chains.setdefault(run.folder, []).append(run)
    results: dict[str, dict[str, Any]] = {}
    deadline = time.perf_counter() + args.budget
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        make_assets(Path(name))
        for found in pool.map(lambda chain: perform_in_turn(chain, Path(name), args.limit, deadline), chains.values()):
            results |= found
    there = [run for run in runs if run.name in results]
    for run in there:
        if run.like in results:
            results[run.name]["like"] = run.like
            difference = differences(results[run.name]["losses"], results[run.like]["losses"])
            results[run.name]["largest_difference"] = difference
    return {run.name: results[run.name] for run in there}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose name this regular expression matches")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, on the same GPUs")
    parser.add_argument("--budget", type=float, default=1800, help="seconds for all of them")
    parser.add_argument("--limit", type=float, default=100, help="seconds for each run")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = perform_all([run for run in RUNS if re.search(args.only, run.name)], args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = machine(device, args.commit)
    facts["packages"] |= {name: version_of(name) for name in ("torchtitan", "torchao")}
    write({"machine": facts, "steps": STEPS, "saved_at": SAVED, "runs": results}, args.output)
    for name, result in results.items():
        show(name, result)


def show(name: str, result: dict[str, Any]) -> None:
    losses = result["losses"]
    ends = f", {losses[min(losses)]} to {losses[max(losses)]}" if losses else ""
    compared = f", {result['largest_difference']} from {result['like']}" if "like" in result else ""
    print(f"{name}: exit {result['exit']}, {result['seconds']:.0f} s, {len(losses)} losses{ends}{compared}")


if __name__ == "__main__":
    if "--train" in sys.argv:
        sys.argv.remove("--train")
        train()
    else:
        main()
