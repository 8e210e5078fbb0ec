"""Diagnostics of the next step: each parameter's update and its rounding errors, in a pass that changes nothing.

The formulas are the reference's. They are applied to a sample of each parameter, which gives sums, and bounds of
scales; ranks add up theirs. The pass is made on request only; nothing of it is in the way of ``step()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adapters import adapter_of
from fused_optim.backends.torch_reference import derive
from fused_optim.decorators import with_denormals
from fused_optim.formats.arithmetic import MASK32
from fused_optim.formats.masters import Master, MasterTensors
from fused_optim.formats.rounding import finalize, rounding_bits, rounding_key
from fused_optim.formats.states import Kind, StateFormat, decode_state, encode_state
from fused_optim.memory.layout import MASTER
from fused_optim.options.checks import check_states, check_update, describe
from fused_optim.rules import Hyper, Rule, Scalars
from fused_optim.sharding.collective import failing_together
from fused_optim.sharding.dtensor import Geometry, dense, finished_local, local_tensor, sharding_dims
from fused_optim.state.param_state import ParamState
from fused_optim.state.store import StateStore
from fused_optim.state.values import Stored
from fused_optim.step.agreement import Agreement, CollectivesOfRank
from fused_optim.step.diagnosed_matrices import sigma_errors
from fused_optim.step.plan import placed_as

LIMIT = 2**20  # elements of a parameter that are looked at, of all ranks together
Hypers = Callable[[torch.device], list[Hyper]]  # of the next step, one per param group
_RUN = 128  # neighbouring elements in a sample: whole blocks of scales, whatever their size
# A row has six sums of a parameter, five of each state, and then the bounds of each state's scales, the least with its
# sign changed: so both are maxima.
_OF_ALL, _OF_STATE = 6, 5
_ELSEWHERE = "diagnostics(): another rank cannot look at its parameters; its error says why"
_LOOKED_AT = 4  # parameters of each group whose matrices are orthogonalized
_SIGMA_ERROR = "sigma_error"


class Diagnostics(dict[str, Any]):
    """Numbers by parameter and by param group, which can be written as JSON.

    ``parameters``: by name; ``groups``: over all parameters of each, with its ``step``. Each has

    * ``update_rms``, ``weight_rms``, ``update_to_weight``, ``gradient_rms``: of the update in FP32, before rounding, of
      the master before it, their ratio, and the gradient as the step reads it (clipped);
    * ``lost_updates``: the share of elements that the update would move and rounding leaves where they are;
    * ``exp_avg_error``, ``exp_avg_sq_error``: RMS of what rounding the new moment changes, relative to its RMS;
    * of moments with scales ``exp_avg_saturated``, the share of elements with their block's largest code (one in each
      block at least), ``exp_avg_lowest``, the share of values other than 0 that get the smallest code or 0, and
      ``exp_avg_scale_min``, ``exp_avg_scale_max`` of scales other than 0; likewise ``exp_avg_sq_...``.

    Of a parameter with more than 2^20 elements these are estimates, from 2^20 of them: whole blocks, spread evenly, and
    the same ones at each call. Elsewhere all elements count.

    Muon's matrices have ``sigma_error`` instead: the mean of |sigma - 1| over the singular values of the update. It is
    computed for a few parameters of each group, and the group has their mean.

    What does not exist is left out: without a gradient or elements there is nothing.
    """

    def scalars(self, prefix: str = "optimizer", parameters: bool = False) -> dict[str, float]:
        """Flat names and numbers, for TensorBoard's ``add_scalar`` and ``wandb.log``; on request of parameters, too."""
        numbers = {
            f"{prefix}/group{number}/{key}": value
            for number, group in enumerate(self["groups"])
            for key, value in group.items()
            if key != "step"
        }
        for name, values in self["parameters"].items() if parameters else ():
            numbers |= {f"{prefix}/{name}/{key}": value for key, value in values.items()}
        return numbers


class _Member(NamedTuple):
    """A parameter: its position, the number of its group, and what the next step reads of it."""

    position: int
    number: int
    param: Tensor
    grad: Tensor | None
    name: str | None
    rule: Rule

    @property
    def shown_name(self) -> str:
        return self.name or describe(self.param, self.position)

    def states_to_change(self, store: StateStore) -> ParamState | None:
        """The states that the step updates. Raises if the step would refuse them or the gradient."""
        if self.grad is None or self.param not in store:
            return None
        states = store[self.param]
        check_update(self.param, self.grad, self.position, self.name)
        layout = states.layout
        check_states(self.param, states.tensors, layout.dtypes(), self.position, self.name, layout.offloaded)
        return states

    def local_gradient(self) -> Tensor:
        """Dense. A collective where it is placed otherwise than the parameter."""
        assert self.grad is not None
        return dense(finished_local(placed_as(self.grad, self.param)))


