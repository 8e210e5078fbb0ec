"""The shards of one device in a plan: only shards that have changed are described to the engine again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adapters import FusedEncode, adapter_of
from fused_optim.backends import Backend, ShardWork
from fused_optim.backends.engine import CachedShard
from fused_optim.backends.gradients import unscaled, write_
from fused_optim.backends.offloaded import HostTransfer, StreamedShards, is_locked, update_streamed
from fused_optim.backends.shards import Shards, shards_on
from fused_optim.matrices.shards import MatrixUpdate
from fused_optim.memory.by_parameter import Reference, reference_to
from fused_optim.memory.layout import MASTER, StateLayout
from fused_optim.rules import Hyper, Rule
from fused_optim.sharding.dtensor import is_dense, local_tensor
from fused_optim.state.param_state import ParamState


@dataclass
class Slot:
    """One shard of a plan.

    ``index``: its parameter's position in the param groups; ``key``: of its sequence of rounding. ``memory``: of a
    cached shard with a master, its memory; once that was freed, others have written, whatever is there now.
    ``absmax``: of a shard whose target measures it, the place in its device's buffer.
    """

    index: int
    name: str | None
    group: int
    layout: StateLayout
    key: int
    memory: object = None
    absmax: int | None = None


class DeviceShards:
    """Shards of one device, one backend, one rule and one place of states (the device, or host memory).

    ``slots`` and ``cached`` have an entry for each. ``is_later``: some parameters share memory with shards that are
    updated before them. ``link``: the states are in host memory. Constructed empty: :meth:`append`, then :meth:`build`.
    """

    def __init__(
        self, device: torch.device, backend: Backend, rule: Rule, is_later: bool, link: HostTransfer | None
    ) -> None:
        self.device, self.backend, self.rule, self.is_later, self._link = device, backend, rule, is_later, link
        self.slots: list[Slot] = []
        self.cached: list[CachedShard] = []
        self.uncached: set[int] = set()  # shards that are described at every step
        self.written: set[int] = set()  # shards that others have written, which is told once
        self.freed: set[int] = set()  # shards whose memory was freed
        self.absmax: Tensor | None = None  # the largest magnitudes of the new values of shards that measure them
        # Gradients that this step reads from copies, and where their unscaled values come from: those copies or, where
        # the copy is placed in another way, themselves.
        self.gradient_copies: list[tuple[Tensor, Tensor]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []  # parameters, and contiguous ones to be updated
        self._measured = 0
        self._attribute = ""
        self._matrices: MatrixUpdate | None = None
        self._streamed: StreamedShards | None = None
        self.shards: Shards

    def append(self, slot: Slot, cached: CachedShard) -> int:
        """Returns the number of the shard here."""
        self.uncached.add(len(self.slots))
        self.slots.append(slot)
        self.cached.append(cached)
        return len(self.slots) - 1

    def build(self, group_count: int, params: list[Tensor]) -> None:
        """``params``: of all shards, in their order; not kept."""
        groups = [slot.group for slot in self.slots]
        about = (self.device, self.backend, groups, group_count)
        if self.rule.whole_matrices:
            self._matrices = MatrixUpdate(*about, params, self._link)
            self.shards = self._matrices.shards
        elif self._link is not None:
            self._streamed = StreamedShards(*about, self.rule, self._link)
            self.shards = shards_on(*about, self.rule, torch.device("cpu"))
        else:
            self.shards = shards_on(*about, self.rule)

    def refresh(self, attribute: str) -> Sequence[int]:
        """Read this step's gradients, ``param.<attribute>``. Returns the shards that have one and must be set again."""
        self._attribute = attribute
        self.gradient_copies.clear()
        self.copies.clear()
        stale = self.shards.refresh(self.cached, attribute)
        if self._streamed is not None:
            having = self.shards.with_gradients()
            stale = sorted({*stale, *(i for i in having if not is_locked(self.cached[i], self.device))})
        self.written.update(self.shards.written())  # also of a step that is refused later
        while self.freed:
            self.written.add(self.freed.pop())
        return stale

    def takes_target(self, layout: StateLayout) -> bool:
        """True if the update of a shard with these states can write codes of a quantized weight itself."""
        if self._matrices is not None:
            return self._matrices.takes_target(layout)
        return self._streamed is None and self.shards.takes_target(layout)

    def absmax_of(self, slot: Slot) -> Tensor:
        """The largest magnitude of a shard's new values, which the update writes: FP32, shape ``(1,)``."""
        if self.absmax is None:
            self.absmax = torch.zeros(len(self.slots), dtype=torch.float32, device=self.device)
        if slot.absmax is None:  # side by side: one reduction takes them as they lie
            slot.absmax, self._measured = self._measured, self._measured + 1
        return self.absmax[slot.absmax : slot.absmax + 1]

    def drop_param(self, i: int) -> None:
        """Release the states of shard ``i``, whose parameter was freed."""
        self.cached[i] = CachedShard(self.cached[i].param_ref, (), None, None, {})
        self.slots[i].memory = None
        self.uncached.discard(i)
        self.written.discard(i)
        self.shards.works.pop(i, None)
        if self._streamed is not None:
            self._streamed.parts.pop(i, None)

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        """Update all shards that have a gradient. ``hypers``: hyperparameters by param group, on this device."""
        if self.absmax is not None:
            self.absmax.zero_()
        for param, copy in self.copies if self.is_later else ():
            copy.copy_(param)
        late = self._unscaled_apart(hypers[0].grad_scale, hypers[0].found_inf) if self.gradient_copies else []
        if self._matrices is not None:
            self._matrices.run(hypers, workspace)
        elif self._streamed is not None:
            update_streamed(self._streamed, self._works(), hypers, workspace)
        else:
            self.shards.run(hypers, workspace)
        for param, copy in self.copies:
            param.copy_(copy)
        self.copies.clear()
        for grad, value in late:
            write_(grad, value)
        self.gradient_copies.clear()

    def _works(self) -> Iterator[tuple[int, ShardWork]]:
        """The shards that have a gradient: as set for this step, or else the unchanged tensors of the last."""
        for i in self.shards.with_gradients():
            if i in self.shards.works:
                yield i, self.shards.works[i]
                continue
            cached, slot = self.cached[i], self.slots[i]
            param = cached.param_ref()
            assert param is not None
            yield (
                i,
                ShardWork(
                    grad=local_tensor(getattr(param, self._attribute)),
                    param=local_tensor(param),
                    master=None if cached.master is None else local_tensor(cached.master),
                    states=tuple(local_tensor(state) for state in cached.state_tensors if state is not None),
                    layout=slot.layout,
                    key=slot.key,
                ),
            )

    def _unscaled_apart(self, scale: Tensor | None, found_inf: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Pairs (gradient, its contiguous copy): passes write unscaled gradients into copies, which go back."""
        if scale is None:
            return []
        if found_inf is not None:
            scale = torch.where(found_inf == 0, scale, 1.0)
        return [(grad, unscaled(grad, scale) if source is grad else source) for grad, source in self.gradient_copies]


def is_cacheable(param: Tensor) -> bool:
    """True for plain parameters whose memory is dense: they are updated in place."""
    plain = type(param) in (Tensor, torch.nn.Parameter, DTensor) and adapter_of(param) is None
    return plain and is_dense(local_tensor(param))


def cached_shard(reference: Reference, states: ParamState) -> CachedShard:
    spec = states.param._spec if isinstance(states.param, DTensor) else None
    tensors = tuple(states.tensors.get(spec.name) for spec in states.layout.specs)
    return CachedShard(reference, tensors, master=states.tensors.get(MASTER), spec=spec, states=states.tensors)


def cached_weight(cached: CachedShard, param: Tensor, target: FusedEncode, master: Tensor) -> CachedShard:
    """The cached shard of a quantized weight: its codes and scales in place of the parameter."""
    return cached._replace(
        local_ref=reference_to(local_tensor(param)),
        components=target.components,
        names=target.names,
        parts=tuple(target.components[name] for name in target.names),
        master_local=master,
    )
