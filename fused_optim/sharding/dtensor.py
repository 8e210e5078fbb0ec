"""DTensors as the optimizer needs them: local tensors, wrapping, and places of shards in the global tensor."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fused_optim.formats.states import BLOCKS

_CUT = 1024  # elements: what engines update at a time, and a multiple of all blocks
SMALLEST_BLOCKED_VECTOR = 4096  # elements; smaller one-dimensional parameters (norms, biases) keep FP32 states


# What torch.distributed.checkpoint asks a local tensor for: where its shard lies, and how it is written.
_CHUNK_LIST, _WRITE_ITEMS = "__create_chunk_list__", "__create_write_items__"

# Subclasses that only mark a plain tensor, and where they hold it: weights that are cast as they are gathered or
# multiplied, ours and torchao's.
_MARKED = {
    "fused_optim.quantized.fp8.kept.KeptWeight": "plain",
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "_tensor",
    "torchao.prototype.moe_training.tensor.TrainingWeightWrapperBaseTensor": "_data",
}


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of this rank, without a copy: plain, or quantized for a quantized parameter."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    kind = type(local)
    if kind is Tensor or kind is torch.nn.Parameter:  # usually: this is called most of all
        return local
    marked = held_attribute(kind)
    return local if marked is None else getattr(local, marked)


@functools.cache
def held_attribute(kind: type) -> str | None:
    """The attribute in which local tensors of this type hold a plain tensor that they only mark;

    None for other types.
    """
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_MARKED[name] for name in names if name in _MARKED), None)


def finished_local(tensor: Tensor) -> Tensor:
    """:func:`local_tensor`, after waiting for an unfinished collective."""
    local = local_tensor(tensor)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def has_values(tensor: Tensor) -> bool:
    """True unless the tensor is only a shape: on the meta device or of a FakeTensorMode."""
    local = local_tensor(tensor)
    return not local.is_meta and not isinstance(local, FakeTensor)


def is_dense(local: Tensor) -> bool:
    """True if a plain tensor's memory is its elements in order.

    False where torch negates lazily (``is_neg()``: imaginary parts of conjugates) or keeps zeros without memory.
    """
    return local.is_contiguous() and not local.is_neg() and not local._is_zerotensor()


def dense(local: Tensor) -> Tensor:
    """The tensor itself if it :func:`is_dense`, else a copy that is."""
    if local._is_zerotensor():
        local = local.clone()
    return local.resolve_neg().contiguous()


def rewrap_like(local: Tensor, like: Tensor) -> Tensor:
    """Wrap ``local`` with the mesh, placements and global shape of ``like``; ``local`` itself if ``like`` is plain.

    ``local`` stays on its device: a DTensor of a GPU mesh in host memory is what torch calls offloaded.
    """
    return _wrap(local, like, like.shape, like.stride()) if isinstance(like, DTensor) else local


def rewrap_shaped(local: Tensor, like: Tensor, shape: Iterable[int]) -> Tensor:
    """:func:`rewrap_like` with another global shape."""
    if not isinstance(like, DTensor):
        return local
    shape = torch.Size(shape)
    stride = tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
    return _wrap(local, like, shape, stride)


class Portable(DTensor):
    """A DTensor in host memory that can be pickled: torch refuses local tensors that are views into a storage.

    It has a copy of its mesh, whose tensors would be moved into shared memory otherwise.
    """

    def __reduce_ex__(self, proto: Any) -> tuple[Any, ...]:
        mesh = copy.deepcopy(self.device_mesh)
        return _rebuild_portable, (self._local_tensor, mesh, self.placements, self.shape, self.stride())


def portable(local: Tensor, like: DTensor) -> Portable:
    """``local`` wrapped as :func:`rewrap_like` does, to be pickled."""
    return _rebuild_portable(local, like.device_mesh, tuple(like.placements), like.shape, like.stride())


def _rebuild_portable(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...]
) -> Portable:
    spec = _spec(mesh, placements, shape, stride, local.dtype)
    return Portable(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # DTensor's


def _wrap(local: Tensor, like: DTensor, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """``local`` as a DTensor on its own device; DTensor.from_local would move it to the mesh's."""
    spec = _spec(like.device_mesh, tuple(like.placements), shape, stride, local.dtype)
    return DTensor(local, spec, requires_grad=False)


