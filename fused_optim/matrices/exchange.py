"""Pieces of matrices go to the ranks that orthogonalize them, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_optim.matrices.owners import Box, Boxes, Matrix, Ownership, boxes_of, matrices_of, piece_of
from fused_optim.matrices.routes import Message, Route, copy_all, copy_regions
from fused_optim.memory.by_parameter import reference_to
from fused_optim.sharding.collective import each_on_any_rank, gather, mesh_group
from fused_optim.sharding.dtensor import local_tensor, own_chunk

# Values of whole matrices, contiguous, and what is made of them.
Orthogonalize = Callable[[Sequence[Matrix], Sequence[Tensor]], Sequence[Tensor]]


class Dtypes(NamedTuple):
    """The dtypes of values to be orthogonalized, and of the result."""

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
        busy: the :attr:`work` that its ranks have with others; None: nothing.
    """

    def __init__(
        self,
        params: Mapping[int, Tensor],
        splits: Sequence[Sequence[int]],
        mesh: DeviceMesh | None,
        busy: Sequence[int] | None = None,
    ) -> None:
        self._params, self._mesh = {i: reference_to(param) for i, param in params.items()}, mesh  # not kept
        self._ranks = [0] if mesh is None else mesh.mesh.flatten().tolist()
        self._rank = 0 if mesh is None else self._ranks.index(dist.get_rank())
        self._boxes = self._boxes_of(params)
        matrices = [matrix for i, param in params.items() for matrix in matrices_of(i, param.shape, splits[i])]
        self._owned = Ownership.of(matrices, self._boxes, busy or [0] * len(self._ranks))
        self._is_local = self._owned.is_local
        self._mine = [n for n, owner in enumerate(self._owned.owners) if owner == self._rank]
        own = ((n, piece_of(matrix, self._box(matrix))) for n, matrix in enumerate(matrices))
        self._held = {n: piece for n, piece in own if piece is not None}
        self._shard_device = local_tensor(next(iter(params.values()))).device
        self._last: tuple[list[int], set[int], Route] | None = None  # of which parameters, and of whose matrices
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
        """True if nothing is moved."""
        return self._is_local

    @property
    def work(self) -> list[int]:
        """The cost of the products of each rank's matrices; see :attr:`Matrix.cost`."""
        return self._by_owner([matrix.cost for matrix in self._owned.matrices])

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of this rank's matrices, in their order."""
        return [(matrix.rows, matrix.columns) for matrix in self._owned.matrices]

    @property
    def owned_elements(self) -> list[int]:
        """The number of elements of each rank's matrices."""
        return self._by_owner([matrix.numel for matrix in self._owned.matrices])

    def _by_owner(self, numbers: Sequence[int]) -> list[int]:
        """The sum of those of each rank's matrices."""
        found = [0] * len(self._ranks)
        for number, owner in zip(numbers, self._owned.owners, strict=True):
            found[owner] += number
        return found

    def begin(self, updated: Collection[int], dtypes: Dtypes) -> Exchange:
        """An exchange of what will be orthogonalized: a collective over the mesh where shards are empty on some ranks.

        ``updated``: the parameters, also others, that this rank updates.
        """
        return Exchange(self, self._route([i for i in self._params if i in updated]), dtypes)

    def _route(self, own: list[int]) -> Route:
        """The route, which is usually that of the last step."""
        taking_part = self._taking_part(own)
        if self._last is None or self._last[:2] != (own, taking_part):
            matrices = self._owned.matrices
            held = {n: piece for n, piece in self._held.items() if matrices[n].param in taking_part}
            mine = [n for n in self._mine if matrices[n].param in taking_part]
            self._last = own, taking_part, Route(self._owned, self._rank, self._places, own, held, mine)
        return self._last[2]

    def _taking_part(self, with_gradients: Collection[int]) -> set[int]:
        """The parameters that some rank updates: a collective where shards are empty on some."""
        flags = [i in with_gradients for i in self._params]
        if self._may_differ:
            flags = each_on_any_rank([param for ref in self._params.values() if (param := ref()) is not None], flags)
        return {i for i, found in zip(self._params, flags, strict=True) if found}

    def matrices(self, numbers: Sequence[int]) -> list[Matrix]:
        return [self._owned.matrices[n] for n in numbers]

    @property
    def shard_device(self) -> torch.device:
        return self._shard_device

    @property
    def device(self) -> torch.device:
        """On which matrices are orthogonalized."""
        if self._mesh is None:
            return self._shard_device
        if self._mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self._mesh.device_type, torch.accelerator.current_device_index())

    def send(self, source: Tensor, target: Tensor, sent: Message, received: Message) -> Delivery:
        """An all-to-all exchange. Messages lie at the beginning of ``source`` and ``target``."""
        size = source.element_size()
        target_bytes, source_bytes = (
            memory[: message.numel].view(torch.uint8) for memory, message in ((target, received), (source, sent))
        )
        into, of = ([size * numel for numel in message.sizes] for message in (received, sent))
        work = dist.all_to_all_single(target_bytes, source_bytes, into, of, group=self._group, async_op=True)
        return Delivery(work, source, target)

    def _box(self, matrix: Matrix) -> Box:
        """The box of the parameter that this rank holds."""
        return self._boxes[matrix.param].of_rank[self._rank]

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        assert self._mesh is not None
        return mesh_group(self._mesh)

    @cached_property
    def _places(self) -> list[int]:
        """The ranks of the mesh, by their numbers in the process group."""
        if self._mesh is None:
            return [0]
        return [dist.get_group_rank(self._group, rank) for rank in self._ranks]


