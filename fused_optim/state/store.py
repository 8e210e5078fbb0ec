"""The states of all parameters of an optimizer."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim import adapters
from fused_optim.adapters import Update, adapter_of
from fused_optim.formats.masters import Master
from fused_optim.memory import copies
from fused_optim.memory.by_parameter import ByParameter
from fused_optim.memory.layout import MASTER, STEP, StateLayout
from fused_optim.options.checks import check_param, describe, names_in
from fused_optim.options.table import Settings
from fused_optim.rules import Rule, Rules
from fused_optim.sharding.collective import FailedElsewhere, any_rank, bare_name
from fused_optim.sharding.dtensor import has_own_chunks, local_tensor, rewrap_like, shard_geometry
from fused_optim.sharding.uneven import locate_uneven_shards
from fused_optim.state.given import decoded, foreign_names, is_replaced, take_foreign, take_steps
from fused_optim.state.groups import Group, Owner
from fused_optim.state.host_states import Offloading, may_be_offloaded
from fused_optim.state.param_state import (
    ParamState,
    discard_initial,
    initial_master,
    master_kind,
    offloadable,
)
from fused_optim.state.published import Snapshot
from fused_optim.state.remainders import MISFIT_ELSEWHERE, LoadedRemainder, misfits


class StateStore:
    """Parameter -> states and their layouts.

    The tensors are in ``optimizer.state``, where everyone may look at them, replace or remove them. Layouts are here,
    and loaded remainders whose parameters were not there yet; None where this rank has joined them already.
    """

    def __init__(
        self,
        owner: Owner,
        layouts: dict[Tensor, StateLayout] | None = None,
        pending: dict[Tensor, LoadedRemainder | None] | None = None,
        rounds_by_names: bool = True,
    ) -> None:
        self._owner: Owner = weakref.proxy(owner)  # which holds this, and is freed as soon as nobody else holds it
        self.layouts: ByParameter[StateLayout] = ByParameter(layouts)
        self.pending: ByParameter[LoadedRemainder | None] = ByParameter(pending)
        # Where parameters have names: then the optimizers of parts of a model round as one of all of it does. Not after
        # a checkpoint whose run has counted parameters.
        self.rounds_by_names = rounds_by_names
        self.snapshot: Snapshot | None = None  # of the parameters, where users ask for their changes
        self.is_untouched = not layouts  # whether states are as they were created
        self.offloading = Offloading(self._owner)
        self._changing = threading.RLock()  # `state_dict()` may be called in one thread and `step()` in another

    @property
    def rule(self) -> Rules:
        return self._owner.rule

    @property
    def settings(self) -> Settings:
        return self._owner.settings

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options of param groups."""
        return self._owner.defaults

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of all states that parameters may have: the rule's, and the master."""
        return (*(spec.name for spec in self._owner.rule.states), MASTER)

    @property
    def format_options(self) -> tuple[str, ...]:
        """The keys of param groups that have the formats of the rule's states; each group has those of its own."""
        return tuple(spec.option for spec in self._owner.rule.states)

    def rules(self) -> dict[Tensor, Rule]:
        """The update rule of each parameter."""
        return {param: self.rule.for_group(group) for group in self.groups for param in group["params"]}

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """``optimizer.state``."""
        return self._owner.state

    @property
    def groups(self) -> Sequence[Group]:
        """``optimizer.param_groups``."""
        return self._owner.param_groups

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the order of the param groups."""
        return list(chain.from_iterable(group["params"] for group in self.groups))

    @property
    def names(self) -> list[str | None]:
        """Their names, where they were given with names. Raises ValueError as ``names_in`` does."""
        return list(chain.from_iterable(map(names_in, self.groups)))

    @property
    def is_keyed_by_names(self) -> bool:
        """True if rounding goes by parameters' names."""
        return self.rounds_by_names and any(self.names)

    def rounding_numbers(self) -> list[int]:
        """By which the parameters' sequences of rounding differ: hashes of names, or positions."""
        named = enumerate(self.names)
        return [zlib.crc32(bare_name(name).encode()) if name and self.rounds_by_names else i for i, name in named]

    def describe(self, param: Tensor) -> str:
        """A parameter in messages. Raises KeyError if the optimizer does not hold it."""
        for index, (candidate, name) in enumerate(zip(self.params, self.names, strict=True)):
            if candidate is param:
                return describe(param, index, name)
        raise KeyError(f"the optimizer does not hold this parameter of shape {tuple(param.shape)}")

    def __contains__(self, param: Tensor) -> bool:
        """False for a parameter whose states were all removed: they start anew."""
        return param in self.layouts and self._has_any(param)

    def __iter__(self) -> Iterator[ParamState]:
        """The states of all parameters that have some."""
        self.import_external()
        return (self[param] for param in self.params if param in self)

    def __getitem__(self, param: Tensor) -> ParamState:
        """Raises KeyError for a parameter without states."""
        if self._is_given(param):
            self.create(param)
        if param not in self:
            raise KeyError(f"{self.describe(param)} has no states yet: call initialize_state() first")
        return self._own(param)

    def _own(self, param: Tensor) -> ParamState:
        return ParamState(param, self._owner.state[param], self.layouts[param])

    @property
    def is_empty(self) -> bool:
        return not any(map(self._has_any, self.params))

    def has_own_states(self, param: Tensor) -> bool:
        """True if a parameter has states of the rule's, or others have put some there."""
        return not self._owner.state.get(param, {}).keys().isdisjoint(self.state_names[:-1])

    @property
    def grad_attribute(self) -> str:
        """The name of the attribute of parameters that holds their gradients."""
        return "decoupled_grad" if self._owner.settings.use_decoupled_grad else "grad"

    def gradient(self, param: Tensor) -> Tensor | None:
        grad: Tensor | None = getattr(param, self.grad_attribute, None)
        return grad

    def gradients(self) -> list[Tensor | None]:
        """Gradients of all parameters, in the order of the param groups."""
        return list(map(self.gradient, self.params))

    def has_gradient(self, param: Tensor) -> bool:
        return self.gradient(param) is not None

    def is_frozen(self, param: Tensor) -> bool:
        """True if a parameter needs no states. Not a plain tensor: Megatron-LM's slices never require gradients."""
        frozen = isinstance(param, torch.nn.Parameter) and not param.requires_grad
        return frozen and not self.has_gradient(param)

    def groups_without_elements(self) -> set[int]:
        """The numbers of the param groups of which this rank has nothing, although others may train them."""
        return {
            number
            for number, group in enumerate(self._owner.param_groups)
            if not any(local_tensor(param).numel() for param in group["params"])
            and (not group["params"] or not all(map(self.is_frozen, group["params"])))
        }

    # --- creating and removing ------------------------------------------------------------------------------------

    def create(self, param: Tensor | None = None, remainders: bool | None = None) -> None:
        """Create the states of ``param``, or of all that are not frozen: zero moments, masters equal to the parameters.

        Only where there are none. Moments that others have put into ``optimizer.state`` are adopted. ``remainders``
        overrides the optimizer's ``store_param_remainders``. Raises TypeError for a parameter that cannot be updated,
        such as a thawed one of FP64; none have been created then.
        """
        for index, (candidate, name) in enumerate(zip(self.params, self.names, strict=True)):
            is_asked = candidate is param or (param is None and not self.is_frozen(candidate))
            if is_asked and candidate not in self:
                check_param(candidate, index, name)
        if param is None:
            self.offloading.invalidate_choice()
        for group in self.groups:
            for candidate in group["params"]:
                if (param is not None and candidate is not param) or candidate in self:
                    continue
                if param is None and self.is_frozen(candidate):
                    discard_initial(candidate)  # no master will start from it
                else:
                    self._create(candidate, group, remainders)

    def wants_initial_values(self) -> bool:
        """True if masters are still to start from values of quantized parameters that no file holds."""
        adapters = ((param, adapter_of(param)) for param in self.params if param not in self)
        return any(adapter.has_initial(param) for param, adapter in adapters if adapter and not self.is_frozen(param))

    def new_layout(self, param: Tensor, group: Group, remainders: bool | None = None) -> StateLayout:
        """The formats that the states of a parameter of ``group`` would have, with scales of their own."""
        settings, specs = self.settings, self.rule.for_group(group).states
        remainders = settings.keeps_remainders if remainders is None else remainders
        bits = settings.param_remainder_bits if remainders else None
        kind = master_kind(param, settings.master_weights, bits, settings.master_weight_dtype)
        on_host = self.offloading.takes(param, lambda: self.params, self.is_frozen)
        offloaded = offloadable(param, specs, kind) if on_host else ()
        return StateLayout.create(param, kind, specs, [group[spec.option] for spec in specs], offloaded=offloaded)

    def _create(self, param: Tensor, group: Group, remainders: bool | None) -> None:
        # A step made in inference mode would leave states for no other.
        with torch.inference_mode(False), torch.no_grad():
            layout = self.new_layout(param, group, remainders)
            created = ParamState.create(param, layout)
            given = self._owner.state.get(param) or {}
            created.import_external(decoded(param, layout, given, self.describe(param)) if given else {})
        self.put(created)
        self.drop_pending(param)  # of states that were removed
        created.record_versions()

    def put(self, states: ParamState) -> None:
        """Let a parameter have these in place of its states."""
        with self._changing:
            self._owner.state[states.param] = states.tensors
            self.layouts[states.param] = states.layout

    def import_external(self) -> None:
        """Make states of what others have put into ``optimizer.state``; see ``given.py``."""
        with self._changing:
            self.prune()
            for param, layout in self.layouts.of(self.params).items():
                if is_replaced(self._owner.state.get(param) or {}, layout):
                    self.layouts.pop(param)
            given = [key for key in [*self._owner.state] if isinstance(key, Tensor) and self._is_given(key)]
            foreign = {p: found for p in self.layouts.of(self.params) if (found := foreign_names(self._own(p)))}
            take_steps(self.groups, self._owner.state)
        for param in given:
            self.is_untouched = False
            self.create(param)
        for param, names in foreign.items():
            take_foreign(self._own(param), names, self.describe(param))

    def _is_given(self, param: Tensor) -> bool:
        """True if the parameter's states were put into ``optimizer.state`` by users; keys of their own do not count."""
        return param not in self.layouts and self._has_any(param)

    def _has_any(self, param: Tensor) -> bool:
        states = self._owner.state.get(param) or ()
        found = [spec for spec in self._owner.rule.states if spec.name in states]  # no generator: asked many times
        return bool(found) or MASTER in states

    @property
    def departed(self) -> list[ParamState]:
        """The states of parameters that are in no param group any more. As in torch.optim, they may come back."""
        known = self.layouts.of(self._owner.state.keys() - {*self.params})
        return [self._own(param) for param in known if self._has_any(param)]

    def prune(self) -> None:
        """Let go of parameters that were removed from ``optimizer.state``: others may have taken their places.

        And of those that were removed from the groups while states say nothing yet, as by Accelerate.
        """
        with self._changing:
            for states in self.departed if self.is_untouched else ():
                others = {name: value for name, value in states.tensors.items() if name not in self.state_names}
                self.forget(states.param)
                self.keep_others(states.param, others)
            known = self.layouts.of(self._owner.state)
            kept = {param: layout for param, layout in known.items() if self._has_any(param)}
            if len(kept) < len(self.layouts):
                self.layouts = ByParameter(kept)
            self.offloading.invalidate_choice()
        if self.snapshot is not None:
            self.snapshot.keep(self.params)

    def exchange_offsets(self) -> None:
        """Find out where uneven shards lie. A collective over the parameters' meshes."""
        locate_uneven_shards(self.params)
        for states in self:
            if has_own_chunks(states.param):
                states.layout.geometry = shard_geometry(states.param)

    def forget(self, param: Tensor) -> None:
        """Drop the states of a parameter."""
        self._owner.state.pop(param, None)
        self.layouts.pop(param)
        self.pending.pop(param)

    def check_replacement(self, old: Tensor, new: Tensor) -> None:
        """Raise KeyError, ValueError or TypeError where :meth:`replace` cannot be."""
        what = self.describe(old)
        if new.shape != old.shape or _placement(new) != _placement(old):
            expected, got = (f"shape {tuple(x.shape)}, {_placement(x) or 'no mesh'}" for x in (old, new))
            raise ValueError(f"{what} is to be replaced: expected {expected}, got {got}")
        index = next(i for i, param in enumerate(self.params) if param is old)
        check_param(new, index, self.names[index])

    def replace(self, old: Tensor, new: Tensor) -> list[Update]:
        """Let ``new`` take the place of ``old``, with its states, and write it from the master.

        Returns what is still to be written, as ``ParamState.write_master`` does.
        """
        group = next(group for group in self.groups if any(param is old for param in group["params"]))
        group["params"][:] = [new if param is old else param for param in group["params"]]
        updates = self._take_over(old, new, group) if old in self else []
        others = {name: value for name, value in self._owner.state.get(old, {}).items() if name not in self.state_names}
        self.forget(old)
        self.keep_others(new, others)
        return updates

    def _take_over(self, old: Tensor, new: Tensor, group: Group) -> list[Update]:
        before = self[old]
        self._create(new, group, None)
        after = self[new]
        for spec in before.layout.specs:
            after.write(spec.name, before.read(spec.name))
        return after.write_master(before.read_master())

    def keep_others(self, param: Tensor, others: dict[str, Any]) -> None:
        """Put what is no state of this optimizer beside the states of ``param``, in place of what was there."""
        if others or param in self._owner.state:
            kept = self._owner.state.setdefault(param, {})
            for name in kept.keys() - {*self.state_names, STEP}:
                del kept[name]
            kept.update(others)

    def keep_entries(self, users: dict[Any, Any]) -> None:
        """Let users' entries of ``optimizer.state`` be these alone, as a load of torch.optim's does."""
        params = set(self.params)
        for key in [key for key in self._owner.state if key not in params]:
            self.forget(key) if isinstance(key, Tensor) else self._owner.state.pop(key)
        self._owner.state.update(users)

    def take_copies(self) -> None:
        """Move offloaded states that were copied or unpickled into page-locked memory again.

        Their masters had followed the parameters before; so the new parameters are no written ones.
        """
        for param, layout in self.layouts.of(self._owner.state).items():
            if layout.offloaded and param in self:
                self[param].place_states(may_be_offloaded(param))
        self.record_versions()

    # --- reading and writing --------------------------------------------------------------------------------------

    def read(self, param: Tensor, name: str) -> Tensor:
        """A state's local values: FP32; remainders that were asked for by name as they are kept.

        Raises KeyError for a state that the parameter does not have.
        """
        states = self._with_state(param, name)
        if name == MASTER:
            self._join(param)
            if self._hides_remainders(states):
                return states.read_master()
        return states.read(name) if _holds_values(states, name) else local_tensor(states.tensors[name])

    def write(self, param: Tensor, name: str, value: Tensor) -> None:
        """The inverse of :meth:`read`; creates the states of a parameter that has none.

        The parameter stays as it is, unless it has a master's upper bits.

        Raises KeyError for an unknown state, ValueError for a wrong local shape, TypeError for a master or remainders
        of another dtype.
        """
        value, shape = local_tensor(value), local_tensor(param).shape
        if name not in self.state_names:
            raise KeyError(f"expected one of {', '.join(self.state_names)}, got {name!r}")
        if value.shape != shape:
            expected = f"expected local shape {tuple(shape)}, got {tuple(value.shape)}"
            raise ValueError(f"{self.describe(param)}: {name}: {expected}")
        self.create(param)
        self.is_untouched = False
        states = self._with_state(param, name)
        target = local_tensor(states.tensors[name])
        if _holds_values(states, name):
            states.write(name, value)
        elif name == MASTER and self._hides_remainders(states) and value.dtype == torch.float32:
            states.write_master(value)
        elif value.dtype != target.dtype:
            raise TypeError(f"{self.describe(param)}: {name}: expected {target.dtype}, got {value.dtype}")
        else:
            copies.wait_for_saves()
            target.copy_(value)
        if name == MASTER:
            states.record_versions()
            self.drop_pending(param)

    def _hides_remainders(self, states: ParamState) -> bool:
        """True if a master in remainders is shown as FP32 values: users did not ask for ``store_param_remainders``."""
        return states.layout.master.is_remainder and self.settings.store_param_remainders is None

    def _with_state(self, param: Tensor, name: str) -> ParamState:
        states = self[param]
        if name not in states.tensors:
            raise KeyError(f"expected one of {', '.join(states.tensors)}, got {name!r}")
        return states

    def master(self, param: Tensor) -> Tensor:
        """The FP32 master, shaped, sharded and placed as the parameter; FP32 masters themselves, others a copy.

        Of a parameter without states: what its master would start from.
        """
        self._join(param)
        return rewrap_like(self[param].read_master() if param in self else initial_master(param), param)

    def sync_params(self) -> None:
        """Write every parameter again from its master. A collective where weights have a scale for all their shards."""
        self.resolve_pending()
        copies.wait_for_saves()
        remaining = []
        for states in self:
            if states.layout.master is not Master.PARAMETER:
                remaining += states.write_master(states.read_master().clone())
        adapters.write(remaining, advance=False)
        self.record_versions()

    def record_versions(self) -> None:
        """Remember all parameters as what belongs to their masters now."""
        for states in self:
            states.record_versions()

    def sync_masters_from_params(self, written_only: bool = True, exclude: Collection[Tensor] = ()) -> list[Tensor]:
        """Let masters follow parameters that others have written: returns these.

        See ``ParamState.sync_master_from_param``.
        """
        self.import_external()
        others = [param for param in self.params if param not in exclude and param in self]
        followed = [param for param in others if self[param].is_written or not written_only]
        for param in followed:
            self[param].sync_master_from_param()
        return followed

    # --- remainders that were loaded before their parameters ----------------------------------------------------------

    def resolve_pending(self) -> None:
        """Join what is pending with the parameters, which must be there now: a collective over their meshes.

        Nothing, and no communication, where nothing is pending. Raises ValueError on every rank if some parameter is
        not the one that its remainders belong to; all of them stay pending then.
        """
        if not self.pending:
            return
        pending = self.pending.of(self.params)
        waiting = {p: loaded for p, loaded in pending.items() if loaded is not None and p in self}
        unfit = misfits(waiting.items())
        if any_rank(pending, bool(unfit), False)[0]:
            raise unfit[0].misfit() if unfit else FailedElsewhere(MISFIT_ELSEWHERE)
        for param, loaded in waiting.items():
            self[param].write_remainder(loaded)
            self[param].record_versions()
        self.pending.clear()

    def _join(self, param: Tensor) -> None:
        """:meth:`resolve_pending` for one parameter; one rank alone may be asked for it. Raises ValueError likewise."""
        loaded = self.pending.get(param)
        if loaded is not None and param in self:
            if misfits([(param, loaded)]):
                raise loaded.misfit()
            self[param].write_remainder(loaded)
            self[param].record_versions()
            self.drop_pending(param)

    def drop_pending(self, param: Tensor) -> None:
        """The others may still wait for this rank in :meth:`resolve_pending`."""
        if param in self.pending:
            self.pending[param] = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds for moments, masters and scales."""
        return sum(states.nbytes for states in (*self, *self.departed))


def _placement(param: Tensor) -> tuple[object, object] | None:
    return (param.device_mesh, param.placements) if isinstance(param, DTensor) else None


def _holds_values(states: ParamState, name: str) -> bool:
    """True if a state stands for FP32 values in some format: all but FP32 masters and remainders."""
    return name != MASTER or states.layout.format(name).scaled
