"""The shards of one device whose matrices are orthogonalized: a pass over elements, the matrices, another pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_optim.backends import Backend, ShardWork, is_capturing, uncounted
from fused_optim.backends.compiled import CompiledShards
from fused_optim.backends.offloaded import HostTransfer, StreamedShards, update_streamed
from fused_optim.backends.shards import ReferenceShards, Shards, shards_on
from fused_optim.formats.masters import Master
from fused_optim.matrices.exchange import Dtypes, Exchange, MatricesOnMesh
from fused_optim.matrices.orthogonalize import orthogonalize
from fused_optim.matrices.owners import MOST_TO_MEAN, Matrix
from fused_optim.matrices.passes import DESCENT, MOMENTUM
from fused_optim.memory.by_parameter import reference_to
from fused_optim.memory.layout import MASTER, StateLayout
from fused_optim.rules import Hyper, Orthogonalization, Rule
from fused_optim.sharding.collective import by_mesh
from fused_optim.sharding.dtensor import largest_shard

# Of what a rank sends of a bucket and gets back. The matrices that it owns take as much again.
BUCKET_BYTES = 1 << 30
OnMesh = tuple[MatricesOnMesh, Dtypes]
Bucket = tuple[list[int], list[OnMesh]]


class Kind(NamedTuple):
    """The settings of a parameter's orthogonalization that decide its matrices and their exchange."""

    splits: tuple[int, ...]
    dtypes: Dtypes

    @staticmethod
    def of(how: Orthogonalization) -> Kind:
        given = torch.float32 if how.dtype == torch.float16 else how.dtype  # gradients may be too small for FP16
        return Kind(how.splits, Dtypes(given, how.dtype))


class _UnderWay(NamedTuple):
    """A bucket of shards between the two passes. ``members``: those that have a gradient here."""

    members: list[int]
    exchanges: list[Exchange]


class MatrixUpdate:
    """The update of shards that depends on whole matrices.

    They are updated bucket by bucket, which bounds the memory that this takes. Where pieces are moved, those of the
    next bucket are on their way to the owners, and those of the last one on their way back, beside the products of one.

    ``shards``: in their place of each step; the reference's where each step describes them anew, which takes far
    longer: without an engine, and with a ``link`` to states in host memory. ``params``: of the shards, in their order;
    not kept.
    """

    def __init__(
        self,
        device: torch.device,
        backend: Backend,
        groups: list[int],
        group_count: int,
        params: list[Tensor],
        link: HostTransfer | None = None,
    ) -> None:
        self._device, self._backend, self._groups, self._group_count = device, backend, groups, group_count
        self._params, self._link = list(map(reference_to, params)), link
        self.shards: Shards
        if backend == "torch" or link is not None:
            self.shards = ReferenceShards(groups)
        else:
            self.shards = CompiledShards(device, backend, groups, group_count, MOMENTUM)
        self._of_group: list[Orthogonalization | None] = []
        self._how: list[Orthogonalization] = []  # by shard
        self._is_local = True  # no matrix is moved
        self._kinds: list[Kind] = []
        self._buckets: list[Bucket] = []

    def takes_target(self, layout: StateLayout) -> bool:
        """True if the second pass over shards with these states can write codes of a quantized weight itself."""
        if self._link is not None:
            return False
        return shards_on(self._device, self._backend, [], 0, DESCENT).takes_target(_without_states(layout))

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        """Update all shards that have a gradient."""
        self._choose_buckets(hypers)
        ahead = 0 if self._is_local else 1
        if ahead and is_capturing():
            raise RuntimeError(
                "CUDA graph capture: FusedMuon moves parts of sharded matrices, which a graph cannot hold"
            )
        count, updated = len(self._buckets), set(self.shards.with_gradients())
        under_way: dict[int, _UnderWay] = {}
        for number in range(count + 2 * ahead):
            worked, ended = number - ahead, number - 2 * ahead
            if number < count:
                members, meshes = self._buckets[number]
                own = [i for i in members if i in updated]
                under_way[number] = self._begin(own, meshes, uncounted(hypers), workspace)
            if 0 <= worked < count:
                for exchange in under_way[worked].exchanges:
                    exchange.work(self._orthogonalize)
            if 0 <= ended < count:
                self._end(under_way.pop(ended), hypers if ended == count - 1 else uncounted(hypers), workspace)

    def _pass(self, rule: Rule, values: Mapping[int, Tensor], hypers: list[Hyper], workspace: Tensor | None) -> None:
        """A pass over elements. ``values``: flat, by shard, ascending; written by MOMENTUM, read by DESCENT."""
        if isinstance(self.shards, CompiledShards):
            self.shards.run_matrix_pass(rule is MOMENTUM, values, hypers, workspace)
            return
        describe = _entering if rule is MOMENTUM else _leaving
        works = [(work := self.shards.works[i], value.view(work.param.shape)) for i, value in values.items()]
        described = [describe(work, value) for work, value in works]
        about = (self._device, self._backend, [self._groups[i] for i in values], self._group_count, rule)
        if self._link is not None:
            update_streamed(StreamedShards(*about, self._link), enumerate(described), hypers, workspace)
            return
        shards = shards_on(*about)
        for number, work in enumerate(described):
            shards.set(number, work, None)
        shards.run(hypers, workspace)

    def _choose_buckets(self, hypers: list[Hyper]) -> None:
        of_group = [hyper.orthogonalization for hyper in hypers]
        if of_group == self._of_group:
            return
        self._of_group = of_group
        self._how = [cast(Orthogonalization, of_group[group]) for group in self._groups]  # each of these has one
        kinds = list(map(Kind.of, self._how))
        if not self._buckets or kinds != self._kinds:
            params = {i: param for i, ref in enumerate(self._params) if (param := ref()) is not None}
            self._buckets, self._kinds = in_buckets(params, kinds), kinds
            self._is_local = all(on_mesh.is_local for _, meshes in self._buckets for on_mesh, _ in meshes)

    def _begin(self, own: list[int], meshes: list[OnMesh], hypers: list[Hyper], workspace: Tensor | None) -> _UnderWay:
        exchanges = [on_mesh.begin(own, dtypes) for on_mesh, dtypes in meshes]
        updates: dict[int, Tensor] = {}
        for exchange in exchanges:
            updates |= exchange.updates
        # With FP32 momentum the matrix that comes out of the pass is rounded to nearest.
        entering = [
            h._replace(
                rule=MOMENTUM,
                stochastic_rounding=h.stochastic_rounding and bool(h.orthogonalization and h.orthogonalization.rotates),
            )
            for h in hypers
        ]
        self._pass(MOMENTUM, {i: updates[i] for i in own}, entering, workspace)
        for exchange in exchanges:
            exchange.send()
        return _UnderWay(own, exchanges)

    def _orthogonalize(self, matrices: Sequence[Matrix], values: Sequence[Tensor]) -> list[Tensor]:
        return orthogonalize(values, [self._how[matrix.param] for matrix in matrices])

    def _end(self, bucket: _UnderWay, hypers: list[Hyper], workspace: Tensor | None) -> None:
        made: dict[int, Tensor] = {}
        for exchange in bucket.exchanges:
            made |= exchange.end()
        # The direction has the gradient's scale, sign and clipping in it.
        leaving = [h._replace(rule=DESCENT, grad_scale=None, grad_factor=None, maximize=False) for h in hypers]
        self._pass(DESCENT, {i: made[i] for i in bucket.members}, leaving, workspace)


