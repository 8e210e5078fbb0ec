"""How far from 1 the singular values are that the next step's updates of whole matrices have: of a few parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_optim.matrices.exchange import Dtypes, MatricesOnMesh
from fused_optim.matrices.orthogonalize import orthogonalize
from fused_optim.matrices.owners import Matrix
from fused_optim.rules import Orthogonalization
from fused_optim.sharding.collective import by_mesh, mesh_group


def sigma_errors(
    params: Sequence[Tensor], updates: Mapping[int, Tensor], how: Sequence[Orthogonalization]
) -> dict[int, float]:
    """The mean of |sigma - 1| over all singular values of a parameter's matrices, by its position.

    ``params``: the same ones on all ranks of their meshes, over which this is a collective. ``updates``: local values
    that are to be orthogonalized, of those with a gradient. ``how``: of each parameter, without a scale.
    """
    found: dict[int, float] = {}
    for mesh, members in by_mesh(dict(enumerate(params))):
        if mesh is not None and mesh.get_coordinate() is None:  # of other ranks
            continue
        sums = _sums(mesh, members, updates, how)
        found |= {i: error / count for i, (error, count) in sums.items() if count}
    return found


def _sums(
    mesh: DeviceMesh | None,
    params: Mapping[int, Tensor],
    updates: Mapping[int, Tensor],
    how: Sequence[Orthogonalization],
) -> dict[int, tuple[float, float]]:
    """By parameter, over all its orthogonalized matrices: the sum of |sigma - 1|, and the number of singular values."""
    sums = {i: [0.0, 0.0] for i in params}

    def look(matrices: Sequence[Matrix], values: Sequence[Tensor]) -> list[Tensor]:
        made = orthogonalize(values, [how[matrix.param] for matrix in matrices])
        for matrix, result in zip(matrices, made, strict=True):
            sums[matrix.param][0] += _distance(result)
            sums[matrix.param][1] += min(result.shape)
        return made

    on_mesh = MatricesOnMesh(params, [each.splits for each in how], mesh)
    exchange = on_mesh.begin(updates, Dtypes(torch.float32, torch.float32))
    for i, memory in exchange.updates.items():
        memory.copy_(updates[i].reshape(-1))
    exchange.send()
    exchange.work(look)
    exchange.end()
    total = torch.tensor(list(sums.values()), dtype=torch.float64)
    if mesh is not None:
        total = total.to(mesh.device_type)
        dist.all_reduce(total, group=mesh_group(mesh))
    return {i: (error, count) for i, (error, count) in zip(sums, total.tolist(), strict=True)}


def _distance(x: Tensor) -> float:
    x = x.float()
    square = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
    if not bool(square.isfinite().all()):
        return math.nan
    sigma = torch.linalg.eigvalsh(square).clamp(min=0.0).sqrt()
    return float((sigma - 1.0).abs().sum())
