"""Pieces of matrices go to the ranks that orthogonalize them, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_optim.matrices.owners import Box, Boxes, Matrix, Ownership, boxes_of, matrices_of, part_of_shard, piece_of
from fused_optim.memory.by_parameter import reference_to
from fused_optim.sharding.collective import each_on_any_rank, gather, mesh_group
from fused_optim.sharding.dtensor import own_chunk

# Values of whole matrices, contiguous, and what is made of them.
Orthogonalize = Callable[[Sequence[Matrix], Sequence[Tensor]], Sequence[Tensor]]


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

    Made by all ranks of the mesh together: where shards lie elsewhere than placements say, as Megatron-FSDP's do, they
    tell each other.

    Args:
        params: by their numbers, the same ones on every rank of the mesh.
        splits: by number, see :func:`matrices_of`.
        mesh: theirs; None: they are plain tensors.
    """

    def __init__(self, params: Mapping[int, Tensor], splits: Sequence[Sequence[int]], mesh: DeviceMesh | None) -> None:
        self._params, self._mesh = {i: reference_to(param) for i, param in params.items()}, mesh  # not kept
        self._ranks = [0] if mesh is None else mesh.mesh.flatten().tolist()
        self._rank = 0 if mesh is None else self._ranks.index(dist.get_rank())
        self._boxes = self._boxes_of(params)
        matrices = [matrix for i, param in params.items() for matrix in matrices_of(i, param.shape, splits[i])]
        self._owned = Ownership.of(matrices, self._boxes, len(self._ranks))
        self._is_local = self._owned.is_local
        self._mine = [n for n, owner in enumerate(self._owned.owners) if owner == self._rank]
        own = ((n, piece_of(matrix, self._box(matrix))) for n, matrix in enumerate(matrices))
        self._held = {n: piece for n, piece in own if piece is not None}
        # FSDP may leave a rank whose shard is empty without a gradient where others have one.
        self._may_differ = any(box.is_empty for boxes in self._boxes.values() for box in boxes.of_rank)

    def _boxes_of(self, params: Mapping[int, Tensor]) -> dict[int, Boxes]:
        chunks = {i: own_chunk(param) for i, param in params.items()}
        own = {i: (tuple(chunk.sizes), tuple(chunk.offsets)) for i, chunk in chunks.items() if chunk is not None}
        found = {i: boxes_of(param, self._mesh) for i, param in params.items() if i not in own}
        if own:
            everyone = gather(own, group=self._group)
            parts = [everyone[place] for place in self._places]
            found |= {i: Boxes([Box.of(*of_rank[i]) for of_rank in parts]) for i in own}
        return found

    @property
    def is_local(self) -> bool:
        """Whether nothing is moved."""
        return self._is_local

    @property
    def work(self) -> list[int]:
        """What the products of the matrices of each rank cost; see :attr:`Matrix.cost`."""
        found = [0] * len(self._ranks)
        for matrix, owner in zip(self._owned.matrices, self._owned.owners, strict=True):
            found[owner] += matrix.cost
        return found

    @property
    def sent_elements(self) -> tuple[int, int]:
        """What this rank puts into the two all-to-alls of a step, what it keeps itself included."""
        if self._is_local:
            return 0, 0
        there = (piece for n, piece in self._held.items() if self._owned.sender(n, piece) == self._rank)
        back = ((piece, ranks) for n in self._mine for piece, ranks in self._owned.pieces[n].items())
        return sum(piece.numel for piece in there), sum(piece.numel * len(ranks) for piece, ranks in back)

    def begin(self, updates: Mapping[int, Tensor], dtypes: Mapping[int, Dtypes]) -> Exchange:
        """Send local parts to the owners of their matrices: a collective over the mesh, if some are moved.

        ``updates``: local parts, by parameter, also of others. ``dtypes``: of every parameter.
        """
        own = {i: update for i, update in updates.items() if i in self._params}
        taking_part = self._taking_part(own)
        mine, held = (
            [n for n in all_ if self._owned.matrices[n].param in taking_part] for all_ in (self._mine, self._held)
        )
        return Exchange(self, own, dtypes, mine, held)

    def _taking_part(self, with_gradients: Mapping[int, Tensor]) -> set[int]:
        """The parameters that some rank updates: a collective where shards are empty on some."""
        flags = [i in with_gradients for i in self._params]
        if self._may_differ:
            flags = each_on_any_rank([param for ref in self._params.values() if (param := ref()) is not None], flags)
        return {i for i, found in zip(self._params, flags, strict=True) if found}

    def matrices(self, numbers: Sequence[int]) -> list[Matrix]:
        return [self._owned.matrices[n] for n in numbers]

    def view(self, locals_: Mapping[int, Tensor], number: int) -> Tensor:
        """What this rank holds of a matrix."""
        matrix = self._owned.matrices[number]
        return part_of_shard(locals_[matrix.param], matrix, self._held[number], self._box(matrix))

    def gather(
        self, held: list[int], mine: list[int], updates: Mapping[int, Tensor], whole: Mapping[int, Tensor]
    ) -> Delivery:
        """Pieces of the matrices that this rank holds go to their owners, and those of others come here."""
        sent = (n for n in held if self._owned.sender(n, self._held[n]) == self._rank)
        return self._move(
            [_Parcel(self._owned.owners[n], self.view(updates, n)) for n in sent],
            [
                _Parcel(self._owned.sender(n, piece), piece.of_matrix(whole[n]))
                for n in mine
                for piece in self._owned.pieces[n]
            ],
        )

    def scatter(
        self, held: list[int], mine: list[int], whole: Mapping[int, Tensor], made: Mapping[int, Tensor]
    ) -> Delivery:
        """The way back."""
        return self._move(
            [
                _Parcel(rank, piece.of_matrix(whole[n]))
                for n in mine
                for piece, ranks in self._owned.pieces[n].items()
                for rank in ranks
            ],
            [_Parcel(self._owned.owners[n], self.view(made, n)) for n in held],
        )

    def empty(self, number: int, dtypes: Mapping[int, Dtypes]) -> Tensor:
        matrix = self._owned.matrices[number]
        return torch.empty(matrix.rows, matrix.columns, dtype=dtypes[matrix.param].given, device=self._device)

    def _box(self, matrix: Matrix) -> Box:
        """What this rank holds of its parameter."""
        return self._boxes[matrix.param].of_rank[self._rank]

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

    def _move(self, outgoing: list[_Parcel], incoming: list[_Parcel]) -> Delivery:
        """All to all, packed: for each rank one run of bytes, in the order of the matrices."""
        places = self._places
        sent, received = (_by_place(parcels, places) for parcels in (outgoing, incoming))
        source = _packed([parcel.memory for parcel in sent], self._device)
        sizes = [[0] * len(places), [0] * len(places)]
        for size, parcels in zip(sizes, (sent, received), strict=True):
            for parcel in parcels:
                size[places[parcel.rank]] += parcel.memory.nbytes
        target = source.new_empty(sum(sizes[1]))
        work = dist.all_to_all_single(target, source, sizes[1], sizes[0], group=self._group, async_op=True)
        return Delivery(work, source, target, received)


