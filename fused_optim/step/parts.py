"""What a plan keeps of the shards of one device, so that only those that have changed are described again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adapters import Target, adapter_of
from fused_optim.backends import Backend
from fused_optim.backends.engine import CachedShard
from fused_optim.backends.gradients import unscaled, write_
from fused_optim.backends.shards import Shards
from fused_optim.memory.by_parameter import Reference, reference_to
from fused_optim.memory.layout import MASTER, memory_of
from fused_optim.rule import Hyper
from fused_optim.sharding.dtensor import is_dense, local_tensor
from fused_optim.state.param_state import ParamState


@dataclass
class Part:
    """The shards of one device whose states are there, or those whose states are in host memory."""

    device: torch.device
    backend: Backend
    is_later: bool = False  # whether some parameters share memory with those of parts before it
    indices: list[int] = field(default_factory=list)  # positions in the param groups
    groups: list[int] = field(default_factory=list)
    watched: list[CachedShard] = field(default_factory=list)
    absmax: Tensor | None = None  # of shards whose targets measure it, memory for as many as there are shards
    measured: dict[int, int] = field(default_factory=dict)  # where a shard's absmax lies in it
    # Gradients that this step reads from copies, and where their unscaled values come from: those copies or, where the
    # copy is placed in another way, themselves.
    apart: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # parameters, and contiguous ones to be updated
    unwatched: set[int] = field(default_factory=set)  # shards that are described at every step
    written: set[int] = field(default_factory=set)  # shards that others have written, which is told once
    # Of watched shards beside masters: their memory. Where it was freed, others have written, whatever is there now.
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

    def let_go(self, i: int) -> None:
        """Of the states of a parameter that nobody holds any more."""
        self.watched[i] = CachedShard(self.watched[i].param_ref, None, None, None, None, {})
        self.memory.pop(i, None)
        self.unwatched.discard(i)
        self.written.discard(i)
        self.shards.let_go(i)

    def find_freed(self) -> None:
        while self.freed:
            self.written.add(self.freed.pop())

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        """Update what has a gradient; ``hypers``: of the param groups, on this device."""
        if self.absmax is not None:
            self.absmax.zero_()
        for param, copy in self.copies if self.is_later else ():
            copy.copy_(param)
        late = self._unscaled_apart(hypers[0].grad_scale, hypers[0].found_inf) if self.apart else []
        self.shards.run(hypers, workspace)
        for param, copy in self.copies:
            param.copy_(copy)
        self.copies.clear()
        for grad, value in late:
            write_(grad, value)
        self.apart.clear()

    def _unscaled_apart(self, scale: Tensor | None, found_inf: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Gradients that a pass does not write itself, and what is to be written: the copies, which it does write."""
        if scale is None:
            return []
        if found_inf is not None:
            scale = torch.where(found_inf == 0, scale, 1.0)
        return [(grad, unscaled(grad, scale) if source is grad else source) for grad, source in self.apart]


def is_watchable(param: Tensor) -> bool:
    """Not where the parameter's memory is another than that of the contiguous tensor that is updated."""
    plain = type(param) in (Tensor, torch.nn.Parameter, DTensor) and adapter_of(param) is None
    return plain and is_dense(local_tensor(param))


def cached(reference: Reference, states: ParamState) -> CachedShard:
    spec = states.param._spec if isinstance(states.param, DTensor) else None
    state0, state1, *_ = (*(states.tensors.get(each.name) for each in states.layout.specs), None)
    return CachedShard(reference, state0, state1, master=states.tensors.get(MASTER), spec=spec, states=states.tensors)


def cached_weight(watched: CachedShard, param: Tensor, target: Target, master: Tensor) -> CachedShard:
    """The same of a quantized weight."""
    return watched._replace(
        local_ref=reference_to(local_tensor(param)),
        components=target.components,
        names=target.names,
        parts=tuple(target.components[name] for name in target.names),
        master_local=master,
    )
