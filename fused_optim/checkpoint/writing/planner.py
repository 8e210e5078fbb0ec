"""Plans of the items that each rank writes, and the layouts by which plans are used again."""

from __future__ import annotations

import functools
import io
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fused_optim.checkpoint.storage.nested import flat
from fused_optim.checkpoint.writing.loadable import check_loadable
from fused_optim.sharding.collective import shared_out
from fused_optim.sharding.dtensor import has_own_chunks, local_tensor, placed_part_of

_HEADER, _OBJECT = 2048, 1024  # bytes that torch writes beside those of a tensor, and for a small object, about


class Planner(DefaultSavePlanner):
    """torch's; numbers, of which every state has some, are serialised once.

    One rank gets the plans of all, so they hold nothing twice of what is under ``SAME``, if all ranks have the same
    keys (``alike``): of replicas of a shard one has it in its plan, where torch drops the others' later, and the
    first rank sends paths and numbers.
    """

    SAME = ("model.", "optimizer.")

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        self.alike = alike

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.mappings = flat(state_dict)
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self.state_dict.items() for item in _items(key, value)]
        places = self.mappings
        same = [item for item in items if self._is_same(item.index.fqn)]
        items = [item for item in items if not self._is_same(item.index.fqn)]
        if not self.is_coordinator:
            same = [item for item in same if item.type != WriteItemType.BYTE_IO]
            places = {key: path for key, path in places.items() if not self._is_same(key)}
        self.plan = SavePlan(items + _own_items(same, self.state_dict), planner_data=places)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """torch's, but a whole tensor is written by the first rank that has it: buffers may differ between ranks."""
        seen: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            whole = {item.index for item in plan.items if item.type == WriteItemType.TENSOR}
            again = whole & seen
            items = [item for item in plan.items if item.index not in again]
            plans.append(replace(plan, items=items))
            seen |= whole
        return super().create_global_plan(plans)

    def _is_same(self, key: str) -> bool:
        """True if all ranks are known to have the key."""
        return self.alike and key.startswith(self.SAME)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO and type(object) in (bool, int, float, str, type(None)):
            return io.BytesIO(_serialised(type(object).__name__, repr(object), object))
        if not isinstance(object, Tensor):
            check_loadable(write_item.index.fqn, object)
        return super().transform_object(write_item, object)


def layout_of(flat: Mapping[str, Any]) -> dict[str, Hashable] | None:
    """The facts that a flattened state dict's plan depends on; None if shards have chunk lists of their own."""
    layout: dict[str, Hashable] = {}
    for key, value in flat.items():
        if not isinstance(value, Tensor):
            layout[key] = type(value).__name__
            continue
        if has_own_chunks(value):
            return None
        placed = (value.device_mesh, value.placements) if isinstance(value, DTensor) else ()
        layout[key] = type(value), value.dtype, value.shape, value.layout, value.requires_grad, placed
    return layout


def _items(key: str, value: Any) -> list[WriteItem]:
    """torch's write items, but none for empty shards, and with offsets that are computed once per layout."""
    if not isinstance(value, DTensor) or has_own_chunks(value):
        return create_default_local_save_plan({key: value}, True).items
    if value.device_mesh.get_coordinate() is None:
        return []
    sizes, offsets = map(torch.Size, placed_part_of(value.shape, value.device_mesh, value.placements))
    if not sizes.numel() and value.numel():
        return []
    properties = TensorProperties.create_from_tensor(local_tensor(value))
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, value.size())
    return [WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)]


def _own_items(items: Iterable[WriteItem], tensors: Mapping[str, Any]) -> list[WriteItem]:
    """The items that this rank writes.

    Shards that others hold, too, are shared out by size, by a rule that all know.
    """
    written: list[WriteItem] = []
    shared: dict[_Replicas, list[WriteItem]] = {}
    for item in items:
        replicas = _replicas(tensors.get(item.index.fqn))
        if replicas is None:
            written.append(item)
        else:
            shared.setdefault(replicas, []).append(item)
    for replicas, held in shared.items():
        held.sort(key=lambda item: item.index.fqn)
        takers = shared_out(list(map(size_of, held)), replicas.count)
        written += [item for item, taker in zip(held, takers, strict=True) if taker == replicas.own]
    return written


@dataclass(frozen=True)
class _Replicas:
    """Ranks of a mesh that have the same shards: this one's number, and how many there are."""

    mesh: DeviceMesh
    dims: tuple[int, ...]
    own: int
    count: int


def _replicas(tensor: Any) -> _Replicas | None:
    """The ranks that hold the same shard. None if only this one may, or placements do not say where it lies."""
    if not isinstance(tensor, DTensor) or has_own_chunks(tensor):
        return None
    at = tensor.device_mesh.get_coordinate()
    return None if at is None else _replicas_at(tensor.device_mesh, tuple(tensor.placements), tuple(at))


@functools.lru_cache(maxsize=64)
def _replicas_at(mesh: DeviceMesh, placements: tuple[Placement, ...], at: tuple[int, ...]) -> _Replicas | None:
    """:func:`_replicas`, cached for all tensors: large meshes take a millisecond to say how large they are."""
    shape = tuple(mesh.shape)
    dims = tuple(dim for dim, place in enumerate(placements) if place.is_replicate() and shape[dim] > 1)
    own, count = 0, 1
    for dim in dims:
        own, count = own * shape[dim] + at[dim], count * shape[dim]
    return _Replicas(mesh, dims, own, count) if dims else None


@functools.lru_cache(maxsize=4096)
def _serialised(kind: str, text: str, value: Any) -> bytes:
    """The pickled value. ``kind`` and ``text`` tell equal values apart: 1, 1.0 and True, 0.0 and -0.0."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def size_of(item: WriteItem) -> int:
    """Bytes that an item takes in its file, about."""
    size = item.tensor_storage_size()
    return _OBJECT if size is None else int(size) + _HEADER