@with_denormals
def diagnose(store: StateStore, hypers: Hypers) -> Diagnostics:
    """A collective over the meshes of parameters, whose masters have followed what others have written.

    Raises RuntimeError where no parameter has states, and for gradients and states that cannot be used; where another
    rank does, FailedElsewhere, a ValueError.
    """
    everything = _members(store)
    members = [member for member in everything if not member.rule.whole_matrices]
    with failing_together(store.params, _ELSEWHERE):
        Agreement(lambda: store.params).check_alike(CollectivesOfRank.of_all(store, every=True))
        states = {member.position: member.states_to_change(store) for member in everything}
        if not any(param in store for param in store.params):
            raise RuntimeError(
                "diagnostics() looks at the next step of existing states: call step() or initialize_state()"
            )
    with failing_together(store.params, _ELSEWHERE):
        rows = _rows(store, members, states, hypers)
    report = _report(store, members, _of_all_ranks(members, rows))
    _add_matrices(report, [member for member in everything if member.rule.whole_matrices], states, hypers)
    return report


def _members(store: StateStore) -> list[_Member]:
    members: list[_Member] = []
    rules, names, attribute = store.rules(), store.names, store.grad_attribute
    for number, group in enumerate(store.groups):
        for param in group["params"]:
            position = len(members)
            grad = getattr(param, attribute, None)
            members.append(_Member(position, number, param, grad, names[position], rules[param]))
    return members


