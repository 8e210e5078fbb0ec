"""State dicts: their two forms, and loading.

Unscaled: every moment and master is a parameter-shaped FP32 tensor, a DTensor with the parameter's mesh and
placements where the parameter is one, whatever the format it is kept in. So it loads into any format, on any world
size, and other tools can read it.

Native: block-scaled moments and masters, and remainders, as they are kept (``native.py``), BF16 moments as BF16
tensors; what is not cut by whole rows, one-dimensional parameters included, as in the unscaled form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fused_optim import adapters
from fused_optim.adapters import Update
from fused_optim.formats.dtypes import as_dtype
from fused_optim.formats.states import Kind
from fused_optim.memory import copies
from fused_optim.memory.layout import MASTER, STEP
from fused_optim.memory.uploads import uploading
from fused_optim.options.checks import check_saved_group, describe
from fused_optim.options.reading import CheckpointDevice, CheckpointFormat
from fused_optim.options.table import FLAGS, read_group
from fused_optim.rules import RULE_KEY, Rule, StateSpec
from fused_optim.sharding.collective import any_rank, failing_together
from fused_optim.sharding.dtensor import cut_by_rows, local_tensor, placed_part
from fused_optim.state.given import warn_of_earlier_steps, whole_step
from fused_optim.state.groups import (
    DESCRIPTION,
    KEYED_BY_NAMES,
    NATIVE,
    VERSION,
    Group,
    check_rule,
    description,
    saved_group,
)
from fused_optim.state.native import check_packed, pack_state, unpack_state
from fused_optim.state.param_state import ParamState, read_parameter
from fused_optim.state.remainders import (
    LoadedRemainder,
    check_remainder,
    is_remainder,
    misfits,
    unpack_remainder,
)
from fused_optim.state.store import StateStore
from fused_optim.state.values import Stored

CANNOT_LOAD_ELSEWHERE = "another rank cannot load its part of the state dict; its error says why"
# What learning-rate schedulers keep in param groups, beside their `initial_...`.
_SCHEDULERS_KEYS = ("max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")


@dataclass(frozen=True)
class Options:
    """How states are converted.

    ``form``: "unscaled" or "native". ``device``: None or "cpu", where copies are made; "stager": none are, see
    ``values.py``. ``int16_remainders``: the unscaled form keeps these instead of FP32 masters, as TransformerEngine's
    does.
    """

    form: CheckpointFormat
    device: CheckpointDevice
    int16_remainders: bool


def numbers_of(store: StateStore) -> dict[Tensor, int]:
    """Each parameter's place in the param groups; of one that is there several times the first, as in torch.optim."""
    numbers: dict[Tensor, int] = {}
    for number, param in enumerate(store.params):
        numbers.setdefault(param, number)
    return numbers


def packed(store: StateStore) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """The states and the param groups as torch.optim packs them: parameters are numbers. Tensors go by reference.

    Users' entries of ``optimizer.state``, whose keys are no tensors, are as they are. States of parameters that have
    left the groups stay where they are: they may come back.
    """
    numbers = numbers_of(store)
    state: dict[Any, Any] = {key: value for key, value in store.state.items() if not isinstance(key, Tensor)}
    state |= {numbers[param]: store.state[param] for param in numbers if store.state.get(param)}
    groups = [{**group, "params": [numbers[param] for param in group["params"]]} for group in store.groups]
    return state, groups


def make_state_dict(store: StateStore, options: Options) -> dict[str, Any]:
    """A state dict with the states in the form that was chosen.

    FP32 states, and BF16 ones in the native form, go by reference; for a stager all that is not converted.
    """
    state, groups = packed(store)
    numbers = numbers_of(store)
    state |= {i: converted(store[param], options) for param, i in numbers.items() if param in store}
    is_packed = any(_is_any_packed(state.get(i, {}), store.state_names) for i in numbers.values())
    for group in groups:
        rule = store.rule.for_group(group)
        formats = {spec.option: as_dtype(group[spec.option]) for spec in rule.states}
        group |= saved_group(group, formats, description(rule), native=is_packed, keyed=store.is_keyed_by_names)
    return {"state": state, "param_groups": groups}


