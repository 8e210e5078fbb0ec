"""The plan of a step: every shard of an optimizer, by device, with its states. Built once, refreshed at each step.

Addresses are never trusted: gradients are new tensors at each step, FSDP2 replaces local tensors, users replace
states. A refresh compares what can change with what it was when it was last checked in full, and checks again in full
only what differs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim import adapters
from fused_optim.adapters import Batch, Fractions, Target, Update, adapter_of
from fused_optim.backends import Backend, ShardWork, backend_of, forced_backend, is_capturing, uncounted
from fused_optim.backends.compiled import Identities, increment_versions
from fused_optim.backends.engine import CachedShard
from fused_optim.backends.gradients import unscaled, write_
from fused_optim.backends.offloaded import OffloadedShards
from fused_optim.backends.shards import Shards, shards_on
from fused_optim.decorators import with_denormals
from fused_optim.formats.masters import Master
from fused_optim.formats.rounding import rounding_key
from fused_optim.matrices.shards import MatrixShards
from fused_optim.memory.by_parameter import Reference, reference_to
from fused_optim.memory.layout import MASTER, memory_of
from fused_optim.options.checks import check_states, check_update, describe
from fused_optim.rule import Hyper
from fused_optim.sharding.dtensor import dense, finished_local, is_dense, local_tensor
from fused_optim.state.changes import CODES, SCALES, WHOLE, ChangeTracker, Shard, StepChanges, Tracked
from fused_optim.state.groups import Group
from fused_optim.state.param_state import ParamState, read_parameter
from fused_optim.state.store import StateStore


@dataclass(frozen=True)
class NewValues:
    """Of a quantized parameter: an ``Update`` without the parameter."""

    values: Tensor
    absmax: Tensor | None = None
    written: bool = False
    changes: Mapping[str, Tensor] | None = None

    def of(self, param: Tensor) -> Update:
        return Update(param, self.values, absmax=self.absmax, written=self.written, changes=self.changes)


@dataclass
class _Part:
    """The shards of one device whose states are there, or those whose states are in host memory."""

    device: torch.device
    backend: Backend
    indices: list[int] = field(default_factory=list)  # positions in the param groups
    groups: list[int] = field(default_factory=list)
    watched: list[CachedShard] = field(default_factory=list)
    absmax: Tensor | None = None  # of shards whose targets measure it, memory for as many as there are shards
    measured: dict[int, int] = field(default_factory=dict)  # where a shard's absmax lies in it
    # Gradients that this step reads from copies, and where their unscaled values come from: those copies or, where the
    # copy is placed in another way, themselves.
    apart: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    unwatched: set[int] = field(default_factory=set)  # shards that are described at every step
    written: set[int] = field(default_factory=set)  # shards that others have written, which is told once
    # Of watched shards beside masters: their memory. Where it was freed, others have written, whatever is there now.
    memory: dict[int, object] = field(default_factory=dict)
    freed: set[int] = field(default_factory=set)
    # By shard, where changes are tracked: the parts of its parameter whose changed bits a step marks itself.
    marked: dict[int, tuple[str, ...]] = field(default_factory=dict)
    tracked: dict[int, Tracked] = field(default_factory=dict)
    changes: StepChanges | None = None  # as long as no shard is described again
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
        self.tracked.pop(i, None)
        self.changes = None
        self.shards.let_go(i)

    def changes_of_step(self, tracker: ChangeTracker) -> StepChanges:
        """Where all of its parameters live."""
        if self.changes is None:
            shards = []
            for i, watched in enumerate(self.watched):
                param = watched.param_ref()
                assert param is not None
                tracked, marked = self.tracked.get(i) or tracker[param], self.marked.get(i, ())
                shards.append(Shard(tracked, marked, self.backend == "cpu" or adapter_of(param) is not None))
            self.changes = StepChanges(self.device, self.watched, shards)
        return self.changes

    def find_freed(self) -> None:
        while self.freed:
            self.written.add(self.freed.pop())


def _formats_of(groups: Sequence[Group], store: StateStore) -> list[Any]:
    """What the groups ask for, as it is written there."""
    options = store.format_options
    return [group.get(option) for group in groups for option in options]


def _is_watchable(param: Tensor) -> bool:
    """Not where the parameter's memory is another than that of the contiguous tensor that is updated."""
    plain = type(param) in (Tensor, torch.nn.Parameter, DTensor) and adapter_of(param) is None
    return plain and is_dense(local_tensor(param))


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


