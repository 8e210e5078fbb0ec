"""What constructors and param groups are given: Python objects, or the text that configs have for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from fused_optim.formats.dtypes import as_dtype

CheckpointFormat = Literal["unscaled", "native", "torch"]
CheckpointDevice = Literal["cpu", "stager"] | None

# --- for type checkers: keyword options, by the classes that have them. All else about them is in options/table.py ----


class OptionsOfAll(TypedDict, total=False):
    """Of every optimizer here, and of neither Apex's nor TransformerEngine's FusedAdam."""

    state_dtype: torch.dtype | str | None
    master_bits: int | None
    stochastic_rounding: bool
    seed: int
    skip_nonfinite: bool
    offload_states: bool
    offload_fraction: float
    checkpoint_format: CheckpointFormat
    checkpoint_device: CheckpointDevice
    fused: bool | None
    foreach: bool | None
    differentiable: bool


class LionOptions(OptionsOfAll, total=False):
    """Of :class:`fused_optim.FusedLion`, and of every other native class."""

    capturable: bool
    maximize: bool
    exp_avg_dtype: torch.dtype | str | None


class AdamOptions(LionOptions, total=False):
    """Of :class:`fused_optim.FusedAdam` and of FusedMuon's groups with ``algorithm="adamw"``."""

    bias_correction: bool
    exp_avg_sq_dtype: torch.dtype | str | None


class Options(AdamOptions, total=False):
    """Of :class:`fused_optim.FusedAdam`."""

    decoupled_weight_decay: bool | None


class MuonOptions(AdamOptions, total=False):
    """Of :class:`fused_optim.FusedMuon`, beside torch.optim.Muon's."""

    ns_dtype: torch.dtype | str
    experts: bool
    momentum_dtype: torch.dtype | str | None
    betas: Sequence[float]


class OptionsBesideTransformerEngine(OptionsOfAll, total=False):
    """Of drop-in classes, and not of TransformerEngine's FusedAdam."""

    maximize: bool
    decoupled_weight_decay: bool | None
    param_remainder_bits: int | None
    unscales_gradients: bool


class OptionsBesideApex(OptionsBesideTransformerEngine, total=False):
    """Of drop-in classes, and not of Apex's FusedAdam."""

    master_weight_dtype: torch.dtype | str
    store_param_remainders: bool | None
    exp_avg_dtype: torch.dtype | str | None
    exp_avg_sq_dtype: torch.dtype | str | None
    use_decoupled_grad: bool


# --- numbers ----------------------------------------------------------------------------------------------------------


def number_of(value: Any) -> Any:
    """A number, also as text such as ``1e-4``, which YAML reads as text, or as a tensor or array of one element.

    All else as it is, to be checked.
    """
    if not isinstance(value, str):
        return _only_element(value)
    try:
        return float(value)
    except ValueError:
        return value


def _only_element(value: Any) -> Any:
    """Of a tensor or a NumPy array or scalar of one element this; all else as it is."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    return value.item() if getattr(value, "size", None) == 1 and hasattr(value, "item") else value


def names_in(group: Mapping[str, Any]) -> Sequence[str | None]:
    """The names of a group's parameters; None where they have none. Raises ValueError where some have one."""
    count = len(group["params"])
    names: Sequence[str | None] = group.get("param_names", [None] * count)
    if len(names) != count:
        text = f"a param group has {count} parameters but {len(names)} names: change its params and param_names alike"
        raise ValueError(f"{text}; its names are {', '.join(map(repr, names[:5]))}{', ...' * (len(names) > 5)}")
    return names


def without_repeats(group: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The parameters of a group, and their names if it has some, each parameter once.

    torch warns of repeats, and updates them repeatedly; here shards are updated at the same time.
    """
    names_in(group)
    first = {param: index for index, param in reversed([*enumerate(group["params"])])}
    return {
        key: [group[key][index] for index in sorted(first.values())]
        for key in ("params", "param_names")
        if key in group
    }


def betas_of(given: Any) -> Any:
    """A tuple of numbers, from any sequence, tensor or array, or from text such as "(0.9, 0.95)"."""
    if isinstance(given, str):
        given = given.strip("()[] ").split(",")
    if hasattr(given, "tolist"):
        given = given.tolist()
    return tuple(map(number_of, given)) if isinstance(given, Sequence) else given


def whole_number_of(name: str, value: Any) -> int:
    """A whole number, also as text. Raises TypeError for all else."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not (isinstance(value, str) or number == value):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    return number


# --- flags ------------------------------------------------------------------------------------------------------------


def flag_of(name: str, value: Any) -> bool:
    """True or False, also as a number, as text, as a tensor or array of one element, or as a list of tensors.

    A list of tensors goes by its truth: callers of Apex's and TransformerEngine's optimizers pass the masters
    themselves as ``master_weights``. Raises TypeError for all else; other text would be true whatever it says.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        found: Any = {"true": True, "false": False}.get(value.lower())
    elif isinstance(value, (list, tuple)) and all(isinstance(each, Tensor) for each in value):
        found = bool(value)
    else:
        found = _only_element(value)
    if not isinstance(found, (Tensor, str)) and isinstance(found, (bool, int, float)) and found in (True, False):
        return bool(found)
    shown = repr(value) if isinstance(value, str) else type(value).__name__
    raise TypeError(f"{name}: expected True or False, got {shown}")


# --- dtypes -----------------------------------------------------------------------------------------------------------


def spelled_alike(dtypes: Mapping[str, Any]) -> dict[str, Any]:
    """Dtypes as names where one of them is given by its name: what came from a config can be written as JSON again."""
    by_name = any(isinstance(dtype, str) for dtype in dtypes.values())
    return {key: _name_of(dtype) if by_name else dtype for key, dtype in dtypes.items()}


def _name_of(dtype: Any) -> Any:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def asks_for_another(key: str, asked: Any, own: Any) -> bool:
    """Whether a param group asks for another value of an option of the whole optimizer, in vain."""
    if asked is None:
        return False
    if isinstance(own, bool):
        return flag_of(key, asked) != own
    return bool((as_dtype(asked) if isinstance(own, torch.dtype) else number_of(asked)) != own)
