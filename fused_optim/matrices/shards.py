"""The shards of one device whose matrices are orthogonalized: a pass over elements, the matrices, another pass."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_optim.backends import Backend, ShardWork, uncounted
from fused_optim.backends.shards import ReferenceShards, shards_on
from fused_optim.formats.masters import Master
from fused_optim.matrices.exchange import Dtypes, MatricesOnMesh
from fused_optim.matrices.newton_schulz import orthogonalized
from fused_optim.matrices.passes import DESCENT, MOMENTUM, after_matrices, before_matrices
from fused_optim.memory.layout import MASTER, StateLayout
from fused_optim.rule import Hyper, Orthogonalization, Rule

# Of what a rank sends of a bucket and gets back. The matrices that it owns take as much again.
BUCKET_BYTES = 512 << 20


class MatrixShards(ReferenceShards):
    """Shards whose update depends on whole matrices. They are described anew at every step: matrices take far longer.

    They are updated bucket by bucket, which bounds the memory that this takes. ``params``: those of the shards, in
    their order, which are not kept.
    """

    def __init__(
        self, device: torch.device, backend: Backend, groups: list[int], group_count: int, params: list[Tensor]
    ) -> None:
        super().__init__(groups)
        self._device, self._backend, self._group_count = device, backend, group_count
        self._params = list(map(weakref.ref, params))
        self._leaving = shards_on(device, backend, [], 0, DESCENT)  # to be asked for targets
        self._how: list[Orthogonalization] = []
        self._buckets: list[tuple[set[int], list[MatricesOnMesh]]] = []

    def takes_target(self, layout: StateLayout) -> bool:
        return self._leaving.takes_target(_without_states(layout))

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        how = [_orthogonalization(hypers[group]) for group in self._groups]
        if not self._buckets or [each.splits for each in how] != [each.splits for each in self._how]:
            self._buckets = self._in_buckets([each.splits for each in how])
        self._how = how
        for number, (members, meshes) in enumerate(self._buckets, start=1):
            works = {i: work for i, work in sorted(self.works.items()) if i in members}
            counting = hypers if number == len(self._buckets) else uncounted(hypers)
            self._run(works, meshes, counting, workspace)

    def _run(
        self,
        works: dict[int, ShardWork],
        meshes: list[MatricesOnMesh],
        hypers: list[Hyper],
        workspace: Tensor | None,
    ) -> None:
        how = self._how
        updates = {i: torch.empty_like(work.param, dtype=_sent_as(how[i])) for i, work in works.items()}
        entering = {i: _entering(work, updates[i]) for i, work in works.items()}
        self._pass(MOMENTUM, entering, list(map(before_matrices, uncounted(hypers))), workspace)
        dtypes = {i: Dtypes(_sent_as(each), each.dtype) for i, each in enumerate(how)}
        made: dict[int, Tensor] = {}
        for members in meshes:
            made |= members.run(updates, dtypes, lambda matrix, values: orthogonalized(values, how[matrix.param]))
        leaving = {i: _leaving(work, made[i]) for i, work in works.items()}
        self._pass(DESCENT, leaving, list(map(after_matrices, hypers)), workspace)

    def _pass(self, rule: Rule, works: dict[int, ShardWork], hypers: list[Hyper], workspace: Tensor | None) -> None:
        groups = [self._groups[i] for i in works]
        shards = shards_on(self._device, self._backend, groups, self._group_count, rule)
        for number, work in enumerate(works.values()):
            shards.set(number, work, None)
        shards.run(hypers, workspace)

    def _in_buckets(self, splits: list[tuple[int, ...]]) -> list[tuple[set[int], list[MatricesOnMesh]]]:
        """The shards of each bucket, and their matrices. Cut by global shapes: the same on all ranks."""
        cuts, size = [0], 0.0
        params = {i: param for i, ref in enumerate(self._params) if (param := ref()) is not None}
        for i, param in params.items():
            own = 4 * param.numel() / (param.device_mesh.size() if isinstance(param, DTensor) else 1)
            if size and size + own > BUCKET_BYTES:
                cuts.append(i)
                size = 0.0
            size += own
        buckets = [range(*ends) for ends in pairwise([*cuts, len(self._params)])]
        return [(set(bucket), _on_meshes({i: params[i] for i in bucket}, splits)) for bucket in buckets]


def _on_meshes(bucket: dict[int, Tensor], splits: list[tuple[int, ...]]) -> list[MatricesOnMesh]:
    """In the order in which the parameters name them: the same on all ranks."""
    by_mesh: dict[DeviceMesh | None, dict[int, Tensor]] = {}
    for i, param in bucket.items():
        by_mesh.setdefault(param.device_mesh if isinstance(param, DTensor) else None, {})[i] = param
    return [MatricesOnMesh(members, splits, mesh) for mesh, members in by_mesh.items()]


def _orthogonalization(hyper: Hyper) -> Orthogonalization:
    assert hyper.orthogonalization is not None
    return hyper.orthogonalization


def _sent_as(how: Orthogonalization) -> torch.dtype:
    """The dtype of values that are to be orthogonalized: gradients may be too small for FP16."""
    return torch.float32 if how.dtype == torch.float16 else how.dtype


def _entering(work: ShardWork, update: Tensor) -> ShardWork:
    """The shard in the first pass."""
    layout = replace(work.layout, master=Master.PARAMETER)
    return ShardWork(grad=work.grad, param=update, master=None, states=work.states, layout=layout, key=work.key)


def _leaving(work: ShardWork, direction: Tensor) -> ShardWork:
    """The shard in the second pass."""
    return replace(work, grad=direction, states=(), layout=_without_states(work.layout))


def _without_states(layout: StateLayout) -> StateLayout:
    scales = layout.scale(MASTER)
    return replace(layout, specs=(), formats=(), scales=layout.scales[:0] if scales is None else scales)
