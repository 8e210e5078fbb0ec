"""How even Muon's work is over many ranks, and what each of them sends: from shapes alone, no rank is started.

    python benchmarks/muon_owners.py --output owners.json
    python benchmarks/muon_owners.py --buckets --output owned.json

Matrices of Llama 3 8B and 70B, cut by rows as FSDP2 cuts them, and of a model with 256 experts in each of 58 layers,
which lie on 256 ranks or fewer by the expert and, on more, are cut by rows beside that. ``--buckets``: what one rank
owns of a step's buckets, on numbers of ranks that the experts do not divide, too.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fused_optim.matrices.exchange import Dtypes
from fused_optim.matrices.owners import Box, Boxes, Ownership, matrices_of
from fused_optim.matrices.shards import Kind, in_buckets
from scale import machine
from simulation import sharded_parameter, simulated

RANKS = (64, 1024, 16384)
IN_BUCKETS = (7, 48, 63, 64, 65, 100)
_EXPERTS = 256
_BYTES = 2  # of an element: updates are sent in BF16, and sent back so


def layer(hidden: int, heads: int, inner: int) -> list[tuple[int, ...]]:
    """Of Llama 3: queries, keys, values, output; gate, up, down."""
    attention = [(hidden, hidden), (heads, hidden), (heads, hidden), (hidden, hidden)]
    return [*attention, (inner, hidden), (inner, hidden), (hidden, inner)]


MODELS: dict[str, list[tuple[int, ...]]] = {
    "Llama 3 8B": layer(4096, 1024, 14336) * 32,
    "Llama 3 70B": layer(8192, 1024, 28672) * 80,
    "256 experts": [
        *layer(7168, 1024, 2048) * 58,
        *[(_EXPERTS, 2048, 7168), (_EXPERTS, 2048, 7168), (_EXPERTS, 7168, 2048)] * 58,
    ],
}


def cuts(size: int, ranks: int) -> list[tuple[int, int]]:
    step = -(-size // ranks)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(ranks)]


def boxes(shape: tuple[int, ...], ranks: int) -> Boxes:
    rows, columns = shape[-2:]
    if len(shape) == 2:
        return Boxes([Box((0, 1), part, (0, columns)) for part in cuts(rows, ranks)])
    by_expert = min(ranks, _EXPERTS)
    parts = cuts(rows, ranks // by_expert)
    return Boxes([Box(experts, part, (0, columns)) for part in parts for experts in cuts(shape[0], by_expert)])


def sent(owned: Ownership) -> Iterator[tuple[int, int]]:
    """(rank, bytes) of everything that leaves a rank, on both ways."""
    for number, (owner, pieces) in enumerate(zip(owned.owners, owned.pieces, strict=True)):
        for piece, ranks in pieces.items():
            size = _BYTES * (piece.rows[1] - piece.rows[0]) * (piece.columns[1] - piece.columns[0])
            if (sender := owned.sender(number, piece)) != owner:
                yield sender, size
            yield owner, size * sum(rank != owner for rank in ranks)


def assigned(shapes: list[tuple[int, ...]], ranks: int) -> dict[str, Any]:
    start = time.perf_counter()
    alike = {shape: boxes(shape, ranks) for shape in dict.fromkeys(shapes)}
    matrices = [matrix for i, shape in enumerate(shapes) for matrix in matrices_of(i, shape)]
    owned = Ownership.of(matrices, {i: alike[shape] for i, shape in enumerate(shapes)}, [0] * ranks)
    seconds = time.perf_counter() - start
    load, out = [0] * ranks, [0] * ranks
    for owner, matrix in zip(owned.owners, matrices, strict=True):
        load[owner] += matrix.cost
    for rank, size in sent(owned):
        out[rank] += size
    least = max(sum(load) / ranks, max(matrix.cost for matrix in matrices))
    return {
        "matrices": len(matrices),
        "most_work_to_mean": max(load) / (sum(load) / ranks),
        "most_work_to_least_possible": max(load) / least,
        "mean_sent_bytes": sum(out) / ranks,
        "most_sent_bytes": max(out),
        "assign_s": seconds,
    }


def owned_by_bucket(shapes: list[tuple[int, ...]], ranks: int) -> dict[str, Any]:
    """``most_owned_to_mean``: of the largest bucket share of a rank, of buckets whose mean is a whole matrix or more.

    ``most_owned_bytes``: in FP32. ``work_to_mean``: of the step, whose buckets wait for the rank that has most to do.
    """
    with simulated(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        params: dict[int, Tensor] = {
            i: sharded_parameter(shape, torch.bfloat16, mesh, [Shard(0)]) for i, shape in enumerate(shapes)
        }
        kinds = [Kind((), Dtypes(torch.bfloat16, torch.bfloat16))] * len(shapes)
        found = [on_mesh for _, meshes in in_buckets(params, kinds) for on_mesh, _ in meshes]
        owned, shares = [on_mesh.owned_elements for on_mesh in found], list[float]()
        for on_mesh, own in zip(found, owned, strict=True):
            largest, mean = max(map(math.prod, on_mesh.shapes)), sum(own) / ranks
            shares += [max(own) / mean] if mean >= largest else []
        work = [on_mesh.work for on_mesh in found]
    return {
        "buckets": len(found),
        "most_owned_to_mean": max(shares, default=None),
        "most_owned_bytes": 4 * max(map(max, owned)),
        "work_to_mean": sum(map(max, work)) * ranks / sum(map(sum, work)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    look, numbers = (owned_by_bucket, IN_BUCKETS) if args.buckets else (assigned, RANKS)
    found = {name: {str(ranks): look(shapes, ranks) for ranks in numbers} for name, shapes in MODELS.items()}
    args.output.write_text(json.dumps({"machine": machine(), "models": found}, indent=2) + "\n")
    print(args.output.read_text())


if __name__ == "__main__":
    main()