def converted(states: ParamState, options: Options) -> dict[str, Any]:
    """The states of one parameter in the form that was chosen."""
    layout, native = states.layout, options.form == "native"
    packed = native and cut_by_rows(states.param)
    out: dict[str, Any] = dict(states.tensors)
    for name, dtype in layout.dtypes().items():
        if packed and layout.is_encoded(name):
            out[name] = pack_state(states, name, options.device)
        elif (layout.is_encoded(name) or not native) and not (dtype == torch.int16 and options.int16_remainders):
            out[name] = states.unscaled(name, options.device)
    return out


@dataclass
class _Loaded:
    """This rank's parts of a parameter's saved states."""

    states: dict[str, Tensor | Stored] = field(default_factory=dict)  # the rule's; empty: there are none
    master: Tensor | Stored | LoadedRemainder | None = None
    others: dict[str, Any] = field(default_factory=dict)  # what users keep beside the states


@dataclass(frozen=True)
class Checked:
    """A state dict that fits an optimizer, by the parameters' ids in it."""

    groups: list[dict[str, Any]]
    steps: list[int]
    params: dict[Any, Tensor]
    states: dict[Any, Mapping[str, Any]]  # of the parameters whose states are to be loaded
    users: dict[Any, Any]  # entries under other keys
    who: dict[Any, str]  # the parameters for messages


def check_state_dict(store: StateStore, state_dict: dict[str, Any], keep: Collection[Tensor] = ()) -> Checked:
    """Raise for a state dict that does not fit an optimizer. No communication, and nothing is changed.

    In either form, torch.optim.Adam(W)'s, TransformerEngine's or Apex's. Parameters in ``keep`` keep their states.
    """
    groups, names = store.groups, store.state_names
    saved_groups = list(map(_without_repeats, state_dict["param_groups"]))
    check_version(saved_groups, "the state dict")
    params = _match_groups(groups, saved_groups)
    state = {id_: states for id_, states in state_dict["state"].items() if id_ in params}
    for group, saved in zip(groups, saved_groups, strict=True):
        check_rule(store.rule.for_group(group), [saved], "the state dict")
    _check_form(saved_groups, state, names, params.values())
    present = {id_: param for id_, param in params.items() if _has_any(state.get(id_, {}), names)}
    steps = []
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        label = f"param group {index} of the state dict"
        timed = names if store.rule.for_group(group).needs_step else ()
        steps.append(group_step(saved, [state.get(id_, {}) for id_ in saved["params"]], timed, label))
        _check_group(store, group, saved, present, steps[-1], label)
    states = {id_: state.get(id_, {}) for id_, param in params.items() if param not in keep}
    who, rules = _descriptions(groups, saved_groups), store.rules()
    for id_, saved in states.items():
        check_states(rules[params[id_]], params[id_], saved, who[id_])
    known = {*map(str, params)}  # dcp.load puts numbers under the texts of numbers
    users = {key: value for key, value in state_dict["state"].items() if str(key) not in known and type(key) is not int}
    return Checked(saved_groups, steps, params, states, users, who)


