"""What the next step will do to each parameter, and what rounding makes of it: one extra pass that changes nothing.

Each backend makes the pass over its own shards; what it gives are sums, and bounds of scales. It is made on request
only; nothing of it is in the way of ``step()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from fused_optim.state.param_state import ParamState, read_parameter
from fused_optim.state.store import StateStore
from fused_optim.step.agreement import Agreement, Own, is_misplaced
from fused_optim.step.diagnosed_matrices import sigma_errors
from fused_optim.step.diagnosed_pieces import LookedAt, add_shard, sums_of
from fused_optim.step.plan import placed_as

Hypers = Callable[[torch.device], list[Hyper]]  # of the next step, one per param group
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


@dataclass(frozen=True)
class _Member:
    """A parameter: its position, the number of its group, and what the next step reads of it."""

    index: int
    number: int
    param: Tensor
    grad: Tensor | None
    states: ParamState | None
    name: str | None
    rule: Rule
    key: int  # of its rounding

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.rule.states)

    @property
    def changes(self) -> bool:
        """Whether the step changes anything here."""
        return self.grad is not None and self.states is not None and local_tensor(self.param).numel() > 0

    def check(self) -> ParamState | None:
        """Raise for a gradient and states that the step would refuse. The states, where it would update them."""
        if self.grad is None or self.states is None:
            return None
        check_update(self.param, self.grad, self.index, self.name)
        layout = self.states.layout
        check_states(self.param, self.states.tensors, layout.dtypes(), self.index, self.name, layout.offloaded)
        return self.states if self.changes else None

    def local_gradient(self) -> Tensor:
        """Dense."""
        assert self.grad is not None
        return dense(finished_local(placed_as(self.grad, self.param)))

    @property
    def backend(self) -> Backend:
        """Of this pass. The reference fetches states from host memory piece by piece."""
        assert self.states is not None
        return "torch" if self.states.layout.offloaded else backend_of(local_tensor(self.param))

    @property
    def is_rounded_elsewhere(self) -> bool:
        """A quantized parameter without a master: only its library knows what rounding makes of the new values."""
        assert self.states is not None
        return adapter_of(self.param) is not None and self.states.layout.master is Master.PARAMETER


def diagnose(store: StateStore, hypers: Hypers) -> Diagnostics:
    """A collective over the meshes of parameters.

    Raises RuntimeError where no parameter has states, and for gradients and states that cannot be used; where another
    rank does, FailedElsewhere, a ValueError.
    """
    everything = list(_members(store))
    members = [each for each in everything if not each.rule.whole_matrices]
    of_matrices = [each for each in everything if each.rule.whole_matrices]
    rows = {each.param: row for each, row in zip(members, _empty_rows(members), strict=True)}
    with failing_together(store.params, _ELSEWHERE):
        Agreement().reach(store.params, Own.of_all(store))
        sent = [each.param for each in everything if is_misplaced(each.param, each.grad)]  # alike on all ranks, hence
        with failing_together(sent, _ELSEWHERE) if sent else nullcontext():
            for each in everything if sent else ():
                each.check()
        if not any(each.states for each in everything):
            raise RuntimeError(
                "diagnostics() looks at the next step of existing states: call step() or initialize_state()"
            )
        _look(members, hypers, rows, len(store.groups))
        for each in of_matrices:
            each.check()
    _reduce(members, rows)
    report = _report(store, members, rows)
    _add_matrices(report, of_matrices, hypers)
    return report


def _members(store: StateStore) -> Iterator[_Member]:
    rules, names, numbers, seed = store.rules(), store.names, store.rounding_numbers(), store.settings.seed
    known = {states.param: states for states in store}
    index = 0
    for number, group in enumerate(store.groups):
        for param in group["params"]:
            grad = getattr(param, store.grad_attribute, None)
            key = rounding_key(seed, numbers[index])
            yield _Member(index, number, param, grad, known.get(param), names[index], rules[param], key)
            index += 1


def _look(members: Iterable[_Member], hypers: Hypers, rows: Mapping[Tensor, Tensor], group_count: int) -> None:
    """Fill the rows. Checks each one in its turn, while a GPU looks at those before."""
    alike: dict[tuple[torch.device, Backend, int], list[_Member]] = {}
    for each in members:
        if each.changes:
            alike.setdefault((local_tensor(each.param).device, each.backend, each.rule.code), []).append(each)
        else:
            each.check()
    for (device, backend, _), some in alike.items():
        if backend == "torch":
            _by_reference(some, hypers(device), rows)
        else:
            shards = CompiledShards(device, backend, [each.number for each in some], group_count, some[0].rule)
            shards.diagnose(hypers(device), ((_work(each), rows[each.param]) for each in some))
            for each in some:
                if each.is_rounded_elsewhere:
                    rows[each.param][_ROUNDED] = 0.0


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


def _work(member: _Member) -> ShardWork:
    """A shard as an engine has it; of a quantized parameter its master alone, or its values."""
    param, states = member.param, member.check()
    assert states is not None
    master = local_tensor(states.tensors[MASTER]) if states.layout.master is not Master.PARAMETER else None
    local = local_tensor(param.detach())
    if adapter_of(param) is not None:
        local = read_parameter(param) if master is None else master
    return ShardWork(
        grad=member.local_gradient(),
        param=dense(local),
        master=master,
        states=tuple(local_tensor(states.tensors[spec.name]) for spec in states.layout.specs),
        layout=states.layout,
        key=member.key,
    )


def _by_reference(members: Iterable[_Member], hypers: Sequence[Hyper], rows: Mapping[Tensor, Tensor]) -> None:
    derived = list(map(derive, hypers))
    for each in members:
        states = each.check()
        assert states is not None
        scalars, offset = derived[each.number]
        grad = each.local_gradient().view(-1)
        add_shard(LookedAt(states, grad, scalars, each.rule.update(scalars), offset, each.key), rows[each.param])


# --- whole matrices -----------------------------------------------------------------------------------------------


def _add_matrices(report: Diagnostics, members: Sequence[_Member], hypers: Hypers) -> None:
    """Of some parameters of each group, which are the same ones on all ranks."""
    chosen = [each for number in sorted({m.number for m in members}) for each in _some_of_group(members, number)]
    if not chosen:
        return
    ways, updates = [], {}
    for i, each in enumerate(chosen):
        hyper = hypers(local_tensor(each.param).device)[each.number]
        assert hyper.orthogonalization is not None
        ways.append(replace(hyper.orthogonalization, scale=_unscaled))
        if each.changes:
            updates[i] = _to_orthogonalize(each, hyper)
        elif each.grad is not None and each.states is not None:  # as on the ranks that have elements of it
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


def _to_orthogonalize(member: _Member, hyper: Hyper) -> Tensor:
    """The local values that the step will orthogonalize, in FP32."""
    assert member.states is not None
    scalars, _ = derive(hyper)
    (spec,) = member.rule.states
    grad = member.local_gradient().float()
    momentum = local_tensor(member.states.unscaled(spec.name, None)).to(grad.device)
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


def _values(rows: Sequence[Sequence[float]], names: tuple[str, ...]) -> dict[str, float]:
    """The numbers of some parameters together. ``names``: of their states."""
    sum_names = sums_of(names)
    of_sums, bounds = rows[0][: len(sum_names)], rows[0][len(sum_names) :]
    if len(rows) > 1:
        columns = list(zip(*rows, strict=True))
        of_sums, bounds = [*map(sum, columns[: len(sum_names)])], [*map(max, columns[len(sum_names) :])]
    sums = dict(zip(sum_names, of_sums, strict=True))
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
