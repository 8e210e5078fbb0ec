"""Muon's steps on parameters that are sharded as FSDP2 shards them, beside one GPU's, torchtitan's and dion's.

    torchrun --nproc-per-node 2 benchmarks/muon_fsdp2.py --output FILE
    torchrun --nproc-per-node 2 benchmarks/muon_fsdp2.py --models tiny --repeats 1    # a trial on CPUs

The hidden matrices of Llama 3.2 1B and Llama 3 8B in BF16, gradients too. torchtitan's DistMuon and dion's Muon are
measured where `torchtitan.distributed.flex_shard` and `dion` can be imported; their momenta are BF16, too, and they
have no masters. One GPU's steps are made by every rank by itself, at once.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fused_optim import FusedMuon
from muon import MATRICES, Shapes
from muon_owners import layer
from step import machine, synchronize, timed, write

MODELS: dict[str, Shapes] = {**MATRICES, "tiny": layer(64, 32, 192) * 4}
LAYER = 7  # matrices
LR = 0.02
WARMUP = 2  # steps; dion compiles in the first
_ELEMENT = 2  # bytes, of BF16

# --- who is measured --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """``build``: of parameters and their mesh. ``modules``: those that must be there."""

    name: str
    build: Callable[[list[Tensor], DeviceMesh], torch.optim.Optimizer]
    is_sharded: bool = True
    modules: tuple[str, ...] = ()

    def is_there(self) -> bool:
        return all(can_import(module) for module in self.modules)


def can_import(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


def ours(params: list[Tensor], mesh: DeviceMesh, **options: Any) -> FusedMuon:
    return FusedMuon(params, lr=LR, **options)


def torchtitan(params: list[Tensor], mesh: DeviceMesh) -> Any:
    """Each matrix has an owner; two layers are sent together, as in torchtitan's own configurations."""
    flex = importlib.import_module("torchtitan.distributed.flex_shard")
    names = [f"layers.{i // LAYER}.{i % LAYER}" for i in range(len(params))]
    (axis,) = mesh.mesh_dim_names or ()
    owned = flex.ComputeLayout(shardings_by_mesh_axis={axis: flex.Owned()})
    buckets = [names[i : i + 2 * LAYER] for i in range(0, len(names), 2 * LAYER)]
    return flex.build_dist_muon(
        [{"params": params, "param_names": names}],
        compute_sharding_by_fqn=dict.fromkeys(names, owned),
        bucket_configs=[flex.BucketConfig(patterns=tuple(bucket)) for bucket in buckets],
        lr=LR,
    )


def dion(params: list[Tensor], mesh: DeviceMesh, **options: Any) -> Any:
    """With Nesterov's momentum, as the others have it."""
    muon = importlib.import_module("dion.muon").Muon
    return muon(params, distributed_mesh=mesh, lr=LR, weight_decay=0.1, nesterov=True, **options)


BF16: dict[str, Any] = {"state_dtype": "bfloat16", "master_bits": 0}
INT8: dict[str, Any] = {"state_dtype": "int8"}
ALONE = ", one GPU"
CONTENDERS = [
    Contender(f"FusedMuon, BF16 momentum, no master{ALONE}", partial(ours, **BF16), is_sharded=False),
    Contender("FusedMuon, BF16 momentum, no master", partial(ours, **BF16)),
    Contender(f"FusedMuon, int8 momentum, exact masters{ALONE}", partial(ours, **INT8), is_sharded=False),
    Contender("FusedMuon, int8 momentum, exact masters", partial(ours, **INT8)),
    Contender("torchtitan DistMuon", torchtitan, modules=("torchtitan.distributed.flex_shard",)),
    Contender("dion Muon", dion, modules=("dion.muon",)),
    Contender("dion Muon, Triton", partial(dion, use_triton=True), modules=("dion.muon", "triton")),
]


# --- measuring --------------------------------------------------------------------------------------------------------


def parameters(shapes: Shapes, mesh: DeviceMesh, device: torch.device, is_sharded: bool) -> list[Tensor]:
    """With gradients, of the same values for all contenders; the first one, which is square, is 0."""
    generator = torch.Generator(device).manual_seed(0)

    def values(shape: tuple[int, ...], scale: float) -> Tensor:
        whole = (scale * torch.randn(shape, device=device, generator=generator)).bfloat16()
        return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) if is_sharded else whole

    params: list[Tensor] = []
    for shape in shapes:
        param = values(shape, 0.02 if params else 0.0).requires_grad_()
        param.grad = values(shape, 1e-3)
        params.append(param)
    return params


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def own_rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    return whole.tensor_split(mesh.size())[mesh.get_local_rank()]


