"""Every option of the optimizers, described once.

Constructors and their signatures, param groups, ``settings``, attributes, errors and docstrings follow from the four
tables below. Type checkers need a second spelling: ``options/reading.py`` has it, and a test holds the two equal.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast, get_args, overload

import torch
from torch import Tensor

from fused_optim.formats.dtypes import as_dtype
from fused_optim.formats.masters import Master
from fused_optim.options.checks import is_number
from fused_optim.options.reading import CheckpointDevice, CheckpointFormat

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def _as_given(name: str, value: Any) -> Any:
    return value


@dataclass(eq=False)
class Option(Generic[T]):
    """One option. Its table says whose it is, and its place there how it is called.

    ``default``: FusedAdam's; the constructors of other rules say which hyperparameters have another. ``read``: of its
    name and a value, an object or a config's text: the value that is kept. It raises TypeError or ValueError; by
    default the update rule checks the value. ``refused_in_release``: why gradient release refuses it where it is true.
    ``document``: its entry in the docstring of the table.

    Options of the whole optimizer are attributes of it, which show its ``settings`` and can be set between two steps.
    """

    default: Any
    read: Callable[[str, Any], Any] = _as_given
    refused_in_release: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        entry = re.search(rf"^    {name}: .*(\n {{8}}.*)*", inspect.cleandoc(owner.__doc__ or ""), re.MULTILINE)
        self.name, self.document = name, entry[0] if entry else ""

    @overload
    def __get__(self, owner: None, kind: type) -> Option[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else getattr(owner.settings, self.name)

    def __set__(self, owner: Any, given: T) -> None:
        value = self.value_of(given)
        owner.check_option(self, value)
        setattr(owner.settings, self.name, value)

    @property
    def is_flag(self) -> bool:
        return isinstance(self.default, bool)

    def value_of(self, given: Any) -> Any:
        """The value that is kept. A flag that is None has its default."""
        return self.default if given is None and self.is_flag else self.read(self.name, given)

    def check_release(self, value: Any) -> None:
        """Raise RuntimeError for a value that gradient release cannot do with."""
        if value and self.refused_in_release:
            raise RuntimeError(f"{self.name}=True {self.refused_in_release}: do without one of the two")


# --- how values are read ----------------------------------------------------------------------------------------------


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
    """The Python number in a tensor, NumPy array or NumPy scalar of one element; other values as they are."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    return value.item() if getattr(value, "size", None) == 1 and hasattr(value, "item") else value


