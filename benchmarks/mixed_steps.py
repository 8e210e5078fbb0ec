"""Steps of several formats or dtypes at once, compared with steps of each of them alone.

The parameters of Llama 3.2 1B are dealt out to the parts of a mix, so that each part has about as many elements.
``python benchmarks/mixed_steps.py --output F`` writes F and prints a table. Target: within 3 points of the slowest
part's share of copy bandwidth.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contenders import BF16, FP8, FP16, FP32, HYPER, INT8, SCALES, SEPARATE, SPLIT8, SPLIT16, states
from fused_optim import FusedAdamW
from step import Shapes, copy_bandwidth, llama_shapes, machine, synchronize, timed, write

WARMUP = 3


@dataclass(frozen=True)
class Part:
    """``dtype`` of parameters and gradients, ``options`` of their param group, and the bytes an element moves."""

    name: str
    dtype: torch.dtype
    moved: float
    options: dict[str, Any]


@dataclass(frozen=True)
class Mix:
    name: str
    parts: tuple[Part, ...]
    options: dict[str, Any]  # of the whole optimizer


MASTER = 8  # bytes that an FP32 master moves


def part(moments: torch.dtype, master: float, dtype: torch.dtype = BF16) -> Part:
    """``master``: bytes of it per element, read and written."""
    of_moments = {FP32: 16, BF16: 8, FP16: 8 + SCALES, FP8: 4 + SCALES, INT8: 4 + SCALES}[moments]
    of_param = 2 if master == MASTER else 3  # the gradient is read and the parameter written; else it is read, too
    moved = of_param * dtype.itemsize + master + of_moments
    return Part(f"{dtype} with {moments}".replace("torch.", ""), dtype, moved, states(moments))


MIXES = [
    Mix("FP32 master: int8, BF16 states", (part(INT8, MASTER), part(BF16, MASTER)), SEPARATE),
    Mix("FP32 master: int8, FP32 states", (part(INT8, MASTER), part(FP32, MASTER)), SEPARATE),
    Mix("FP32 master: FP8, int8 states", (part(FP8, MASTER), part(INT8, MASTER)), SEPARATE),
    Mix("FP32 master: int8, FP16 states", (part(INT8, MASTER), part(FP16, MASTER)), SEPARATE),
    Mix("16-bit remainder: int8, BF16 states", (part(INT8, 4), part(BF16, 4)), SPLIT16),
    Mix("8-bit remainder: int8, FP32 states", (part(INT8, 2), part(FP32, 2)), SPLIT8),
    Mix("FP32 and BF16 parameters, int8 states", (part(INT8, 0, FP32), part(INT8, MASTER)), SEPARATE),
    Mix("FP32 parameters, 8-bit remainders, int8 and BF16 states", (part(BF16, 0, FP32), part(INT8, 2)), SPLIT8),
    Mix("four state formats", tuple(part(moments, MASTER) for moments in (INT8, BF16, FP32, FP8)), SEPARATE),
]


def dealt(shapes: Shapes, parts: int) -> list[Shapes]:
    """Each shape goes to who has the fewest elements so far."""
    hands: list[Shapes] = [[] for _ in range(parts)]
    held = [0] * parts
    for shape in sorted(shapes, key=lambda shape: -torch.Size(shape).numel()):
        poorest = held.index(min(held))
        hands[poorest].append(shape)
        held[poorest] += torch.Size(shape).numel()
    return hands


def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    params = [(0.02 * torch.randn(shape, device=device)).to(dtype).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = (1e-3 * torch.randn(param.shape, device=device)).to(dtype)
    return params


def step_ms(
    parts: Sequence[Part], hands: Sequence[Shapes], options: dict[str, Any], device: torch.device, repeats: int
) -> list[float]:
    torch.manual_seed(0)
    groups = [
        {"params": make(shapes, each.dtype, device), **each.options} for each, shapes in zip(parts, hands, strict=True)
    ]
    optimizer = FusedAdamW(groups, **HYPER, **options)
    for _ in range(WARMUP):
        optimizer.step()
    synchronize(device)
    return timed(optimizer.step, device, repeats)[0]


def share(parts: Sequence[Part], hands: Sequence[Shapes], ms: float, bandwidth: float) -> float:
    """Of copy bandwidth that a step reaches."""
    numels = [sum(torch.Size(shape).numel() for shape in shapes) for shapes in hands]
    return 1e3 * sum(p.moved * numel for p, numel in zip(parts, numels, strict=True)) / bandwidth / ms


def measure(
    mix: Mix, shapes: Shapes, device: torch.device, args: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    hands = dealt(shapes, len(mix.parts))
    alone = {
        p.name: min(median(step_ms([p], [shapes], mix.options, device, args.repeats)) for _ in range(args.rounds))
        for p in mix.parts
    }
    ms = min(median(step_ms(mix.parts, hands, mix.options, device, args.repeats)) for _ in range(args.rounds))
    shares = {p.name: share([p], [shapes], alone[p.name], bandwidth) for p in mix.parts}
    return {
        "name": mix.name,
        "ms": ms,
        "share_of_copy": share(mix.parts, hands, ms, bandwidth),
        "parts": [{"name": name, "ms": alone[name], "share_of_copy": shares[name]} for name in alone],
        "points_behind_slowest_part": 100 * (min(shares.values()) - share(mix.parts, hands, ms, bandwidth)),
    }


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'mix':<58}{'ms':>9}{'of copy':>9}{'slowest part':>14}{'behind':>8}"]
    for row in rows:
        slowest = min(each["share_of_copy"] for each in row["parts"])
        behind = row["points_behind_slowest_part"]
        lines.append(f"{row['name']:<58}{row['ms']:>9.3f}{row['share_of_copy']:>9.1%}{slowest:>14.1%}{behind:>8.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10, help="steps timed in each round")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    bandwidth = copy_bandwidth(device)
    report: dict[str, Any] = {"machine": machine(device, args.commit), "copy_bytes_per_s": bandwidth, "mixes": []}
    shapes = llama_shapes() if device.type == "cuda" else llama_shapes(1, 4096)
    for mix in MIXES:
        report["mixes"].append(measure(mix, shapes, device, args, bandwidth))
        write(report, args.output)
    print(f"copy: {bandwidth / 1e12:.3f} TB/s\n{table(report['mixes'])}")


if __name__ == "__main__":
    main()