class Plan:
    """The shards of all parameters that have states, or of ``members`` alone.

    It keeps none of them: where others let go of a parameter, so does the plan, at once, and fits no more.
    """

    def __init__(self, groups: Sequence[Group], store: StateStore, members: Collection[Tensor] | None = None) -> None:
        params = store.params
        own = set(params if members is None else members)
        self._members = None if members is None else list(map(self._reference, members))
        self._names, self._numbers = store.names, store.rounding_numbers()
        self._sizes = [len(group["params"]) for group in groups]
        self._seed, self._forced = store.settings.seed, forced_backend()
        self._formats = _formats_of(groups, store)
        self._in_groups = [Identities(group["params"]) for group in groups]
        self._state_keys = Identities(store.state)
        self._state_dicts = Identities(store.state.values() if members is None else map(store.state.get, members))
        self._layouts = {
            index: store.layouts[param] for index, param in enumerate(params) if param in own and param in store
        }
        others = [(i, param) for i, param in enumerate(params) if param in own and i not in self._layouts]
        self._stateless = [self._reference(param, i) for i, param in others]
        self._has_lost = False  # a parameter
        self._store = store
        self._copies: list[tuple[Tensor, Tensor]] = []
        parts: dict[tuple[torch.device, bool, int], _Part] = {}
        numbers = [number for number, size in enumerate(self._sizes) for _ in range(size)]
        rules = [store.rule.for_group(group) for group in groups]
        # Quantized parameters, by position, with their groups; how they are updated: those with targets at every step
        # until they are set again, others in this step.
        self._quantized = {i: numbers[i] for i in self._layouts if adapter_of(params[i]) is not None}
        self._lasting: dict[int, NewValues] = {}
        self._passing: dict[int, NewValues] = {}
        # The last step's updates, as long as the same parameters are updated by the same ones.
        self._batches: list[Batch] | None = None
        self._batched = Identities(())
        self._attribute = ""
        self._places: dict[int, tuple[_Part, int]] = {}  # by position in the param groups
        for index in self._layouts:
            param = params[index]
            local = local_tensor(param)
            key = local.device, bool(self._layouts[index].offloaded), rules[numbers[index]].code
            part = parts.get(key) or parts.setdefault(key, _Part(local.device, backend_of(local)))
            part.indices.append(index)
            part.groups.append(numbers[index])
            part.unwatched.add(len(part.watched))
            self._places[index] = part, len(part.watched)
            part.watched.append(_watched(self._reference(param, index), store[param]))
        for (device, offloaded, _), part in parts.items():
            about = (device, part.backend, part.groups, len(groups), rules[part.groups[0]])
            if rules[part.groups[0]].whole_matrices:
                link = store.link(device) if offloaded else None
                part.shards = MatrixShards(*about[:4], [params[index] for index in part.indices], link)
            else:
                part.shards = OffloadedShards(*about, store.link(device)) if offloaded else shards_on(*about)
        self._parts = [parts[key] for key in sorted(parts, key=str)]
        self.backends: dict[torch.device, str] = {part.device: part.backend for part in self._parts}
        self._last = {part.device: part for part in self._parts}  # to be launched

    def _reference(self, param: Tensor, index: int | None = None) -> Reference:
        return reference_to(param, None if index is None else functools.partial(_let_go, weakref.ref(self), index))

    def let_go(self, index: int) -> None:
        """Of all that belongs to a parameter that nobody holds any more."""
        self._has_lost = True
        self._batches = None
        for kept in (self._lasting, self._passing, self._layouts, self._quantized):
            kept.pop(index, None)
        if index in self._places:
            part, i = self._places[index]
            part.let_go(i)

    @property
    def measured(self) -> list[Tensor]:
        """Memory of its own that steps write to."""
        return [part.absmax for part in self._parts if part.absmax is not None]

    def fits(self, groups: Sequence[Group], store: StateStore) -> bool:
        """Whether parameters, groups, dicts of states, formats, seed and backend are those of when the plan was built.

        And whether what has no states still has no gradient. Of a plan of some parameters: whether these are as they
        were.
        """
        is_same = not self._has_lost and store.settings.seed == self._seed and forced_backend() == self._forced
        if not is_same or self._has_new_gradient(store.grad_attribute) or _formats_of(groups, store) != self._formats:
            return False
        state = store.state
        if self._members is not None:
            alive = [param for member in self._members if (param := member()) is not None]
            return self._state_dicts.are(list(map(state.get, alive)))
        return (
            len(groups) == len(self._in_groups)
            and all(own.are(group["params"]) for group, own in zip(groups, self._in_groups, strict=True))
            and Identities.are_items(state, self._state_keys, self._state_dicts)
        )

    def _has_new_gradient(self, attribute: str) -> bool:
        """Whether a parameter without states has a gradient."""
        if not self._stateless:
            return False
        with torch._C.DisableTorchFunctionSubclass():  # of a DTensor, reading `.grad` is slow where torch looks for it
            return any(getattr(param(), attribute, None) is not None for param in self._stateless)

    @property
    def groups_with_gradients(self) -> set[int]:
        """The numbers of the param groups that have a gradient in this step."""
        return {number for part in self._parts for number in part.shards.groups_with_gradients()}

    def refresh(self, attribute: str, scaled: bool = False) -> bool:
        """Take the gradients, ``param.<attribute>``, and all addresses of this step.

        ``scaled``: the gradients have a scale, so the pass writes them, too.

        False if a parameter has left its device or backend, or its states were removed: the plan does not fit any more.
        Raises for gradients and states that cannot be used; nothing has been changed then.
        """
        self._copies.clear()
        self._passing.clear()
        self._attribute = attribute
        stale: list[tuple[_Part, int, Tensor]] = []
        for part in self._parts:
            part.apart.clear()
            changed = part.shards.refresh(part.watched, attribute)
            stale += [(part, i, param) for i in changed if (param := part.watched[i].param_ref()) is not None]
            part.written.update(part.shards.written())  # also of a step that is refused below
            part.find_freed()
        for part, _, param in stale:
            local = local_tensor(param)
            if param not in self._store or local.device != part.device or backend_of(local) != part.backend:
                return False
        for part, i, param in stale:
            self._check(part, i, param, attribute)
        self._sync([(part, i) for part, i, _ in stale if self._may_be_written(part, i)])
        for part, i, param in stale:
            self._set(part, i, param, attribute)
        for part in self._parts if scaled else []:
            for i in part.shards.sharing():
                if (param := part.watched[i].param_ref()) is not None:
                    self._set(part, i, param, attribute, shared=True)
        return True

    @property
    def params(self) -> set[Tensor]:
        """All that it knows of; what was written into others the store knows."""
        found = (watched.param_ref() for part in self._parts for watched in part.watched)
        return {param for param in found if param is not None}

    def sync_written_masters(self) -> None:
        """Let masters follow parameters that others have written since the last step."""
        for part in self._parts:
            part.find_freed()
            self._sync([(part, i) for i in part.shards.find_written(part.watched)])
            self._sync([(part, i) for i in list(part.unwatched) if self._may_be_written(part, i)])

    def _may_be_written(self, part: _Part, i: int) -> bool:
        """Of a shard that is not watched; or not any more, when nobody has looked at the parameter's versions."""
        param = part.watched[i].param_ref()
        if param is None or param not in self._store:
            return False
        return i not in part.unwatched or self._store[param].is_written

    def _sync(self, shards: Sequence[tuple[_Part, int]]) -> None:
        """Those that raise are followed when this is called again."""
        for part, i in shards:
            part.written.add(i)
        for part in self._parts:
            for i in sorted(part.written):
                self._sync_shard(part, i)
                part.written.discard(i)  # another thread may have followed it

    def _sync_shard(self, part: _Part, i: int) -> None:
        param = part.watched[i].param_ref()
        if param is None or param not in self._store:
            return
        states = self._store[param]
        if states.layout.master.is_separate and is_capturing():
            who = describe(states.param, part.indices[i], self._names[part.indices[i]])
            hint = "call sync_masters_from_params() before the capture"
            raise RuntimeError(f"CUDA graph capture: {who} may have been written since the last step; {hint}")
        states.sync_master_from_param()
        if i in part.memory:
            part.watch_memory(i, param)

    def _check(self, part: _Part, i: int, param: Tensor, attribute: str) -> None:
        index, states = part.indices[i], part.watched[i].states
        name = self._names[index]
        check_update(param, getattr(param, attribute), index, name)
        layout = self._layouts[index]
        check_states(param, states, layout.dtypes(), index, name, layout.offloaded)
        if local_tensor(param).numel() != layout.geometry.numel:
            created = layout.geometry.numel
            raise ValueError(f"{describe(param, index, name)}: its states were created for {created} local elements")

    def _set(self, part: _Part, i: int, param: Tensor, attribute: str, shared: bool = False) -> None:
        index, states = part.indices[i], part.watched[i].states
        grad, layout = getattr(param, attribute), self._layouts[index]
        master = local_tensor(states[MASTER]) if MASTER in states else None
        part.watched[i] = _watched(part.watched[i].param_ref, ParamState(param, states, layout))
        adapter, target, absmax = adapter_of(param), None, None
        changes = self._track(part, i, param)
        if adapter is not None:
            self._batches = None
        if adapter is None:
            updated = self._contiguous_param(param)
        else:
            updated = read_parameter(param) if master is None else master
            target = adapter.target(param) if master is not None and part.shards.takes_target(layout) else None
            if layout.master is Master.FLOAT16 and (target is None or target.data is None):
                target = None  # the pass leaves the new values of the master here
                updated = ParamState(param, states, layout).read_master()
            elif target is None or master is None:  # the values are updated as an FP32 parameter is, and then encoded
                master, layout = None, replace(layout, master=Master.PARAMETER)
            if target is None or master is None:
                self._lasting.pop(index, None)
                self._passing[index] = NewValues(updated, changes=changes)
            else:
                absmax = part.absmax_of(i) if target.measures else None
                self._lasting[index] = NewValues(updated, absmax, target.data is not None, changes)
                part.watched[i] = _watched_weight(part.watched[i], param, target, master)
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
        self._let_mark(part, i, work, work.param is local_tensor(param))
        can_be_watched = not shared and (_is_watchable(param) if target is None else target.names is not None)
        is_watched = part.shards.set(i, work, part.watched[i] if can_be_watched else None)
        (part.unwatched.discard if is_watched else part.unwatched.add)(i)
        if is_watched and self._layouts[index].master.is_separate:
            part.watch_memory(i, param)

    def _track(self, part: _Part, i: int, param: Tensor) -> dict[str, Tensor] | None:
        """Where changes are tracked: the bits that an adapter's writes of the parameter mark."""
        part.changes = None
        if self._store.changes is None:
            return None
        part.tracked[i] = tracked = self._store.changes[param]
        adapter = adapter_of(param)
        part.marked[i] = () if adapter is None else tuple(adapter.marks(param))
        return {name: tracked.bits[name] for name in part.marked[i]}

    def _let_mark(self, part: _Part, i: int, work: ShardWork, has_param: bool) -> None:
        """Let the pass mark what it changes of the parameter's bits, where changes are tracked and it can."""
        if self._store.changes is None or not part.shards.marks(work):
            return
        bits, target = part.tracked[i].bits, work.target
        if target is None and has_param and WHOLE in bits:
            work.changes, part.marked[i] = bits[WHOLE], (WHOLE,)
        elif target is not None and target.data is not None:
            work.changes, work.scale_changes = bits[CODES], bits.get(SCALES)
            part.marked[i] = tuple({*part.marked[i], CODES, SCALES})

    @staticmethod
    def _dense_gradient(part: _Part, grad: Tensor, param: Tensor, shared: bool) -> Tensor:
        local, aligned = finished_local(grad), placed_as(grad, param)
        placed = local if aligned is grad else finished_local(aligned)
        read = placed.clone(memory_format=torch.contiguous_format) if shared else dense(placed)
        if read is not local:
            part.apart.append((local, read if placed is local else local))
        return read

    def _contiguous_param(self, param: Tensor) -> Tensor:
        local = local_tensor(param)
        contiguous = dense(local)
        if contiguous is not local:
            self._copies.append((local, contiguous))
        return contiguous

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
        per_device = [hypers(part.device) for part in self._parts]
        batches: list[Batch] = []
        applies = None
        if self._quantized:
            batches = self._batches_of(per_device)
        changes = self._begin_changes()
        if self._quantized:
            applies = None if found_inf is None else found_inf.reshape(()) == 0
            for batch in batches:
                batch.prepare(applies)
        for part, on_device in zip(self._parts, per_device, strict=True):
            if part.absmax is not None:
                part.absmax.zero_()
            unscaled_apart = _unscaled_apart(part.apart, on_device)
            counting = on_device if part is self._last[part.device] else uncounted(on_device)
            part.shards.run(counting, workspaces.get(part.device))
            for grad, value in unscaled_apart:
                write_(grad, value)
            part.apart.clear()
        for target, source in self._copies:
            target.copy_(source)
        self._copies.clear()
        for batch in batches:
            batch.write(applies)
        self._passing.clear()
        if not all(batch.lasts for batch in batches):
            self._batches = None
        written = self._updated()
        if per_device and per_device[0][0].grad_scale is not None:
            written += [getattr(param, self._attribute) for param in written]
        increment_versions(written)
        for part in self._parts:  # which may share counters
            updated = part.unwatched.intersection(part.shards.with_gradients()) if part.unwatched else ()
            part.shards.mark(part.watched)
            for i in updated:  # of the others nobody has looked whether they were written
                if (param := part.watched[i].param_ref()) is not None:
                    self._store[param].record_versions()
        for each in changes:
            each.finish(may_skip=found_inf is not None)

    def _begin_changes(self) -> list[StepChanges]:
        if (tracker := self._store.changes) is None:
            return []
        found = []
        for part in self._parts:
            found.append(part.changes_of_step(tracker))
            found[-1].begin(part.shards.with_gradients())
        return found

    def _updated(self) -> list[Tensor]:
        """The parameters that have a gradient in this step."""
        return list(chain.from_iterable(part.shards.updated(part.watched) for part in self._parts))

    def _batches_of(self, per_device: list[list[Hyper]]) -> list[Batch]:
        updated = self._updated()
        if self._batches is None or not self._batched.are(updated):
            hypers = dict(zip((part.device for part in self._parts), per_device, strict=True))
            self._batches, self._batched = adapters.batches(self._quantized_updates(hypers)), Identities(updated)
        return self._batches

    def _quantized_updates(self, hypers: dict[torch.device, list[Hyper]]) -> list[Update]:
        """All quantized parameters, also those that take part in reductions only."""
        updates = []
        for index, group in self._quantized.items():
            part, i = self._places[index]
            param = part.watched[i].param_ref()
            assert param is not None
            if getattr(param, self._attribute, None) is None:
                update = Update(param, None)
            else:
                update = (self._lasting.get(index) or self._passing[index]).of(param)
            if self._layouts[index].master is Master.PARAMETER:
                fractions = self._fractions(index, hypers[local_tensor(param).device][group])
                update = replace(update, fractions=fractions)
            updates.append(update)
        return updates

    def _fractions(self, index: int, hyper: Hyper) -> Fractions | None:
        """Rotating rounding of a quantized parameter that has no master."""
        if not hyper.stochastic_rounding:
            return None
        step = hyper.step if hyper.steps_done is None else hyper.steps_done  # counted already
        return Fractions(rounding_key(self._seed, self._numbers[index]), self._layouts[index].geometry, step)


