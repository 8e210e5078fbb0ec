"""What an update rule tells the optimizer and the backends: its states, its hyperparameters, its update."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from fused_optim.formats.states import Kind

# FP32 values of one piece of a parameter: (gradient, parameter, states) -> (new parameter, new states). The update uses
# the new states before they are rounded.
Update = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True)
class StateSpec:
    """A state of every parameter, ``optimizer.state[p][name]``. Param groups have its format as ``option``."""

    name: str
    kind: Kind
    option: str


@dataclass(frozen=True)
class Orthogonalization:
    """What makes an update from a matrix: its singular values become 1, about, and ``scale`` of its shape times that.

    ``coefficients``: (a, b, c) of each Newton-Schulz step. ``eps``: the least Frobenius norm that is divided by.
    ``dtype``: of the products. ``scale``: of (rows, columns). ``splits``: rows of the matrices that a parameter joins;
    empty: it is one. ``rotates``: the momentum is not FP32, so the pass that updates it rounds in the rotating way, the
    matrix that comes out of it, too.
    """

    coefficients: tuple[tuple[float, float, float], ...]
    eps: float
    dtype: torch.dtype
    scale: Callable[[int, int], float]
    splits: tuple[int, ...] = ()
    rotates: bool = False


class Hyper(NamedTuple):
    """Hyperparameters of one param group for one step. Tensors are scalars on the device that runs the step."""

    rule: Rule
    lr: float | Tensor  # a tensor is FP32
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # number of this step, from 1; counts only without `steps_done`
    adam_w: bool  # decoupled weight decay
    bias_correction: bool
    maximize: bool
    stochastic_rounding: bool
    grad_scale: Tensor | None = None  # FP32: gradients are divided by it, and left so
    grad_factor: Tensor | None = None  # FP32: gradients are multiplied by it
    found_inf: Tensor | None = None  # FP32: not 0 skips the step
    steps_done: Tensor | None = None  # int64: advanced by the backend unless the step is skipped
    orthogonalization: Orthogonalization | None = None  # None: the update is elementwise


class Scalars(Protocol):
    """What the update of an element reads, derived once per step and param group; every float is rounded to FP32."""

    @property
    def grad_factor(self) -> float:
        """What gradients are multiplied by."""

    @property
    def step_size(self) -> float: ...

    @property
    def decay(self) -> float:
        """What the parameter is multiplied by."""


@dataclass(frozen=True)
class LinearScalars:
    """Those of rules with one average and no division; every float is rounded to FP32."""

    grad_factor: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    decay: float

    @staticmethod
    def of(hyper: Hyper, lr: float, grad_factor: float) -> LinearScalars:
        return LinearScalars(
            grad_factor=float32(grad_factor),
            beta1=float32(hyper.beta1),
            one_minus_beta1=float32(1.0 - hyper.beta1),
            beta2=float32(hyper.beta2),
            one_minus_beta2=float32(1.0 - hyper.beta2),
            step_size=float32(lr),
            decay=float32(1.0 - lr * hyper.weight_decay),
        )


class Rule(Protocol):
    """An update rule. The reference backend calls :meth:`derive` and :meth:`update`; engines know it by ``code``."""

    code: int
    states: tuple[StateSpec, ...]
    shown: tuple[str, ...]  # its hyperparameters that the optimizer's text shows
    whole_matrices: bool  # whether an element's update depends on its whole matrix
    needs_step: bool  # whether states mean nothing without the number of their step
    # Keys of param groups that all ranks must have alike: those that decide what ranks send each other, which steps
    # are planned by, and those of which each rank's counts for the parts that it computes of others' updates.
    collective_keys: tuple[str, ...]
    rank_uniform_keys: tuple[str, ...]

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError for the rule's hyperparameters of a param group if they make no sense."""

    def problem_of(self, param: Tensor, group: Mapping[str, Any]) -> str:
        """Why a parameter cannot be in a param group of this rule; empty if it can."""

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """beta1, beta2, eps, adam_w and bias_correction of :class:`Hyper`, and the orthogonalization, if any."""

    def derive(self, hyper: Hyper, lr: float, step: int, grad_factor: float) -> Scalars:
        """``lr``, ``step`` and ``grad_factor``, with the sign of ``maximize``: read from their device."""

    def update(self, scalars: Any) -> Update:
        """The update with what :meth:`derive` gave."""


class Rules(Protocol):
    """The update rules of an optimizer: one, or one for each kind of param group.

    ``code``: of the one that it is called by. ``states`` and ``shown``: of all of them.
    """

    code: int
    states: tuple[StateSpec, ...]
    shown: tuple[str, ...]
    has_torch_form: bool  # whether state dicts may have torch.optim.AdamW's form

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the whole optimizer that are the rules', by the names of the constructor's arguments."""

    def for_group(self, group: Mapping[str, Any]) -> Rule:
        """The rule of a param group."""

    def foreign_keys(self, group: Mapping[str, Any]) -> Collection[str]:
        """The optimizer's defaults that mean nothing in this param group."""


class OneRule:
    """A rule that all param groups have, and whose updates are elementwise: its own :class:`Rules`."""

    whole_matrices = False
    needs_step = True
    collective_keys: tuple[str, ...] = ()
    rank_uniform_keys: tuple[str, ...] = ()
    has_torch_form = False

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    def for_group(self, group: Mapping[str, Any]) -> Self:
        return self

    def foreign_keys(self, group: Mapping[str, Any]) -> Collection[str]:
        return ()

    def problem_of(self, param: Tensor, group: Mapping[str, Any]) -> str:
        return ""


def integer_power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring: the same bits as the engines', which library pow does not promise."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def float32(x: float) -> float:
    """A number as FP32 has it."""
    return ctypes.c_float(x).value
