"""Host time of one step per tensor: what Python and the launch cost, whatever the tensors' sizes.

Gradients are new tensors at each step, as in training; making them is not timed. On CPUs the update itself is part of
the time, so the tensors are tiny: ``python benchmarks/host.py [--device cuda] [--output host.json]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fused_optim import FusedAdamW
from fused_optim.quantized import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    QuantizedTensor,
    Recipe,
)
from step import machine, write

FORMATS = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}


def sharded(count: int, mesh: DeviceMesh) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """DTensor parameters, and how they get their gradients: with the parameter's own spec, as FSDP2 makes them."""
    full = torch.ones(1, 32, device=mesh.device_type)
    params = [torch.nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])) for _ in range(count)]
    return params, lambda param: DTensor(torch.ones_like(full), param._spec, requires_grad=False)


def plain(count: int, device: str) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    return [torch.nn.Parameter(torch.ones(1, 32, device=device)) for _ in range(count)], torch.ones_like


def slices(count: int, device: str) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """As Megatron-LM's distributed optimizer has them: at any address, with gradients of another dtype."""
    buffer = torch.ones(33 * count, dtype=torch.bfloat16, device=device)
    return list(buffer.split(33)), lambda param: torch.ones_like(param, dtype=torch.float32)


def quantized(count: int, device: str, recipe: Recipe) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    full = torch.ones(1, 128, dtype=torch.bfloat16, device=device)
    weights = [torch.nn.Parameter(QuantizedTensor.from_values(full, recipe)) for _ in range(count)]
    return weights, lambda _: torch.ones_like(full)


def host_times(
    params: list[Tensor], grad: Callable[[Tensor], Tensor], device: str, steps: int, is_torchs: bool
) -> list[float]:
    """Seconds of each step after three that warm up; a GPU is idle when a step begins."""
    decoupled = type(params[0]) is Tensor and params[0].dtype != torch.float32
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(params, lr=1e-3, fused=True) if is_torchs else FusedAdamW(params, lr=1e-3, **FORMATS)
    )
    if isinstance(optimizer, FusedAdamW):
        optimizer.use_decoupled_grad = decoupled
    times = []
    for _ in range(steps + 3):
        for param in params:
            setattr(param, "decoupled_grad" if decoupled else "grad", grad(param))
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
        optimizer.zero_grad()
    return times[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, help="a JSON file for the microseconds per tensor")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(options.device, (1,))
    found: dict[str, dict[str, float]] = {}
    for name, (params, grad) in {
        "2000 DTensors": sharded(2000, mesh),
        "2000 slices": slices(2000, options.device),
        "146 plain tensors": plain(146, options.device),
        "146 plain tensors, torch.optim.AdamW(fused=True)": plain(146, options.device),
        "146 MXFP8 weights": quantized(146, options.device, MXFP8BlockScaling()),
        "146 FP8 weights, delayed scaling": quantized(146, options.device, Float8DelayedScaling()),
        "146 FP8 weights, current scaling": quantized(146, options.device, Float8CurrentScaling()),
    }.items():
        times = host_times(params, grad, options.device, options.steps, "torch.optim" in name)
        median, best = statistics.median(times), min(times)
        each = 1e6 / len(params)
        print(f"{name}: {1e3 * median:.3f} ms per step, {each * median:.2f} us per tensor (best {each * best:.2f})")
        found[name] = {"median_us": each * median, "best_us": each * best}
    dist.destroy_process_group()
    write({"machine": machine(torch.device(options.device), options.commit), "per_tensor": found}, options.output)


if __name__ == "__main__":
    main()