def largest(value: float, device: torch.device) -> float:
    """Over ranks."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


class Measured:
    """What the steps of one contender take, and what they have made."""

    def __init__(
        self, contender: Contender, shapes: Shapes, mesh: DeviceMesh, device: torch.device, repeats: int
    ) -> None:
        on_gpu = device.type == "cuda"
        self.params = parameters(shapes, mesh, device, contender.is_sharded)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        optimizer = contender.build(self.params, mesh)
        optimizer.step()
        self.first = self._own_rows(0, mesh, contender).clone()
        for _ in range(WARMUP - 1):
            optimizer.step()
        synchronize(device)
        dist.barrier()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device) if on_gpu else 0
        times, host = timed(optimizer.step, device, repeats)
        times = [largest(time, device) for time in times]
        self.row: dict[str, Any] = {"ms": statistics.median(times), "all_ms": times, "host_ms": statistics.median(host)}
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        if on_gpu:
            on_rank = sum(local(param).numel() for param in self.params)
            self.row["state_bytes_per_element"] = (held - before) / on_rank
            self.row["temporary_bytes"] = torch.cuda.max_memory_allocated(device) - held
            self.row |= {key: largest(value, device) for key, value in spans_of(optimizer.step, device).items()}
        if contender.is_sharded:
            ranks = mesh.size()
            self.row["sent_bytes"] = 2 * _ELEMENT * numel * (ranks - 1) // ranks**2  # on both ways, by a rank
        self.parts = [self._own_rows(i, mesh, contender) for i in range(len(self.params))]

    def _own_rows(self, i: int, mesh: DeviceMesh, contender: Contender) -> Tensor:
        param = local(self.params[i])
        return param if contender.is_sharded else own_rows(param, mesh)


def spans_of(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of one step in which a kernel of NCCL runs, in which no other runs beside it, in which none runs.

    A kernel of NCCL also waits for the other ranks.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        synchronize(device)
    events = [
        (event.time_range.start, event.time_range.end, event.name.startswith("nccl"))
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith("nccl:")
    ]
    everything = covered((start, end) for start, end, _ in events)
    of_others = covered((start, end) for start, end, is_nccl in events if not is_nccl)
    whole = max(end for _, end, _ in events) - min(start for start, _, _ in events)
    return {
        "communication_ms": covered((start, end) for start, end, is_nccl in events if is_nccl) / 1e3,
        "not_hidden_ms": (everything - of_others) / 1e3,
        "no_kernel_ms": (whole - everything) / 1e3,
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of their union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# --- all of them ------------------------------------------------------------------------------------------------------


class Comparison:
    """The rows of one model."""

    def __init__(self, shapes: Shapes, mesh: DeviceMesh, device: torch.device, repeats: int) -> None:
        self._given = shapes, mesh, device, repeats
        self.rows: dict[str, dict[str, Any]] = {}
        self._alone: dict[str, list[Tensor]] = {}
        self._first: Tensor | None = None

    def add(self, contender: Contender) -> dict[str, Any]:
        device = self._given[2]
        try:
            found = Measured(contender, *self._given)
            row = found.row | self._compared(contender.name, found)
        except Exception as error:  # one that fails must not hide the others' results
            row = {"error": f"{type(error).__name__}: {error}"[:300]}
        self.rows[contender.name] = row
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return row

    def _compared(self, name: str, found: Measured) -> dict[str, Any]:
        """With one GPU's time and bits, and the first update with that of the first contender."""
        device = self._given[2]
        row: dict[str, Any] = {}
        if self._first is None:
            self._first = found.first
        else:
            error = (found.first.float() - self._first.float()).norm() / self._first.float().norm()
            row["difference_of_first_update"] = largest(error.item(), device)
        alone = name + ALONE
        if name.endswith(ALONE):
            self._alone = {name: found.parts}
        elif alone in self._alone:
            pairs = zip(self._alone.pop(alone), found.parts, strict=True)
            row["share_of_one_gpu"] = found.row["ms"] / self.rows[alone]["ms"]
            row["same_bits_as_one_gpu"] = not largest(any(not torch.equal(*pair) for pair in pairs), device)
        return row


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MATRICES))
    parser.add_argument("--only", default="", help="contenders whose name this regular expression matches")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    first = dist.get_rank() == 0
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    report: dict[str, Any] = {"machine": machine(device, args.commit), "ranks": dist.get_world_size(), "models": {}}
    for model in args.models:
        comparison = Comparison(MODELS[model], mesh, device, args.repeats)
        report["models"][model] = comparison.rows
        for contender in CONTENDERS:
            if not re.search(args.only, contender.name):
                continue
            row = comparison.add(contender) if contender.is_there() else {"skipped": f"needs {contender.modules}"}
            comparison.rows[contender.name] = row
            if first:
                short = {key: value for key, value in row.items() if key != "all_ms"}
                print(f"{model}: {contender.name}: {short}", flush=True)
                write(report, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