class Delivery(NamedTuple):
    """Values on their way to this rank. ``source`` must not be written before :meth:`wait`."""

    work: dist.Work
    source: Tensor
    target: Tensor

    def wait(self) -> Tensor:
        """The values that have arrived. On a GPU the current stream waits for them, not the host."""
        self.work.wait()
        return self.target


class Exchange:
    """Updates of one step on their way to the owners of their matrices: ``send``, then ``work``, then back, ``end``.

    Each of the first two is a collective over the mesh, if some are moved. What is begun in between is on its way
    beside the work. ``updates``: memory for the local parts, flat, by parameter, which ``send`` reads.
    """

    def __init__(self, on_mesh: MatricesOnMesh, route: Route, dtypes: Dtypes) -> None:
        self._on_mesh, self._route, self._dtypes = on_mesh, route, dtypes
        self._memory = torch.empty(route.updates.numel, dtype=dtypes.given, device=on_mesh.shard_device)
        self.updates = route.updates.of_params(self._memory)
        self._made: dict[int, Tensor] = {}
        self._delivery: Delivery | None = None

    def send(self) -> None:
        if self._on_mesh.is_local:
            return
        route, source = self._route, self._memory
        copy_regions(source, source, route.updates.apart)
        target = source.new_empty(route.coming.numel)
        self._delivery = self._on_mesh.send(source, target, route.sent, route.coming)
        self.updates.clear()
        self._memory = source.new_empty(0)  # the delivery has it

    def work(self, do: Orthogonalize) -> None:
        """Orthogonalize what this rank owns."""
        route, on_mesh, memory = self._route, self._on_mesh, self._memory
        if self._delivery is not None:
            come = self._delivery.wait()
            memory = torch.empty(route.numel, dtype=come.dtype, device=on_mesh.device)
            copy_regions(memory, come, route.gathered)
            self._delivery = None
            del come
        whole = [region.of(memory) for region in route.matrices.values()]
        results = dict(zip(route.mine, do(on_mesh.matrices(route.mine), whole), strict=True))
        del memory, whole  # before there is memory for what is sent back
        if on_mesh.is_local:  # those of a parameter lie one behind the other
            nothing = torch.empty(0, dtype=self._dtypes.made, device=on_mesh.shard_device)
            for param, numbers in route.held_of.items():
                own = [results[n].view(-1) for n in numbers]
                self._made[param] = own[0] if len(own) == 1 else torch.cat(own or [nothing])
            return
        source = torch.empty(route.returning.numel, dtype=self._dtypes.made, device=on_mesh.device)
        copy_all([(to.of(source), piece.of_matrix(results[n])) for to, n, piece in route.returned])
        target = source.new_empty(route.made.numel)
        self._delivery = on_mesh.send(source, target, route.returning, route.back)

    def end(self) -> dict[int, Tensor]:
        """The local parts of what was made, flat, by parameter."""
        if self._delivery is not None:
            target = self._delivery.wait().to(self._on_mesh.shard_device)
            copy_regions(target, target, [(shard, there) for there, shard in self._route.made.apart])
            self._made = self._route.made.of_params(target)
        return self._made
