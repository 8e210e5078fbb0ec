"""The plan of a step: every shard of an optimizer, by device, with its states. Built once, refreshed at each step.

Addresses are never trusted: gradients are new tensors at each step, FSDP2 replaces local tensors, users replace
states. A refresh compares what can change with what it was when it was last checked in full, and checks again in full
only what differs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_optim.adapters import adapter_of
from fused_optim.backends import ShardWork, backend_of, forced_backend, is_capturing, uncounted
from fused_optim.backends.compiled import Identities
from fused_optim.decorators import with_denormals
from fused_optim.formats.masters import Master
from fused_optim.formats.rounding import rounding_key
from fused_optim.memory.by_parameter import Reference, reference_to
from fused_optim.memory.layout import MASTER, memory_of
from fused_optim.options.checks import check_states, check_update, describe
from fused_optim.rules import Hyper
from fused_optim.sharding.dtensor import dense, finished_local, local_tensor
from fused_optim.state.param_state import ParamState, read_parameter
from fused_optim.state.store import StateStore
from fused_optim.step.agreement import CollectivesOfRank
from fused_optim.step.overlaps import Sharing
from fused_optim.step.parts import DeviceShards, Slot, cached_shard, cached_weight, is_cacheable
from fused_optim.step.signature import CollectiveSignature, signature_of
from fused_optim.step.weights import Weight, WeightUpdate, WeightUpdates

Stale = Sequence[tuple[DeviceShards, int, Tensor]]  # shards that must be described again, and their parameters


def _entries(state: Mapping[Any, Any]) -> int:
    """The number of states of each parameter. It changes when a program adds ``state["step"]``, as torch.optim has."""
    try:
        return sum(map(len, state.values()))
    except TypeError:  # what users keep under other keys
        return sum(len(entries) for entries in state.values() if isinstance(entries, dict))


def placed_as(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient with its parameter's placements."""
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor) or grad.placements == param.placements:
        return grad
    return grad.redistribute(param.device_mesh, param.placements)


def check_capturable(backends: dict[torch.device, str]) -> None:
    """Raise RuntimeError where a CUDA graph could not hold the update of some device's parameters."""
    for device, backend in backends.items():
        if backend != "cuda":
            raise RuntimeError(
                f"CUDA graph capture: parameters on {device} are updated by the {backend} backend, which cannot be "
                "captured; the cuda backend can"
            )


class PlanKey:
    """The inputs of plans: the parameters of the groups, the dicts of states and the backend. Keeps none of them.

    Formats and options are not among them: plans are left where these are set. ``release``: see
    :func:`fused_optim.step.signature.signature_of`.
    """

    def __init__(self, store: StateStore, release: Callable[[Tensor], int | None] | None = None) -> None:
        self._store, self._release = store, release
        self._in_groups = [Identities(group["params"]) for group in store.groups]
        self._state_keys, self._state_dicts = Identities(store.state), Identities(store.state.values())
        self._entries, self._forced = _entries(store.state), forced_backend()

    @cached_property
    def facts(self) -> dict[DeviceMesh, CollectiveSignature]:
        """The signature of this rank's collectives on each mesh; computed at the first use."""
        return signature_of(self._store, self._release)

    def matches(self) -> bool:
        """True if parameters and state dicts are the same objects.

        Call only after :meth:`Plan.is_whole`: ids of freed objects may be used again.
        """
        groups, state = self._store.groups, self._store.state
        if len(groups) != len(self._in_groups) or _entries(state) != self._entries:
            return False
        if forced_backend() != self._forced:
            return False
        for group, own in zip(groups, self._in_groups, strict=True):
            if not own.are(group["params"]):
                return False
        return Identities.are_items(state, self._state_keys, self._state_dicts)


