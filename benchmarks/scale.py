"""What one rank of many does: the shapes of large models on up to 16,384 ranks, without the other ranks.

torch's fake process group makes this process any rank of any world; its collectives do nothing. So a rank's shards, its
optimizer, its step and its plan of a checkpoint are the real ones, and nothing that ranks tell each other is.

``python benchmarks/scale.py --output scale.json``, for one process after the other: ``--models``, ``--world-sizes``.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fused_optim import FusedAdamW
from fused_optim.checkpoint.write import Planner
from fused_optim.sharding.dtensor import local_tensor, shard_geometry
from simulation import sharded_parameter, simulated

TENSOR_PARALLEL = 8
SHARDED_BY = {64: 8, 1024: 64, 16384: 256}  # ranks of one replica under HSDP
LAUNCH = 396  # shards in the table of one launch, csrc/multi_tensor/cuda/table.cuh
FORMATS = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}


# --- models -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """``parallel``: the dim that tensor parallelism cuts; None: every rank of it has all."""

    name: str
    shape: tuple[int, ...]
    parallel: int | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Model = list[Weight]


def llama(layers: int, width: int, inner: int, heads: int, keys: int = 8, vocabulary: int = 128_256) -> Model:
    """Table 3 of "The Llama 3 Herd of Models" (arXiv 2407.21783); the vocabulary is that of the released weights."""
    size = width // heads
    found = [Weight("embed.weight", (vocabulary, width), 0)]
    for layer in range(layers):
        shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
            "norm1": ((width,), None),
            "q": ((width, width), 0),
            "k": ((keys * size, width), 0),
            "v": ((keys * size, width), 0),
            "o": ((width, width), 1),
            "norm2": ((width,), None),
            "gate": ((inner, width), 0),
            "up": ((inner, width), 0),
            "down": ((width, inner), 1),
        }
        found += [Weight(f"layers.{layer}.{name}.weight", *each) for name, each in shapes.items()]
    return [*found, Weight("norm.weight", (width,), None), Weight("head.weight", (vocabulary, width), 0)]


def experts(
    layers: int = 61, width: int = 7168, inner: int = 2048, count: int = 256, dense: int = 3, heads: int = 128
) -> Model:
    """Section 4.2 of the DeepSeek-V3 report (arXiv 2412.19437) and the config of its weights.

    256 routed experts and a shared one in all layers but the first three. Experts of a layer are one tensor, as
    grouped products take them.
    """
    query, key, rope, part, vocabulary = 1536, 512, 64, 128, 129_280
    found = [Weight("embed.weight", (vocabulary, width), 0)]
    for layer in range(layers):
        shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
            "norm1": ((width,), None),
            "q_a": ((query, width), None),
            "q_norm": ((query,), None),
            "q_b": ((heads * (part + rope), query), 0),
            "kv_a": ((key + rope, width), None),
            "kv_norm": ((key,), None),
            "kv_b": ((heads * 2 * part, key), 0),
            "o": ((width, heads * part), 1),
            "norm2": ((width,), None),
        }
        wide = 9 * inner if layer < dense else inner
        shapes |= {"gate": ((wide, width), 0), "up": ((wide, width), 0), "down": ((width, wide), 1)}
        if layer >= dense:
            shapes["router"] = ((count, width), None)
            shapes |= {f"experts.{name}": ((count, inner, width), 1) for name in ("gate", "up")}
            shapes["experts.down"] = ((count, width, inner), 2)
        found += [Weight(f"layers.{layer}.{name}.weight", *each) for name, each in shapes.items()]
    return [*found, Weight("norm.weight", (width,), None), Weight("head.weight", (vocabulary, width), 0)]


MODELS: dict[str, Callable[[], Model]] = {
    "Llama 3 8B": lambda: llama(32, 4096, 14336, 32),
    "Llama 3 70B": lambda: llama(80, 8192, 28672, 64),
    "Llama 3 405B": lambda: llama(126, 16384, 53248, 128),
    "256 experts, 671B": experts,
}


# --- layouts, and where shards lie by a formula of our own --------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """``kind``: "fsdp", "hsdp" or "fsdp_tp"; ``mesh``: its shape, the dim that numbers ranks fastest last."""

    kind: str
    mesh: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    @property
    def shards(self) -> int:
        """Into how many parts FSDP cuts."""
        return self.mesh[0] if self.kind == "fsdp_tp" else self.mesh[-1]

    def placements(self, weight: Weight) -> list[Placement]:
        if self.kind == "fsdp":
            return [Shard(0)]
        if self.kind == "hsdp":
            return [Replicate(), Shard(0)]
        if weight.parallel is None:
            return [Shard(0), Replicate()]
        if weight.parallel == 0:  # FSDP cuts what tensor parallelism has cut
            return [_StridedShard(0, split_factor=self.mesh[1]), Shard(0)]
        return [Shard(0), Shard(weight.parallel)]

    def ranges(self, weight: Weight, rank: int) -> list[tuple[int, int]]:
        """By dim, what a rank has. Ceiling division, as ``torch.chunk`` cuts; nothing of torch or the package."""
        found = [(0, size) for size in weight.shape]
        number = rank % self.mesh[-1] if self.kind == "hsdp" else rank
        if self.kind == "fsdp_tp":
            number, inner = divmod(rank, self.mesh[1])
            if weight.parallel is not None:
                found[weight.parallel] = _cut(found[weight.parallel], self.mesh[1], inner)
        found[0] = _cut(found[0], self.shards, number)
        return found

    def length(self, weight: Weight) -> int:
        """Of a full shard, in dim 0."""
        return self.ranges(weight, 0)[0][1]

    def rank_of(self, number: int) -> int:
        """A rank that has the shard of this number; under tensor parallelism the last of them."""
        if self.kind == "fsdp_tp":
            return number * self.mesh[1] + self.mesh[1] - 1
        return number if self.kind == "fsdp" else (self.mesh[0] // 2) * self.mesh[1] + number


def _cut(whole: tuple[int, int], parts: int, number: int) -> tuple[int, int]:
    first, end = whole
    size = -(-(end - first) // parts)
    start = min(first + number * size, end)
    return start, min(start + size, end)


def layouts(ranks: int) -> list[Layout]:
    replica, inner = SHARDED_BY.get(ranks, max(ranks // 2, 1)), min(TENSOR_PARALLEL, ranks // 2)
    return [
        Layout("fsdp", (ranks,)),
        Layout("hsdp", (ranks // replica, replica)),
        Layout("fsdp_tp", (ranks // inner, inner)),
    ]


def kinds_of_ranks(model: Iterable[Weight], layout: Layout) -> dict[str, int]:
    """First, middle and last; and, where there are such, one with an uneven shard and one with an empty shard."""
    last = layout.shards - 1
    found = {"first": 0, "middle": layout.rank_of(layout.shards // 2), "last": layout.ranks - 1}
    for weight in model:
        rows = -(-weight.shape[0] // layout.mesh[1]) if _cut_twice(weight, layout) else weight.shape[0]
        size = -(-rows // layout.shards)
        full, rest = divmod(rows, size)
        if rest and "uneven" not in found:
            found["uneven"] = layout.rank_of(full)
        if full + bool(rest) <= last and "empty" not in found:
            found["empty"] = layout.rank_of(full + bool(rest))
    return found


def _cut_twice(weight: Weight, layout: Layout) -> bool:
    return layout.kind == "fsdp_tp" and weight.parallel == 0


# --- one rank -----------------------------------------------------------------------------------------------------


def build(model: Iterable[Weight], layout: Layout, mesh: DeviceMesh, device: str) -> list[tuple[str, nn.Parameter]]:
    return [
        (weight.name, sharded_parameter(weight.shape, torch.bfloat16, mesh, layout.placements(weight), device))
        for weight in model
    ]


def mesh_of(layout: Layout) -> DeviceMesh:
    return init_device_mesh("cpu", layout.mesh)


def indices(weight: Weight, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The elements of a shard by their numbers in the whole tensor, row by row."""
    found = torch.zeros((), dtype=torch.int64)
    for dim, (start, end) in enumerate(ranges):
        stride = math.prod(weight.shape[dim + 1 :])
        found = found.unsqueeze(-1) + torch.arange(start, end) * stride
    return found.flatten()


