"""The shards of one device in a plan: only shards that have changed are described to the engine again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adapters import FusedEncode, adapter_of
from fused_optim.backends import Backend
from fused_optim.backends.engine import CachedShard
from fused_optim.backends.gradients import unscaled, write_
from fused_optim.backends.shards import Shards
from fused_optim.memory.by_parameter import Reference, reference_to
from fused_optim.memory.layout import MASTER, memory_of
from fused_optim.rules import Hyper, RuleSpec
from fused_optim.sharding.dtensor import is_dense, local_tensor
from fused_optim.state.param_state import ParamState


@dataclass
class DeviceShards:
    """Shards of one device, one backend, one rule and one place of states (the device, or host memory)."""

    device: torch.device
    backend: Backend
    rule: RuleSpec
    is_later: bool = False  # whether some parameters share memory with those of parts before it
    indices: list[int] = field(default_factory=list)  # positions in the param groups
    groups: list[int] = field(default_factory=list)
    cached: list[CachedShard] = field(default_factory=list)
    absmax: Tensor | None = None  # of shards whose targets measure it, memory for as many as there are shards
    measured: dict[int, int] = field(default_factory=dict)  # where a shard's absmax lies in it
    # Gradients that this step reads from copies, and where their unscaled values come from: those copies or, where the
    # copy is placed in another way, themselves.
    gradient_copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # parameters, and contiguous ones to be updated
    uncached: set[int] = field(default_factory=set)  # shards that are described at every step
    written: set[int] = field(default_factory=set)  # shards that others have written, which is told once
    # Of cached shards beside masters: their memory. Where it was freed, others have written, whatever is there now.
    memory: dict[int, object] = field(default_factory=dict)
    freed: set[int] = field(default_factory=set)
    shards: Shards = field(init=False)

    def absmax_of(self, i: int) -> Tensor:
        if self.absmax is None:
            self.absmax = torch.zeros(len(self.indices), dtype=torch.float32, device=self.device)
        slot = self.measured.setdefault(i, len(self.measured))  # side by side: one reduction takes them as they lie
        return self.absmax[slot : slot + 1]

    def watch_memory(self, i: int, param: Tensor) -> None:
        freed = self.freed  # not the plan itself, which would live as long as the memory
        self.memory[i] = memory_of(param, lambda _: freed.add(i))

    def drop_param(self, i: int) -> None:
        """Release the states of shard ``i``, whose parameter was freed."""
        self.cached[i] = CachedShard(self.cached[i].param_ref, (), None, None, {})
        self.memory.pop(i, None)
        self.uncached.discard(i)
        self.written.discard(i)
        self.shards.drop_param(i)

    def find_freed(self) -> None:
        while self.freed:
            self.written.add(self.freed.pop())

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        """Update all shards that have a gradient. ``hypers``: hyperparameters by param group, on this device."""
        if self.absmax is not None:
            self.absmax.zero_()
        for param, copy in self.copies if self.is_later else ():
            copy.copy_(param)
        late = self._unscaled_apart(hypers[0].grad_scale, hypers[0].found_inf) if self.gradient_copies else []
        self.shards.run(hypers, workspace)
        for param, copy in self.copies:
            param.copy_(copy)
        self.copies.clear()
        for grad, value in late:
            write_(grad, value)
        self.gradient_copies.clear()

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
