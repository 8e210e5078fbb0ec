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
from fused_optim.backends.compiled import Identities, increment_versions
from fused_optim.backends.offloaded import OffloadedShards
from fused_optim.backends.shards import shards_on
from fused_optim.decorators import with_denormals
from fused_optim.formats.masters import Master
from fused_optim.formats.rounding import rounding_key
from fused_optim.matrices.shards import MatrixShards
from fused_optim.memory.by_parameter import Reference, reference_to
from fused_optim.memory.layout import MASTER
from fused_optim.options.checks import check_states, check_update, describe
from fused_optim.rules import Hyper
from fused_optim.sharding.dtensor import dense, finished_local, local_tensor
from fused_optim.state.groups import Group
from fused_optim.state.param_state import ParamState, read_parameter
from fused_optim.state.store import StateStore
from fused_optim.step.agreement import CollectivesOfRank
from fused_optim.step.overlaps import Sharing
from fused_optim.step.parts import DeviceShards, cached_shard, cached_weight, is_cacheable
from fused_optim.step.signature import CollectiveSignature, signature_of
from fused_optim.step.weights import Weight, WeightUpdate, WeightUpdates


def _formats_of(groups: Sequence[Group], store: StateStore) -> list[Any]:
    """The options of the param groups that decide which formats their states have."""
    specs = store.rule.states
    return [group.get(spec.option) for group in groups for spec in specs]


def _entries(state: Mapping[Any, Any]) -> int:
    """The number of states of each parameter. It changes when a program adds ``state["step"]``, as torch.optim has."""
    try:
        return sum(map(len, state.values()))
    except TypeError:  # what users keep under other keys
        return sum(len(entries) for entries in state.values() if isinstance(entries, dict))


def _copied(value: Any) -> Any:
    """A copy of a list, which can be changed in place; any other value itself."""
    return list(value) if isinstance(value, list) else value


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
    """The inputs of plans: param groups, dicts of states, options of groups, seed and backend. Keeps none of them.

    ``release``: see :func:`fused_optim.step.signature.signature_of`.
    """

    def __init__(
        self, groups: Sequence[Group], store: StateStore, release: Callable[[Tensor], int | None] | None = None
    ) -> None:
        self._store, self._release = store, release
        settings = store.settings
        self._seed, self._skips, self._forced = settings.seed, settings.skip_nonfinite, forced_backend()
        self._formats = _formats_of(groups, store)
        rules = [store.rule.for_group(group) for group in groups]
        self._planned_keys = [(number, key) for number, rule in enumerate(rules) for key in rule.collective_keys]
        self._planned = self._planned_of(groups)
        self._in_groups = [Identities(group["params"]) for group in groups]
        self._state_keys, self._state_dicts = Identities(store.state), Identities(store.state.values())
        self._entries = _entries(store.state)

    @cached_property
    def facts(self) -> dict[DeviceMesh, CollectiveSignature]:
        """The signature of this rank's collectives on each mesh; computed at the first use."""
        return signature_of(self._store, self._release)

    def _planned_of(self, groups: Sequence[Group]) -> list[Any]:
        """The signature of this rank's collectives on each mesh."""
        return [_copied(groups[number].get(key)) for number, key in self._planned_keys]

    def matches(self, groups: Sequence[Group], store: StateStore) -> bool:
        """True if groups, options and state dicts are unchanged (by id). Call only after :meth:`is_whole`: ids of freed
        objects may be used again."""
        settings, state = store.settings, store.state
        return (
            settings.seed == self._seed
            and settings.skip_nonfinite == self._skips
            and forced_backend() == self._forced
            and _formats_of(groups, store) == self._formats
            and len(groups) == len(self._in_groups)
            and not (self._planned_keys and self._planned_of(groups) != self._planned)
            and all([own.are(group["params"]) for group, own in zip(groups, self._in_groups, strict=True)])
            and Identities.are_items(state, self._state_keys, self._state_dicts)
            and _entries(state) == self._entries
        )


