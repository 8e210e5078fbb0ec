"""Quantized parameters in a step: what the passes have computed for them, and the adapters' updates made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_optim import adapters
from fused_optim.adapters import Batch, Fractions, Update
from fused_optim.backends.compiled import Identities
from fused_optim.formats.masters import Master
from fused_optim.memory.by_parameter import Reference
from fused_optim.memory.layout import StateLayout
from fused_optim.rules import Hyper
from fused_optim.sharding.dtensor import local_tensor


@dataclass(frozen=True)
class WeightUpdate:
    """An ``Update`` without the parameter."""

    values: Tensor
    absmax: Tensor | None = None
    written: bool = False

    def of(self, param: Tensor) -> Update:
        return Update(param, self.values, absmax=self.absmax, written=self.written)


@dataclass(frozen=True)
class Weight:
    """A quantized parameter: the number of its group, its layout, and the key of its sequence of rounding."""

    param_ref: Reference
    group: int
    layout: StateLayout
    key: int


class WeightUpdates:
    """The updates of a plan's quantized parameters, by their positions in the param groups."""

    def __init__(self, weights: dict[int, Weight]) -> None:
        self._weights = weights
        self._reusable: dict[int, WeightUpdate] = {}  # of those with targets: at every step until they are put again
        self._one_step: dict[int, WeightUpdate] = {}  # of this step
        # The last step's updates, as long as the same parameters are updated by the same ones.
        self._batches: list[Batch] | None = None
        self._batched = Identities(())

    def put(self, index: int, values: WeightUpdate, reusable: bool) -> None:
        self._batches = None
        if reusable:
            self._reusable[index] = values
        else:
            self._reusable.pop(index, None)
            self._one_step[index] = values

    def drop_param(self, index: int) -> None:
        self._batches = None
        for kept in (self._weights, self._reusable, self._one_step):
            kept.pop(index, None)

    def end_step(self) -> None:
        self._one_step.clear()
        if self._batches and not all(batch.lasts for batch in self._batches):
            self._batches = None

    def batches(
        self, attribute: str, updated: Sequence[Tensor], hypers: Mapping[torch.device, list[Hyper]]
    ) -> list[Batch]:
        """The batches of a step over ``updated`` parameters, quantized or not, whose gradients are in ``attribute``."""
        if self._batches is None or not self._batched.are(updated):
            self._batches = adapters.batches(self._updates(attribute, hypers))
            self._batched = Identities(updated)
        return self._batches

    def _updates(self, attribute: str, hypers: Mapping[torch.device, list[Hyper]]) -> list[Update]:
        """All quantized parameters, also those that take part in reductions only."""
        updates = []
        for index, weight in self._weights.items():
            param = weight.param_ref()
            assert param is not None
            if getattr(param, attribute, None) is None:
                update = Update(param, None)
            else:
                update = (self._reusable.get(index) or self._one_step[index]).of(param)
            if weight.layout.master is Master.PARAMETER:
                hyper = hypers[local_tensor(param).device][weight.group]
                update = replace(update, fractions=self._fractions(weight, hyper))
            updates.append(update)
        return updates

    def _fractions(self, weight: Weight, hyper: Hyper) -> Fractions | None:
        """Rotating rounding of a quantized parameter that has no master."""
        if not hyper.stochastic_rounding:
            return None
        step = hyper.step if hyper.steps_done is None else hyper.steps_done  # counted already
        return Fractions(weight.key, weight.layout.geometry, step)
