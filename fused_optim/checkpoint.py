"""State dicts: the "unscaled" form and its inverse.

Unscaled: every moment and master is a parameter-shaped FP32 tensor, a DTensor with the parameter's mesh and
placements where the parameter is one, whatever the format it is kept in. So it loads into any format, on any world
size, and other tools can read it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fused_optim.dtensor import local_tensor, rewrap_like
from fused_optim.formats import Master
from fused_optim.state import MASTER, MOMENTS, read_master, read_moment, write_master, write_moment
from fused_optim.validate import describe

if TYPE_CHECKING:
    from fused_optim.adam import FusedAdam

# The running optimizer's choices, which a checkpoint does not change. Saved as text: torch.distributed.checkpoint
# gathers and offloads no torch.dtype.
_OWN_KEYS = ("exp_avg_dtype", "exp_avg_sq_dtype")


def unscale(optimizer: FusedAdam, state_dict: dict[str, Any]) -> dict[str, Any]:
    """State-dict post-hook: replace stored states by unscaled ones. FP32 states are passed by reference."""
    params = dict(enumerate(chain.from_iterable(g["params"] for g in optimizer.param_groups)))
    state = {
        key: _unscaled_states(optimizer, params[key], states) if key in params else states
        for key, states in state_dict["state"].items()
        if states
    }
    groups = [{**group, **{key: str(group[key]) for key in _OWN_KEYS}} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}


def _unscaled_states(optimizer: FusedAdam, param: Tensor, states: dict[str, Any]) -> dict[str, Any]:
    slots = optimizer._slots[param]
    out = dict(states)
    for name in MOMENTS:
        if slots.format(name).dtype(name) != torch.float32:
            out[name] = rewrap_like(read_moment(states, slots, name), param)
    if slots.master in (Master.REMAINDER16, Master.REMAINDER8):
        out[MASTER] = rewrap_like(read_master(param, states, slots), param)
    return out


def load(optimizer: FusedAdam, state_dict: dict[str, Any]) -> None:
    """Load an unscaled state dict, or torch.optim.Adam(W)'s with one ``step`` per parameter.

    Everything is checked before the first state is written; ``state_dict`` and its tensors are not changed or kept.
    """
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    saved_ids = _match_groups(groups, saved_groups)
    state = state_dict["state"]
    known = {id_: param for id_, param in saved_ids.items() if state.get(id_)}
    steps = [_group_step(saved, state) for saved in saved_groups]
    for group, saved, step in zip(groups, saved_groups, steps, strict=True):
        _check_group(group, saved, known, step)
    locals_ = {id_: _local_states(optimizer, known[id_], state[id_]) for id_ in known}

    for group, saved, step in zip(groups, saved_groups, steps, strict=True):
        options = {key: value for key, value in saved.items() if key not in ("params", "param_names", *_OWN_KEYS)}
        group.update({key: _copied(value) for key, value in options.items()})
        group["step"] = step
    for id_, param in saved_ids.items():
        if id_ in locals_:
            _write_states(optimizer, param, locals_[id_])
        else:
            optimizer._forget(param)


def _match_groups(groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]) -> dict[Any, Tensor]:
    if len(groups) != len(saved_groups):
        raise ValueError(f"the state dict has {len(saved_groups)} param groups, the optimizer {len(groups)}")
    ids: dict[Any, Tensor] = {}
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            expected, got = len(group["params"]), len(saved["params"])
            raise ValueError(f"param group {index}: the state dict has {got} parameters, the optimizer {expected}")
        ids.update(zip(saved["params"], group["params"], strict=True))
    return ids


def _group_step(saved: Mapping[str, Any], state: Mapping[Any, Mapping[str, Any]]) -> int:
    """The group's step; from the parameters' own (torch.optim) the largest."""
    if "step" in saved:
        return int(saved["step"])
    own = [int(state[id_]["step"]) for id_ in saved["params"] if "step" in state.get(id_, {})]
    if own:
        behind = sum(step != max(own) for step in own)
        if behind:
            text = (
                f"{behind} of {len(own)} parameters were saved at an earlier step than the group's latest, {max(own)}"
            )
            warnings.warn(
                f"{text}; the step is shared by a param group, so they continue from the latest", stacklevel=3
            )
        return max(own)
    if any(state.get(id_) for id_ in saved["params"]):
        raise ValueError("the state dict has moments but no step, in a param group or per parameter; it is not guessed")
    return 0


def _check_group(group: Mapping[str, Any], saved: Mapping[str, Any], known: Mapping[Any, Tensor], step: int) -> None:
    if saved.get("amsgrad"):
        raise ValueError("the state dict was saved with amsgrad=True, which is not supported")
    trained = [param for param in group["params"] if param.requires_grad]
    if step and trained and not any(id_ in known for id_ in saved["params"]):
        raise RuntimeError(
            f"the state dict is at step {step} but holds no states for a param group of {len(group['params'])} "
            "parameters; if it came through torch.distributed.checkpoint, call optimizer.zero_grad() before loading it"
        )


def _local_states(optimizer: FusedAdam, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    index, name = optimizer._identify(param)
    missing = [moment for moment in MOMENTS if moment not in saved]
    if missing:
        raise KeyError(f"{describe(param, index, name)}: the state dict lacks {' and '.join(missing)}")
    return {
        key: _local_value(param, saved[key], f"{describe(param, index, name)}: {key}")
        for key in (*MOMENTS, MASTER)
        if saved.get(key) is not None
    }


def _local_value(param: Tensor, value: Any, what: str) -> Tensor:
    """This rank's part of a saved state."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.element_size() < 2:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{what}: expected an unscaled floating-point tensor, got {kind}")
    if value.shape != param.shape:
        raise ValueError(f"{what}: expected shape {tuple(param.shape)}, the state dict has {tuple(value.shape)}")
    if isinstance(value, DTensor) and isinstance(param, DTensor):
        if (value.device_mesh, value.placements) != (param.device_mesh, param.placements):
            value = value.redistribute(param.device_mesh, param.placements)
        return local_tensor(value)
    if isinstance(param, DTensor):  # a full tensor, the same on every rank
        return local_tensor(distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None))
    return value.full_tensor() if isinstance(value, DTensor) else value


def _write_states(optimizer: FusedAdam, param: Tensor, values: dict[str, Tensor]) -> None:
    optimizer.initialize_state(param)
    states, slots = optimizer.state[param], optimizer._slots[param]
    for name in MOMENTS:
        write_moment(states, slots, name, values[name])
    if MASTER in values:
        write_master(param, states, slots, values[MASTER])
    else:  # seeded from the parameter
        write_master(param, states, slots, local_tensor(param.detach()).float())


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
