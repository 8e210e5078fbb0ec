"""What constructors and param groups are given: Python objects, or the text that configs have for them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from fused_optim.formats.dtypes import as_dtype

F = TypeVar("F", bound=Callable[..., Any])

CheckpointFormat = Literal["unscaled", "native", "torch"]
CheckpointDevice = Literal["cpu", "stager"] | None

# Of torch's optimizers: which of its implementations is to run. Here they say nothing, and are no keys of param groups.
IMPLEMENTATIONS = ("fused", "foreach")
TORCHS_OPTIONS = (*IMPLEMENTATIONS, "differentiable", "decoupled_weight_decay")
FLAGS = ("amsgrad", "bias_correction", "maximize")  # of param groups
NUMBERS = ("lr", "eps", "weight_decay")  # of param groups, beside the betas
# Words of earlier releases' constructors, and what to write instead.
REMOVED = {
    "adam_w_mode": "decoupled_weight_decay=False for torch.optim.Adam's weight decay, True for AdamW's",
    "master_weights": "master_bits=32 for exact FP32 masters, the default, or master_bits=0 for none",
    "master_weight_dtype": "master_bits; fused_optim.compat.transformer_engine.FusedAdam has FP16 masters",
    "store_param_remainders": "master_bits=32, the default: exact FP32 masters, in 2 bytes beside a BF16 element",
    "param_remainder_bits": "master_bits=24 for 8, master_bits=32 for 16",
    "use_decoupled_grad": "optimizer.use_decoupled_grad = True, on the optimizer",
    "unscales_gradients": "optimizer.unscales_gradients = False, on the optimizer",
    "set_grad_none": "zero_grad(set_to_none=...)",
}


# --- for type checkers: keyword options, by the classes that have them ------------------------------------------------


class CommonOptions(TypedDict, total=False):
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


class SharedOptions(CommonOptions, total=False):
    """Of every optimizer here."""

    capturable: bool
    maximize: bool
    exp_avg_dtype: torch.dtype | str | None


class Options(SharedOptions, total=False):
    """All of :class:`fused_optim.FusedAdam` that are given by keyword only."""

    bias_correction: bool
    exp_avg_sq_dtype: torch.dtype | str | None
    decoupled_weight_decay: bool | None


class MuonOptions(SharedOptions, total=False):
    """Of :class:`fused_optim.FusedMuon`, beside torch.optim.Muon's."""

    ns_dtype: torch.dtype | str
    experts: bool
    momentum_dtype: torch.dtype | str | None
    exp_avg_sq_dtype: torch.dtype | str | None
    betas: Sequence[float]
    bias_correction: bool


class AdEMAMixOptions(SharedOptions, total=False):
    """Of :class:`fused_optim.FusedAdEMAMix`, by keyword only."""

    exp_avg_slow_dtype: torch.dtype | str | None
    exp_avg_sq_dtype: torch.dtype | str | None


class PeersOptions(TypedDict, total=False):
    """Settings that only drop-in classes are given as arguments, most of them in the words of their peers."""

    master_weights: bool
    master_weight_dtype: torch.dtype | str
    store_param_remainders: bool | None
    param_remainder_bits: int | None
    use_decoupled_grad: bool
    set_grad_none: bool | None
    unscales_gradients: bool


PEERS_WORDS = tuple(PeersOptions.__annotations__)


class OptionsBesideTransformerEngine(CommonOptions, total=False):
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


def read_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a param group that are not plain numbers, tuples of these, or bools yet: as such.

    Tensors are read now, but for ``lr``, which schedulers and replays of CUDA graphs fill with other values. A flag
    that is None has the value of ``defaults``. What cannot be read stays as it is, to be checked. Raises TypeError for
    flags that are none.
    """
    read: dict[str, Any] = {}
    for key in NUMBERS:
        if type(group.get(key, 0.0)) not in (float, int) and not (key == "lr" and isinstance(group[key], Tensor)):
            read[key] = number_of(group[key])
    if "betas" in group and not _are_plain(group["betas"]):
        read["betas"] = betas_of(group["betas"])
    for key in FLAGS:
        if type(group.get(key, False)) is not bool:
            read[key] = flag_of(key, defaults[key] if group[key] is None else group[key])
    return read


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


def _are_plain(betas: Any) -> bool:
    return type(betas) is tuple and all(type(beta) is float for beta in betas)


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


def truth_of(name: str, value: Any) -> bool:
    """A flag as Apex's and TransformerEngine's classes read it: by its truth. Text is read as text."""
    return flag_of(name, value) if isinstance(value, str) else bool(value)


# --- constructors -----------------------------------------------------------------------------------------------------


def reads_arguments(function: F) -> F:
    """A decorator of a constructor: reads flags, the parameters with a default of True or False, by :func:`flag_of`.

    None means the default. An unknown argument raises TypeError with the class and the nearest name that there is.
    """
    signature = inspect.signature(function)
    flags = {name: each.default for name, each in signature.parameters.items() if isinstance(each.default, bool)}

    @functools.wraps(function)
    def with_read_arguments(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_names(type(self).__name__, kwargs, [*signature.parameters][1:])
        given = signature.bind(self, *args, **kwargs)
        for name in flags.keys() & given.arguments.keys():
            value = given.arguments[name]
            given.arguments[name] = flags[name] if value is None else flag_of(name, value)
        return function(*given.args, **given.kwargs)

    return cast(F, with_read_arguments)


def reads_flags_by_truth(function: F) -> F:
    """A decorator of a drop-in class's constructor: its own flags go by their truth, as in the original's."""
    signature = inspect.signature(function)
    flags = {name for name, each in signature.parameters.items() if isinstance(each.default, bool)}

    @functools.wraps(function)
    def with_truths(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments.update({name: truth_of(name, given.arguments[name]) for name in flags & given.arguments.keys()})
        return function(*given.args, **given.kwargs)

    return cast(F, with_truths)


def check_names(owner: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known and name in REMOVED:
            raise TypeError(f"{owner}() takes no {name} any more: write {REMOVED[name]}")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise TypeError(f"{owner}() got an unexpected argument {name!r}{hint}")


def shows_options_of(base: Callable[..., Any]) -> Callable[[F], F]:
    """A decorator: ``inspect.signature`` shows the keyword-only parameters of ``base`` in place of ``**options``."""

    def declare(function: F) -> F:
        own = inspect.signature(function)
        named = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            each
            for name, each in inspect.signature(base).parameters.items()
            if each.kind is inspect.Parameter.KEYWORD_ONLY and name not in own.parameters
        ]
        function.__dict__["__signature__"] = own.replace(parameters=[*named, *options])
        return function

    return declare


# --- dtypes -----------------------------------------------------------------------------------------------------------


def spelled_alike(dtypes: Mapping[str, Any]) -> dict[str, Any]:
    """Dtypes as names where one of them is given by its name: what came from a config can be written as JSON again."""
    by_name = any(isinstance(dtype, str) for dtype in dtypes.values())
    return {key: _name_of(dtype) if by_name else dtype for key, dtype in dtypes.items()}


def _name_of(dtype: Any) -> Any:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def asks_for_another(key: str, asked: Any, own: Any) -> bool:
    """Whether a param group asks for another value of an option of the whole optimizer, in vain."""
    if key in IMPLEMENTATIONS or asked is None:
        return False
    if isinstance(own, bool):
        return flag_of(key, asked) != own
    return bool((as_dtype(asked) if isinstance(own, torch.dtype) else number_of(asked)) != own)
