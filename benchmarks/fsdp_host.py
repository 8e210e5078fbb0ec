"""Host time of FSDP2 in eager mode, per weight: quantized weights compared with BF16 ones, in one process.

A rank of a process group that sends nothing (torch's ``fake`` backend) and weights so small that all of the time is the
host's; CPU time, which other processes do not add to. "gather": all-gather and free again (``unshard``, ``reshard``).
"training": forward and backward with these. On CPUs products in FP8 are stand-ins, a BF16 layer of the same sizes each,
as GPUs run one kernel.

    python benchmarks/fsdp_host.py --output FILE
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import pstats
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    quantize_model_,
)
from fused_optim.quantized.fp8 import products
from fused_optim.quantized.fp8.casts import Codes
from step import machine, write

GATHERED: dict[str, Recipe | None] = {
    "BF16": None,
    "Float8CurrentScaling": Float8CurrentScaling(),
    "Float8DelayedScaling": Float8DelayedScaling(),
    "Float8BlockScaling (1, 128)": Float8BlockScaling(block=(1, 128)),
    "Float8BlockScaling (128, 128)": Float8BlockScaling(),
    "MXFP8BlockScaling": MXFP8BlockScaling(),
    "NVFP4BlockScaling": NVFP4BlockScaling(),
}
TRAINED: dict[str, Recipe | None] = {
    "BF16": None,
    "one scale, decoded": Float8CurrentScaling(),
    "one scale, auto": Float8CurrentScaling(compute="auto"),
    "one scale, FP8 products": Float8CurrentScaling(compute="fp8"),
    "rows, FP8 products, weight gradients BF16": Float8CurrentScaling(compute="fp8", activation_scaling="row"),
}


def build(recipe: Recipe | None, width: int, args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    groups = [
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(args.weights))) for _ in range(args.groups)
    ]
    model = nn.Sequential(*groups).bfloat16()
    if recipe is not None:
        quantize_model_(model, recipe, keep_initial=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for group in model:
        fully_shard(group, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gathering(model: nn.Sequential) -> Callable[[], None]:
    def run() -> None:
        for group in model:
            assert isinstance(group, FSDPModule)
            group.unshard()
            group.reshard()

    return run


def training(model: nn.Sequential, width: int) -> Callable[[], None]:
    x = torch.randn(16, width).bfloat16().requires_grad_()
    gradient = torch.randn(16, width).bfloat16()

    def run() -> None:
        model(x).backward(gradient)
        x.grad = None
        for param in model.parameters():
            param.grad = None

    return run


def stand_in(a: Codes, b: Codes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """One kernel, as a GPU runs it; its values do not matter."""
    return nn.functional.linear(zeros(*a.data.shape, dtype), zeros(*b.data.shape, dtype))


@functools.cache
def zeros(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


def microseconds(runs: dict[str, Callable[[], None]], weights: int, repeats: int) -> dict[str, dict[str, float]]:
    """Per weight, of runs that take turns: the smallest and the median."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
        run()
    gc.disable()
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(1e6 * (time.process_time() - start) / weights)
    gc.enable()
    return {name: {"min_us": min(each), "median_us": statistics.median(each)} for name, each in times.items()}


def report_on(part: str, runs: dict[str, Callable[[], None]], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    found = microseconds(runs, args.groups * args.weights, args.repeats)
    print(f"\n{part + ', us per weight':<52}{'min':>10}{'median':>10}{'above BF16':>12}")
    for name, row in found.items():
        row["above_bf16_us"] = row["min_us"] - found["BF16"]["min_us"]
        print(f"{name:<52}{row['min_us']:>10.1f}{row['median_us']:>10.1f}{row['above_bf16_us']:>12.1f}", flush=True)
    for name, run in runs.items():
        if re.search(args.profile, f"{part}, {name}"):
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(20):
                run()
            profile.disable()
            print(f"{part}, {name}: calls of {20 * args.groups * args.weights} weights")
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=("gather", "training"), default=["gather", "training"])
    parser.add_argument("--groups", type=int, default=1, help="that FSDP2 gathers, one after the other")
    parser.add_argument("--weights", type=int, default=5, help="of each group")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--profile", default="^$", help="contenders that are profiled: a regular expression")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    products._emulated = stand_in
    options = {key: value for key, value in vars(args).items() if key not in ("output", "commit")}
    report: dict[str, Any] = {"machine": machine(torch.device("cpu"), args.commit), "options": options}
    print(report["machine"])
    width = 128 * args.ranks
    if "gather" in args.parts:
        runs = {name: gathering(build(recipe, width, args)) for name, recipe in GATHERED.items()}
        report["gather"] = report_on("gather", runs, args)
    if "training" in args.parts:
        runs = {name: training(build(recipe, 32, args), 32) for name, recipe in TRAINED.items()}
        report["training"] = report_on("training", runs, args)
    write(report, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
