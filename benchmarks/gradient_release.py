"""Peak memory and time of training steps that update parameters in the backward pass, compared with steps that do not.

The model has the shapes of Llama 3.2 1B, in BF16. On one GPU: ``python benchmarks/gradient_release.py --output FILE``;
under FSDP2 on several: ``torchrun --nproc-per-node 2 benchmarks/gradient_release.py --output FILE``. FlashOptim's
release is measured where that package is installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from contenders import HYPER, INT8, SPLIT16, states
from fused_optim import FusedAdamW, enable_gradient_release
from llama import Llama, llama_1b, small_llama
from step import machine, timed, version_of, write

WARMUP = 2
Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """``release``: attaches the optimizer to the backward pass; None for a normal step."""

    name: str
    build: Callable[[list[nn.Parameter]], Any]
    release: Callable[[nn.Module, Any], Any] | None = None
    needs: str = field(default="torch")


def ours(**options: Any) -> Callable[[list[nn.Parameter]], FusedAdamW]:
    return lambda params: FusedAdamW(params, **HYPER, **states(INT8), **options)


def flash(params: list[nn.Parameter]) -> Any:
    return importlib.import_module("flashoptim").FlashAdamW(params, **HYPER, master_weight_bits=32)


def flash_release(model: nn.Module, optimizer: Any) -> Any:
    return importlib.import_module("flashoptim").enable_gradient_release(model, optimizer)


def each_alone(model: nn.Module, optimizer: FusedAdamW) -> Any:
    return enable_gradient_release(model, optimizer, bucket_bytes=0)


CASES = [
    Case("FP32 master, int8 states", ours()),
    Case("FP32 master, int8 states, release", ours(), enable_gradient_release),
    Case("FP32 master, int8 states, release of each parameter", ours(), each_alone),
    Case("16-bit remainder, int8 states", ours(**SPLIT16)),
    Case("16-bit remainder, int8 states, release", ours(**SPLIT16), enable_gradient_release),
    Case("16-bit remainder, int8 states, release of each parameter", ours(**SPLIT16), each_alone),
    Case("FlashAdamW 32-bit master", flash, needs="flashoptim"),
    Case("FlashAdamW 32-bit master, release", flash, flash_release, needs="flashoptim"),
]


# --- measuring ------------------------------------------------------------------------------------------------------


def build_model(small: bool, device: torch.device) -> Llama:
    """In BF16, sharded by FSDP2 where there are several ranks."""
    torch.manual_seed(0)
    with device:
        model = (small_llama() if small else llama_1b()).to(torch.bfloat16)
    if dist.is_initialized():
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def training_step(model: nn.Module, optimizer: Any, tokens: Tensor) -> Step:
    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def held_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measure(case: Case, args: argparse.Namespace, device: torch.device) -> dict[int, dict[str, Any]]:
    """By length: milliseconds of steps on the device, bytes held between steps and at the peak of one, on this rank."""
    model = build_model(args.small, device)
    optimizer = case.build(list(model.parameters()))
    handle = case.release(model, optimizer) if case.release else None
    found = {length: measure_steps(model, optimizer, length, args.repeats, device) for length in args.lengths}
    if handle is not None:  # else FlashOptim's hooks keep the parameters
        (handle.disable if isinstance(optimizer, FusedAdamW) else handle.remove)()
    return found


def measure_steps(model: nn.Module, optimizer: Any, length: int, repeats: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(1 + int(os.environ.get("RANK", "0")))
    vocabulary = model.embedding.weight.shape[0]
    tokens = torch.randint(vocabulary, (1, length + 1), device=device, generator=generator)
    step = training_step(model, optimizer, tokens)
    for _ in range(WARMUP):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    held = held_bytes(device)
    times, host = timed(step, device, repeats)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"ms": times, "host_ms": host, "held_bytes": held, "peak_bytes": peak, "loss": model(tokens).item()}


def measured(case: Case, args: argparse.Namespace, device: torch.device) -> dict[int, dict[str, Any]]:
    """:func:`measure`, or the error, after which everything that it held is given back."""
    try:
        found = measure(case, args, device)
    except Exception as error:  # a peer that fails must not hide the others' results
        found = {length: {"error": f"{type(error).__name__}: {error}"[:300]} for length in args.lengths}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one length in all rounds."""
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        return {"error": errors[0]}
    rows = {key: statistics.median(time for each in found for time in each[key]) for key in ("ms", "host_ms")}
    rounds = [statistics.median(each["ms"]) for each in found]
    return {**rows, "ms_of_rounds": rounds, **{key: found[-1][key] for key in ("held_bytes", "peak_bytes", "loss")}}


def show(name: str, row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{name:<60} {row['error']}")
    else:
        print(
            f"{name:<60} {row['ms']:8.2f} ms {row['held_bytes'] / 1e9:7.2f} GB, peak {row['peak_bytes'] / 1e9:7.2f} GB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of 3 M parameters, for a trial")
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 4096], help="tokens of a step on each rank")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=6, help="steps timed in each round")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if "WORLD_SIZE" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    cases = [case for case in CASES if importlib.util.find_spec(case.needs) is not None]
    facts = machine(device, args.commit)
    facts["packages"] |= {"flashoptim": version_of("flashoptim")}
    report: dict[str, Any] = {"machine": facts, "ranks": int(os.environ.get("WORLD_SIZE", "1")), "lengths": {}}
    found: dict[str, list[dict[int, dict[str, Any]]]] = {case.name: [] for case in cases}
    for number in range(args.rounds):
        for case in cases[:: 1 - 2 * (number % 2)]:  # so that drifts of the machine hit all alike
            found[case.name].append(measured(case, args, device))
            for length in args.lengths:
                each = {name: [of[length] for of in rounds] for name, rounds in found.items() if rounds}
                report["lengths"][str(length)] = {name: summary(rounds) for name, rounds in each.items()}
            if rank == 0:
                write(report, args.output)
    for length, rows in report["lengths"].items() if rank == 0 else ():
        print(f"{length} tokens on each of {report['ranks']} ranks")
        for name, row in rows.items():
            show(name, row)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