class Plan:
    """The shards of all parameters that have states, or of ``members`` alone.

    Holds parameters by weak reference: when one is freed, the plan drops its row and becomes invalid. Several plans
    have their ``key`` in common, which is compared once for all.

    A step is :meth:`refresh`, :meth:`take` for the shards that it returns, :meth:`run`.
    """

    def __init__(
        self, store: StateStore, members: Collection[Tensor] | None = None, key: PlanKey | None = None
    ) -> None:
        params, names, numbers = store.params, store.names, store.rounding_numbers()
        own = set(params if members is None else members)
        self.key, self._store, self._seed = key or PlanKey(store), store, store.settings.seed
        self.is_new = True  # until the first `take`
        self._attribute, self._scaled = "", False  # of the last refresh
        self._has_lost = False  # a parameter
        self._sent: tuple[list[Sequence[int]], CollectivesOfRank] | None = None  # matrices, and shards with gradients
        self._stateless = [self._reference(p, i) for i, p in enumerate(params) if p in own and p not in store]
        planned = {i: param for i, param in enumerate(params) if param in own and param in store}
        self._sharing = Sharing(planned)
        self._sharing.check_masters(
            lambda i: store.layouts[params[i]].master is not Master.PARAMETER,
            lambda i: describe(params[i], i, names[i]),
        )
        turns = self._sharing.turns()
        of_group = [number for number, group in enumerate(store.groups) for _ in group["params"]]
        rules = [store.rule.for_group(group) for group in store.groups]
        parts: dict[tuple[int, torch.device, bool, str], DeviceShards] = {}
        self._places: dict[int, tuple[DeviceShards, int]] = {}  # by position in the param groups
        weights: dict[int, Weight] = {}
        for index, param in planned.items():
            layout, local, rule = store.layouts[param], local_tensor(param), rules[of_group[index]]
            turn, offloaded = turns.get(index, 0), bool(layout.offloaded)
            place = turn, local.device, offloaded, rule.name
            if place not in parts:
                link = store.offloading.link(local.device) if offloaded else None
                parts[place] = DeviceShards(local.device, backend_of(local, rule.spec), rule, turn > 0, link)
            slot = Slot(index, names[index], of_group[index], layout, rounding_key(self._seed, numbers[index]))
            reference = self._reference(param, index)
            self._places[index] = parts[place], parts[place].append(slot, cached_shard(reference, store[param]))
            if adapter_of(param) is not None:
                weights[index] = Weight(self._reference(param, index), slot.group, layout, slot.key)
        self._weights = WeightUpdates(weights) if weights else None
        self.parts = [parts[place] for place in sorted(parts, key=lambda place: (place[0], str(place)))]
        for part in self.parts:
            part.build(len(store.groups), [params[slot.index] for slot in part.slots])
        self.backends: dict[torch.device, str] = {part.device: part.backend for part in self.parts}
        self.is_on_gpu = any(device.type == "cuda" for device in self.backends)
        self.has_matrices = any(part.rule.whole_matrices for part in self.parts)
        self._last = {part.device: part for part in self.parts}  # to be launched

    def _reference(self, param: Tensor, index: int) -> Reference:
        return reference_to(param, functools.partial(_drop_param, weakref.ref(self), index))

    def drop_param(self, index: int) -> None:
        """Drop the row of a parameter that was freed. The plan is invalid from then on."""
        self._has_lost = True
        if self._weights is not None:
            self._weights.drop_param(index)
        if index in self._places:
            part, i = self._places[index]
            part.drop_param(i)

    @property
    def measured(self) -> list[Tensor]:
        """The buffers into which steps of this plan write absmaxes of quantized weights."""
        return [part.absmax for part in self.parts if part.absmax is not None]

    def is_whole(self, attribute: str) -> bool:
        """True if no parameter was freed, and none without states needs them by now.

        A parameter without states needs them if it is trained, or has a gradient, ``param.<attribute>``. Not only the
        latter: a rank that has no elements of it gets none, and must plan what the others do.
        """
        if self._has_lost or not self._stateless:
            return not self._has_lost
        with torch._C.DisableTorchFunctionSubclass():  # of a DTensor, reading `.grad` is slow where torch looks for it
            alive = [param for reference in self._stateless if (param := reference()) is not None]
            return not any(param.requires_grad or getattr(param, attribute, None) is not None for param in alive)

    def groups_with_gradients(self) -> set[int]:
        """The numbers of the param groups that have a gradient in this step."""
        found: set[int] = set()
        for part in self.parts:
            found.update(part.shards.groups_with_gradients())
        return found

    def refresh(self, attribute: str, scaled: bool = False) -> Stale | None:
        """Read the gradients, ``param.<attribute>``, and all addresses of this step.

        ``scaled``: the gradients have a scale, so the pass writes them, too.

        Returns the shards that are not as they were, for :meth:`take`; None if a parameter has left its device or
        backend, or its states were removed: the plan does not fit any more. Raises for gradients and states that cannot
        be used; nothing has been changed then.
        """
        self._attribute, self._scaled = attribute, scaled
        if self._weights is not None:
            self._weights.end_step()  # where one was refused
        stale: list[tuple[DeviceShards, int, Tensor]] = []
        for part in self.parts:
            for i in part.refresh(attribute):
                if (param := part.cached[i].param_ref()) is not None:
                    stale.append((part, i, param))
        if not stale:
            return stale
        stale.sort(key=lambda each: each[0].slots[each[1]].index)  # some are sent: in one order on all ranks
        for part, _, param in stale:
            local, spec = local_tensor(param), part.rule.spec
            if param not in self._store or local.device != part.device or backend_of(local, spec) != part.backend:
                return None
        moved = {part.slots[i].index: param for part, i, param in stale}
        if self._sharing.is_changed(moved, self._store.params):
            return None
        for part, i, param in stale:
            self._check(part.slots[i], part.cached[i].states, param)
        return stale

    def collectives(self, stale: Stale) -> CollectivesOfRank:
        """The collectives that this step starts on this rank."""
        own = CollectivesOfRank(facts=self.key.facts)
        for part, i, param in stale:
            own.add(param, getattr(param, self._attribute), part.slots[i].index, part.slots[i].name)
        if self.has_matrices:  # those of the step before if the same shards have gradients
            having = [part.shards.with_gradients() for part in self.parts]
            if stale or self._sent is None or self._sent[0] != having:
                matrices = CollectivesOfRank()
                matrices.add_matrices(self._store)
                self._sent = None if stale else (having, matrices)
            else:
                matrices = self._sent[1]
            own.gradients, own.with_empty = matrices.gradients, matrices.with_empty
        return own

    def take(self, stale: Stale) -> None:
        """Describe these shards to the engines. A collective where gradients are placed otherwise than parameters."""
        self.is_new = False
        for part, i, _ in stale:
            if self._may_be_written(part, i):
                part.written.add(i)
        self._sync()
        for part, i, param in stale:
            self._set(part, i, param)
        for part in self.parts if self._scaled else ():
            for i in part.shards.with_gradients() if part.is_later else part.shards.sharing():
                if (shared := part.cached[i].param_ref()) is not None:
                    self._set(part, i, shared, shared=True)

    @property
    def params(self) -> set[Tensor]:
        """The parameters of this plan. Writes into other parameters are noticed by the store."""
        found = (cached.param_ref() for part in self.parts for cached in part.cached)
        return {param for param in found if param is not None}

    def sync_written_masters(self) -> list[Tensor]:
        """Copy parameters that were written since the last step into their masters; return these parameters."""
        for part in self.parts:
            while part.freed:
                part.written.add(part.freed.pop())
            part.written.update(part.shards.find_written(part.cached))
            part.written.update(i for i in list(part.uncached) if self._may_be_written(part, i))
        return self._sync()

    def _may_be_written(self, part: DeviceShards, i: int) -> bool:
        """True if the version counter of a shard's parameter has to be asked whether it was written."""
        param = part.cached[i].param_ref()
        if param is None or param not in self._store:
            return False
        return i not in part.uncached or self._store[param].is_written

    def _sync(self) -> list[Tensor]:
        """Copy written parameters into their masters. One that raises is tried again at the next call."""
        followed: list[Tensor] = []
        for part in self.parts:
            for i in sorted(part.written) if part.written else ():
                param = part.cached[i].param_ref()
                if param is not None and param in self._store:
                    self._sync_shard(part, i, param)
                    followed.append(param)
                part.written.discard(i)  # another thread may have followed it
        return followed

    def _sync_shard(self, part: DeviceShards, i: int, param: Tensor) -> None:
        states, slot = self._store[param], part.slots[i]
        if states.layout.master.is_separate and is_capturing():
            who = describe(states.param, slot.index, slot.name)
            hint = "call sync_masters_from_params() before the capture"
            raise RuntimeError(f"CUDA graph capture: {who} may have been written since the last step; {hint}")
        states.sync_master_from_param()
        if slot.memory is not None:
            self._watch_memory(part, i, param)

    @staticmethod
    def _watch_memory(part: DeviceShards, i: int, param: Tensor) -> None:
        freed = part.freed  # not the plan itself, which would live as long as the memory
        part.slots[i].memory = memory_of(param, lambda _: freed.add(i))

    def _check(self, slot: Slot, states: dict[str, Tensor], param: Tensor) -> None:
        check_update(param, getattr(param, self._attribute), slot.index, slot.name)
        check_states(param, states, slot.layout.dtypes(), slot.index, slot.name, slot.layout.offloaded)
        if local_tensor(param).numel() != slot.layout.geometry.numel:
            created = slot.layout.geometry.numel
            who = describe(param, slot.index, slot.name)
            raise ValueError(f"{who}: its states were created for {created} local elements")

    def _set(self, part: DeviceShards, i: int, param: Tensor, shared: bool = False) -> None:
        """Describe a shard to its engine. ``shared``: its gradient has memory in common with another."""
        slot, states, layout = part.slots[i], part.cached[i].states, part.slots[i].layout
        master = local_tensor(states[MASTER]) if MASTER in states else None
        part.cached[i] = cached_shard(part.cached[i].param_ref, ParamState(param, states, layout))
        adapter, target, absmax = adapter_of(param), None, None
        if adapter is None:
            local = local_tensor(param)
            updated = dense(local)
            if updated is not local:
                part.copies.append((local, updated))
        else:
            updated = read_parameter(param) if master is None else master
            target = adapter.target(param) if master is not None and part.takes_target(layout) else None
            if layout.master is Master.FLOAT16 and (target is None or target.data is None):
                target = None  # the pass leaves the new values of the master here
                updated = ParamState(param, states, layout).read_master()
            elif target is None or master is None:  # the values are updated as an FP32 parameter is, and then encoded
                master, layout = None, replace(layout, master=Master.PARAMETER)
            update = WeightUpdate(updated)
            if target is not None and master is not None:
                absmax = part.absmax_of(slot) if target.measures else None
                update = WeightUpdate(updated, absmax, target.data is not None)
                part.cached[i] = cached_weight(part.cached[i], param, target, master)
            assert self._weights is not None  # which has all that have adapters
            self._weights.put(slot.index, update, reusable=target is not None and master is not None)
        grad = getattr(param, self._attribute)
        local_grad, aligned = finished_local(grad), placed_as(grad, param)
        placed = local_grad if aligned is grad else finished_local(aligned)
        read = placed.clone(memory_format=torch.contiguous_format) if shared else dense(placed)
        if read is not local_grad:
            part.gradient_copies.append((local_grad, read if placed is local_grad else local_grad))
        work = ShardWork(
            grad=read,
            param=updated,
            master=master,
            states=tuple(local_tensor(states[spec.name]) for spec in layout.specs),
            layout=layout,
            key=slot.key,
            target=target,
            absmax=absmax,
        )
        can_be_cached = not shared and (target is not None or is_cacheable(param))
        is_cached = part.shards.set(i, work, part.cached[i] if can_be_cached else None)
        (part.uncached.discard if is_cached else part.uncached.add)(i)
        if is_cached and slot.layout.master.is_separate:
            self._watch_memory(part, i, param)

    @with_denormals
    def run(
        self,
        hypers: Callable[[torch.device], list[Hyper]],
        workspaces: Mapping[torch.device, Tensor],
        found_inf: Tensor | None,
    ) -> None:
        """Update what has a gradient; ``hypers`` gives the param groups' hyperparameters on a device.

        ``workspaces``: see ``DeviceScalars.workspaces``. ``found_inf``: not 0 skips the step.
        """
        self._store.is_untouched = False
        on_devices = {}
        for device in self.backends:
            on_devices[device] = hypers(device)
        updated: list[Tensor] = []  # parameters with a gradient
        for part in self.parts:
            updated += part.shards.updated(part.cached)
        batches = [] if self._weights is None else self._weights.batches(self._attribute, updated, on_devices)
        applies = None if found_inf is None or not batches else found_inf.reshape(()) == 0
        for batch in batches:
            batch.prepare(applies)
        for part in self.parts:
            on_device = on_devices[part.device]
            counting = on_device if part is self._last[part.device] else uncounted(on_device)
            part.run(counting, workspaces.get(part.device))
        for batch in batches:
            batch.write(applies)
        if self._weights is not None:
            self._weights.end_step()
        if self._scaled:
            torch.autograd.graph.increment_version([getattr(param, self._attribute) for param in updated])
        torch.autograd.graph.increment_version(updated)
        for part in self.parts:  # which may share counters
            uncached = part.uncached.intersection(part.shards.with_gradients()) if part.uncached else ()
            part.shards.mark(part.cached)
            for i in uncached:  # of the others nobody has looked whether they were written
                if (param := part.cached[i].param_ref()) is not None:
                    self._store[param].record_versions()


def _drop_param(plan: weakref.ref[Plan], index: int, _: object) -> None:
    if (kept := plan()) is not None:
        kept.drop_param(index)
