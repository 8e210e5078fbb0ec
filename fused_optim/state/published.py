"""The tensors that are published of an optimizer's parameters: names in a model, parts and places."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_optim.adapters import Place, adapter_of
from fused_optim.options.checks import check_belongs, check_whole
from fused_optim.sharding.collective import parameter_names
from fused_optim.sharding.dtensor import shard_offsets
from fused_optim.state.snapshot import parts_of
from fused_optim.wire.apply import part_name


class Part(NamedTuple):
    """A tensor that is published. ``local``: this rank's shard of it, not empty. ``part``: as in ``parts_of``."""

    name: str
    param: Tensor
    part: str
    local: Tensor
    place: Place

    @property
    def first(self) -> int | None:
        """The index in the whole of the local tensor's first element, if the others follow it as they do here."""
        offsets, shape = self.place.offsets, self.place.shape
        if tuple(self.local.shape[1:]) != tuple(shape[1:]):
            return None
        return math.prod(shape[1:]) * (offsets[0] if offsets else 0)


def published(model: nn.Module, params: Sequence[Tensor]) -> list[Part]:
    """The model's tensors that this rank publishes. ``params``: the optimizer's, which may have those of other models.

    Raises as ``take_changes`` does.
    """
    check_whole(model, params)
    check_belongs(model, params)
    names = parameter_names(model)
    own = [(param, parts_of(param)) for param in params if param in names and _is_first_replica(param)]
    called = {(param, part): part_name(names[param][0], part) for param, parts in own for part in parts}
    if twice := sorted(name for name, count in Counter(called.values()).items() if count > 1):
        raise ValueError(f"two tensors would be published as {', '.join(twice)}: rename the parameter of that name")
    return [
        Part(called[param, part], param, part, local, _place(param, part))
        for param, parts in own
        if next(iter(parts.values())).numel()  # a rank without elements gives no scales
        for part, local in parts.items()
    ]


def _place(param: Tensor, part: str) -> Place:
    adapter = adapter_of(param)
    if adapter is not None:
        return adapter.place(param, part)
    offsets = shard_offsets(param) if isinstance(param, DTensor) else (0,) * param.dim()
    return Place(tuple(param.shape), tuple(offsets))


def _is_first_replica(param: Tensor) -> bool:
    """True on the first of the ranks that hold the same shard of a DTensor."""
    if not isinstance(param, DTensor):
        return True
    at = param.device_mesh.get_coordinate()
    if at is None:  # a mesh of other ranks
        return False
    return all(i == 0 for i, placement in zip(at, param.placements, strict=True) if placement.is_replicate())
