"""States that others put into ``optimizer.state`` themselves, as torch's ZeroRedundancyOptimizer and Megatron-LM do.

They are in whatever form their checkpoints have: FP32 values, native form, a step for each parameter as
torch.optim.AdamW's. They become states of our own before anything is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fused_optim.decorators import callers_level
from fused_optim.formats.states import Kind
from fused_optim.memory.layout import STEP, StateLayout, state_zeros
from fused_optim.sharding.dtensor import rewrap_like
from fused_optim.state.groups import Group
from fused_optim.state.native import check_packed, unpack_state
from fused_optim.state.param_state import ParamState
from fused_optim.state.remainders import check_remainder, is_remainder, misfits, unpack_remainder


def is_replaced(states: Mapping[str, Any], layout: StateLayout) -> bool:
    """True if a load has put torch.optim.AdamW's states in place of ours: masters start anew, too."""
    return STEP in states and not layout.dtypes().keys() <= states.keys()


def foreign_names(states: ParamState) -> list[str]:
    """The states that are not as they are kept, but values of another format, or in native form.

    Not codes of another format: what these stand for nobody knows.
    """
    return [name for name, dtype in states.layout.dtypes().items() if _is_foreign(states.tensors.get(name), dtype)]


def _is_foreign(value: Any, dtype: torch.dtype) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, Mapping)
    return value.dtype != dtype and value.dtype in (torch.float32, torch.bfloat16, torch.float64)


def take_foreign(states: ParamState, names: Sequence[str], who: str) -> None:
    """Keep them as this parameter's are kept. Raises TypeError or ValueError for what cannot be."""
    values = decoded(states.param, states.layout, {name: states.tensors[name] for name in names}, who)
    for name, dtype in states.layout.dtypes().items():
        if name in values:
            zeros = state_zeros(states.param, states.param.shape, dtype, name in states.layout.offloaded)
            states.tensors[name] = rewrap_like(zeros, states.param)
    states.import_external(values)


def decoded(param: Tensor, layout: StateLayout, given: Mapping[str, Any], who: str) -> dict[str, Any]:
    """The given states, with native forms decoded as in a load. Raises KeyError, TypeError or ValueError."""
    return {name: _decoded(param, layout, name, value, who) for name, value in given.items()}


def _decoded(param: Tensor, layout: StateLayout, name: str, value: Any, who: str) -> Any:
    if name not in layout.names or not isinstance(value, Mapping):
        return value
    label, kind = f"{who}: {name}", layout.kind(name)
    if kind is Kind.MASTER and is_remainder(value):
        check_remainder(param, value, label)
        loaded = unpack_remainder(param, value, who)
        if misfits([(param, loaded)]):
            raise loaded.misfit()
        return loaded
    check_packed(param, kind, value, label)
    return unpack_state(param, kind, value)


def take_steps(groups: Sequence[Group], state: Mapping[Tensor, Any]) -> None:
    """Let groups have the steps that others have put into states, where torch.optim.AdamW has them.

    Raises TypeError or ValueError for what is no step.
    """
    for number, group in enumerate(groups):
        label, states = f"param group {number}", [tensors for param in group["params"] if (tensors := state.get(param))]
        if not (given_steps := [whole_step(tensors[STEP], label) for tensors in states if STEP in tensors]):
            continue
        steps = [*given_steps, *[int(group.get(STEP, 0))] * (len(states) - len(given_steps))]
        group[STEP] = latest = max(steps)
        for tensors in states:
            tensors.pop(STEP, None)
        warn_of_earlier_steps(sum(step != latest for step in steps), len(steps), f"{label}, at step {latest}")


def whole_step(value: Any, label: str) -> int:
    """A step as state dicts have it. Raises TypeError or ValueError for what is none."""
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{label}: step: expected a number, got {type(value).__name__}")
    step = float(value)
    if not (step >= 0.0 and step.is_integer()):
        raise ValueError(f"{label}: step: expected a whole number >= 0, got {value}")
    return int(step)


def warn_of_earlier_steps(behind: int, count: int, label: str) -> None:
    """Warn if ``behind`` of ``count`` parameters were saved at an earlier step than they continue from."""
    if behind:
        text = f"{label}: {behind} of {count} parameters were saved at an earlier step than their group's latest"
        reason = "the step is shared by a param group, so they continue from the latest"
        warnings.warn(f"{text}; {reason}", stacklevel=callers_level())
