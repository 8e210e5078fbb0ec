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
from fused_optim.backends.compiled import Identities
from fused_optim.options.checks import check_belongs, check_whole
from fused_optim.sharding.collective import parameter_names
from fused_optim.sharding.dtensor import own_chunk, shard_offsets
from fused_optim.state.changes import parts_of
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
        first = [(i, param) for i, param in enumerate(params) if param in names and _is_first_replica(param)]
        self._names = [(i, {part: part_name(names[param][0], part) for part in parts_of(param)}) for i, param in first]
        self._located: dict[tuple[int, str], Located] = {}
        every = Counter(name for _, own in self._names for name in own.values())
        if twice := sorted(name for name, count in every.items() if count > 1):
            raise ValueError(f"two tensors would be published as {', '.join(twice)}: rename the parameter of that name")

    def is_of(self, model: nn.Module, params: Sequence[Tensor]) -> bool:
        """Whether these hold the same parameters under the same names."""
        named = [*model.named_parameters(remove_duplicate=False)]
        return (
            self._own.are(params)
            and self._in_model.are([param for _, param in named])
            and self._names_in_model == [name for name, _ in named]
        )

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


def _is_first_replica(param: Tensor) -> bool:
    """Of the ranks that hold the same shard of a DTensor."""
    if not isinstance(param, DTensor):
        return True
    at = param.device_mesh.get_coordinate() or ()
    return all(i == 0 for i, placement in zip(at, param.placements, strict=True) if placement.is_replicate())
