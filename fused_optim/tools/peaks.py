"""What FSDP2 allocates in a training step beyond what a rank holds between steps: its work, followed in its order.

Layers are told by the numbers in names, and each is sharded on its own, with what is in no layer (embeddings, the head)
around them. FSDP2's defaults are assumed: no mixed precision policy, layers are resharded after the forward pass, the
backward pass gathers the next layer while one is at work, and the input of one reduce-scatter is kept until the next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.tensor import DTensor

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.)")  # "model.layers.3", "3"


@dataclass
class Unit:
    """Parameters that are gathered together: bytes of all ranks' shards, and of their whole gradients."""

    weights: int = 0
    gradients: int = 0

    def add(self, weights: int, gradients: int) -> None:
        self.weights += weights
        self.gradients += gradients


@dataclass
class Units:
    """The layers, in order, and what is in none: ``before`` the first layer and ``after`` it, as they are named."""

    before: Unit = field(default_factory=Unit)
    layers: dict[str, Unit] = field(default_factory=dict)
    after: Unit = field(default_factory=Unit)

    @classmethod
    def of(cls, sizes: Sequence[tuple[str, int, int]]) -> Units:
        """``sizes``: of each parameter its name, its bytes and those of its gradient, whole."""
        units = cls()
        for name, weights, gradients in sizes:
            match = _LAYER.match(name)
            if match:
                unit = units.layers.setdefault(match[0], Unit())
            else:
                unit = units.after if units.layers else units.before
            unit.add(weights, gradients)
        return units


class _Memory:
    """Bytes by what they are for, and the most that there were at once."""

    def __init__(self) -> None:
        self._held: dict[str, float] = {}
        self.peak = 0.0

    def take(self, what: str, size: float) -> None:
        self._held[what] = self._held.get(what, 0.0) + size
        self.peak = max(self.peak, sum(self._held.values()))

    def free(self, what: str) -> None:
        self._held.pop(what, None)


def ranks_of(params: Sequence[Tensor]) -> int:
    """Over how many parameters are sharded, whose replicas do not count; 0 where none is."""
    found = [0]
    for param in params:
        if isinstance(param, DTensor):
            dims = [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate()]
            found.append(math.prod(param.device_mesh.size(dim) for dim in dims) if dims else 0)
    return max(found)


def forward_peak(units: Units, ranks: int) -> int:
    """Of gathered parameters and the buffers that they are received in. One rank receives none, and copies.

    A layer is copied out of its buffer, which is kept until the next layer has been copied, too.
    """
    memory = _Memory()
    rest = units.before.weights + units.after.weights
    last = ""
    for name, weights in [("rest", rest), *((name, unit.weights) for name, unit in units.layers.items())]:
        memory.take(f"buffer {name}", weights if ranks > 1 else 0)
        memory.take(name, weights)
        memory.free(f"buffer {last}")
        if name != "rest":  # which the backward pass will begin with
            memory.free(name)
        last = name
    return int(memory.peak)


def backward_peak(units: Units, ranks: int) -> int:
    """The same of a backward pass, with whole gradients, and the shards of gradients that are there already."""
    memory, names = _Memory(), [*units.layers]
    is_sent = ranks > 1
    memory.take("rest", units.before.weights + units.after.weights)
    for ahead, name in zip([*names[-2::-1], None], reversed(names), strict=True):
        unit = units.layers[name]
        if name == names[-1]:
            memory.take(f"buffer {name}", is_sent * unit.weights)
            memory.take("rest's gradients", units.after.gradients)
        memory.take(name, unit.weights)
        memory.free(f"buffer {name}")
        if ahead is not None:
            memory.take(f"buffer {ahead}", is_sent * units.layers[ahead].weights)
        memory.take("gradients", unit.gradients)
        memory.free(name)
        _reduce(memory, "gradients", unit.gradients, ranks)
    memory.take("rest's gradients", units.before.gradients)
    memory.free("rest")
    _reduce(memory, "rest's gradients", units.before.gradients + units.after.gradients, ranks)
    return int(memory.peak)


def _reduce(memory: _Memory, gradients: str, size: int, ranks: int) -> None:
    """Gradients are copied for the reduce-scatter, whose input is kept until the next one."""
    memory.free("sent")
    memory.take("sent", size)
    memory.free(gradients)
    memory.take("shards", size / ranks)