def load_checked(store: StateStore, checked: Checked) -> None:
    """Load a state dict that every rank has checked: a collective over the parameters' meshes.

    Its tensors are not changed or kept. Remainders whose parameters are not there yet wait for them in ``store``.
    """
    params = checked.params
    with failing_together(store.params, CANNOT_LOAD_ELSEWHERE):
        rules = store.rules()
        loaded = {
            id_: _unpack(params[id_], saved, rules[params[id_]].states, checked.who[id_])
            for id_, saved in checked.states.items()
        }
    misfit = _any_misfit(loaded, params)
    copies.wait_for_saves()
    for group, saved, step in zip(store.groups, checked.groups, checked.steps, strict=True):
        taken = {key: copy.deepcopy(saved[key]) for key in taken_keys(store, group, saved)}
        group.update({**taken, **read_group(taken, store.defaults)})
        group["step"] = step
    if described := _flags(checked.groups):  # goes on as it was; another optimizer has rounded in no way of ours
        store.rounds_by_names = any(flags & KEYED_BY_NAMES for flags in described)
    remaining = []
    with uploading():
        for id_, parts in loaded.items():
            remaining += _write(store, params[id_], parts, misfit)
    adapters.write_loaded(remaining)
    store.is_untouched = False
    store.keep_entries(_copied(checked.users))
    store.record_versions()


