"""The shards of one device whose matrices are orthogonalized: a pass over elements, the matrices, another pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_optim.backends import NOT_MARKING, Backend, Marking, ShardWork, is_capturing, uncounted
from fused_optim.backends.offloaded import Link, OffloadedShards
from fused_optim.backends.shards import ReferenceShards, shards_on
from fused_optim.formats.masters import Master
from fused_optim.matrices.exchange import Dtypes, Exchange, MatricesOnMesh
from fused_optim.matrices.orthogonalize import orthogonalize
from fused_optim.matrices.owners import Matrix
from fused_optim.matrices.passes import DESCENT, MOMENTUM, after_matrices, before_matrices
from fused_optim.memory.by_parameter import reference_to
from fused_optim.memory.layout import MASTER, StateLayout
from fused_optim.rule import Hyper, Orthogonalization, Rule

# Of what a rank sends of a bucket and gets back. The matrices that it owns take as much again.
BUCKET_BYTES = 1 << 30
Bucket = tuple[set[int], list[MatricesOnMesh]]


class _UnderWay(NamedTuple):
    """A bucket of shards between the two passes. ``works``: of those that have a gradient here."""

    works: dict[int, ShardWork]
    exchanges: list[Exchange]


class MatrixShards(ReferenceShards):
    """Shards whose update depends on whole matrices. They are described anew at every step: matrices take far longer.

    They are updated bucket by bucket, which bounds the memory that this takes. Where pieces are moved, those of the
    next bucket are on their way to the owners, and those of the last one on their way back, beside the products of one.
    ``params``: those of the shards, in their order, which are not kept. ``link``: their states are in host memory.
    """

    def __init__(
        self,
        device: torch.device,
        backend: Backend,
        groups: list[int],
        group_count: int,
        params: list[Tensor],
        link: Link | None = None,
    ) -> None:
        super().__init__(groups)
        self._device, self._backend, self._group_count = device, backend, group_count
        self._params, self._link = list(map(reference_to, params)), link
        self._leaving = shards_on(device, backend, [], 0, DESCENT)  # to be asked for targets
        self._how: list[Orthogonalization] = []
        self._buckets: list[Bucket] = []

    def takes_target(self, layout: StateLayout) -> bool:
        return self._link is None and self._leaving.takes_target(_without_states(layout))

    def run(self, hypers: list[Hyper], workspace: Tensor | None, marking: Marking = NOT_MARKING) -> None:
        how = [_orthogonalization(hypers[group]) for group in self._groups]
        if not self._buckets or [each.splits for each in how] != [each.splits for each in self._how]:
            self._buckets = self._in_buckets([each.splits for each in how])
        self._how = how
        ahead = 0 if all(each.is_local for _, meshes in self._buckets for each in meshes) else 1
        if ahead and is_capturing():
            raise RuntimeError(
                "CUDA graph capture: FusedMuon moves parts of sharded matrices, which a graph cannot hold"
            )
        count = len(self._buckets)
        under_way: dict[int, _UnderWay] = {}
        for number in range(count + 2 * ahead):
            worked, ended = number - ahead, number - 2 * ahead
            if number < count:
                under_way[number] = self._begin(*self._buckets[number], uncounted(hypers), workspace)
            if 0 <= worked < count:
                for exchange in under_way[worked].exchanges:
                    exchange.work(self._orthogonalize)
            if 0 <= ended < count:
                self._end(under_way.pop(ended), hypers if ended == count - 1 else uncounted(hypers), workspace)

    def _begin(
        self, members: set[int], meshes: list[MatricesOnMesh], hypers: list[Hyper], workspace: Tensor | None
    ) -> _UnderWay:
        works = {i: work for i, work in sorted(self.works.items()) if i in members}
        updates = {i: torch.empty_like(work.param, dtype=_sent_as(self._how[i])) for i, work in works.items()}
        entering = {i: _entering(work, updates[i]) for i, work in works.items()}
        self._pass(MOMENTUM, entering, list(map(before_matrices, hypers)), workspace)
        dtypes = {i: Dtypes(_sent_as(each), each.dtype) for i, each in enumerate(self._how)}
        return _UnderWay(works, [on_mesh.begin(updates, dtypes) for on_mesh in meshes])

    def _orthogonalize(self, matrices: Sequence[Matrix], values: Sequence[Tensor]) -> list[Tensor]:
        return orthogonalize(values, [self._how[matrix.param] for matrix in matrices])

    def _end(self, bucket: _UnderWay, hypers: list[Hyper], workspace: Tensor | None) -> None:
        made: dict[int, Tensor] = {}
        for exchange in bucket.exchanges:
            made |= exchange.end()
        leaving = {i: _leaving(work, made[i]) for i, work in bucket.works.items()}
        self._pass(DESCENT, leaving, list(map(after_matrices, hypers)), workspace)

    def _pass(self, rule: Rule, works: dict[int, ShardWork], hypers: list[Hyper], workspace: Tensor | None) -> None:
        groups = [self._groups[i] for i in works]
        about = (self._device, self._backend, groups, self._group_count, rule)
        shards = shards_on(*about) if self._link is None else OffloadedShards(*about, self._link)
        for number, work in enumerate(works.values()):
            shards.set(number, work, None)
        shards.run(hypers, workspace)

    def _in_buckets(self, splits: list[tuple[int, ...]]) -> list[Bucket]:
        return in_buckets({i: param for i, ref in enumerate(self._params) if (param := ref()) is not None}, splits)


def in_buckets(params: dict[int, Tensor], splits: list[tuple[int, ...]]) -> list[Bucket]:
    """The parameters of each bucket, and their matrices. Cut by global shapes: the same on all ranks."""
    is_sharded = any(isinstance(param, DTensor) and param.device_mesh.size() > 1 for param in params.values())
    most = BUCKET_BYTES // 2 if is_sharded else BUCKET_BYTES  # parts of three are there at once
    buckets: list[dict[int, Tensor]] = [{}]
    size = 0.0
    for i, param in params.items():
        own = 4 * param.numel() / (param.device_mesh.size() if isinstance(param, DTensor) else 1)
        if size and size + own > most:
            buckets.append({})
            size = 0.0
        buckets[-1][i] = param
        size += own
    return [(set(bucket), _on_meshes(bucket, splits)) for bucket in buckets]


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