def check_geometry(weight: Weight, layout: Layout, rank: int, param: Tensor, at_most: int = 1 << 20) -> None:
    """Indices and scale blocks are the whole tensor's: those of its first and last elements, and all rows' ends."""
    ranges, geometry = layout.ranges(weight, rank), shard_geometry(param)
    sizes = [end - start for start, end in ranges]
    assert geometry.numel == math.prod(sizes) == local_tensor(param).numel(), weight.name
    whole = shard_geometry(torch.empty(weight.shape, device="meta"))
    assert geometry.block == whole.block, f"{weight.name}: blocks of {geometry.block}, of the whole {whole.block}"
    if not geometry.numel:
        return
    row = geometry.numel // sizes[0]
    some = max(1, at_most // row)  # rows
    first, end = ranges[0]
    for start in sorted({first, max(first, end - some)}):
        part = [(start, min(start + some, end)), *ranges[1:]]
        expected, at = indices(weight, part), (start - first) * row
        assert torch.equal(geometry.global_of(torch.arange(at, at + len(expected))), expected), weight.name
        if geometry.block and len(weight.shape) > 1:
            starts = expected.view(-1, geometry.block)
            assert not (starts[:, 0] % geometry.block).any(), f"{weight.name}: a block of the whole tensor is cut"
            assert (starts[:, -1] - starts[:, 0] == geometry.block - 1).all(), f"{weight.name}: a block is torn"
    last = sum((end - 1) * math.prod(weight.shape[dim + 2 :]) for dim, (_, end) in enumerate(ranges[1:]))
    for at in range(0, sizes[0], max(1, sizes[0] // 100)):
        found = geometry.global_of(torch.tensor((at + 1) * row - 1))
        assert int(found) == (first + at) * (weight.numel // weight.shape[0]) + last, weight.name


def gradient(numbers: Tensor, step: int) -> Tensor:
    """Of elements by their numbers: the same on all ranks that have one."""
    return (((numbers * 2_654_435_761 + step * 40_503) % 65_521).float() / 65_521 - 0.5).bfloat16()


def train(params: Sequence[nn.Parameter], numbers: Sequence[Tensor], names: Sequence[str], steps: int) -> FusedAdamW:
    optimizer = FusedAdamW(list(zip(names, params, strict=True)), lr=1e-2, **FORMATS)
    for step in range(steps):
        for param, each in zip(params, numbers, strict=True):
            grad = gradient(each, step).view(local_tensor(param).shape)
            param.grad = DTensor(grad, param._spec, requires_grad=False) if isinstance(param, DTensor) else grad
        optimizer.step()
    return optimizer


def stored(optimizer: FusedAdamW, param: Tensor) -> dict[str, Tensor]:
    """The bits of its states, its own and those of its scales: one per block in rows of blocks."""
    found = {name: local_tensor(value) for name, value in optimizer.state[param].items()}
    layout, blocks = optimizer.store.layouts[param], optimizer.store.layouts[param].geometry.blocks
    scales = layout.scales.view(-1, blocks) if blocks else layout.scales.view(0, 1)
    return {**found, "param": local_tensor(param).detach(), **{f"scale {i}": each for i, each in enumerate(scales)}}


def check_states(weights: Sequence[Weight], layout: Layout, ranks: Iterable[int], steps: int = 2) -> tuple[int, int]:
    """Stored bits after some steps are those slices of one process's. Returns how many tensors were compared.

    And how many shards were not: vectors, whose blocks are counted from where the shard begins, with shards that do not
    begin where a block of the whole does.
    """
    whole = [nn.Parameter(torch.zeros(weight.shape, dtype=torch.bfloat16)) for weight in weights]
    everything = [torch.arange(weight.numel) for weight in weights]
    names = [weight.name for weight in weights]
    alone = train(whole, everything, names, steps)
    compared = left_out = 0
    for rank in ranks:
        with simulated(layout.ranks, rank):
            named = build(weights, layout, mesh_of(layout), "cpu")
            numbers = [indices(weight, layout.ranges(weight, rank)) for weight in weights]
            params = [param for _, param in named]
            sharded = train(params, numbers, names, steps)
            for weight, number, param, alone_param in zip(weights, numbers, params, whole, strict=True):
                expected, block = stored(alone, alone_param), shard_geometry(param).block
                if block and len(weight.shape) == 1 and layout.length(weight) % block:
                    left_out += 1
                    continue
                for name, found in stored(sharded, param).items():
                    at = number[::block] // block if name.startswith("scale") else number
                    same = torch.equal(_bits(found), _bits(expected[name].flatten()[at]))
                    assert same, f"{layout} rank {rank}: {name} of {weight.name}"
                    compared += 1
    return compared, left_out


def _bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().contiguous().view(torch.uint8)


def stepped(model: Model, layout: Layout, rank: int, budget: int) -> dict[str, Any]:
    """Build one rank and step it, with as many of its weights, layer by layer, as have ``budget`` elements in all."""
    chosen, total = [], 0
    for weight in sorted(model, key=lambda each: each.name in ("embed.weight", "head.weight")):  # the largest last
        size = math.prod(end - start for start, end in layout.ranges(weight, rank))
        if total + size <= budget:
            chosen.append(weight)
            total += size
    with simulated(layout.ranks, rank):
        mesh = mesh_of(layout)
        whole = [param for _, param in build(model, layout, mesh, "meta")]
        alike = {(weight.shape, weight.parallel): (weight, param) for weight, param in zip(model, whole, strict=True)}
        for weight, param in alike.values():  # layers repeat each other
            check_geometry(weight, layout, rank, param)
        named = build(chosen, layout, mesh, "cpu")
        optimizer = FusedAdamW(named, lr=1e-3, **FORMATS)
        times = []
        for _ in range(3):
            for _, param in named:
                param.grad = torch.full_like(param, 1e-3)
            start = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - start)
        full = sum(local_tensor(param).numel() > 0 for param in whole)
    return {
        "rank": rank,
        "weights": len(chosen),
        "weights_of_model": len(model),
        "elements": total,
        "shards_with_elements": full,
        "launches": -(-full // LAUNCH),
        "first_step_ms": 1e3 * times[0],
        "step_ms": 1e3 * min(times[1:]),
    }


def host_time(model: Model, layout: Layout, steps: int) -> float:
    """Milliseconds of a step, the least, with every weight cut down to one block of 128 on each rank."""
    with simulated(layout.ranks):
        mesh = mesh_of(layout)
        small = []
        for weight in model:
            rows = layout.shards * (layout.mesh[1] if _cut_twice(weight, layout) else 1)
            cut = layout.kind == "fsdp_tp" and weight.parallel not in (0, None)
            small.append(
                Weight(weight.name, (rows, 128 * (layout.mesh[1] if cut else 1)), 1 if cut else weight.parallel)
            )
        params = [param for _, param in build(small, layout, mesh, "cpu")]
        optimizer = FusedAdamW(params, lr=1e-3, **FORMATS)
        times = []
        for _ in range(steps + 3):
            for param in params:
                param.grad = DTensor(torch.ones_like(local_tensor(param)), param._spec, requires_grad=False)
            start = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - start)
            optimizer.zero_grad()
    return 1e3 * min(times[3:])


# --- checkpoints --------------------------------------------------------------------------------------------------


def state_of(model: Model, layout: Layout) -> dict[str, Any]:
    """A rank's model and native states, without memory."""
    named = build(model, layout, mesh_of(layout), "meta")
    optimizer = FusedAdamW(named, checkpoint_format="native", **FORMATS)
    optimizer.initialize_state()
    state = optimizer.state_dict()
    names = [name for name, _ in named]
    groups = [{**group, "params": names} for group in state["param_groups"]]
    states = {names[number]: each for number, each in state["state"].items()}
    return {"model": dict(named), "optimizer": {"state": states, "param_groups": groups}}


def local_plan(planner: DefaultSavePlanner, state: dict[str, Any], rank: int) -> tuple[SavePlan, float]:
    start = time.perf_counter()
    planner.set_up_planner(state, None, rank == 0)
    plan = planner.create_local_plan()
    return plan, time.perf_counter() - start


def metadata_bytes(plans: list[SavePlan]) -> tuple[int, int, float]:
    """Bytes of ``.metadata`` of these plans alone, its parts, and the seconds that the plan of all takes."""
    start = time.perf_counter()
    finished, found = create_default_global_save_plan(plans)
    seconds = time.perf_counter() - start
    found.planner_data = {key: path for plan in plans for key, path in (plan.planner_data or {}).items()}
    found.storage_data = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", 1_000_000 * number, 1_000_000)
        for rank, plan in enumerate(finished)
        for number, item in enumerate(plan.items)
    }
    return len(pickle.dumps(found)), len(found.storage_data), seconds


def planned(model: Model, whole: Model, layout: Layout, samples: int, compare: bool) -> dict[str, Any]:
    """What a save gathers, writes and takes: plans of the first rank and of others in equal distances are made.

    Bytes and seconds of one item are theirs; how many there are of all ranks is counted by :func:`shards`.
    ``compare``: with torch's planner, too.
    """
    ranks = sorted({round(i * (layout.ranks - 1) / (samples - 1)) for i in range(samples)})
    plans, sizes, seconds, before = [], [], [], []
    for rank in ranks:
        with simulated(layout.ranks, rank):
            state = state_of(model, layout)
            plan, took = local_plan(Planner(True), state, rank)
            if compare and rank in (ranks[0], ranks[len(ranks) // 2], ranks[-1]):
                before.append(len(pickle.dumps(local_plan(DefaultSavePlanner(), state, rank)[0])))
            plans.append(plan)
            sizes.append(len(pickle.dumps(plan)))
            seconds.append(took)
    others = [len(plan.items) for plan in plans[1:]]
    numbers = sum(item.type == WriteItemType.BYTE_IO for item in plans[0].items)
    items = numbers + sum(entries(weight, layout) * shards(weight, layout) for weight in whole)
    gathered = round(items * sum(sizes) / sum(len(plan.items) for plan in plans))
    nbytes, parts, took = metadata_bytes(plans)
    each, once = _line(plans, nbytes, parts)
    files = max(shards(weight, layout) for weight in model) if layout.kind == "fsdp" else layout.ranks
    names = len(pickle.dumps([weight.name for weight in whole]))
    found = {
        "sampled_ranks": len(ranks),
        "items_of_a_rank": max(others),
        "items": items,
        "plan_bytes_of_a_rank": max(sizes[1:]),
        "gathered_bytes": gathered,
        "local_plan_seconds": max(seconds),
        "global_plan_seconds": took / parts * items,
        "metadata_bytes": round(once + each * items),
        "checksum_bytes": items * len(json.dumps([123_456_789, 1_234_567, "01234567"]) + ", "),
        "files_at_least": files,
        "manifest_bytes": files * len(' "__12345_0.distcp": 1234567890,\n'),
        "names_gathered_before": names * layout.ranks,
    }
    if before:
        found["gathered_bytes_with_torch_planner"] = round(sum(before) / len(before) * layout.ranks)
    return found


def entries(weight: Weight, layout: Layout) -> int:
    """Tensors of a weight in a native checkpoint: itself, bits and scales of two moments, remainder and its check.

    Where shards are no whole rows: itself, two moments and the master, unscaled.
    """
    whole_rows = len(weight.shape) > 1 and (layout.kind != "fsdp_tp" or not weight.parallel)
    return 7 if whole_rows else 4


def shards(weight: Weight, layout: Layout) -> int:
    """That have elements, replicas counted once."""
    if layout.kind != "fsdp_tp" or weight.parallel is None:
        return _pieces(weight.shape[0], layout.shards)
    if weight.parallel:
        return _pieces(weight.shape[0], layout.shards) * _pieces(weight.shape[weight.parallel], layout.mesh[1])
    cuts = (_cut((0, weight.shape[0]), layout.mesh[1], number) for number in range(layout.mesh[1]))
    return sum(_pieces(end - start, layout.shards) for start, end in cuts)


def _pieces(size: int, parts: int) -> int:
    return -(-size // -(-size // parts)) if size else 0


def _line(plans: list[SavePlan], nbytes: int, parts: int) -> tuple[float, float]:
    """Bytes of metadata for each part, and those that are there once, from two sizes of plans."""
    fewer, fewer_parts, _ = metadata_bytes(plans[:1])
    if parts == fewer_parts:
        return 0.0, float(nbytes)
    each = (nbytes - fewer) / (parts - fewer_parts)
    return each, fewer - each * fewer_parts


# --- runs ---------------------------------------------------------------------------------------------------------


def fitting(model: Model, at_most: int) -> list[Weight]:
    """One weight of each name in a layer, the smaller ones, for comparisons with one process."""
    found: dict[str, Weight] = {}
    for weight in model:
        kind = weight.name.split(".", 2)[-1] if weight.name.startswith("layers") else weight.name
        if weight.numel <= at_most:
            found.setdefault(kind, weight)
    return list(found.values())


def slice_of(model: Model, layers: int | None) -> Model:
    """The first layer, the last ``layers``, and what is in none; None: all."""
    count = 1 + max(int(weight.name.split(".")[1]) for weight in model if weight.name.startswith("layers"))
    if layers is None or layers + 1 >= count:
        return model
    kept = {"0", *map(str, range(count - layers, count))}
    return [weight for weight in model if not weight.name.startswith("layers") or weight.name.split(".")[1] in kept]


_GROWING = ("items_of_a_rank", "plan_bytes_of_a_rank", "gathered_bytes_with_torch_planner")


def run(name: str, whole: Model, layout: Layout, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one rank's plan grow with the number of weights: those of a slice are multiplied."""
    model = slice_of(whole, options.layers)
    kinds = kinds_of_ranks(model, layout)
    small = fitting(model, options.whole)
    steps = {kind: stepped(model, layout, rank, options.elements) for kind, rank in kinds.items()}
    compared, left_out = check_states(small, layout, sorted(set(kinds.values()))) if small else (0, 0)
    checkpoint = planned(model, whole, layout, options.samples, layout.kind != "fsdp_tp" or layout.ranks <= 64)
    checkpoint |= {key: checkpoint[key] * len(whole) / len(model) for key in _GROWING if key in checkpoint}
    return {
        "model": name,
        "elements": sum(weight.numel for weight in whole),
        "weights": len(whole),
        "weights_of_slice": len(model),
        "ranks": layout.ranks,
        "layout": layout.kind,
        "mesh": list(layout.mesh),
        "steps": steps,
        "states_compared": compared,
        "shards_of_vectors_not_compared": left_out,
        "shapes_checked": len({(weight.shape, weight.parallel) for weight in model}),
        "weights_compared": [weight.name for weight in small],
        "host_ms": host_time(whole, layout, options.steps),
        "checkpoint": checkpoint,
    }


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return {
        "cpu": model or platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


_KINDS = {"fsdp": "FSDP", "hsdp": "HSDP", "fsdp_tp": "FSDP x TP"}


def table(runs: Iterable[Mapping[str, Any]]) -> str:
    """Of docs/scale.md. Of runs of the same model, ranks and mesh the last one."""
    runs = {(run["model"], run["ranks"], run["layout"]): run for run in runs}.values()
    rows = ["| model | ranks | mesh | plans of torch | ours | `.metadata` | checksums | files |", "|---|" + "---|" * 7]
    for run in runs:
        found = run["checkpoint"]
        names = ("gathered_bytes_with_torch_planner", "gathered_bytes", "metadata_bytes", "checksum_bytes")
        sizes = [_size(found[name]) if name in found else "-" for name in names]
        mesh = f"{_KINDS[run['layout']]} {' x '.join(map(str, run['mesh']))}"
        first = [run["model"], f"{run['ranks']:,}", mesh]
        rows.append(f"| {' | '.join([*first, *sizes, format(found['files_at_least'], ',')])} |")
    return "\n".join(rows)


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.{int(nbytes < 1e7)}f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[64, 1024, 16384])
    parser.add_argument("--layouts", nargs="+", default=["fsdp", "hsdp", "fsdp_tp"])
    parser.add_argument("--layers", type=int, help="a slice, for all but host times: the first and the last")
    parser.add_argument("--elements", type=int, default=3_000_000, help="of a rank that are stepped")
    parser.add_argument("--whole", type=int, default=5_000_000, help="elements of weights compared with one process")
    parser.add_argument("--steps", type=int, default=10, help="for host time")
    parser.add_argument("--samples", type=int, default=3, help="ranks whose plans are made")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", nargs="+", type=Path, help="print that of these results, instead of a run")
    options = parser.parse_args()
    if options.table:
        print(table(run for path in options.table for run in json.loads(path.read_text())["runs"]))
        return
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*gathers the shards.*")
    results: Mapping[str, Any] = {"machine": machine(), "options": vars(options) | {"output": None}, "runs": []}
    for name in options.models:
        model = MODELS[name]()
        for ranks in options.world_sizes:
            for layout in layouts(ranks):
                if layout.kind in options.layouts:
                    found = run(name, model, layout, options)
                    results["runs"].append(found)
                    brief = {key: found["checkpoint"][key] for key in ("gathered_bytes", "metadata_bytes")}
                    print(name, ranks, layout.kind, f"host {found['host_ms']:.2f} ms", brief, flush=True)
                    if options.output:
                        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