class Delivery:
    """What is on its way to this rank."""

    def __init__(self, work: dist.Work, source: Tensor, target: Tensor, parcels: list[_Parcel]) -> None:
        self._work, self._target, self._parcels = work, target, parcels
        self._source = source  # which is being read

    def wait(self) -> None:
        """Put it where it belongs, once it is there; on a GPU, the current stream waits, not the host."""
        self._work.wait()
        start = 0
        for parcel in self._parcels:
            end = start + parcel.memory.nbytes
            parcel.memory.copy_(self._target[start:end].view(parcel.memory.dtype).view(parcel.memory.shape))
            start = end


class Exchange:
    """Updates of one step on their way to the owners of their matrices, then ``work``, then back, then ``end``.

    What is begun in between is on its way beside the work. ``mine``, ``held``: the matrices that this rank owns, and
    those of which it holds pieces, as far as they take part.
    """

    def __init__(
        self,
        on_mesh: MatricesOnMesh,
        updates: Mapping[int, Tensor],
        dtypes: Mapping[int, Dtypes],
        mine: list[int],
        held: list[int],
    ) -> None:
        self._on_mesh, self._updates, self._dtypes = on_mesh, updates, dtypes
        self._mine, self._held = mine, held
        self._made: dict[int, Tensor] = {}
        self._delivery: Delivery | None = None
        self._whole: dict[int, Tensor] = {}
        if not on_mesh.is_local:
            self._whole = {n: on_mesh.empty(n, dtypes) for n in mine}
            self._delivery = on_mesh.gather(held, mine, updates, self._whole)

    def work(self, do: Orthogonalize) -> None:
        """Orthogonalize what this rank owns. A collective over the mesh, if some are moved."""
        if self._delivery is None:
            whole = {n: self._on_mesh.view(self._updates, n).contiguous() for n in self._mine}
        else:
            self._delivery.wait()
            whole = self._whole
        results = dict(zip(self._mine, do(self._on_mesh.matrices(self._mine), list(whole.values())), strict=True))
        self._whole = {}
        if self._delivery is None:
            self._join(results)
        else:
            self._made = {i: self._empty_like(i) for i in self._updates}
            self._delivery = self._on_mesh.scatter(self._held, self._mine, results, self._made)

    def end(self) -> dict[int, Tensor]:
        """The local parts of what was made, by parameter."""
        if self._delivery is not None:
            self._delivery.wait()
        return self._made

    def _join(self, results: Mapping[int, Tensor]) -> None:
        """Results of matrices that this rank holds and owns, by parameter: itself, if it is all of one.

        Empty shards have none.
        """
        for n, matrix in zip(self._mine, self._on_mesh.matrices(self._mine), strict=True):
            if results[n].shape == self._updates[matrix.param].shape:
                self._made[matrix.param] = results[n]
                continue
            if matrix.param not in self._made:
                self._made[matrix.param] = self._empty_like(matrix.param)
            self._on_mesh.view(self._made, n).copy_(results[n])
        self._made |= {i: self._empty_like(i) for i in self._updates.keys() - self._made}

    def _empty_like(self, param: int) -> Tensor:
        return torch.empty_like(self._updates[param], dtype=self._dtypes[param].made)


def _by_place(parcels: list[_Parcel], places: Sequence[int]) -> list[_Parcel]:
    return sorted(parcels, key=lambda parcel: places[parcel.rank])


def _packed(values: list[Tensor], device: torch.device) -> Tensor:
    flat = [value.contiguous().view(-1).view(torch.uint8) for value in values]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
