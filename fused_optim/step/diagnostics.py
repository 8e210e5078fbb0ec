"""What the next step will do to each parameter, and what rounding makes of it: one extra pass that changes nothing.

Each backend makes the pass over its own shards; what it gives are sums, and bounds of scales. It is made on request
only; nothing of it is in the way of ``step()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adapters import adapter_of
from fused_optim.backends import Backend, ShardWork, backend_of
from fused_optim.backends.compiled import CompiledShards
from fused_optim.backends.torch_reference import derive
from fused_optim.formats.masters import Master
from fused_optim.formats.rounding import rounding_key
from fused_optim.memory.layout import MASTER
from fused_optim.options.checks import check_states, check_update, describe
from fused_optim.rule import Hyper, Rule
from fused_optim.sharding.collective import failing_together
from fused_optim.sharding.dtensor import dense, finished_local, local_tensor, sharding_dims
from fused_optim.state.param_state import read_parameter
from fused_optim.state.store import StateStore
from fused_optim.step.diagnosed_matrices import sigma_errors
from fused_optim.step.diagnosed_pieces import LookedAt, add_shard, sums_of
from fused_optim.step.plan import placed_as

Hypers = Callable[[torch.device], list[Hyper]]  # of the next step, one per param group
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


@dataclass(frozen=True)
class _Member:
    """A parameter: its position, the number of its group."""

    index: int
    number: int
    param: Tensor
    name: str | None
    rule: Rule
    key: int  # of its rounding

    @property
    def state_names(self) -> list[str]:
        return [spec.name for spec in self.rule.states]


def diagnose(store: StateStore, hypers: Hypers) -> Diagnostics:
    """A collective over the meshes of parameters.

    Raises RuntimeError where no parameter has states, and for gradients and states that cannot be used; where another
    rank does, FailedElsewhere, a ValueError.
    """
    everything = list(_members(store))
    with failing_together(
        store.params, "diagnostics(): another rank cannot look at its parameters; its error says why"
    ):
        if not any(each.param in store for each in everything):
            raise RuntimeError(
                "diagnostics() looks at the next step of existing states: call step() or initialize_state()"
            )
        updated = {each.param for each in everything if _is_updated(store, each)}
    members = [each for each in everything if not each.rule.whole_matrices]
    of_matrices = [each for each in everything if each.rule.whole_matrices]
    rows = {each.param: row for each, row in zip(members, _empty_rows(members), strict=True)}
    alike: dict[tuple[torch.device, Backend, int], list[_Member]] = {}
    for each in (each for each in members if each.param in updated):
        alike.setdefault((local_tensor(each.param).device, _backend(store, each), each.rule.code), []).append(each)
    for (device, backend, _), some in alike.items():
        if backend == "torch":
            _by_reference(store, some, hypers(device), rows)
        else:
            numbers = [each.number for each in some]
            shards = CompiledShards(device, backend, numbers, len(store.groups), some[0].rule)
            shards.diagnose(hypers(device), ((_work(store, each), rows[each.param]) for each in some))
            for each in some:
                if _is_rounded_elsewhere(store, each):
                    rows[each.param][_ROUNDED] = 0.0
    _reduce(members, rows)
    report = _report(store, members, rows)
    _add_matrices(report, store, of_matrices, hypers, updated)
    return report


def _members(store: StateStore) -> Iterator[_Member]:
    rules, names, numbers, seed = store.rules(), store.names, store.rounding_numbers(), store.settings.seed
    index = 0
    for number, group in enumerate(store.groups):
        for param in group["params"]:
            key = rounding_key(seed, numbers[index])
            yield _Member(index, number, param, names[index], rules[param], key)
            index += 1


def _empty_rows(members: Sequence[_Member]) -> list[Tensor]:
    """Of each parameter sums, then the bounds of its states' scales, on its device.

    A bound's least has its sign changed, so that both are maxima.
    """
    memory: dict[tuple[torch.device, int], list[Tensor]] = {}
    kinds = [(local_tensor(each.param).device, len(each.rule.states)) for each in members]
    for device, states in dict.fromkeys(kinds):
        sums = len(sums_of(("",) * states))
        rows = torch.zeros(kinds.count((device, states)), sums + 2 * states, dtype=torch.float64, device=device)
        rows[:, sums:] = -math.inf
        memory[device, states] = list(rows.unbind())
    return [memory[kind].pop(0) for kind in kinds]


def _is_updated(store: StateStore, member: _Member) -> bool:
    """Checks what the step will read."""
    param, index, name = member.param, member.index, member.name
    grad = getattr(param, store.grad_attribute, None)
    if grad is None or param not in store:
        return False
    states = store[param]
    check_update(param, grad, index, name)
    check_states(param, states.tensors, states.layout.dtypes(), index, name, states.layout.offloaded)
    return local_tensor(param).numel() > 0


def _backend(store: StateStore, member: _Member) -> Backend:
    """Of this pass. The reference fetches states from host memory piece by piece."""
    return "torch" if store.layouts[member.param].offloaded else backend_of(local_tensor(member.param))


def _gradient(store: StateStore, member: _Member) -> Tensor:
    """Local, dense."""
    return dense(finished_local(placed_as(getattr(member.param, store.grad_attribute), member.param)))


def _is_rounded_elsewhere(store: StateStore, member: _Member) -> bool:
    """A quantized parameter without a master: only its library knows what rounding makes of the new values."""
    return adapter_of(member.param) is not None and store.layouts[member.param].master is Master.PARAMETER


def _work(store: StateStore, member: _Member) -> ShardWork:
    """A shard as an engine has it; of a quantized parameter its master alone, or its values."""
    param, states = member.param, store[member.param]
    master = local_tensor(states.tensors[MASTER]) if states.layout.master is not Master.PARAMETER else None
    local = local_tensor(param.detach())
    if adapter_of(param) is not None:
        local = read_parameter(param) if master is None else master
    return ShardWork(
        grad=_gradient(store, member),
        param=dense(local),
        master=master,
        states=tuple(local_tensor(states.tensors[spec.name]) for spec in states.layout.specs),
        layout=states.layout,
        key=member.key,
    )


def _by_reference(
    store: StateStore, members: Iterable[_Member], hypers: Sequence[Hyper], rows: Mapping[Tensor, Tensor]
) -> None:
    derived = list(map(derive, hypers))
    for each in members:
        scalars, offset = derived[each.number]
        grad = _gradient(store, each).view(-1)
        shard = LookedAt(store[each.param], grad, scalars, each.rule.update(scalars), offset, each.key)
        add_shard(shard, rows[each.param])


# --- whole matrices -----------------------------------------------------------------------------------------------


def _add_matrices(
    report: Diagnostics, store: StateStore, members: Sequence[_Member], hypers: Hypers, updated: Collection[Tensor]
) -> None:
    """Of some parameters of each group, which are the same ones on all ranks."""
    chosen = [each for number in sorted({m.number for m in members}) for each in _some_of_group(members, number)]
    if not chosen:
        return
    ways, updates = [], {}
    for i, each in enumerate(chosen):
        hyper = hypers(local_tensor(each.param).device)[each.number]
        assert hyper.orthogonalization is not None
        ways.append(replace(hyper.orthogonalization, scale=_unscaled))
        if each.param in updated:
            updates[i] = _to_orthogonalize(store, each, hyper)
        elif (
            each.param in store  # as on the ranks that have elements of it
            and not local_tensor(each.param).numel()
            and getattr(each.param, store.grad_attribute, None) is not None
        ):
            updates[i] = torch.empty_like(local_tensor(each.param.detach()), dtype=torch.float32)
    errors = sigma_errors([each.param for each in chosen], updates, ways)
    for i, error in errors.items():
        name = chosen[i].name or describe(chosen[i].param, chosen[i].index)
        report["parameters"][name] = {_SIGMA_ERROR: error}
    for number in {each.number for each in chosen}:
        own = [error for i, error in errors.items() if chosen[i].number == number]
        if own:
            report["groups"][number][_SIGMA_ERROR] = math.fsum(own) / len(own)


def _some_of_group(members: Sequence[_Member], number: int) -> list[_Member]:
    """Spread evenly."""
    own = [each for each in members if each.number == number]
    count = min(len(own), _LOOKED_AT)
    return [own[i * len(own) // count] for i in range(count)]


def _to_orthogonalize(store: StateStore, member: _Member, hyper: Hyper) -> Tensor:
    """The local values that the step will orthogonalize, in FP32."""
    scalars, _ = derive(hyper)
    (spec,) = member.rule.states
    grad = _gradient(store, member).float()
    momentum = local_tensor(store[member.param].unscaled(spec.name, None)).to(grad.device)
    return member.rule.update(scalars)(grad, grad, [momentum.view(grad.shape)])[0].contiguous()


def _unscaled(rows: int, columns: int) -> float:
    return 1.0


# --- all shards ---------------------------------------------------------------------------------------------------


def _reduce(members: Iterable[_Member], rows: dict[Tensor, Tensor]) -> None:
    """Replace each parameter's row by that over the ranks that hold its shards."""
    alike: dict[Any, list[_Member]] = {}
    for each in members:
        param = each.param
        if isinstance(param, DTensor) and sharding_dims(param):
            kind = param.device_mesh, sharding_dims(param), len(each.rule.states)
            alike.setdefault(kind, []).append(each)
    for (mesh, dims, _), some in alike.items():
        all_rows = torch.stack([rows[each.param].to(mesh.device_type) for each in some])
        sums = len(sums_of(some[0].state_names))
        both = [all_rows[:, :sums].contiguous(), all_rows[:, sums:].contiguous()]
        for dim in dims:
            for values, how in zip(both, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
                dist.all_reduce(values, how, group=mesh.get_group(dim))
        rows.update(zip((each.param for each in some), torch.cat(both, 1).unbind(), strict=True))


def _report(store: StateStore, members: Sequence[_Member], rows: Mapping[Tensor, Tensor]) -> Diagnostics:
    listed = dict(zip(rows, _on_host(list(rows.values())), strict=True))
    parameters: dict[str, dict[str, float]] = {}
    groups: list[dict[str, float]] = [{"step": int(group["step"]) + 1} for group in store.groups]
    for each in members:
        if values := _values([listed[each.param]], each.state_names):
            parameters[each.name or describe(each.param, each.index)] = values
    for number, group in enumerate(groups):
        own = [each for each in members if each.number == number]
        group |= _values([listed[each.param] for each in own], own[0].state_names) if own else {}
    return Diagnostics(parameters=parameters, groups=groups)


def _on_host(rows: Sequence[Tensor]) -> list[list[float]]:
    """Each device is waited for once."""
    found: dict[int, list[float]] = {}
    kinds = [(row.device, row.numel()) for row in rows]
    for kind in dict.fromkeys(kinds):
        own = [i for i, each in enumerate(kinds) if each == kind]
        found |= zip(own, torch.stack([rows[i] for i in own]).tolist(), strict=True)
    return [found[i] for i in range(len(rows))]


def _values(rows: Sequence[Sequence[float]], names: Sequence[str]) -> dict[str, float]:
    """The numbers of some parameters together. ``names``: of their states."""
    columns, sum_names = list(zip(*rows, strict=True)), sums_of(names)
    sums = dict(zip(sum_names, map(sum, columns), strict=False))
    bounds = list(map(max, columns[len(sum_names) :]))
    count = sums["elements"]
    if not count:
        return {}
    found = {f"{key}_rms": math.sqrt(sums[key] / count) for key in ("update", "weight", "gradient")}
    found |= _ratio("update_to_weight", found["update_rms"], found["weight_rms"])
    found |= _ratio("lost_updates", sums["lost"], sums["moved"])
    for name, least, largest in zip(names, bounds[::2], bounds[1::2], strict=True):
        found |= _ratio(f"{name}_error", math.sqrt(sums[f"{name}_error"]), math.sqrt(sums[f"{name}_value"]))
        found |= _ratio(f"{name}_saturated", sums[f"{name}_top"], sums[f"{name}_coded"])
        found |= _ratio(f"{name}_lowest", sums[f"{name}_low"], sums[f"{name}_coded"])
        if largest > 0.0:
            found |= {f"{name}_scale_min": -least, f"{name}_scale_max": largest}
    return found


def _ratio(name: str, part: float, whole: float) -> dict[str, float]:
    return {name: part / whole} if whole else {}