class Plan:
    """The shards of all parameters that have states, or of ``members`` alone.

    It keeps none of them: where others let go of a parameter, so does the plan, at once, and fits no more. Several
    plans have their ``basis`` in common, which is compared once for all.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        store: StateStore,
        members: Collection[Tensor] | None = None,
        basis: PlanKey | None = None,
    ) -> None:
        params = store.params
        own = set(params if members is None else members)
        self._names, self._numbers = store.names, store.rounding_numbers()
        self._sizes, self._seed = [len(group["params"]) for group in groups], store.settings.seed
        self._basis = basis or PlanKey(groups, store)
        self._layouts = {
            index: store.layouts[param] for index, param in enumerate(params) if param in own and param in store
        }
        others = [(i, param) for i, param in enumerate(params) if param in own and i not in self._layouts]
        self._stateless = [self._reference(param, i) for i, param in others]
        self._has_lost = False  # a parameter
        self._sent: tuple[list[list[int]], CollectivesOfRank] | None = None  # matrices, and which shards had gradients
        self._store = store
        self._sharing = Sharing({index: params[index] for index in self._layouts})
        self._sharing.check_masters(
            lambda index: self._layouts[index].master is not Master.PARAMETER,
            lambda index: describe(params[index], index, self._names[index]),
        )
        turns = self._sharing.turns()
        parts: dict[tuple[int, torch.device, bool, str], DeviceShards] = {}
        numbers = [number for number, size in enumerate(self._sizes) for _ in range(size)]
        rules = [store.rule.for_group(group) for group in groups]
        self._attribute, self._scaled = "", False  # of the last refresh
        self._places: dict[int, tuple[DeviceShards, int]] = {}  # by position in the param groups
        for index in self._layouts:
            param = params[index]
            local = local_tensor(param)
            turn, offloaded = turns.get(index, 0), bool(self._layouts[index].offloaded)
            key = turn, local.device, offloaded, rules[numbers[index]].name
            rule = rules[numbers[index]].spec
            part = parts.get(key) or parts.setdefault(
                key, DeviceShards(local.device, backend_of(local, rule), rule, is_later=turn > 0)
            )
            part.indices.append(index)
            part.groups.append(numbers[index])
            part.uncached.add(len(part.cached))
            self._places[index] = part, len(part.cached)
            part.cached.append(cached_shard(self._reference(param, index), store[param]))
        weights = {
            index: Weight(self._reference(params[index], index), numbers[index], layout, self._numbers[index])
            for index, layout in self._layouts.items()
            if adapter_of(params[index]) is not None
        }
        self._weights = WeightUpdates(weights, self._seed)
        for (_, device, offloaded, _), part in parts.items():
            about = (device, part.backend, part.groups, len(groups), rules[part.groups[0]])
            if rules[part.groups[0]].whole_matrices:
                link = store.offloading.link(device) if offloaded else None
                part.shards = MatrixShards(*about[:4], [params[index] for index in part.indices], link)
            else:
                part.shards = OffloadedShards(*about, store.offloading.link(device)) if offloaded else shards_on(*about)
        self.parts = [parts[key] for key in sorted(parts, key=lambda key: (key[0], str(key)))]
        self.backends: dict[torch.device, str] = {part.device: part.backend for part in self.parts}
        self.is_on_gpu = any(device.type == "cuda" for device in self.backends)
        self._has_matrices = any(rules[part.groups[0]].whole_matrices for part in self.parts)
        self._last = {part.device: part for part in self.parts}  # to be launched

    def _reference(self, param: Tensor, index: int) -> Reference:
        return reference_to(param, functools.partial(_let_go, weakref.ref(self), index))

    def drop_param(self, index: int) -> None:
        """Drop the row of a parameter that was freed. The plan is invalid from then on."""
        self._has_lost = True
        self._layouts.pop(index, None)
        self._weights.drop_param(index)
        if index in self._places:
            part, i = self._places[index]
            part.drop_param(i)

    @property
    def measured(self) -> list[Tensor]:
        """The buffers into which steps of this plan write absmaxes of quantized weights."""
        return [part.absmax for part in self.parts if part.absmax is not None]

    def fits(self, groups: Sequence[Group], attribute: str) -> bool:
        """True if the plan still describes the optimizer. Gradients are read from ``param.<attribute>``."""
        return self.is_whole(attribute) and self._basis.matches(groups, self._store)

    def is_whole(self, attribute: str) -> bool:
        """True if no parameter was freed, and none without states needs them by now."""
        return not self._has_lost and not (self._stateless and self._needs_states(attribute))

    def _needs_states(self, attribute: str) -> bool:
        """True if a parameter without states is trained by now, or has a gradient, ``param.<attribute>``.

        Not only the latter: a rank that has no elements of it gets none, and must plan what the others do.
        """
        with torch._C.DisableTorchFunctionSubclass():  # of a DTensor, reading `.grad` is slow where torch looks for it
            alive = [param for reference in self._stateless if (param := reference()) is not None]
            return any(param.requires_grad or getattr(param, attribute, None) is not None for param in alive)

    @property
    def groups_with_gradients(self) -> set[int]:
        """The numbers of the param groups that have a gradient in this step."""
        return {number for part in self.parts for number in part.shards.groups_with_gradients()}

    def refresh(
        self, attribute: str, scaled: bool = False, agree: Callable[[CollectivesOfRank], None] | None = None
    ) -> bool:
        """Take the gradients, ``param.<attribute>``, and all addresses of this step.

        ``scaled``: the gradients have a scale, so the pass writes them, too. ``agree``: is called with what is to be
        sent to other ranks, before it is, and may raise.

        False if a parameter has left its device or backend, or its states were removed: the plan does not fit any more.
        Raises for gradients and states that cannot be used; nothing has been changed then.
        """
        self._weights.end_step()  # where one was refused
        self._attribute, self._scaled = attribute, scaled
        stale: list[tuple[DeviceShards, int, Tensor]] = []
        for part in self.parts:
            part.gradient_copies.clear()
            part.copies.clear()
            changed = part.shards.refresh(part.cached, attribute)
            stale += [(part, i, param) for i in changed if (param := part.cached[i].param_ref()) is not None]
            part.written.update(part.shards.written())  # also of a step that is refused below
            part.find_freed()
        stale.sort(key=lambda each: each[0].indices[each[1]])  # some are sent: in one order on all ranks
        for part, _, param in stale:
            local = local_tensor(param)
            if param not in self._store or local.device != part.device or backend_of(local, part.rule) != part.backend:
                return False
        if stale:
            moved = {part.indices[i]: param for part, i, param in stale}
            if self._sharing.is_changed(moved, self._store.params):
                return False
        for part, i, param in stale:
            self._check(part, i, param, attribute)
        if agree is not None:
            agree(self._to_send(stale, attribute))
        self._sync([(part, i) for part, i, _ in stale if self._may_be_written(part, i)])
        for part, i, param in stale:
            self._set(part, i, param, attribute)
        for part in self.parts if scaled else []:
            for i in part.shards.with_gradients() if part.is_later else part.shards.sharing():
                if (param := part.cached[i].param_ref()) is not None:
                    self._set(part, i, param, attribute, shared=True)
        return True

    def _to_send(self, stale: Sequence[tuple[DeviceShards, int, Tensor]], attribute: str) -> CollectivesOfRank:
        own = CollectivesOfRank(facts=self._basis.facts)
        for part, i, param in stale:
            own.add(param, getattr(param, attribute), part.indices[i], self._names[part.indices[i]])
        if self._has_matrices:
            matrices = self._matrices_to_send(bool(stale))
            own.gradients, own.with_empty = matrices.gradients, matrices.with_empty
        return own

    def _matrices_to_send(self, has_stale: bool) -> CollectivesOfRank:
        """The collectives of whole matrices: those of the step before if the same shards have gradients."""
        having = [list(part.shards.with_gradients()) for part in self.parts]
        if has_stale or self._sent is None or self._sent[0] != having:
            own = CollectivesOfRank()
            own.add_matrices(self._store)
            self._sent = None if has_stale else (having, own)
            return own
        return self._sent[1]

    @property
    def params(self) -> set[Tensor]:
        """The parameters of this plan. Writes into other parameters are noticed by the store."""
        found = (cached.param_ref() for part in self.parts for cached in part.cached)
        return {param for param in found if param is not None}

    def sync_written_masters(self) -> list[Tensor]:
        """Copy parameters that were written since the last step into their masters; return these parameters."""
        followed = []
        for part in self.parts:
            part.find_freed()
            followed += self._sync([(part, i) for i in part.shards.find_written(part.cached)])
            followed += self._sync([(part, i) for i in list(part.uncached) if self._may_be_written(part, i)])
        return followed

    def _may_be_written(self, part: DeviceShards, i: int) -> bool:
        """True if the version counter of a shard's parameter has to be asked whether it was written."""
        param = part.cached[i].param_ref()
        if param is None or param not in self._store:
            return False
        return i not in part.uncached or self._store[param].is_written

    def _sync(self, shards: Sequence[tuple[DeviceShards, int]]) -> list[Tensor]:
        """Copy the parameters of ``shards`` into their masters. One that raises is tried again at the next call."""
        for part, i in shards:
            part.written.add(i)
        followed = []
        for part in self.parts:
            for i in sorted(part.written):
                param = part.cached[i].param_ref()
                if param is not None and param in self._store:
                    self._sync_shard(part, i, param)
                    followed.append(param)
                part.written.discard(i)  # another thread may have followed it
        return followed

    def _sync_shard(self, part: DeviceShards, i: int, param: Tensor) -> None:
        states = self._store[param]
        if states.layout.master.is_separate and is_capturing():
            who = describe(states.param, part.indices[i], self._names[part.indices[i]])
            hint = "call sync_masters_from_params() before the capture"
            raise RuntimeError(f"CUDA graph capture: {who} may have been written since the last step; {hint}")
        states.sync_master_from_param()
        if i in part.memory:
            part.watch_memory(i, param)

    def _check(self, part: DeviceShards, i: int, param: Tensor, attribute: str) -> None:
        index, states = part.indices[i], part.cached[i].states
        name = self._names[index]
        check_update(param, getattr(param, attribute), index, name)
        layout = self._layouts[index]
        check_states(param, states, layout.dtypes(), index, name, layout.offloaded)
        if local_tensor(param).numel() != layout.geometry.numel:
            created = layout.geometry.numel
            raise ValueError(f"{describe(param, index, name)}: its states were created for {created} local elements")

    def _set(self, part: DeviceShards, i: int, param: Tensor, attribute: str, shared: bool = False) -> None:
        index, states = part.indices[i], part.cached[i].states
        grad, layout = getattr(param, attribute), self._layouts[index]
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
            target = adapter.target(param) if master is not None and part.shards.takes_target(layout) else None
            if layout.master is Master.FLOAT16 and (target is None or target.data is None):
                target = None  # the pass leaves the new values of the master here
                updated = ParamState(param, states, layout).read_master()
            elif target is None or master is None:  # the values are updated as an FP32 parameter is, and then encoded
                master, layout = None, replace(layout, master=Master.PARAMETER)
            if target is None or master is None:
                self._weights.put(index, WeightUpdate(updated), lasts=False)
            else:
                absmax = part.absmax_of(i) if target.measures else None
                self._weights.put(index, WeightUpdate(updated, absmax, target.data is not None), lasts=True)
                part.cached[i] = cached_weight(part.cached[i], param, target, master)
        work = ShardWork(
            grad=self._dense_gradient(part, grad, param, shared),
            param=updated,
            master=master,
            states=tuple(local_tensor(states[spec.name]) for spec in layout.specs),
            layout=layout,
            key=rounding_key(self._seed, self._numbers[index]),
            target=target,
            absmax=absmax,
        )
        can_be_cached = not shared and (target is not None or is_cacheable(param))
        is_cached = part.shards.set(i, work, part.cached[i] if can_be_cached else None)
        (part.uncached.discard if is_cached else part.uncached.add)(i)
        if is_cached and self._layouts[index].master.is_separate:
            part.watch_memory(i, param)

    @staticmethod
    def _dense_gradient(part: DeviceShards, grad: Tensor, param: Tensor, shared: bool) -> Tensor:
        local, aligned = finished_local(grad), placed_as(grad, param)
        placed = local if aligned is grad else finished_local(aligned)
        read = placed.clone(memory_format=torch.contiguous_format) if shared else dense(placed)
        if read is not local:
            part.gradient_copies.append((local, read if placed is local else local))
        return read

    @with_denormals
    def run(
        self,
        hypers: Callable[[torch.device], list[Hyper]],
        workspaces: dict[torch.device, Tensor],
        found_inf: Tensor | None,
    ) -> None:
        """Update what has a gradient; ``hypers`` gives the param groups' hyperparameters on a device.

        ``workspaces``: see ``DeviceScalars.workspaces``. ``found_inf``: not 0 skips the step.
        """
        self._store.is_untouched = False
        on_devices = {device: hypers(device) for device in self.backends}
        updated: list[Tensor] = []  # parameters with a gradient
        for part in self.parts:
            updated += part.shards.updated(part.cached)
        batches = self._weights.batches(self._attribute, updated, on_devices)
        applies = None if found_inf is None or not batches else found_inf.reshape(()) == 0
        for batch in batches:
            batch.prepare(applies)
        for part in self.parts:
            on_device = on_devices[part.device]
            counting = on_device if part is self._last[part.device] else uncounted(on_device)
            part.run(counting, workspaces.get(part.device))
        for batch in batches:
            batch.write(applies)
        self._weights.end_step()
        if self._scaled:
            increment_versions([getattr(param, self._attribute) for param in updated])
        increment_versions(updated)
        for part in self.parts:  # which may share counters
            uncached = part.uncached.intersection(part.shards.with_gradients()) if part.uncached else ()
            part.shards.mark(part.cached)
            for i in uncached:  # of the others nobody has looked whether they were written
                if (param := part.cached[i].param_ref()) is not None:
                    self._store[param].record_versions()


def _let_go(plan: weakref.ref[Plan], index: int, _: object) -> None:
    if (kept := plan()) is not None:
        kept.drop_param(index)