def _let_go(plan: weakref.ref[Plan], index: int, _: object) -> None:
    if (kept := plan()) is not None:
        kept.let_go(index)


def _unscaled_apart(apart: list[tuple[Tensor, Tensor]], hypers: list[Hyper]) -> list[tuple[Tensor, Tensor]]:
    """Gradients that a pass does not write itself, and what is to be written: the copies, which it does write."""
    scale, found_inf = hypers[0].grad_scale, hypers[0].found_inf
    if scale is None:
        return []
    if found_inf is not None:
        scale = torch.where(found_inf == 0, scale, 1.0)
    return [(grad, unscaled(grad, scale) if source is grad else source) for grad, source in apart]


def _watched(reference: Reference, states: ParamState) -> CachedShard:
    spec = states.param._spec if isinstance(states.param, DTensor) else None
    state0, state1, *_ = (*(states.tensors.get(each.name) for each in states.layout.specs), None)
    return CachedShard(reference, state0, state1, master=states.tensors.get(MASTER), spec=spec, states=states.tensors)


def _watched_weight(watched: CachedShard, param: Tensor, target: Target, master: Tensor) -> CachedShard:
    """The same of a quantized weight, as far as it can be watched."""
    if target.names is None or target.components is None:
        return watched
    return watched._replace(
        local_ref=reference_to(local_tensor(param)),
        components=target.components,
        names=target.names,
        parts=tuple(target.components[name] for name in target.names),
        master_local=master,
    )
