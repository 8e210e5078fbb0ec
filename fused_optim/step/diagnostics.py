"""What the next step will do to each parameter, and what rounding makes of it: one extra pass that changes nothing.

The next step's plan is refreshed, as the step will do, and what it would refuse raises here. Then each backend makes
the pass over its own shards; what it gives are sums, and bounds of scales. It is made on request only; nothing of it is
in the way of ``step()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_optim.adapters import adapter_of
from fused_optim.backends.compiled import CompiledShards
from fused_optim.backends.torch_reference import derive
from fused_optim.formats.masters import Master
from fused_optim.formats.rounding import rounding_key
from fused_optim.options.checks import check_states, check_update, describe
from fused_optim.rule import Hyper, Rule
from fused_optim.sharding.collective import failing_together
from fused_optim.sharding.dtensor import dense, finished_local, local_tensor, sharding_dims
from fused_optim.state.param_state import ParamState
from fused_optim.state.store import StateStore
from fused_optim.step.agreement import Agreement, Own, is_misplaced
from fused_optim.step.diagnosed_matrices import sigma_errors
from fused_optim.step.diagnosed_pieces import OF_ALL, OF_STATE, LookedAt, add_shard, sums_of
from fused_optim.step.parts import Part
from fused_optim.step.plan import Plan, placed_as

Hypers = Callable[[torch.device], list[Hyper]]  # of the next step, one per param group
_Kind = tuple[torch.device, int]  # of rows: how many states there are
_ELSEWHERE = "diagnostics(): another rank cannot look at its parameters; its error says why"
_LOOKED_AT = 4  # parameters of each group whose matrices are orthogonalized
_SIGMA_ERROR = "sigma_error"
_ROUNDED = slice(4, 6)  # of a row: what the update moves, and what rounding loses of that


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

    Muon's matrices have ``sigma_error`` instead: the mean of |sigma - 1| over the singular values of the update. It is
    computed for a few parameters of each group, and the group has their mean.

    What does not exist is left out: without a gradient or elements there is nothing.
    """

    def scalars(self, prefix: str = "optimizer", parameters: bool = False) -> dict[str, float]:
        """Flat names and numbers, for TensorBoard's ``add_scalar`` and ``wandb.log``; on request of parameters, too."""
        found = {
            f"{prefix}/group{number}/{key}": value
            for number, group in enumerate(self["groups"])
            for key, value in group.items()
            if key != "step"
        }
        for name, values in self["parameters"].items() if parameters else ():
            found |= {f"{prefix}/{name}/{key}": value for key, value in values.items()}
        return found


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
        """Those that the step updates, of a parameter with elements. Raises for what the step would refuse."""
        if self.grad is None or self.param not in store:
            return None
        states = store[self.param]
        check_update(self.param, self.grad, self.position, self.name)
        layout = states.layout
        check_states(self.param, states.tensors, layout.dtypes(), self.position, self.name, layout.offloaded)
        return states if local_tensor(self.param).numel() else None

    def local_gradient(self) -> Tensor:
        """Dense."""
        assert self.grad is not None
        return dense(finished_local(placed_as(self.grad, self.param)))