@functools.lru_cache(maxsize=1024)  # making one takes longer than all else that a state dict does for a tensor
def _spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    return DTensorSpec(mesh, placements, TensorMeta(shape, stride, dtype))


def sharding_dims(param: Tensor) -> tuple[int, ...]:
    """The mesh dims that shard a parameter; none on a mesh without this rank."""
    if not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is None:
        return ()
    sizes = param.device_mesh.shape
    return tuple(i for i, p in enumerate(param.placements) if not p.is_replicate() and sizes[i] > 1)


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dim that a placement shards, strided or not; None if it shards none."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def is_strided(placement: Placement) -> bool:
    """True if the placement cuts shards of other placements."""
    return isinstance(placement, _StridedShard)


def cut_by_rows(tensor: Tensor) -> bool:
    """True if every rank holds whole rows: at least two dims, of which at most the first is sharded."""
    if tensor.dim() < 2 or not isinstance(tensor, DTensor):
        return tensor.dim() >= 2
    return all(placement.is_replicate() or sharded_dim(placement) == 0 for placement in tensor.placements)


def rewrap_rows(local: Tensor, like: Tensor) -> Tensor:
    """:func:`rewrap_like` for a tensor with as many rows as ``like``, which is cut by rows."""
    return rewrap_shaped(local, like, (*like.shape[:1], *local.shape[1:]))


def own_chunk(tensor: Tensor) -> ChunkStorageMetadata | None:
    """The place of the shard if the tensor itself says it, as Megatron-FSDP's do (placements do not); else None."""
    chunks: Callable[[], list[ChunkStorageMetadata]] | None = getattr(local_tensor(tensor), _CHUNK_LIST, None)
    return None if chunks is None else chunks()[0]


def has_own_chunks(tensor: Tensor) -> bool:
    """True if :func:`own_chunk` knows the place."""
    return hasattr(local_tensor(tensor), _CHUNK_LIST)


def keep_chunks(tensor: Tensor, like: Tensor) -> Tensor:
    """Let ``tensor``, whose shard lies where that of ``like`` does, say so to torch.distributed.checkpoint, too."""
    for hook in (_CHUNK_LIST, _WRITE_ITEMS):
        if hasattr(local_tensor(like), hook):
            setattr(local_tensor(tensor), hook, getattr(local_tensor(like), hook))
    return tensor


def set_chunks(
    tensor: Tensor,
    chunk_list: Callable[[], list[ChunkStorageMetadata]],
    write_items: Callable[[str, DTensor], list[WriteItem]],
) -> None:
    """Let ``tensor`` say where its shard lies."""
    for hook, answer in ((_CHUNK_LIST, chunk_list), (_WRITE_ITEMS, write_items)):
        setattr(local_tensor(tensor), hook, answer)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor; a collective if it is a DTensor."""
    return _on_mesh(tensor).full_tensor() if isinstance(tensor, DTensor) else tensor


def _on_mesh(tensor: DTensor) -> DTensor:
    """The tensor on the device of its mesh, which collectives need of an offloaded one."""
    return cast(DTensor, tensor.to(tensor.device_mesh.device_type))


def placed_part(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of ``value`` if it is placed as ``like`` is; a plain ``value`` is the same on every rank."""
    if isinstance(value, DTensor) and isinstance(like, DTensor):
        if (value.device_mesh, value.placements) != (like.device_mesh, like.placements):
            value = _on_mesh(value).redistribute(like.device_mesh, like.placements)
        return local_tensor(value)
    chunk = own_chunk(like)
    if chunk is not None:
        return value[tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))]
    if isinstance(like, DTensor):
        return local_tensor(distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None))
    return full_tensor(value)


