"""The choice of states that live in host memory, and their transfers to the parameters' devices and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fused_optim.backends.compiled import SameTensors
from fused_optim.backends.offloaded import HostTransfer
from fused_optim.sharding.dtensor import has_values, local_tensor
from fused_optim.state.groups import Owner

OFFLOADED_FROM = ("cuda",)  # kinds of devices


def may_be_offloaded(param: Tensor) -> bool:
    """True for parameters on devices whose states can be kept in host memory."""
    return local_tensor(param).device.type in OFFLOADED_FROM and has_values(param)


class Offloading:
    """The offloaded states of one optimizer, by ``offload_states`` and ``offload_fraction``."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.links: dict[torch.device, HostTransfer] = {}
        self._chosen: tuple[SameTensors, set[int]] | None = None  # of these parameters, those to be offloaded

    @property
    def is_on(self) -> bool:
        """True if states are to be offloaded where they can be."""
        return self._owner.settings.offload_states and self._owner.settings.offload_fraction > 0.0

    def takes(self, param: Tensor, params: Callable[[], list[Tensor]], is_frozen: Callable[[Tensor], bool]) -> bool:
        """True if new states of a parameter go into host memory; ``params``: all of the optimizer's."""
        fraction = self._owner.settings.offload_fraction
        if not self.is_on or not may_be_offloaded(param):
            return False
        if fraction >= 1.0:
            return True
        if self._chosen is None or not self._chosen[0].are(params()):
            own = [param for param in params() if may_be_offloaded(param) and not is_frozen(param)]
            matrices = self._matrices()
            chosen = _choose(
                {id(param): local_tensor(param).numel() for param in own if param not in matrices}, fraction
            )
            # Ranks put these together in one order: by shards, which may differ, they would wait for each other.
            chosen |= _choose({id(param): param.numel() for param in own if param in matrices}, fraction)
            self._chosen = SameTensors(params()), chosen
        return id(param) in self._chosen[1]

    def _matrices(self) -> set[Tensor]:
        """The parameters that are updated as whole matrices."""
        owner = self._owner
        groups = [group for group in owner.param_groups if owner.rule.for_group(group).whole_matrices]
        return {param for group in groups for param in group["params"]}

    def invalidate_choice(self) -> None:
        """Let the next :meth:`takes` choose the offloaded parameters anew: some may be frozen, or have states, now."""
        self._chosen = None

    def link(self, device: torch.device) -> HostTransfer:
        """The transfer of states in host memory to a device and back."""
        return self.links.get(device) or self.links.setdefault(device, HostTransfer(device))

    def synchronize(self) -> None:
        """Wait until states in host memory are there."""
        for link in self.links.values():
            link.synchronize()


def _choose(sizes: Mapping[int, int], fraction: float) -> set[int]:
    """Parameters with this share of all elements, spread evenly; ``sizes``: by ``id()`` of a parameter."""
    chosen, total, offloaded = set(), 0, 0
    for param, size in sizes.items():
        total += size
        if 2 * (offloaded + size) <= 2 * fraction * total + size:
            chosen.add(param)
            offloaded += size
    return chosen