class _Rows:
    """Of each parameter sums, then the bounds of its states' scales, on its device.

    A bound's least has its sign changed, so that both are maxima.
    """

    def __init__(self, members: Sequence[_Member]) -> None:
        kinds = [(local_tensor(each.param).device, len(each.rule.states)) for each in members]
        self._matrices: dict[_Kind, Tensor] = {}
        for device, states in dict.fromkeys(kinds):
            sums = len(sums_of(("",) * states))
            matrix = torch.zeros(kinds.count((device, states)), sums + 2 * states, dtype=torch.float64, device=device)
            matrix[:, sums:] = -math.inf
            self._matrices[device, states] = matrix
        used = dict.fromkeys(self._matrices, 0)
        self._places: dict[int, tuple[_Kind, int]] = {}
        for each, kind in zip(members, kinds, strict=True):
            self._places[each.position] = kind, used[kind]
            used[kind] += 1

    def of(self, index: int) -> Tensor:
        """A parameter's, by its position."""
        kind, row = self._places[index]
        return self._matrices[kind][row]

    def addresses(self, indices: Iterable[int]) -> list[int]:
        """Of parameters' rows."""
        first = {kind: matrix.data_ptr() for kind, matrix in self._matrices.items()}
        width = {kind: matrix.shape[1] * matrix.element_size() for kind, matrix in self._matrices.items()}
        return [first[kind] + row * width[kind] for kind, row in map(self._places.__getitem__, indices)]

    def reduce(self, members: Iterable[_Member]) -> None:
        """Replace each row by that over the ranks that hold the parameter's shards."""
        alike: dict[tuple[DeviceMesh, tuple[int, ...], _Kind], list[int]] = {}
        for each in members:
            param = each.param
            if isinstance(param, DTensor) and (dims := sharding_dims(param)):
                kind, row = self._places[each.position]
                alike.setdefault((param.device_mesh, tuple(dims), kind), []).append(row)
        for (mesh, dims, kind), some in alike.items():
            matrix, sums = self._matrices[kind], len(sums_of(("",) * kind[1]))
            own = matrix[some].to(mesh.device_type)
            both = [own[:, :sums].contiguous(), own[:, sums:].contiguous()]
            for dim in dims:
                for values, how in zip(both, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
                    dist.all_reduce(values, how, group=mesh.get_group(dim))
            matrix[some] = torch.cat(both, 1).to(matrix.device)

    def on_host(self) -> dict[int, list[float]]:
        """By the parameters' positions. Each device is waited for once."""
        listed = {kind: matrix.tolist() for kind, matrix in self._matrices.items()}
        return {index: listed[kind][row] for index, (kind, row) in self._places.items()}


def diagnose(store: StateStore, hypers: Hypers, refreshed_plan: Callable[[], Plan]) -> Diagnostics:
    """A collective over the meshes of parameters. ``refreshed_plan``: gives the next step's, with its gradients.

    Raises RuntimeError where no parameter has states, and for gradients and states that cannot be used; where another
    rank does, FailedElsewhere, a ValueError.
    """
    everything = _members(store)
    members = [each for each in everything if not each.rule.whole_matrices]
    rows = _Rows(members)
    with failing_together(store.params, _ELSEWHERE):
        Agreement(lambda: store.params).reach(Own.of_all(store, every=True))
        sent = [each.param for each in everything if is_misplaced(each.param, each.grad)]  # alike on all ranks, hence
        with failing_together(sent, _ELSEWHERE) if sent else nullcontext():
            for each in everything if sent else ():
                each.states_to_change(store)
        if not any(param in store for param in store.params):
            raise RuntimeError(
                "diagnostics() looks at the next step of existing states: call step() or initialize_state()"
            )
        plan, by_position = refreshed_plan(), {each.position: each for each in members}
        try:
            for part in plan.parts:
                _look(store, part, by_position, hypers(part.device), rows)
        finally:
            plan.give_up()
    rows.reduce(members)
    report = _report(store, members, rows.on_host())
    _add_matrices(store, report, [each for each in everything if each.rule.whole_matrices], hypers)
    return report


def _members(store: StateStore) -> list[_Member]:
    found: list[_Member] = []
    rules, names, attribute = store.rules(), store.names, store.grad_attribute
    for number, group in enumerate(store.groups):
        for param in group["params"]:
            position = len(found)
            grad = getattr(param, attribute, None)
            found.append(_Member(position, number, param, grad, names[position], rules[param]))
    return found


def _look(store: StateStore, part: Part, members: Mapping[int, _Member], hypers: list[Hyper], rows: _Rows) -> None:
    """Fill the rows of a part's shards, by the backend that updates them.

    The reference looks at states in host memory, which it fetches piece by piece; matrices have no rows.
    """
    own = [(i, part.indices[i]) for i in part.shards.with_gradients() if part.indices[i] in members]
    own = [(i, index) for i, index in own if local_tensor(members[index].param).numel()]
    if not isinstance(part.shards, CompiledShards):
        return _by_reference(store, [members[index] for _, index in own], hypers, rows)
    part.shards.diagnose(hypers, [i for i, _ in own], rows.addresses(index for _, index in own))
    for _, index in own:
        param = members[index].param
        if adapter_of(param) is not None and store.layouts[param].master is Master.PARAMETER:
            rows.of(index)[_ROUNDED] = 0.0  # only its library knows what rounding makes of the new values


def _by_reference(store: StateStore, members: Iterable[_Member], hypers: Sequence[Hyper], rows: _Rows) -> None:
    derived, numbers, seed = list(map(derive, hypers)), store.rounding_numbers(), store.settings.seed
    for each in members:
        scalars, offset = derived[each.number]
        grad, key = each.local_gradient().view(-1), rounding_key(seed, numbers[each.position])
        looked_at = LookedAt(store[each.param], grad, scalars, each.rule.update(scalars), offset, key)
        add_shard(looked_at, rows.of(each.position))


# --- whole matrices -----------------------------------------------------------------------------------------------


def _add_matrices(store: StateStore, report: Diagnostics, members: Sequence[_Member], hypers: Hypers) -> None:
    """Of some parameters of each group, which are the same ones on all ranks."""
    chosen = [each for number in sorted({m.number for m in members}) for each in _some_of_group(members, number)]
    if not chosen:
        return
    ways, updates = [], {}
    for i, each in enumerate(chosen):
        hyper = hypers(local_tensor(each.param).device)[each.number]
        assert hyper.orthogonalization is not None
        ways.append(replace(hyper.orthogonalization, scale=_unscaled))
        if states := each.states_to_change(store):
            updates[i] = _to_orthogonalize(each, states, hyper)
        elif each.grad is not None and each.param in store:  # as on the ranks that have elements of it
            updates[i] = torch.empty_like(local_tensor(each.param.detach()), dtype=torch.float32)
    errors = sigma_errors([each.param for each in chosen], updates, ways)
    for i, error in errors.items():
        report["parameters"][chosen[i].shown_name] = {_SIGMA_ERROR: error}
    for number in {each.number for each in chosen}:
        own = [error for i, error in errors.items() if chosen[i].number == number]
        if own:
            report["groups"][number][_SIGMA_ERROR] = math.fsum(own) / len(own)


def _some_of_group(members: Sequence[_Member], number: int) -> list[_Member]:
    """Spread evenly."""
    own = [each for each in members if each.number == number]
    count = min(len(own), _LOOKED_AT)
    return [own[i * len(own) // count] for i in range(count)]


def _to_orthogonalize(member: _Member, states: ParamState, hyper: Hyper) -> Tensor:
    """The local values that the step will orthogonalize, in FP32."""
    scalars, _ = derive(hyper)
    (spec,) = member.rule.states
    grad = member.local_gradient().float()
    momentum = local_tensor(states.unscaled(spec.name, None)).to(grad.device)
    return member.rule.update(scalars)(grad, grad, [momentum.view(grad.shape)])[0].contiguous()


def _unscaled(rows: int, columns: int) -> float:
    return 1.0


# --- the report ---------------------------------------------------------------------------------------------------


def _report(store: StateStore, members: Sequence[_Member], rows: Mapping[int, Sequence[float]]) -> Diagnostics:
    parameters: dict[str, dict[str, float]] = {}
    groups: list[dict[str, float]] = [{"step": int(group["step"]) + 1} for group in store.groups]
    by_group: list[list[_Member]] = [[] for _ in groups]
    for each in members:
        by_group[each.number].append(each)
    for group, own in zip(groups, by_group, strict=True):
        if not own:
            continue
        names = [spec.name for spec in own[0].rule.states]
        for each in own:
            if values := _values(rows[each.position], names):
                parameters[each.shown_name] = values
        group |= _values(_total([rows[each.position] for each in own], len(names)), names)
    return Diagnostics(parameters=parameters, groups=groups)


def _total(rows: Sequence[Sequence[float]], states: int) -> list[float]:
    columns, sums = list(zip(*rows, strict=True)), -2 * states
    return [*map(sum, columns[:sums]), *map(max, columns[sums:])]


def _values(row: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """The numbers of a parameter, or of some together. ``names``: of its states."""
    elements, update, weight, gradient, moved, lost = row[:OF_ALL]
    if not elements:
        return {}
    found = {"update_rms": math.sqrt(update / elements), "weight_rms": math.sqrt(weight / elements)}
    found["gradient_rms"] = math.sqrt(gradient / elements)
    if found["weight_rms"]:
        found["update_to_weight"] = found["update_rms"] / found["weight_rms"]
    if moved:
        found["lost_updates"] = lost / moved
    for i, name in enumerate(names):
        first = OF_ALL + i * OF_STATE
        value, error, coded, top, low = row[first : first + OF_STATE]
        least, largest = row[2 * (i - len(names))], row[2 * (i - len(names)) + 1]
        if value:
            found[f"{name}_error"] = math.sqrt(error) / math.sqrt(value)
        if coded:
            found[f"{name}_saturated"], found[f"{name}_lowest"] = top / coded, low / coded
        if largest > 0.0:
            found[f"{name}_scale_min"], found[f"{name}_scale_max"] = -least, largest
    return found