def whole_number_of(name: str, value: Any) -> int:
    """A whole number, also as text. Raises TypeError for all else."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not (isinstance(value, str) or number == value):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    return number


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


def _number(name: str, value: Any) -> Any:
    return number_of(value)


def _rate(name: str, value: Any) -> Any:
    """Tensors stay: schedulers and replays of CUDA graphs fill them with other values."""
    return value if isinstance(value, Tensor) else number_of(value)


def _betas(name: str, value: Any) -> Any:
    """A tuple of numbers, from any sequence, tensor or array, or from text such as "(0.9, 0.95)"."""
    if type(value) is tuple and {*map(type, value)} == {float}:
        return value
    if isinstance(value, str):
        value = value.strip("()[] ").split(",")
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(number_of, value)) if isinstance(value, Sequence) else value


def _flag_or_none(name: str, value: Any) -> bool | None:
    return None if value is None else flag_of(name, value)


def _dtype_name(name: str, value: Any) -> str:
    """Checkpoints gather no torch.dtype."""
    return str(value).removeprefix("torch.")


def _fraction(name: str, value: Any) -> float:
    number = number_of(value)
    if not is_number(number):
        raise TypeError(f"{name}: expected a number in [0, 1], got {type(number).__name__}")
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1], got {number}")
    return float(number)


def _one_of(expected: str, *values: Any) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if (found := number_of(value)) not in values:
            raise ValueError(f"{name}: expected {expected}, got {value!r}")
        return values[values.index(found)]

    return read


def _differentiable(name: str, value: Any) -> bool:
    if flag_of(name, value):
        raise ValueError("differentiable=True is not supported: use torch.optim.AdamW(differentiable=True)")
    return False


def _master_dtype(name: str, value: Any) -> torch.dtype:
    dtype = as_dtype(value)
    if dtype not in (torch.float32, torch.float16):
        raise ValueError(
            f"{name}={value}: expected torch.float32 or torch.float16; "
            "store_param_remainders=True keeps FP32 masters in 2 bytes per element without loss"
        )
    return dtype


def _remainder_bits(name: str, value: Any) -> int:
    bits = 16 if value is None else number_of(value)
    if bits not in (8, 16):
        raise ValueError(f"{name}: expected 16 or 8, got {value}")
    return int(bits)


# --- the tables -------------------------------------------------------------------------------------------------------

# Why gradient release refuses an option.
_AT_ONCE = "needs all gradients at once, and gradient release has them one by one"
_ELSEWHERE = "has gradients outside of p.grad, which do not tell gradient release when they are ready"


class OfGroups:
    """Keys of param groups. Classes whose rule gives one a meaning of its own document it themselves.

    Attributes:
        maximize: ascend instead of descend.
        bias_correction: divide the moments by ``1 - beta ** step``.
        exp_avg_dtype: how the first moment is kept: ``torch.float32``, ``bfloat16``, ``float16``, ``float8_e4m3fn`` or
            ``int8``; the last three with one FP32 scale per 128, 64 or 32 elements of a row, and FP32 where no such
            block divides the rows of all shards or a one-dimensional parameter has fewer than 4096 elements. Also as a
            param-group option.
        exp_avg_sq_dtype: how the second moment is kept: the same formats.
        exp_avg_slow_dtype: how the slow first moment is kept: the same formats.
        momentum_dtype: how the momentum is kept: the same formats.
        ns_dtype: of the products: "bfloat16", "float16" or "float32". GPUs make both 16-bit ones of FP16 values where
            steps on Gram matrices take less time, which rounds less.
        experts: whether parameters with three dims are experts, each entry of the first a matrix. Else they are
            refused: weights of convolutions have three dims, too. Also of param groups.
    """

    lr = Option[float | Tensor](1e-3, _rate)
    betas = Option[Sequence[float]]((0.9, 0.999), _betas)
    eps = Option[float](1e-8, _number)
    alpha = Option[float](5.0, _number)
    t_alpha = Option[int | None](None, _number)
    t_beta3 = Option[int | None](None, _number)
    weight_decay = Option[float](0.0, _number)
    amsgrad = Option[bool](False, flag_of)
    maximize = Option[bool](False, flag_of)
    bias_correction = Option[bool](True, flag_of)
    exp_avg_dtype = Option[torch.dtype | str | None](None)
    exp_avg_sq_dtype = Option[torch.dtype | str | None](None)
    exp_avg_slow_dtype = Option[torch.dtype | str | None](None)
    momentum_dtype = Option[torch.dtype | str | None](None)
    ns_dtype = Option[torch.dtype | str]("bfloat16", _dtype_name)
    experts = Option[bool](False, flag_of)


class OfConstructors:
    """Arguments that stand for other options, or for none that an optimizer here has.

    Attributes:
        state_dtype: of all states whose own option is None.
        master_bits: 32: parameters that are not FP32 have exact FP32 masters; BF16 parameters store only the bits that
            they lack, in 2 bytes per element. 24: BF16 parameters have 24-bit masters, in 1 byte, which round in the
            rotating way, and others FP32 ones. 0: no masters. None means 32.
        differentiable: not supported, must be False.
        decoupled_weight_decay: False: weight decay is added to the gradient, as by torch.optim.Adam (L2). True: the
            parameter is multiplied by ``1 - lr * weight_decay``, as by torch.optim.AdamW, and by TransformerEngine's
            and Apex's FusedAdam. None: not said. The ``defaults`` of torch.optim.Adam and AdamW are arguments.
    """

    state_dtype = Option[torch.dtype | str | None](None)
    master_bits = Option[int | None](None, _one_of("32 (exact FP32 masters), 24 or 0 (none)", None, 0, 24, 32))
    differentiable = Option[bool](False, _differentiable)
    decoupled_weight_decay = Option[bool | None](None, _flag_or_none)


class OfOptimizers:
    """Arguments and attributes of every optimizer.

    Attributes:
        capturable: ``step()`` can be captured into a CUDA graph, after one warm-up step or ``initialize_state()``. Step
            counters are on the GPU then. Replays read a tensor ``lr`` on the GPU; a float ``lr`` is copied there by
            each ``step()`` or ``initialize_state()`` outside of captures. The capture fixes all other hyperparameters,
            and which parameters have gradients. No effect on parameters on the CPU.
        stochastic_rounding: rotating rounding, not nearest, of states that are not FP32, of 24-bit masters, and of
            parameters without master. Rounded to nearest, changes below half a last place are lost forever.
        seed: of the rounding sequence, a function of (seed, step, parameter, global element index). A parameter counts
            by its name where ``params`` has names, so that optimizers of parts of a model round as one of all of it
            does; else by its position.
        decoupled_lr: weight decay follows the schedule of the learning rate, not its size: the parameter is multiplied
            by ``1 - weight_decay * lr / initial_lr``. ``param_group["initial_lr"]``, which torch's schedulers set, too,
            is the group's first learning rate. Only for decoupled weight decay (Loshchilov & Hutter, 2019, propose it).
        skip_nonfinite: a step whose gradients hold a NaN or an infinity, on any rank, changes nothing and does not
            count; nothing is read back. Costs one pass over the gradients, unless the optimizer's ``clip_grad_norm_``
            was called for the step, and makes ``step()`` a collective over ``skip_nonfinite_group``, by default all
            ranks. ``skipped_steps`` counts.
        offload_states: moments, masters beside the parameters, and scales live in page-locked host memory. ``step()``
            brings them to the GPU in chunks, through 96 MB of buffers, and back; it returns when they are in host
            memory again. The same bits as without. No effect on parameters in host memory, whose states are there
            anyway; masters of quantized weights stay on the GPU. Not with ``capturable``.
        offload_fraction: the share of the parameters' elements whose states are offloaded, in [0, 1]; parameters are
            chosen as wholes, evenly over the model.
        checkpoint_format: the form of ``state_dict()``. ``"unscaled"``: FP32 tensors; ``"native"``: the stored bits and
            scales, several times smaller; ``"torch"``: what torch.optim.AdamW has, for going over from it and back to
            it: FP32 moments without masters, a ``step`` per parameter, and the running param groups show AdamW's keys.
            All of them load whatever this is; it may be changed at any time.
        checkpoint_device: where ``state_dict()`` puts the states that it converts. None: where the parameters are;
            "cpu": in host memory, one state after the other, so that a save takes no more of a GPU's memory than the
            unscaled states of one parameter do (or 64 MB). What it hands over by reference (FP32 states; in the native
            form BF16 ones, too) stays where it is. "stager": all is handed over by reference, or made when it is read,
            to be copied by ``fused_optim.checkpoint.PinnedStager``. It may be changed at any time.
        fused: which of torch.optim.AdamW's implementations is to run; without effect here.
        foreach: without effect, as ``fused``.
    """

    capturable = Option[bool](False, flag_of, _AT_ONCE)
    stochastic_rounding = Option[bool](True, flag_of)
    seed = Option[int](0, whole_number_of)
    decoupled_lr = Option[bool](False, flag_of)
    skip_nonfinite = Option[bool](False, flag_of, _AT_ONCE)
    offload_states = Option[bool](False, flag_of)
    offload_fraction = Option[float](1.0, _fraction)
    checkpoint_format = Option[CheckpointFormat](
        "unscaled", _one_of("'unscaled', 'native' or 'torch'", *get_args(CheckpointFormat))
    )
    checkpoint_device = Option[CheckpointDevice](None, _one_of("None, 'cpu' or 'stager'", None, "cpu", "stager"))
    fused = Option[bool | None](None)
    foreach = Option[bool | None](None)


class OfDropIns:
    """Arguments and attributes of drop-in classes alone, in the words of their peers; see ``fused_optim.compat``.

    ``Settings`` has them for every optimizer: native classes say ``master_bits`` for the four of masters, and two are
    attributes of theirs, too. ``REMOVED`` has what else to write instead.

    Attributes:
        master_weights: whether parameters that are not FP32 have masters.
        master_weight_dtype: ``torch.float32`` or ``torch.float16``: with one FP32 scale per block, and FP32 where no
            block fits; it rounds in the rotating way, and the parameter is its rounded value.
        store_param_remainders: keep only the bits that a BF16 parameter lacks instead of a whole FP32 master.
        param_remainder_bits: 16 for lossless ones, 8 for 24-bit masters.
        use_decoupled_grad: read gradients from ``p.decoupled_grad`` instead of ``p.grad``.
        set_grad_none: what ``zero_grad()`` does by default; None means True.
        unscales_gradients: whether ``step()`` divides gradients by the scale of a GradScaler, or the scaler does.
    """

    master_weights = Option[bool](True, flag_of)
    master_weight_dtype = Option[torch.dtype](torch.float32, _master_dtype)
    store_param_remainders = Option[bool | None](None, _flag_or_none)
    param_remainder_bits = Option[int](None, _remainder_bits)
    use_decoupled_grad = Option[bool](False, flag_of, _ELSEWHERE)
    set_grad_none = Option[bool | None](None, _flag_or_none)
    unscales_gradients = Option[bool](True, flag_of)


def _options_in(*tables: type) -> dict[str, Option[Any]]:
    return {name: each for table in tables for name, each in vars(table).items() if isinstance(each, Option)}


OPTIONS = _options_in(OfGroups, OfConstructors, OfOptimizers, OfDropIns)
OF_CONSTRUCTORS = _options_in(OfConstructors)
OF_OPTIMIZERS = _options_in(OfOptimizers)
OF_DROP_INS = _options_in(OfDropIns)
OF_SETTINGS = OF_OPTIMIZERS | OF_DROP_INS
FLAGS = tuple(name for name, each in _options_in(OfGroups).items() if each.is_flag)
# Of torch's optimizers: which of its implementations is to run. Here they say nothing.
IMPLEMENTATIONS = ("fused", "foreach")
# Values of these types stay as they are: steps ask for all groups, whose values are such usually.
_USUAL: dict[Any, type] = {flag_of: bool, _number: float, _rate: float, _dtype_name: str}
_READ_IN_GROUPS = [
    (name, each, _USUAL.get(each.read))
    for name, each in _options_in(OfGroups, OfConstructors).items()
    if each.read is not _as_given
]

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


# --- values -----------------------------------------------------------------------------------------------------------


class Settings(OfOptimizers, OfDropIns):
    """The values of one optimizer's options that are no keys of param groups. Raises ValueError or TypeError."""

    __slots__ = tuple(OF_SETTINGS)  # steps read them as plain attributes

    def __init__(self, given: Mapping[str, Any]) -> None:
        given = {**given, **_masters_of_bits(given)}
        for name, option in OF_SETTINGS.items():
            setattr(self, name, option.value_of(given.get(name, option.default)))
        if self.offload_fraction != 1.0 and not self.offload_states:
            raise ValueError(f"offload_fraction={self.offload_fraction} needs offload_states=True")
        if self.offload_states and self.capturable:
            why = "offload_states=True: a CUDA graph does not wait for states to be in host memory"
            raise ValueError(f"{why}; leave out capturable=True")
        is_whole = self.master_weight_dtype == torch.float32
        if self.store_param_remainders and not is_whole:
            raise ValueError(
                "store_param_remainders=True keeps FP32 masters in 2 bytes per element without loss: it needs "
                f"master_weight_dtype=torch.float32, got {self.master_weight_dtype}"
            )
        if self.store_param_remainders and not self.master_weights:
            raise ValueError("store_param_remainders=True needs master_weights=True")
        if self.param_remainder_bits == 8 and self.master_weights and not self.keeps_remainders:
            hint = "store_param_remainders=True, or None with FP32 masters"
            raise ValueError(f"param_remainder_bits=8 needs remainders: {hint}")

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OF_SETTINGS}

    def arguments(self, of_drop_in: bool) -> dict[str, Any]:
        """The arguments of a constructor that mean the same."""
        if of_drop_in:
            return {**self.as_dict(), "master_bits": None}
        return {**{name: getattr(self, name) for name in OF_OPTIMIZERS}, "master_bits": self.master_bits}

    @property
    def master_bits(self) -> int:
        """The option ``master_bits`` with the same meaning; 32 also for separate masters, which it cannot ask for."""
        return 0 if not self.master_weights else 24 if self.param_remainder_bits == 8 else 32

    @property
    def keeps_remainders(self) -> bool:
        """True if BF16 parameters have remainders in place of masters."""
        if self.store_param_remainders is None:
            return self.master_weights and self.master_weight_dtype == torch.float32
        return self.master_weights and self.store_param_remainders

    @property
    def asked_master(self) -> Master | None:
        """The kind of master that was asked for by name; None where the smallest exact way is meant, or none."""
        if not self.master_weights:
            return None
        if self.store_param_remainders:
            return Master.REMAINDER16 if self.param_remainder_bits == 16 else Master.REMAINDER8
        return Master.FLOAT16 if self.master_weight_dtype == torch.float16 else None


