"""Optimizer steps on the CPU under FSDP2's ``CPUOffloadPolicy``, compared with torch's AdamW.

``torchrun --nproc-per-node 2 benchmarks/cpu_offload.py --output F``: a model with the shapes of Llama 3.2 1B, computed
in BF16 on GPUs; its parameters, gradients and states are in host memory. The cores are shared out over the ranks.
Prints the median milliseconds of the optimizer's step and of a whole training step, and the bytes of the states.
``--device cpu --small`` is a trial, without offloading.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fused_optim import FusedAdamW
from llama import llama_1b, small_llama
from step import machine, synchronize, write

HYPER: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.1}
INT8: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
BF16: dict[str, Any] = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}

Build = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
# The dtype of the parameters, and their optimizer.
CONTENDERS: dict[str, tuple[torch.dtype, Build]] = {
    "torch AdamW, fused, FP32": (torch.float32, lambda params: torch.optim.AdamW(params, fused=True, **HYPER)),
    "torch AdamW, foreach, FP32": (torch.float32, lambda params: torch.optim.AdamW(params, foreach=True, **HYPER)),
    "FusedAdamW, FP32": (torch.float32, lambda params: FusedAdamW(params, **HYPER)),
    "FusedAdamW, BF16 states": (torch.float32, lambda params: FusedAdamW(params, **HYPER, **BF16)),
    "FusedAdamW, int8 states": (torch.float32, lambda params: FusedAdamW(params, **HYPER, **INT8)),
    "FusedAdamW, BF16, 16-bit remainder, int8 states": (
        torch.bfloat16,
        lambda params: FusedAdamW(params, **HYPER, **INT8),
    ),
}


def make_model(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with device:
        model: nn.Module = (small_llama if args.small else llama_1b)().to(dtype)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
    offload = CPUOffloadPolicy() if device.type == "cuda" else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mp_policy=policy, offload_policy=offload)
    return model


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Of the states, masters included."""
    if isinstance(optimizer, FusedAdamW):
        return optimizer.state_bytes()
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in values)


def measure(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    dtype, build = CONTENDERS[name]
    model = make_model(args, device, dtype)
    optimizer = build(model.parameters())
    tokens = torch.randint(model.embedding.num_embeddings, (1, 129 if args.small else 2049), device=device)
    steps, wholes = [], []
    for _ in range(args.warmup + args.steps):
        synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        model(tokens).backward()
        synchronize(device)
        before = time.perf_counter()
        optimizer.step()
        steps.append(time.perf_counter() - before)
        optimizer.zero_grad()
        synchronize(device)
        wholes.append(time.perf_counter() - began)
    times = torch.tensor([statistics.median(each[args.warmup :]) for each in (steps, wholes)])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    held = bytes_of(optimizer)
    return {"name": name, "step_ms": 1e3 * times[0].item(), "training_ms": 1e3 * times[1].item(), "state_bytes": held}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':<50}{'step':>11}{'training':>12}{'states':>10}"]
    for row in rows:
        times = f"{row['step_ms']:>8.1f} ms{row['training_ms']:>9.1f} ms"
        lines.append(f"{row['name']:<50}{times}{row['state_bytes'] / 1e9:>7.2f} GB")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a model of 3 M parameters")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    torch.set_num_threads(threads)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    facts = machine(device, args.commit) | {"ranks": dist.get_world_size(), "threads_of_a_rank": threads}
    report: dict[str, Any] = {"machine": facts, "contenders": []}
    for name in CONTENDERS:
        report["contenders"].append(measure(name, args, device))
        gc.collect()
        if not rank:
            write(report, args.output)
    if not rank:
        print(f"{facts}\n{table(report['contenders'])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