# --- a sample of a parameter --------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """Some elements of a parameter, on its device.

    ``elements``: their places in the local shard: whole blocks. ``u``: the fractions by which they are rounded.
    """

    states: ParamState
    elements: Tensor
    u: Tensor

    def stored(self, name: str) -> Stored:
        """The elements of a state or a stored master, undecoded."""
        stored = self.states.stored(name)
        bits, scale = _at(stored.bits, self.elements), stored.scale
        if scale is not None:
            scale = _at(scale, self.elements[:: stored.block] // stored.block)
        return replace(stored, bits=bits, scale=scale)

    def master(self) -> Tensor:
        """FP32 values of the master."""
        kind, param, adapter = self.states.layout.master, None, adapter_of(self.states.param)
        if not kind.is_separate:
            local = local_tensor(self.states.param.detach())
            param = _at(local if adapter is None else adapter.values(local), self.elements)
        stored = None if kind is Master.PARAMETER else self.stored(MASTER)
        bits, scale = (None, None) if stored is None else (stored.bits, stored.scale)
        return kind.codec.read(MasterTensors(param, bits, scale, self.states.layout.geometry.block))

    def rounded_master(self, before: Tensor, after: Tensor) -> Tensor | None:
        """The new master as the step rounds it; None if a quantized parameter without one is rounded by its library."""
        layout, param = self.states.layout, self.states.param
        if layout.master is Master.PARAMETER and adapter_of(param) is not None:
            return None
        codec = layout.master.codec
        fractions = codec.fractions(before, after, self.u)
        return codec.read(codec.encode(after, param.dtype, layout.geometry.block, fractions))


def _at(tensor: Tensor, places: Tensor) -> Tensor:
    flat = local_tensor(tensor).reshape(-1)
    return flat[places.to(flat.device)].to(places.device)


def _elements(param: Tensor, geometry: Geometry) -> Tensor:
    """Sampled places in the local shard: all, or one run of each of some stretches of equal length.

    Where in its stretch a hash tells: with even steps it could be the same columns of each row.
    """
    device, runs = local_tensor(param).device, -(-geometry.numel // _RUN)
    count = max(runs * min(LIMIT, param.numel()) // param.numel(), 1)
    stretches = torch.arange(count + 1, device=device) * runs // count
    first = stretches[:-1] + (stretches.diff() * finalize(stretches[:-1] + geometry.offset // _RUN & MASK32) >> 32)
    places = (first[:, None] * _RUN + torch.arange(_RUN, device=device)).view(-1)
    return places[places < geometry.numel]


def _rows(
    store: StateStore, members: Iterable[_Member], states: Mapping[int, ParamState | None], hypers: Hypers
) -> dict[int, Tensor]:
    """Rows of this rank's shards, by the parameters' positions."""
    rows, numbers = {}, store.rounding_numbers()
    derived: dict[torch.device, list[tuple[Scalars, int | None]]] = {}
    for member in members:
        updated, device = states[member.position], local_tensor(member.param).device
        grad = None if updated is None else member.local_gradient()
        if updated is None or grad is None or not grad.numel():
            rows[member.position] = _empty_row(member.rule, device)
            continue
        if device not in derived:
            derived[device] = list(map(derive, hypers(device)))
        scalars, offset = derived[device][member.number]
        elements = _elements(member.param, updated.layout.geometry)
        key = rounding_key(store.settings.seed, numbers[member.position])
        u = rounding_bits(key, updated.layout.geometry.global_of(elements), offset)
        rows[member.position] = _row(_Sample(updated, elements, u), grad, member.rule, scalars)
    return rows


def _sums_of(rule: Rule) -> int:
    return _OF_ALL + _OF_STATE * len(rule.states)


def _empty_row(rule: Rule, device: torch.device) -> Tensor:
    sums = torch.zeros(_sums_of(rule), dtype=torch.float64, device=device)
    return torch.cat([sums, sums.new_full((2 * len(rule.states),), -math.inf)])


def _row(sample: _Sample, grad: Tensor, rule: Rule, scalars: Scalars) -> Tensor:
    layout, before = sample.states.layout, sample.master()
    grad = _at(grad, sample.elements).float()
    after, values = rule.update(scalars)(grad, before, [sample.stored(spec.name).read() for spec in layout.specs])
    moved = lost = torch.zeros_like(before, dtype=torch.bool)
    rounded = sample.rounded_master(before, after)
    if rounded is not None and scalars.step_size != 0.0:
        moved = (values[0] != 0) | ((before != 0) & (scalars.decay != 1.0))
        lost = moved & (rounded == before)
    change, read = after.double() - before.double(), (grad * scalars.grad_factor).double()
    elements = change.new_full((), before.numel())
    counted = [elements, change.square(), before.double().square(), read.square(), moved, lost]
    bounds = []
    for spec, fmt, value in zip(layout.specs, layout.formats, values, strict=True):
        rounding, least, largest = _rounding_of(value, spec.kind, fmt, layout.geometry.block, sample.u)
        counted += rounding
        bounds += [-least, largest]
    factor = layout.geometry.numel / sample.elements.numel()
    sums = torch.stack([quantity.sum(dtype=torch.float64) for quantity in counted]) * factor
    return torch.cat([sums, torch.stack(bounds)])


def _rounding_of(
    value: Tensor, kind: Kind, fmt: StateFormat, block: int, u: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Sums of a new state's rounding errors; the least and the largest of its scales other than 0."""
    bits, scale = encode_state(value, kind, fmt, block, u)
    kept = decode_state(bits, scale, kind, fmt, block)
    exact = value.double()
    sums, infinite = [exact.square(), (kept.double() - exact).square()], exact.new_full((), math.inf)
    if scale is None:
        none = exact.new_zeros(())
        return [*sums, none, none, none], infinite, -infinite
    smallest = decode_state(_first_code(bits), scale, kind, fmt, block)
    blocks = torch.nn.functional.pad(kept.abs(), (0, -kept.numel() % block)).view(-1, block)
    largest = blocks.amax(1).repeat_interleave(block)[: kept.numel()]
    coded, top = value != 0, (kept != 0) & (kept.abs() == largest)
    used, scale = (scale > 0) & scale.isfinite(), scale.double()
    bounds = torch.where(used, scale, infinite).amin(), torch.where(used, scale, -infinite).amax()
    return [*sums, coded, top, coded & (kept.abs() <= smallest.abs())], *bounds


def _first_code(bits: Tensor) -> Tensor:
    """The smallest code above that of 0, in place of all."""
    integers = {1: torch.uint8, 2: torch.int16}[bits.element_size()]
    return torch.ones(bits.shape, dtype=integers, device=bits.device).view(bits.dtype)