def in_buckets(params: dict[int, Tensor], kinds: Sequence[Kind]) -> list[Bucket]:
    """The parameters of each bucket of :func:`cut`, ascending, and their matrices.

    ``kinds``: by the parameters' numbers.
    """
    here = {i: param for i, param in params.items() if _is_here(param)}
    work: dict[DeviceMesh | None, list[int]] = {}
    return [(sorted(bucket), _by_dtypes(mesh, bucket, kinds, work)) for mesh, bucket in cut(here)]


def cut(params: Mapping[int, Tensor]) -> list[tuple[DeviceMesh | None, dict[int, Tensor]]]:
    """Parameters by the bucket that they are in, and the bucket's mesh. At least one, which may be empty.

    Cut by global shapes, and each mesh by itself: the same on all ranks of a mesh, whatever else they hold. Experts may
    be more on some ranks than on others.
    """
    found = [(mesh, bucket) for mesh, members in by_mesh(params) for bucket in _cut_on_one(mesh, members)]
    return found or [(None, {})]


def _cut_on_one(mesh: DeviceMesh | None, params: Mapping[int, Tensor]) -> list[dict[int, Tensor]]:
    """The buckets of the matrices on one mesh, by position: equal shapes, or transposed, in as few as possible.

    The more matrices are orthogonalized together, the better they fill a GPU. A bucket's size is the mean of all ranks;
    with uneven shards no rank holds more than ``MOST_TO_MEAN`` times as much.
    """
    ranks = 1 if mesh is None else mesh.size()
    most = BUCKET_BYTES // 2 if ranks > 1 else BUCKET_BYTES  # parts of three are there at once
    buckets: list[dict[int, Tensor]] = [{}]
    mean = largest = 0.0
    for i, param in sorted(params.items(), key=lambda numbered: (sorted(numbered[1].shape[-2:]), numbered[0])):
        own = 4 * param.numel() / ranks
        held = 4 * largest_shard(param)
        if mean and (mean + own > most or largest + held > MOST_TO_MEAN * most):
            buckets.append({})
            mean = largest = 0.0
        buckets[-1][i] = param
        mean += own
        largest += held
    return buckets


def _is_here(param: Tensor) -> bool:
    """False for a parameter on a mesh of other ranks."""
    return not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is not None


def _by_dtypes(
    mesh: DeviceMesh | None,
    bucket: Mapping[int, Tensor],
    kinds: Sequence[Kind],
    work: dict[DeviceMesh | None, list[int]],
) -> list[OnMesh]:
    """In one order on all ranks. ``work``: of ranks so far, added to."""
    found: dict[Dtypes, dict[int, Tensor]] = {}
    for i, param in sorted(bucket.items()):
        found.setdefault(kinds[i].dtypes, {})[i] = param
    splits = [kind.splits for kind in kinds]
    made: list[OnMesh] = []
    for dtypes, members in found.items():
        busy = work.get(mesh)
        on_mesh = MatricesOnMesh(members, splits, mesh, busy)
        work[mesh] = on_mesh.work if busy is None else [a + b for a, b in zip(on_mesh.work, busy, strict=True)]
        made.append((on_mesh, dtypes))
    return made


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
