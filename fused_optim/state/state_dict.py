"""State dicts: their two forms, and loading.

Unscaled: every moment and master is a parameter-shaped FP32 tensor, a DTensor with the parameter's mesh and
placements where the parameter is one, whatever the format it is kept in. So it loads into any format, on any world
size, and other tools can read it.

Native: block-scaled moments and remainders as they are kept (``native.py``), BF16 moments as BF16 tensors; what is not
cut by whole rows, one-dimensional parameters included, as in the unscaled form.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fused_optim import adapters
from fused_optim.adapters import Update
from fused_optim.formats import Master
from fused_optim.sharding.collective import FailedElsewhere, announce_failure, any_rank
from fused_optim.sharding.dtensor import cut_by_rows, local_tensor, placed_part, rewrap_like
from fused_optim.slots import MASTER, MOMENTS
from fused_optim.state.native import (
    StoredMoment,
    StoredRemainder,
    pack_moment,
    pack_remainder,
    unpack_moment,
    unpack_remainder,
)
from fused_optim.state.param_state import ParamState, read_parameter
from fused_optim.state.store import StateStore
from fused_optim.validate import CheckpointFormat, check_checkpoint_device, check_checkpoint_format, describe

VERSION = 1
# What a checkpoint says of itself, as numbers and in every param group: torch.distributed.checkpoint keeps no metadata,
# and its flattened form only such keys of a param group as the running optimizer has.
DESCRIPTION = {"fused_optim_version": VERSION, "fused_optim_native": 0}
# The running optimizer's choices, which a checkpoint does not change. Saved as text: torch.distributed.checkpoint
# gathers and offloads no torch.dtype.
_OWN_KEYS = ("exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass
class _Loaded:
    """This rank's parts of a parameter's saved states."""

    moments: dict[str, Tensor | StoredMoment]
    master: Tensor | StoredRemainder | None


@dataclass(frozen=True)
class Options:
    """How states are converted.

    ``form``: "unscaled" or "native". ``device``: None or "cpu", where copies are made. ``int16_remainders``: the
    unscaled form keeps these instead of FP32 masters, as TransformerEngine's does.
    """

    form: CheckpointFormat
    device: Literal["cpu"] | None
    int16_remainders: bool


def convert(store: StateStore, state_dict: dict[str, Any], options: Options) -> dict[str, Any]:
    """A state dict of torch.optim's with the states in the form that was chosen.

    FP32 states, and BF16 ones in the native form, go by reference.
    """
    check_checkpoint_format(options.form)
    check_checkpoint_device(options.device)
    params = dict(enumerate(store.params))
    state = {
        key: _converted(store[params[key]], options) if key in params else states
        for key, states in state_dict["state"].items()
        if states
    }
    description = {**DESCRIPTION, "fused_optim_native": int(any(map(_any_packed, state.values())))}
    groups = [
        {**group, **{key: str(group[key]) for key in _OWN_KEYS}, **description} for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": groups}


def _converted(states: ParamState, options: Options) -> dict[str, Any]:
    slots, native = states.slots, options.form == "native"
    packed = native and cut_by_rows(states.param)
    out: dict[str, Any] = dict(states.tensors)
    for name in MOMENTS:
        if packed and slots.format(name).scaled:
            out[name] = pack_moment(states, name, options.device)
        elif slots.format(name).scaled or not native:
            out[name] = _unscaled_moment(states, name, options.device)
    if slots.master.is_remainder:
        if packed:
            out[MASTER] = pack_remainder(states, options.device)
        elif slots.master is Master.REMAINDER8 or not options.int16_remainders:
            out[MASTER] = rewrap_like(states.read_master(options.device), states.param)
    return out


def _unscaled_moment(states: ParamState, name: str, device: str | None) -> Tensor:
    if states.slots.format(name).dtype(name) == torch.float32:
        return states.tensors[name]
    return rewrap_like(states.read_moment(name, device), states.param)


def load(
    store: StateStore, groups: list[dict[str, Any]], state_dict: dict[str, Any], keep: Collection[Tensor] = ()
) -> None:
    """Load a state dict in either form, or torch.optim.Adam(W)'s with one ``step`` per parameter.

    Everything is checked before the first state is written; ``state_dict`` and its tensors are not changed or kept.
    The parameters in ``keep`` keep their states.
    """
    saved_groups = state_dict["param_groups"]
    _check_version(saved_groups)
    saved_ids = _match_groups(groups, saved_groups)
    state = state_dict["state"]
    present = {id_: param for id_, param in saved_ids.items() if state.get(id_)}
    known = {id_: param for id_, param in present.items() if param not in keep}
    who = _descriptions(groups, saved_groups)
    packed = {id_: param for id_, param in known.items() if _is_packed(state[id_].get(MASTER))}
    reduced = [param for param in known.values() if adapters.needs_collective(param)]
    with _failing_together([*packed.values(), *reduced]):
        _check_form(saved_groups, state, saved_ids.values())
        steps = [_group_step(saved, state) for saved in saved_groups]
        for group, saved, step in zip(groups, saved_groups, steps, strict=True):
            _check_group(group, saved, present, step)
        loaded = {id_: _loaded_states(known[id_], state[id_], who[id_]) for id_ in known}
    _load_remainders(packed, state, who, loaded)

    kept = ("params", "param_names", *_OWN_KEYS, *DESCRIPTION)
    for group, saved, step in zip(groups, saved_groups, steps, strict=True):
        group.update({key: _copied(value) for key, value in saved.items() if key not in kept})
        group["step"] = step
    remaining = []
    for id_, param in saved_ids.items():
        if id_ in loaded:
            remaining += _write_states(store, param, loaded[id_])
        elif param not in keep:
            store.forget(param)
    adapters.write(remaining, advance=False)
    store.mark()


@contextmanager
def _failing_together(params: Collection[Tensor]) -> Iterator[None]:
    """Where the body fails on one rank of the meshes, raise on all: what follows would wait for that rank."""
    try:
        yield
    except Exception:
        announce_failure(params)
        raise
    if any_rank(params, False, False)[1]:
        raise FailedElsewhere("another rank cannot load its part of the state dict; its error says why")


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


def _descriptions(groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]) -> dict[Any, str]:
    """The parameters for messages, by their ids in the state dict; with names where either side has them."""
    found: dict[Any, str] = {}
    for group, saved in zip(groups, saved_groups, strict=True):
        names = group.get("param_names") or saved.get("param_names")
        if not isinstance(names, list) or len(names) != len(group["params"]):
            names = [None] * len(group["params"])
        for id_, param, name in zip(saved["params"], group["params"], names, strict=True):
            found[id_] = describe(param, len(found), name)
    return found


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


def _check_version(saved_groups: list[dict[str, Any]]) -> None:
    """A state dict without description is accepted: it is another optimizer's or an older one's."""
    version = max((int(saved.get("fused_optim_version", VERSION)) for saved in saved_groups), default=VERSION)
    if version > VERSION:
        raise ValueError(
            f"the state dict has version {version}, this fused_optim reads versions up to {VERSION}: update fused_optim"
        )


def _check_form(
    saved_groups: list[dict[str, Any]], state: Mapping[Any, Mapping[str, Any]], params: Iterable[Tensor]
) -> None:
    """torch may lay a checkpoint against a state dict of another form and leave there what does not match."""
    described = [saved["fused_optim_native"] for saved in saved_groups if "fused_optim_native" in saved]
    native, packed = any(described), any(map(_any_packed, state.values()))
    comparable = described and any(state.values()) and any(p.requires_grad and cut_by_rows(p) for p in params)
    if comparable and packed != native:
        forms = ("unscaled", "native")
        raise ValueError(
            f"the checkpoint is {forms[native]} but its state dict has the states of one that is {forms[packed]}: set "
            f"optimizer.checkpoint_format = {forms[native]!r} before you take the state dict to load into"
        )


def _any_packed(states: Mapping[str, Any]) -> bool:
    return any(map(_is_packed, states.values()))


def _is_packed(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)  # torch makes {} of states that a flattened state dict lacks


def _has(saved: Mapping[str, Any], key: str) -> bool:
    return saved.get(key) is not None and (_is_packed(saved[key]) or not isinstance(saved[key], Mapping))


def _loaded_states(param: Tensor, saved: Mapping[str, Any], who: str) -> _Loaded:
    """Without remainders."""
    missing = [moment for moment in MOMENTS if not _has(saved, moment)]
    if missing:
        raise KeyError(f"{who}: the state dict lacks {' and '.join(missing)}")
    loaded = _Loaded({}, None)
    for name in MOMENTS:
        value, what = saved[name], f"{who}: {name}"
        packed = _is_packed(value)
        loaded.moments[name] = unpack_moment(param, name, value, what) if packed else _local_value(param, value, what)
    if _has(saved, MASTER) and not _is_packed(saved[MASTER]):
        loaded.master = _local_value(param, saved[MASTER], f"{who}: {MASTER}")
    return loaded


def _load_remainders(
    packed: Mapping[Any, Tensor],
    state: Mapping[Any, Mapping[str, Any]],
    who: Mapping[Any, str],
    loaded: dict[Any, _Loaded],
) -> None:
    """Add saved remainders to ``loaded``. Raises on every rank if any rank's part of a parameter does not fit them."""
    wrong: list[str] = []
    for id_, param in packed.items():
        loaded[id_].master, fits = unpack_remainder(param, state[id_][MASTER], f"{who[id_]}: {MASTER}")
        if not fits:
            wrong.append(who[id_])
    if any_rank(packed.values(), bool(wrong), False)[0]:
        raise (ValueError if wrong else FailedElsewhere)(
            f"{wrong[0] if wrong else 'a parameter of another rank'}: the state dict has the low bits of its master, "
            "but the parameter is not the one that they belong to. Load the model's checkpoint of the same step first, "
            "without changing its precision; or save with checkpoint_format='unscaled', which has whole masters"
        )


def _local_value(param: Tensor, value: Any, what: str) -> Tensor:
    """This rank's part of an unscaled state."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.element_size() < 2:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{what}: expected an unscaled floating-point tensor, got {kind}")
    if value.shape != param.shape:
        raise ValueError(f"{what}: expected shape {tuple(param.shape)}, the state dict has {tuple(value.shape)}")
    return placed_part(value, param)


def _write_states(store: StateStore, param: Tensor, loaded: _Loaded) -> list[Update]:
    """Returns what is still to be written; see ``ParamState.write_master``."""
    store.create(param)
    states = store[param]
    for name, value in loaded.moments.items():
        if isinstance(value, StoredMoment):
            value.write(states, name)
        else:
            states.write_moment(name, value)
    master = loaded.master
    if master is None:  # seeded from the parameter
        states.write_master(read_parameter(param).float())
        return []  # which is not to be encoded again
    if isinstance(master, StoredRemainder):
        master = master.master(local_tensor(param.detach()))
    return states.write_master(master.float())


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