def _masters_of_bits(given: Mapping[str, Any]) -> dict[str, Any]:
    """The drop-in classes' words that ``master_bits`` stands for."""
    bits = OPTIONS["master_bits"].value_of(given.get("master_bits"))
    if bits is None:
        return {}
    words = ("store_param_remainders", "param_remainder_bits", "master_weights")
    twice = [word for word in words if given.get(word, OPTIONS[word].default) is not OPTIONS[word].default]
    if as_dtype(given.get("master_weight_dtype", torch.float32)) != torch.float32:
        twice.append("master_weight_dtype")
    if twice:
        raise ValueError(f"master_bits={bits} and {', '.join(twice)} say the same thing twice: give one of them")
    return {"master_weights": bits != 0, "param_remainder_bits": 8 if bits == 24 else 16}


def read_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options in a param group whose values are not as they are kept: as such.

    Keys that are not in ``defaults`` are users' own. A flag that is None has its value there. Raises TypeError for
    flags that are none; other values that cannot be read stay as they are, to be checked.
    """
    read: dict[str, Any] = {}
    for key, option, usual in _READ_IN_GROUPS:
        if key in group and key in defaults and type(given := group[key]) is not usual:
            if given is None and option.is_flag:
                given = option.default if defaults[key] is None else defaults[key]
            if (kept := option.read(key, given)) is not group[key]:
                read[key] = kept
    return read


def spelled_alike(dtypes: Mapping[str, Any]) -> dict[str, Any]:
    """Dtypes as names where one of them is given by its name: what came from a config can be written as JSON again."""
    by_name = any(isinstance(dtype, str) for dtype in dtypes.values())
    names = {key: str(dtype).removeprefix("torch.") for key, dtype in dtypes.items() if isinstance(dtype, torch.dtype)}
    return {**dtypes, **(names if by_name else {})}


def asks_for_another(key: str, asked: Any, own: Any) -> bool:
    """True if a param group asks for another value of an option of the whole optimizer, in vain."""
    if key in IMPLEMENTATIONS or asked is None:
        return False
    if isinstance(own, bool):
        return flag_of(key, asked) != own
    return bool((as_dtype(asked) if isinstance(own, torch.dtype) else number_of(asked)) != own)


# --- constructors -----------------------------------------------------------------------------------------------------


def takes_options(options: type) -> Callable[[F], F]:
    """A decorator of a constructor, whose ``**options`` the TypedDict ``options`` has: it is given all of them.

    ``inspect.signature`` lists them, with defaults and types. An unknown argument raises TypeError with the class and
    the nearest name that there is.
    """

    def declare(function: F) -> F:
        own = inspect.signature(function)
        named = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        defaults = {name: OPTIONS[name].default for name in options.__annotations__}
        types = typing.get_type_hints(options)
        listed = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
            for name, default in defaults.items()
        ]
        known = [each.name for each in (*named[1:], *listed)]

        @functools.wraps(function)
        def with_all_options(self: Any, *args: Any, **given: Any) -> None:
            check_names(type(self).__name__, given, [*known, *(OF_DROP_INS if isinstance(self, OfDropIns) else ())])
            function(self, *args, **{**defaults, **given})

        with_all_options.__dict__["__signature__"] = own.replace(parameters=[*named, *listed])
        return cast(F, with_all_options)

    return declare


def check_names(owner: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known and name in REMOVED:
            raise TypeError(f"{owner}() takes no {name} any more: write {REMOVED[name]}")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise TypeError(f"{owner}() got an unexpected argument {name!r}{hint}")


def documents_options(kind: C) -> C:
    """A decorator of a class: its docstring's ``Args`` go on with the options that they do not name themselves."""
    text = inspect.cleandoc(kind.__doc__ or "")
    names = [name for name in inspect.signature(kind).parameters if f"\n    {name}: " not in text]
    kind.__doc__ = text.replace(
        "\n\nRaises:", "\n".join(["", *(OPTIONS[name].document for name in names), "\nRaises:"])
    )
    return kind
