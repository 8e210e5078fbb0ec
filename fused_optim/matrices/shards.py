"""The shards of one device whose matrices are orthogonalized: a pass over elements, the matrices, another pass."""

from __future__ import annotations

from dataclasses import replace

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


class MatrixShards(ReferenceShards):
    """Shards whose update depends on whole matrices. They are described anew at every step: matrices take far longer.

    ``params``: those of the shards, in their order.
    """

    def __init__(
        self, device: torch.device, backend: Backend, groups: list[int], group_count: int, params: list[Tensor]
    ) -> None:
        super().__init__(groups)
        self._device, self._backend, self._group_count = device, backend, group_count
        self._params = params
        self._splits: list[tuple[int, ...]] = []
        self._meshes: list[MatricesOnMesh] = []

    def takes_target(self, layout: StateLayout) -> bool:
        return shards_on(self._device, self._backend, [], 0, DESCENT).takes_target(_without_states(layout))

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        how = [_orthogonalization(hypers[group]) for group in self._groups]
        works = dict(sorted(self.works.items()))
        updates = {i: torch.empty_like(work.param, dtype=_sent_as(how[i])) for i, work in works.items()}
        entering = {i: _entering(work, updates[i]) for i, work in works.items()}
        self._pass(MOMENTUM, entering, list(map(before_matrices, uncounted(hypers))), workspace)
        made = self._orthogonalized(updates, how)
        leaving = {i: _leaving(work, made[i]) for i, work in works.items()}
        self._pass(DESCENT, leaving, list(map(after_matrices, hypers)), workspace)

    def _pass(self, rule: Rule, works: dict[int, ShardWork], hypers: list[Hyper], workspace: Tensor | None) -> None:
        groups = [self._groups[i] for i in works]
        shards = shards_on(self._device, self._backend, groups, self._group_count, rule)
        for number, work in enumerate(works.values()):
            shards.set(number, work, None)
        shards.run(hypers, workspace)

    def _orthogonalized(self, updates: dict[int, Tensor], how: list[Orthogonalization]) -> dict[int, Tensor]:
        splits = [each.splits for each in how]
        if not self._meshes or self._splits != splits:
            self._splits, self._meshes = splits, self._on_meshes(splits)
        dtypes = {i: Dtypes(_sent_as(each), each.dtype) for i, each in enumerate(how)}
        made: dict[int, Tensor] = {}
        for members in self._meshes:
            made |= members.run(updates, dtypes, lambda matrix, values: orthogonalized(values, how[matrix.param]))
        return made

    def _on_meshes(self, splits: list[tuple[int, ...]]) -> list[MatricesOnMesh]:
        """In the order in which the parameters name them: the same on all ranks."""
        by_mesh: dict[DeviceMesh | None, dict[int, Tensor]] = {}
        for i, param in enumerate(self._params):
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