@dataclass(frozen=True)
class Geometry:
    """Places of a local shard's elements in the global tensor, and the size of blocks.

    Global index of local element i: ``offset + (i // inner_local) * inner_global + i % inner_local``.
    ``block`` is 0 if states stay FP32 because no block fits.
    """

    numel: int
    offset: int
    inner_local: int
    inner_global: int
    block: int

    @property
    def blocks(self) -> int:
        return -(-self.numel // self.block) if self.block else 0

    def global_indices(self, device: torch.device) -> Tensor:
        """Global indices of all local elements (int64)."""
        return self.global_of(torch.arange(self.numel, device=device))

    def global_of(self, i: Tensor) -> Tensor:
        """Global indices of these local elements (int64)."""
        return self.offset + i // self.inner_local * self.inner_global + i % self.inner_local

    def of_rows(self, start: int, numel: int) -> Geometry:
        """The geometry of ``numel`` elements from local element ``start``, the first of a row."""
        offset = self.offset + start // self.inner_local * self.inner_global + start % self.inner_local
        return replace(self, numel=numel, offset=offset)

    def part(self, start: int, end: int) -> Geometry:
        """The geometry of elements ``start`` to ``end``, two neighbours in :meth:`cuts`."""
        part = self.of_rows(start, end - start)
        inside_a_row = start % self.inner_local + part.numel <= self.inner_local
        return replace(part, inner_local=part.numel, inner_global=part.numel) if inside_a_row else part

    def cuts(self, most: int) -> list[int]:
        """Boundaries, from 0 to ``numel``, of parts of up to ``most`` elements: of one row, or whole rows.

        Blocks stay whole. Parts are larger if rows or the smallest cut, ``_CUT``, are.
        """
        consecutive, block = self.inner_local >= self.numel, self.block or 1
        rows = math.lcm(self.inner_local, block)
        if self.numel <= most:
            starts: Iterable[int] = (0,)
        elif not consecutive and (rows <= most or self.inner_local % block):
            starts = range(0, self.numel, _even_part(self.numel, most, rows))
        else:
            step = _even_part(self.inner_local, most, _CUT)
            first = range(0, self.numel, self.inner_local)
            starts = (s for row in first for s in range(row, min(row + self.inner_local, self.numel), step))
        return [*starts, self.numel]


def _even_part(length: int, most: int, unit: int) -> int:
    """The size, in whole units, of the fewest equal parts of up to ``most`` elements (at least one ``unit``)."""
    parts = -(-length // (max(most // unit, 1) * unit))
    return -(-length // (parts * unit)) * unit


def shard_geometry(param: Tensor) -> Geometry:
    """The geometry of a parameter's local shard; blocks are chosen from the global shape, so ranks agree."""
    local = local_tensor(param)
    block = _block_size(tuple(param.shape), _possible_rows(param))
    if not isinstance(param, DTensor):
        return Geometry(local.numel(), 0, max(local.numel(), 1), max(local.numel(), 1), block)
    if param.device_mesh.get_coordinate() is None:  # a mesh of other ranks: torch has no shape and no offsets here
        return Geometry(0, 0, 1, 1, block)
    shape, offsets = tuple(param.shape), shard_offsets(param)
    cut = [d for d in range(1, len(shape)) if local.shape[d] != shape[d]]
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    offset = sum(o * s for o, s in zip(offsets, strides, strict=True)) if local.numel() else 0
    if len(cut) == 1:
        inner_local, inner_global = math.prod(local.shape[cut[0] :]), math.prod(shape[cut[0] :])
    else:  # cut on dim 0 only, or on several inner dims, where elements are numbered from the shard's first one
        inner_local = inner_global = local.numel()
    return Geometry(local.numel(), offset, max(inner_local, 1), max(inner_global, 1), block)


def shard_offsets(param: DTensor) -> Sequence[int]:
    """The start of the local shard in every dim."""
    chunk = own_chunk(param)
    if chunk is not None:
        return chunk.offsets
    return placed_part_of(param.shape, param.device_mesh, param.placements)[1]


def placed_part_of(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offsets) of this rank's shard, by placements only.

    torch counts through whole dims of strided shards, for a third of a second on thousands of ranks; parameters of a
    model have few shapes, so results are cached.
    """
    at = tuple(mesh.get_coordinate() or ())
    return _placed_part_of(tuple(shape), mesh, tuple(placements), at)


@functools.lru_cache(maxsize=1024)
def _placed_part_of(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...], at: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """:func:`placed_part_of`, cached. ``at``: this rank's coordinate: a mesh equals those of other ranks."""
    local, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(local), tuple(offsets)


def placed_parts_of(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """:func:`placed_part_of` for every rank of the mesh, in its order."""
    by_cut: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    parts = []
    for at in itertools.product(*map(range, mesh.shape)):
        cut = tuple(0 if p.is_replicate() else i for i, p in zip(at, placements, strict=True))
        if cut not in by_cut:
            local, offsets = _compute_local_shape_and_global_offset(tuple(shape), mesh.shape, list(cut), placements)
            by_cut[cut] = tuple(local), tuple(offsets)
        parts.append(by_cut[cut])
    return parts


def shard_ranges(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement], dim: int
) -> tuple[tuple[int, int], ...]:
    """(start, end) in a dim of all shards that have elements, by placements only."""
    cutting = [
        (is_strided(placement), ranks)
        for ranks, placement in zip(mesh.shape, placements, strict=True)
        if sharded_dim(placement) == dim
    ]
    # Strided ones cut what the others have cut.
    return _ranges(shape[dim], tuple(ranks for _, ranks in sorted(cutting, key=lambda each: each[0])))


@functools.cache
def _ranges(size: int, ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    ranges = [(0, size)]
    for count in ranks:
        ranges = [
            (start + at, min(start + at + chunk, end))
            for start, end in ranges
            for chunk in [max(-(-(end - start) // count), 1)]
            for at in range(0, end - start, chunk)
        ]
    return tuple(ranges)


def _block_size(shape: tuple[int, ...], rows: Iterable[int]) -> int:
    if len(shape) < 2:
        return BLOCKS[0] if math.prod(shape) >= SMALLEST_BLOCKED_VECTOR else 0
    lengths = set(rows)
    return next((block for block in BLOCKS if all(row % block == 0 for row in lengths)), 0)


def largest_shard(param: Tensor) -> int:
    """The number of elements in the largest shard of a parameter, by placements only."""
    sizes = list(param.shape)
    if isinstance(param, DTensor):
        for ranks, placement in zip(param.device_mesh.shape, param.placements, strict=True):
            if (dim := sharded_dim(placement)) is not None:
                sizes[dim] = -(-sizes[dim] // ranks)
    return math.prod(sizes)


def _possible_rows(param: Tensor) -> list[int]:
    """Lengths of a row (all dims but the first) on the ranks of the mesh."""
    sizes = [_possible_sizes(param, dim) for dim in range(1, param.dim())]
    return [math.prod(combination) for combination in itertools.product(*sizes)]


def _possible_sizes(param: Tensor, dim: int) -> list[int]:
    sizes = {param.shape[dim]}
    if isinstance(param, DTensor):
        for ranks, placement in zip(param.device_mesh.shape, param.placements, strict=True):
            if sharded_dim(placement) == dim:
                sizes = {part for size in sizes for part in _chunk_sizes(size, ranks)}
    return sorted(sizes)


def _chunk_sizes(size: int, ranks: int) -> set[int]:
    full = -(-size // ranks)
    return {min(max(size - rank * full, 0), full) for rank in range(ranks)}
