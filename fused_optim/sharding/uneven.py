"""Places of the shards of unevenly cut DTensors, which their placements do not say.

Megatron-FSDP cuts its buffers where it suits it. It tells torch.distributed.checkpoint of the rows that each rank holds
by two functions on the local tensor, but the parameters that it hands to an optimizer are copies that lack them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_optim.sharding.collective import any_rank, gather, mesh_order
from fused_optim.sharding.dtensor import (
    has_own_chunks,
    is_strided,
    local_tensor,
    placed_part_of,
    set_chunks,
    sharded_dim,
)


@dataclass(frozen=True)
class _ChunkList:
    chunk: ChunkStorageMetadata

    def __call__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk]


@dataclass(frozen=True)
class _WriteItems:
    chunk: ChunkStorageMetadata

    def __call__(self, fqn: str, tensor: DTensor) -> list[WriteItem]:
        local = local_tensor(tensor)
        if not local.numel():
            return []
        data = TensorWriteData(self.chunk, TensorProperties.create_from_tensor(local), tensor.size())
        return [WriteItem(MetadataIndex(fqn, self.chunk.offsets), WriteItemType.SHARD, tensor_data=data)]


def locate_uneven_shards(params: Iterable[Tensor]) -> None:
    """Give chunk lists to the DTensors of every mesh on which some rank's shard is not what its placements say.

    A collective over the parameters' meshes, of one flag where all shards are even.
    """
    alike: dict[tuple[DeviceMesh, tuple[int, ...]], list[DTensor]] = {}
    for param in params:
        if isinstance(param, DTensor) and param.device_mesh.get_coordinate() is not None:
            alike.setdefault((param.device_mesh, _innermost_first(param)), []).append(param)
    for (mesh, order), members in sorted(alike.items(), key=lambda each: (mesh_order(each[0][0]), each[0][1])):
        if any_rank(members, any(map(_is_uneven, members)), False)[0]:
            _locate(mesh, order, members)


def _is_uneven(param: DTensor) -> bool:
    if has_own_chunks(param):
        return False
    if _cut_order(param) is not None:  # sizes may be even, but torch would count the ranks in another order
        return True
    shape, _ = placed_part_of(param.shape, param.device_mesh, param.placements)
    return tuple(local_tensor(param).shape) != tuple(shape)


def _locate(mesh: DeviceMesh, order: tuple[int, ...], params: list[DTensor]) -> None:
    """Set chunk lists. Offsets are sums over the ranks before this one, from the innermost cut to the outermost."""
    sizes = [list(local_tensor(param).shape) for param in params]
    offsets = [[0] * param.dim() for param in params]
    for mesh_dim in order:
        group = mesh.get_group(mesh_dim)
        everyone = gather(sizes, group=group)
        before = everyone[: dist.get_rank(group)]
        for i, param in enumerate(params):
            dim = sharded_dim(param.placements[mesh_dim])
            if dim is not None:
                offsets[i][dim] += sum(ranks[i][dim] for ranks in before)
        sizes = [_joined(param, mesh_dim, [ranks[i] for ranks in everyone]) for i, param in enumerate(params)]
    for param, offset, whole in zip(params, offsets, sizes, strict=True):
        if tuple(whole) != tuple(param.shape):
            raise ValueError(f"the ranks' shards make up shape {tuple(whole)}, expected {tuple(param.shape)}")
        chunk = ChunkStorageMetadata(torch.Size(offset), local_tensor(param).shape)
        set_chunks(param, _ChunkList(chunk), _WriteItems(chunk))


def _innermost_first(param: DTensor) -> tuple[int, ...]:
    """The mesh dims from the innermost cut to the outermost.

    Megatron-FSDP cuts last by the mesh's first dim, or notes its order; strided placements were cut last.
    """
    said = _cut_order(param)
    if said is not None:
        return tuple(reversed(said))
    dims = range(len(param.placements))
    return tuple(sorted(dims, key=lambda dim: not is_strided(param.placements[dim])))


def _cut_order(param: DTensor) -> list[int] | None:
    """Megatron-FSDP's note on a mesh by several of whose dims it has cut: the dims, the first cut first."""
    return getattr(param.device_mesh, "_shard_order", None)


def _joined(param: DTensor, mesh_dim: int, sizes: list[list[int]]) -> list[int]:
    whole, dim = list(sizes[0]), sharded_dim(param.placements[mesh_dim])
    if dim is not None:
        whole[dim] = sum(size[dim] for size in sizes)
    return whole
