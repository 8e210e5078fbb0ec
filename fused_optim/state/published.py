"""What is published of an optimizer's parameters: their names in a model, parts and places.

Names take longer to find than a device takes to collect what has changed, so they are kept from one take to the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fused_optim.adapters import Place, adapter_of
from fused_optim.backends import forced_backend
from fused_optim.backends.changed_bits import Collector, MarkedTensor
from fused_optim.backends.compiled import Identities
from fused_optim.options.checks import check_belongs, check_whole
from fused_optim.sharding.collective import parameter_names
from fused_optim.sharding.dtensor import dense, has_own_chunks, is_dense, own_chunk, shard_offsets
from fused_optim.state.changes import ChangeTracker, parts_of
from fused_optim.wire.apply import part_name


class Located(NamedTuple):
    """Where a local tensor of shape ``local`` lies in the whole. ``spec``: of the parameter, if it is a DTensor.

    ``first``: the index of the local tensor's first element in the whole, if the others follow it as they do here.
    """

    local: torch.Size
    spec: DTensorSpec | None
    place: Place
    first: int | None

    @staticmethod
    def of(param: Tensor, part: str, local: Tensor) -> Located:
        place, spec = _place(param, part), param._spec if isinstance(param, DTensor) else None
        _, *inner = place.shape or (1,)
        follows = [*local.shape[1:]] == inner
        first = math.prod(inner) * (place.offsets[0] if place.offsets else 0) if follows else None
        return Located(local.shape, spec, place, first)


class Part(NamedTuple):
    """A tensor that is published. ``local``: what this rank holds of it; it has elements."""

    name: str
    param: Tensor
    part: str
    local: Tensor
    at: Located


def _place(param: Tensor, part: str) -> Place:
    adapter = adapter_of(param)
    if adapter is not None:
        return adapter.place(param, part)
    offsets = shard_offsets(param) if isinstance(param, DTensor) else (0,) * param.dim()
    return Place(tuple(param.shape), tuple(offsets))


class Published:
    """The names of an optimizer's parameters in a model, as long as both hold the same ones. These are not kept.

    Raises as ``take_changes`` does.
    """

    def __init__(self, model: nn.Module, params: Sequence[Tensor]) -> None:
        check_whole(model, params)
        check_belongs(model, params)
        names = parameter_names(model)
        named = [*model.named_parameters(remove_duplicate=False)]
        self._names_in_model = [name for name, _ in named]
        self._in_model, self._own = Identities(param for _, param in named), Identities(params)
        self._missing = [i for i, param in enumerate(params) if param not in names]  # those of another model
        first = [(i, param) for i, param in enumerate(params) if param in names and _is_first_replica(param)]
        self._names = [(i, {part: part_name(names[param][0], part) for part in parts_of(param)}) for i, param in first]
        self._located: dict[tuple[int, str], Located] = {}
        self._sources: Sources | None = None
        every = Counter(name for _, own in self._names for name in own.values())
        if twice := sorted(name for name, count in every.items() if count > 1):
            raise ValueError(f"two tensors would be published as {', '.join(twice)}: rename the parameter of that name")

    def in_model(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        """Which of the optimizer's parameters the model has, here or on other ranks; None if it has all."""
        missing = set(self._missing)
        return [param for i, param in enumerate(params) if i not in missing] if missing else None

    def is_of(self, model: nn.Module, params: Sequence[Tensor]) -> bool:
        """Whether these hold the same parameters under the same names."""
        named = [*model.named_parameters(remove_duplicate=False)]
        return (
            self._own.are(params)
            and self._in_model.are([param for _, param in named])
            and self._names_in_model == [name for name, _ in named]
        )

    def sources(self, params: Sequence[Tensor], tracker: ChangeTracker) -> Sources:
        """Those of the last call, if nothing has moved since. ``params``: the optimizer's."""
        found = self._sources
        if found is None or not found.are_of(params, tracker):
            found = Sources(list(self.parts(params)), params, tracker)
            self._sources = found if found.can_be_kept else None
        return found

    def parts(self, params: Sequence[Tensor]) -> Iterator[Part]:
        """Those that this rank gives. ``params``: the optimizer's."""
        for i, names in self._names:
            param = params[i]
            found = parts_of(param)
            if next(iter(found.values())).numel():
                for part, local in found.items():
                    yield Part(names[part], param, part, local, self._locate(i, param, part, local))

    def _locate(self, i: int, param: Tensor, part: str, local: Tensor) -> Located:
        """Found once, as long as the parameter is sharded as it was, by placements alone."""
        known = self._located.get((i, part))
        if not isinstance(param, DTensor):
            is_known = known is not None and known.spec is None and known.local == local.shape
        else:
            is_known = known is not None and known.spec is param._spec and known.local == local.shape
            is_known = is_known and own_chunk(param) is None
        if known is None or not is_known:
            known = self._located[i, part] = Located.of(param, part, local)
        return known


class Sources:
    """The bits and values of all that is published, by address. Neither these nor the parameters are kept."""

    def __init__(self, parts: Sequence[Part], params: Sequence[Tensor], tracker: ChangeTracker) -> None:
        marked, self._copies = [], []
        for _, param, part, local, at in parts:
            values = local
            if not is_dense(local):
                values = dense(local.detach())
                self._copies.append(values)
            marked.append(MarkedTensor(tracker.bits_of(param, part, values), values, at.first or 0))
        self.named = [(part.name, part.at) for part in parts]
        self._collector = Collector(marked)
        self._arrangement, self._moves = tracker.arrangement, tracker.arrangement.moves
        self._shardings, self._backend = list(map(_sharding, params)), forced_backend()
        self.can_be_kept = self._collector.can_be_kept and not (
            self._copies or any(has_own_chunks(part.param) for part in parts)
        )

    def are_of(self, params: Sequence[Tensor], tracker: ChangeTracker) -> bool:
        return (
            self._arrangement is tracker.arrangement
            and self._moves == tracker.arrangement.moves
            and self._backend == forced_backend()
            and self._shardings == list(map(_sharding, params))
        )

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        return self._collector.collect()


def _sharding(param: Tensor) -> object:
    """``.data`` may have other strides at the same address."""
    if isinstance(param, DTensor):
        return param._spec, param._local_tensor.stride()
    return param.shape, param.stride()


def _is_first_replica(param: Tensor) -> bool:
    """Of the ranks that hold the same shard of a DTensor."""
    if not isinstance(param, DTensor):
        return True
    at = param.device_mesh.get_coordinate()
    if at is None:  # a mesh of other ranks
        return False
    return all(i == 0 for i, placement in zip(at, param.placements, strict=True) if placement.is_replicate())
