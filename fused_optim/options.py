"""What constructors and param groups are given: Python objects, or the text that configs have for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

# Of torch's optimizers: which of its implementations is to run. Here they say nothing, and are no keys of param groups.
IMPLEMENTATIONS = ("fused", "foreach")


def number_of(value: Any) -> Any:
    """A number that is given as text, such as ``1e-4``, which YAML reads as one. All else as it is, to be checked."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a param group that are numbers, each as one. ``betas`` may be any sequence."""
    found = {key: number_of(group[key]) for key in ("lr", "eps", "weight_decay") if key in group}
    betas = group.get("betas")
    if isinstance(betas, Sequence) and not isinstance(betas, str):
        found["betas"] = tuple(map(number_of, betas))
    return found


FLAGS = ("amsgrad", "bias_correction", "maximize")  # of param groups


def flag_of(name: str, value: Any) -> bool:
    """True or False, also where it is given as a number or, by configs, as text. Raises TypeError for all else."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    check_flag(name, value)
    return bool(value)


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError for what is not True, False or a number equal to one of them. Text is none: it would be true."""
    if isinstance(value, bool) or (not isinstance(value, (str, torch.Tensor)) and value in (True, False)):
        return
    shown = repr(value) if isinstance(value, str) else type(value).__name__
    raise TypeError(f"{name}: expected True or False, got {shown}")


def flags_of(group: Mapping[str, Any]) -> dict[str, bool]:
    """The flags of a param group. Raises TypeError for what is none."""
    return {key: flag_of(key, group[key]) for key in FLAGS if key in group}


def takes_flags(function: F) -> F:
    """A decorator: parameters whose default is True or False are given as one of these, or raise TypeError."""
    signature = inspect.signature(function)
    flags = [name for name, each in signature.parameters.items() if isinstance(each.default, bool)]

    @functools.wraps(function)
    def with_flags(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments.update(
            {name: flag_of(name, given.arguments[name]) for name in flags if name in given.arguments}
        )
        return function(*given.args, **given.kwargs)

    return cast(F, with_flags)


def whole_number_of(name: str, value: Any) -> int:
    """A whole number, also as text. Raises TypeError for all else."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not (isinstance(value, str) or number == value):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    return number


def spelled_alike(dtypes: Mapping[str, Any]) -> dict[str, Any]:
    """Dtypes as names where one of them is given by its name: what came from a config can be written as JSON again."""
    by_name = any(isinstance(dtype, str) for dtype in dtypes.values())
    return {key: _name_of(dtype) if by_name else dtype for key, dtype in dtypes.items()}


def _name_of(dtype: Any) -> Any:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


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