def run_pre_hooks(hooks: Iterable[Callable[..., Any]], optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of the state dict after hooks that run before a load, as in torch.optim's loader."""
    state_dict = state_dict.copy()
    for hook in hooks:
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict


def _without_repeats(saved: dict[str, Any]) -> dict[str, Any]:
    """torch.optim lists a parameter as often as it was given."""
    return {**saved, "params": [*dict.fromkeys(saved["params"])]} if "params" in saved else saved


def _match_groups(groups: Sequence[Group], saved_groups: list[dict[str, Any]]) -> dict[Any, Tensor]:
    if len(groups) != len(saved_groups):
        raise ValueError(f"the state dict has {len(saved_groups)} param groups, the optimizer {len(groups)}")
    ids: dict[Any, Tensor] = {}
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            expected, got = len(group["params"]), len(saved["params"])
            raise ValueError(f"param group {index}: the state dict has {got} parameters, the optimizer {expected}")
        ids.update(zip(saved["params"], group["params"], strict=True))
    count = sum(len(group["params"]) for group in groups)
    if len(ids) != count:
        raise ValueError(f"the state dict lists {len(ids)} different parameters, the optimizer has {count}")
    return ids


def _descriptions(groups: Sequence[Group], saved_groups: list[dict[str, Any]]) -> dict[Any, str]:
    """The parameters for messages, by their ids in the state dict; with names where either side has them."""
    descriptions: dict[Any, str] = {}
    for group, saved in zip(groups, saved_groups, strict=True):
        names = group.get("param_names") or saved.get("param_names")
        if not isinstance(names, list) or len(names) != len(group["params"]):
            names = [None] * len(group["params"])
        for id_, param, name in zip(saved["params"], group["params"], names, strict=True):
            descriptions[id_] = describe(param, len(descriptions), name)
    return descriptions


def group_step(
    saved: Mapping[str, Any], states: Sequence[Mapping[str, Any]], names: Collection[str], label: str
) -> int:
    """The group's step; where it has none, the largest of its parameters' own (torch.optim).

    ``states``: of the group's parameters. ``names``: of states that mean nothing without a step.
    """
    if STEP in saved:
        return whole_step(saved[STEP], label)
    steps = [whole_step(saved_states[STEP], label) for saved_states in states if STEP in saved_states]
    if steps:
        latest = max(steps)
        warn_of_earlier_steps(sum(step != latest for step in steps), len(steps), f"{label}, at step {latest}")
        return latest
    if any(_has_any(saved_states, names) for saved_states in states):
        raise ValueError("the state dict has states but no step, in a param group or per parameter; it is not guessed")
    return 0


def _check_group(
    store: StateStore,
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    present: Mapping[Any, Tensor],
    step: int,
    label: str,
) -> None:
    try:
        taken = {key: saved[key] for key in taken_keys(store, group, saved)}
        check_saved_group({**group, **taken, **read_group(taken, store.defaults)}, saved, store.rule)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{label}: {error}") from error
    trained = [param for param in group["params"] if param.requires_grad]
    if step and trained and not any(id_ in present for id_ in saved["params"]):
        raise RuntimeError(
            f"{label}: the state dict is at step {step} but holds no states for a param group of "
            f"{len(group['params'])} parameters; if it came through torch.distributed.checkpoint, call "
            "optimizer.zero_grad() before loading it"
        )


def taken_keys(store: StateStore, group: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The keys of a saved param group that are loaded: all of one of ours, users' own included.

    Of another optimizer's those that ``group`` has, and schedulers': others would stay in the group, and the next
    checkpoint to be loaded would have to have them. Formats are the running optimizer's choices.
    """
    kept = ("params", "param_names", STEP, *store.format_options, *DESCRIPTION, RULE_KEY)
    is_ours = not DESCRIPTION.keys().isdisjoint(saved)
    known = [
        key for key in saved if is_ours or key in group or key in _SCHEDULERS_KEYS or str(key).startswith("initial_")
    ]
    unset = [key for key in FLAGS if saved.get(key) is None]  # as another optimizer's defaults may be
    return [key for key in known if key not in (*kept, *unset)]


def check_version(saved_groups: Iterable[Mapping[str, Any]], label: str) -> None:
    """Raise ValueError for a newer version. One without description is another optimizer's or an older one's."""
    version = max((int(saved.get("fused_optim_version", VERSION)) for saved in saved_groups), default=VERSION)
    if version > VERSION:
        text = f"{label} has version {version}, this fused_optim reads versions up to {VERSION}: update fused_optim"
        raise ValueError(text)


def _check_form(
    saved_groups: list[dict[str, Any]],
    state: Mapping[Any, Mapping[str, Any]],
    names: Collection[str],
    params: Iterable[Tensor],
) -> None:
    """torch may lay a checkpoint against a state dict of another form and leave there what does not match."""
    described = _flags(saved_groups)
    native = any(flags & NATIVE for flags in described)
    packed = any(_is_any_packed(states, names) for states in state.values())
    comparable = described and any(state.values()) and any(p.requires_grad and cut_by_rows(p) for p in params)
    if comparable and packed != native:
        forms = ("unscaled", "native")
        raise ValueError(
            f"the checkpoint is {forms[native]} but its state dict has the states of one that is {forms[packed]}: set "
            f"optimizer.checkpoint_format = {forms[native]!r} before you take the state dict to load into"
        )


def _flags(saved_groups: list[dict[str, Any]]) -> list[int]:
    return [int(saved["fused_optim_native"]) for saved in saved_groups if "fused_optim_native" in saved]


def _is_any_packed(states: Mapping[str, Any], names: Collection[str]) -> bool:
    return any(_is_packed(states.get(name)) for name in names)


def _is_packed(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)  # torch makes {} of states that a flattened state dict lacks


def _has(saved: Mapping[str, Any], key: str) -> bool:
    return saved.get(key) is not None and (_is_packed(saved[key]) or not isinstance(saved[key], Mapping))


def _has_any(saved: Mapping[str, Any], names: Collection[str]) -> bool:
    """True if there are an optimizer's states, beside entries of users."""
    return not saved.keys().isdisjoint((*names, STEP))


def check_states(rule: Rule, param: Tensor, saved: Mapping[str, Any], who: str) -> None:
    """Raise KeyError, TypeError or ValueError for states that are not those of ``param``. No communication."""
    specs = rule.states
    if not _has_any(saved, [*(spec.name for spec in specs), MASTER]):
        return
    missing = [spec.name for spec in specs if not _has(saved, spec.name)]
    if missing:
        raise KeyError(f"{who}: the state dict lacks {' and '.join(missing)}")
    for spec in specs:
        check_state(param, spec.kind, saved[spec.name], f"{who}: {spec.name}")
    if _has(saved, MASTER):
        check_state(param, Kind.MASTER, saved[MASTER], f"{who}: {MASTER}")


def check_state(param: Tensor, kind: Kind, saved: Any, label: str) -> None:
    """Raise KeyError, TypeError or ValueError for what is no saved state, or master, of ``param``."""
    if kind is Kind.MASTER and is_remainder(saved):
        check_remainder(param, saved, label)
    elif _is_packed(saved):
        check_packed(param, kind, saved, label)
    else:
        _check_value(param, saved, label)


def _check_value(param: Tensor, value: Any, label: str) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.element_size() < 2:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{label}: expected an unscaled floating-point tensor, got {got}")
    if value.shape != param.shape:
        raise ValueError(f"{label}: expected shape {tuple(param.shape)}, the state dict has {tuple(value.shape)}")


def _unpack(param: Tensor, saved: Mapping[str, Any], specs: Sequence[StateSpec], who: str) -> _Loaded:
    """This rank's parts of states that were checked. A collective where they are not placed as ``param`` is."""
    names = [*(spec.name for spec in specs), MASTER]
    loaded = _Loaded(others=_others(param, saved, names))
    if not _has_any(saved, names):
        return loaded
    for spec in specs:
        loaded.states[spec.name] = read_state(param, spec.kind, saved[spec.name])
    if is_remainder(saved.get(MASTER)):
        loaded.master = unpack_remainder(param, saved[MASTER], who)
    elif _has(saved, MASTER):
        loaded.master = read_state(param, Kind.MASTER, saved[MASTER])
    return loaded


def read_state(param: Tensor, kind: Kind, saved: Any) -> Stored | Tensor:
    """This rank's part of a state, or of a master other than remainders, that was checked."""
    return unpack_state(param, kind, saved) if _is_packed(saved) else placed_part(saved, param)


def _others(param: Tensor, saved: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Users' own entries: copies of tensors on the parameter's device, other objects themselves."""
    others = {name: value for name, value in saved.items() if name not in (*names, STEP)}
    return _copied(others, local_tensor(param).device)


def _copied(values: dict[Any, Any], device: torch.device | None = None) -> dict[Any, Any]:
    """A copy of nested values with new tensors."""
    copied: dict[Any, Any] = tree_map_only(Tensor, lambda value: value.detach().to(device, copy=True), values)
    return copied


def _any_misfit(loaded: Mapping[Any, _Loaded], params: Mapping[Any, Tensor]) -> bool:
    """True if some parameter is not the one that its remainders belong to: a collective over these parameters' meshes.

    One is enough for all of them to wait: it is the model that has not been loaded.
    """
    checked = {params[id_]: parts.master for id_, parts in loaded.items() if isinstance(parts.master, LoadedRemainder)}
    checked = {param: remainder for param, remainder in checked.items() if remainder.checks is not None}
    return any_rank(checked, bool(misfits(checked.items())), False)[0]


def _write(store: StateStore, param: Tensor, loaded: _Loaded, misfit: bool) -> list[Update]:
    """Returns what is still to be written; see ``ParamState.write_master``."""
    store.pending.pop(param)
    if not loaded.states:
        store.forget(param)
        store.keep_others(param, loaded.others)
        return []
    store.create(param)
    store.keep_others(param, loaded.others)
    states = store[param]
    for name, value in loaded.states.items():
        states.write(name, value)
    master = loaded.master
    if master is None:  # seeded from the parameter
        states.seed_master(read_parameter(param).float())
        return []
    if isinstance(master, LoadedRemainder):
        _write_remainder(store, states, master, misfit)
        return []
    return states.write_master((master.read() if isinstance(master, Stored) else master).float())


def _write_remainder(store: StateStore, states: ParamState, loaded: LoadedRemainder, misfit: bool) -> None:
    """Write remainders, or keep them until the parameter is there. Without checks only those that need it wait."""
    needs_parameter = states.layout.master is not loaded.kind
    waits = needs_parameter if loaded.checks is None else misfit
    if not (waits and needs_parameter):
        states.write_remainder(loaded)
    if waits:
        store.pending[states.param] = states.hold_remainder(loaded)
