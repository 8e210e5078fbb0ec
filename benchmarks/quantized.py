"""What FSDP2 training costs with quantized and with BF16 weights: times of a step, memory, bytes that are gathered.

Products in FP8, always and where the recipes' default takes them, and torchao's float8 training with FP8 all-gathers,
where it is installed; eager, and each group of layers compiled. ``--decoded``: weights that are decoded, too.

torchrun --nproc-per-node 2 benchmarks/quantized.py --batch 32768 --output FILE
torchrun --nproc-per-node 2 benchmarks/quantized.py --width 256 --layers 4 --batch 128 --steps 2   # a trial on CPUs
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import itertools
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

from fused_optim import FusedAdamW
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    quantize_model_,
)
from step import machine, synchronize, write

RECIPES: dict[str, Recipe | None] = {
    "BF16": None,
    "one scale, FP8 products": Float8CurrentScaling(compute="fp8"),
    "rows, FP8 products": Float8CurrentScaling(compute="fp8", activation_scaling="row"),
    "blocks, FP8 products": Float8BlockScaling(compute="fp8"),
    "one scale, default products": Float8CurrentScaling(),
    "rows, default products": Float8CurrentScaling(activation_scaling="row"),
    "blocks, default products": Float8BlockScaling(),
}
DECODED: dict[str, Recipe | None] = {
    "Float8CurrentScaling": Float8CurrentScaling(compute="decode"),
    "Float8DelayedScaling": Float8DelayedScaling(compute="decode"),
    "Float8BlockScaling (1, 128)": Float8BlockScaling(block=(1, 128), compute="decode"),
    "Float8BlockScaling (128, 128)": Float8BlockScaling(compute="decode"),
    "MXFP8BlockScaling": MXFP8BlockScaling(compute="decode"),
    "NVFP4BlockScaling": NVFP4BlockScaling(compute="decode"),
}
WAYS = ("eager", "compiled")

Convert = Callable[[nn.Module], Any]


class Group(nn.Sequential):
    """Layers that are gathered, and compiled, together.

    torch's compiler leaves the frames of ``torch.nn`` alone: within an ``nn.Sequential`` that FSDP2 has hooked, each
    quantized layer would be a graph of its own, and layers of BF16 none.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in self:
            input = layer(input)
        return input


def build(convert: Convert, way: str, args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, FusedAdamW]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    layers = [nn.Linear(args.width, args.width, bias=False, device=device) for _ in range(args.layers)]
    groups = [Group(*layers[i : i + args.group]) for i in range(0, args.layers, args.group)]
    model = nn.Sequential(*groups).bfloat16()
    convert(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for group in model:
        if way == "compiled":
            group.compile()
        fully_shard(group, mesh=mesh)
    fully_shard(model, mesh=mesh)
    states = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
    return model, FusedAdamW(model.parameters(), lr=1e-4, **states)


def quantize(recipe: Recipe | None) -> Convert:
    return lambda model: None if recipe is None else quantize_model_(model, recipe)


def to_torchao(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))


