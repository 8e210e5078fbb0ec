"""Pieces of matrices go to the ranks that orthogonalize them, and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_optim.matrices.owners import Box, Matrix, Ownership, boxes_of, matrices_of, part_of_shard, piece_of
from fused_optim.sharding.collective import each_on_any_rank, mesh_group

Orthogonalize = Callable[[Matrix, Tensor], Tensor]


class _Parcel(NamedTuple):
    """Values that go to another rank, or come from there: ``memory`` has them, or takes them."""

    rank: int
    memory: Tensor


class Dtypes(NamedTuple):
    """Of a parameter's values as they are orthogonalized, and of what is made of them."""

    given: torch.dtype
    made: torch.dtype


class MatricesOnMesh:
    """The matrices of the parameters on one mesh; without a mesh, those of plain parameters.

    Args:
        params: by their numbers, the same ones on every rank of the mesh.
        splits: by number, see :func:`matrices_of`.
        mesh: theirs; None: they are plain tensors.
    """

    def __init__(self, params: Mapping[int, Tensor], splits: Sequence[Sequence[int]], mesh: DeviceMesh | None) -> None:
        self._params, self._mesh = {i: weakref.ref(param) for i, param in params.items()}, mesh  # not kept
        self._ranks = [0] if mesh is None else mesh.mesh.flatten().tolist()
        self._rank = 0 if mesh is None else self._ranks.index(dist.get_rank())
        self._boxes = {i: boxes_of(param, mesh) for i, param in params.items()}
        matrices = [matrix for i, param in params.items() for matrix in matrices_of(i, param.shape, splits[i])]
        self._owned = Ownership.of(matrices, self._boxes, len(self._ranks))
        self._is_local = self._owned.is_local
        self._mine = [n for n, owner in enumerate(self._owned.owners) if owner == self._rank]
        own = ((n, piece_of(matrix, self._box(matrix))) for n, matrix in enumerate(matrices))
        self._held = {n: piece for n, piece in own if piece is not None}
        # FSDP may leave a rank whose shard is empty without a gradient where others have one.
        self._may_differ = any(box.is_empty for boxes in self._boxes.values() for box in boxes.of_rank)

    def _taking_part(self, with_gradients: Mapping[int, Tensor]) -> set[int]:
        """The parameters that some rank updates: a collective where shards are empty on some."""
        flags = [i in with_gradients for i in self._params]
        if self._may_differ:
            flags = each_on_any_rank([param for ref in self._params.values() if (param := ref()) is not None], flags)
        return {i for i, found in zip(self._params, flags, strict=True) if found}

    def run(self, updates: Mapping[int, Tensor], dtypes: Mapping[int, Dtypes], do: Orthogonalize) -> dict[int, Tensor]:
        """The local parts of what ``do`` makes of whole matrices. A collective over the mesh where pieces are moved.

        ``updates``: local parts, by parameter, also of others. ``dtypes``: of every parameter.
        """
        updates = {i: update for i, update in updates.items() if i in self._params}
        taking_part = self._taking_part(updates)
        made = {i: torch.empty_like(update, dtype=dtypes[i].made) for i, update in updates.items()}
        matrices, owners = self._owned.matrices, self._owned.owners
        mine, held = ([n for n in own if matrices[n].param in taking_part] for own in (self._mine, self._held))
        if self._is_local:
            for n in mine:
                self._view(made, n).copy_(do(matrices[n], self._view(updates, n).contiguous()))
            return made
        whole = {n: self._empty(matrices[n], dtypes, made) for n in mine}
        self._move(
            [
                _Parcel(owners[n], self._view(updates, n))
                for n in held
                if self._owned.sender(n, self._held[n]) == self._rank
            ],
            [
                _Parcel(self._owned.sender(n, piece), piece.of_matrix(whole[n]))
                for n in mine
                for piece in self._owned.pieces[n]
            ],
        )
        for n in mine:
            whole[n] = do(matrices[n], whole[n])
        self._move(
            [
                _Parcel(rank, piece.of_matrix(whole[n]))
                for n in mine
                for piece, ranks in self._owned.pieces[n].items()
                for rank in ranks
            ],
            [_Parcel(owners[n], self._view(made, n)) for n in held],
        )
        return made

    def _box(self, matrix: Matrix) -> Box:
        """What this rank holds of its parameter."""
        return self._boxes[matrix.param].of_rank[self._rank]

    def _view(self, locals_: Mapping[int, Tensor], number: int) -> Tensor:
        """What this rank holds of a matrix."""
        matrix = self._owned.matrices[number]
        return part_of_shard(locals_[matrix.param], matrix, self._held[number], self._box(matrix))

    def _empty(self, matrix: Matrix, dtypes: Mapping[int, Dtypes], like: Mapping[int, Tensor]) -> Tensor:
        device = next(iter(like.values())).device if like else self._device
        return torch.empty(matrix.rows, matrix.columns, dtype=dtypes[matrix.param].given, device=device)

    @property
    def _device(self) -> torch.device:
        assert self._mesh is not None
        if self._mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self._mesh.device_type, torch.accelerator.current_device_index())

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        assert self._mesh is not None
        return mesh_group(self._mesh)

    @cached_property
    def _places(self) -> list[int]:
        """Of the mesh's ranks in the process group."""
        return [dist.get_group_rank(self._group, rank) for rank in self._ranks]

    def _move(self, outgoing: list[_Parcel], incoming: list[_Parcel]) -> None:
        """All to all, packed: for each rank one run of bytes, in the order of the matrices."""
        places = self._places
        sent, received = (_by_place(parcels, places) for parcels in (outgoing, incoming))
        source = _packed([parcel.memory for parcel in sent], self._device)
        sizes = [[0] * len(places), [0] * len(places)]
        for size, parcels in zip(sizes, (sent, received), strict=True):
            for parcel in parcels:
                size[places[parcel.rank]] += parcel.memory.nbytes
        target = source.new_empty(sum(sizes[1]))
        dist.all_to_all_single(target, source, sizes[1], sizes[0], group=self._group)
        start = 0
        for parcel in received:
            end = start + parcel.memory.nbytes
            parcel.memory.copy_(target[start:end].view(parcel.memory.dtype).view(parcel.memory.shape))
            start = end


def _by_place(parcels: list[_Parcel], places: Sequence[int]) -> list[_Parcel]:
    return sorted(parcels, key=lambda parcel: places[parcel.rank])


def _packed(values: list[Tensor], device: torch.device) -> Tensor:
    flat = [value.contiguous().view(-1).view(torch.uint8) for value in values]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