def _of_all_ranks(members: Iterable[_Member], rows: Mapping[int, Tensor]) -> dict[int, list[float]]:
    """Rows over the ranks that hold a parameter's shards. Each kind of rows is waited for once."""
    alike: dict[Hashable, list[_Member]] = {}
    for member in members:
        mesh = member.param.device_mesh if isinstance(member.param, DTensor) else None
        row = rows[member.position]
        alike.setdefault((mesh, sharding_dims(member.param), row.device, len(row)), []).append(member)
    totals: dict[int, list[float]] = {}
    for some in alike.values():
        param, matrix = some[0].param, torch.stack([rows[member.position] for member in some])
        sums = _sums_of(some[0].rule)
        for dim in sharding_dims(param):
            mesh = cast(DTensor, param).device_mesh
            parts = [part.contiguous().to(mesh.device_type) for part in (matrix[:, :sums], matrix[:, sums:])]
            for part, how in zip(parts, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
                dist.all_reduce(part, how, group=mesh.get_group(dim))
            matrix = torch.cat(parts, 1)
        totals |= zip([member.position for member in some], matrix.tolist(), strict=True)
    return totals


# --- whole matrices -----------------------------------------------------------------------------------------------


def _add_matrices(
    report: Diagnostics, members: Sequence[_Member], states: Mapping[int, ParamState | None], hypers: Hypers
) -> None:
    """Add sigma errors of some parameters of each group, the same ones on all ranks."""
    chosen = [member for number in sorted({m.number for m in members}) for member in _some_of_group(members, number)]
    if not chosen:
        return
    ways, updates = [], {}
    for i, member in enumerate(chosen):
        hyper = hypers(local_tensor(member.param).device)[member.number]
        assert hyper.orthogonalization is not None
        ways.append(replace(hyper.orthogonalization, scale=_unscaled))
        if (member_states := states[member.position]) is not None:
            updates[i] = _to_orthogonalize(member, member_states, hyper)
    errors = sigma_errors([member.param for member in chosen], updates, ways)
    for i, error in errors.items():
        report["parameters"][chosen[i].shown_name] = {_SIGMA_ERROR: error}
    for number in {member.number for member in chosen}:
        of_group = [error for i, error in errors.items() if chosen[i].number == number]
        if of_group:
            report["groups"][number][_SIGMA_ERROR] = math.fsum(of_group) / len(of_group)


def _some_of_group(members: Sequence[_Member], number: int) -> list[_Member]:
    """Members of one group, at most _LOOKED_AT, spread evenly."""
    of_group = [member for member in members if member.number == number]
    count = min(len(of_group), _LOOKED_AT)
    return [of_group[i * len(of_group) // count] for i in range(count)]


def _to_orthogonalize(member: _Member, states: ParamState, hyper: Hyper) -> Tensor:
    """The local values that the step will orthogonalize, in FP32."""
    scalars, _ = derive(hyper)
    (spec,) = member.rule.states
    grad = member.local_gradient().float()
    if not grad.numel():  # as on the ranks that have elements
        return grad
    momentum = local_tensor(states.unscaled(spec.name, None)).to(grad.device)
    return member.rule.update(scalars)(grad, grad, [momentum.view(grad.shape)])[0].contiguous()


def _unscaled(rows: int, columns: int) -> float:
    return 1.0


# --- the report ---------------------------------------------------------------------------------------------------


def _report(store: StateStore, members: Sequence[_Member], rows: Mapping[int, Sequence[float]]) -> Diagnostics:
    parameters: dict[str, dict[str, float]] = {}
    groups: list[dict[str, float]] = [{"step": int(group["step"]) + 1} for group in store.groups]
    by_group: list[list[_Member]] = [[] for _ in groups]
    for member in members:
        by_group[member.number].append(member)
    for group, of_group in zip(groups, by_group, strict=True):
        if not of_group:
            continue
        names = [spec.name for spec in of_group[0].rule.states]
        for member in of_group:
            if values := _values(rows[member.position], names):
                parameters[member.shown_name] = values
        group |= _values(_total([rows[member.position] for member in of_group], len(names)), names)
    return Diagnostics(parameters=parameters, groups=groups)


def _total(rows: Sequence[Sequence[float]], states: int) -> list[float]:
    columns, sums = list(zip(*rows, strict=True)), -2 * states
    return [*map(sum, columns[:sums]), *map(max, columns[sums:])]


def _values(row: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """The numbers of a parameter, or of some together. ``names``: of its states."""
    elements, update, weight, gradient, moved, lost = row[:_OF_ALL]
    if not elements:
        return {}
    numbers = {"update_rms": math.sqrt(update / elements), "weight_rms": math.sqrt(weight / elements)}
    numbers["gradient_rms"] = math.sqrt(gradient / elements)
    if numbers["weight_rms"]:
        numbers["update_to_weight"] = numbers["update_rms"] / numbers["weight_rms"]
    if moved:
        numbers["lost_updates"] = lost / moved
    for i, name in enumerate(names):
        first = _OF_ALL + i * _OF_STATE
        value, error, coded, top, low = row[first : first + _OF_STATE]
        least, largest = row[2 * (i - len(names))], row[2 * (i - len(names)) + 1]
        if value:
            numbers[f"{name}_error"] = math.sqrt(error) / math.sqrt(value)
        if coded:
            numbers[f"{name}_saturated"], numbers[f"{name}_lowest"] = top / coded, low / coded
        if largest > 0.0:
            numbers[f"{name}_scale_min"], numbers[f"{name}_scale_max"] = -least, largest
    return numbers