def refresh_scales(model: nn.Module) -> None:
    """torchao's, of all weights at once after each step, as its documentation recommends."""
    if any(type(module).__name__.endswith("Float8Linear") for module in model.modules()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


class CountedGathers:
    """Bytes that this rank puts into all-gathers."""

    def __init__(self) -> None:
        self.bytes = 0
        self._inputs = _fsdp_param.FSDPParam.all_gather_inputs

    def __enter__(self) -> CountedGathers:
        def counted(param: Any) -> list[torch.Tensor]:
            inputs = self._inputs.fget(param)
            self.bytes += sum(part.nbytes for part in inputs)
            return inputs

        _fsdp_param.FSDPParam.all_gather_inputs = property(counted)
        return self

    def __exit__(self, *_: object) -> None:
        _fsdp_param.FSDPParam.all_gather_inputs = self._inputs


def milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return 1000 * (time.perf_counter() - start)


def phases(
    model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Median times of the parts of a training step, each waited for."""
    x = torch.randn(args.batch, args.width, device=device).bfloat16()
    times: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    for _ in range(args.warmup + args.steps):
        out: list[torch.Tensor] = []
        times["forward"].append(milliseconds(lambda: out.append(model(x).float().square().mean()), device))  # noqa: B023
        times["backward"].append(milliseconds(lambda: out[0].backward(), device))  # noqa: B023
        times["optimizer"].append(milliseconds(lambda: (optimizer.step(), refresh_scales(model)), device))
        optimizer.zero_grad()
    return {f"{name}_ms": statistics.median(values[args.warmup :]) for name, values in times.items()}


def training_ms(
    model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, device: torch.device
) -> float:
    """Of a whole step where nothing is waited for between steps, as in training: the median of three rounds."""
    x = torch.randn(args.batch, args.width, device=device).bfloat16()

    def train() -> None:
        model(x).backward(x)
        optimizer.step()
        optimizer.zero_grad()
        refresh_scales(model)

    for _ in range(args.warmup):
        train()
    rounds = [milliseconds(lambda: [train() for _ in range(args.steps)], device) for _ in range(3)]
    return statistics.median(rounds) / args.steps


def measure(convert: Convert, way: str, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    model, optimizer = build(convert, way, args, device)
    found = phases(model, optimizer, args, device)
    found["training_ms"] = training_ms(model, optimizer, args, device)
    x = torch.randn(args.batch, args.width, device=device).bfloat16()
    with CountedGathers() as gathers:
        model(x).float().square().mean().backward()
    elements = sum(param.numel() for param in model.parameters())
    gathered = 2 * elements / dist.get_world_size()  # for forward and for backward
    return {**found, "gathered_bytes_per_element": gathers.bytes / gathered}


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8192, help="rows of activations of each rank")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--group", type=int, default=4, help="layers that are gathered, and compiled, together")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--decoded", action="store_true")
    parser.add_argument("--only", default="", help="contenders whose name this regular expression matches")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


Measure = Callable[[argparse.Namespace, torch.device], dict[str, float]]


def compare(args: argparse.Namespace, contenders: dict[str, Measure]) -> None:
    """Measure all contenders, one after the other; print a table and write a report."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    first = dist.get_rank() == 0
    options = {key: value for key, value in vars(args).items() if key not in ("output", "commit")}
    report = {"machine": machine(device, args.commit), "ranks": dist.get_world_size(), "options": options}
    if first:
        print(report["machine"], flush=True)
    report["results"] = {}
    for name, measure_one in contenders.items():
        if not re.search(args.only, name):
            continue
        if on_gpu:
            gc.collect()  # wrapped models refer to themselves
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0  # Megatron-FSDP keeps some of its models' memory
        try:
            row: dict[str, Any] = measure_one(args, device)
        except Exception as error:  # a peer's: gloo gathers no FP8, for one
            print(f"{name}: {error!r}" if first else "", flush=True)
            report["results"][name] = {"error": repr(error)}
            continue
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
        if first:
            if not any("error" not in each for each in report["results"].values()):
                print(f"{'':<50}" + "".join(f"{column:>28}" for column in row))
            print(f"{name:<50}" + "".join(f"{value:>28.3f}" for value in row.values()), flush=True)
            report["results"][name] = row
            write(report, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = parse_args(__doc__)
    ways: dict[str, Convert] = {name: quantize(recipe) for name, recipe in RECIPES.items()}
    if args.decoded:
        ways |= {name: quantize(recipe) for name, recipe in DECODED.items()}
    if importlib.util.find_spec("torchao") is not None:
        ways["torchao, FP8 all-gathers and products"] = to_torchao
    pairs = itertools.product(args.ways, ways.items())
    compare(args, {f"{name}, {way}": functools.partial(measure, convert, way) for way, (name, convert) in pairs})
