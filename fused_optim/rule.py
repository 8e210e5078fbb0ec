"""What an update rule tells the optimizer and the backends: its states, its hyperparameters, its update."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fused_optim.formats.states import Kind

# FP32 values of one piece of a parameter: (gradient, parameter, states) -> (new parameter, new states). The update uses
# the new states before they are rounded.
Update = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True)
class StateSpec:
    """A state of every parameter, ``optimizer.state[p][name]``. Param groups have its format as ``<name>_dtype``."""

    name: str
    kind: Kind

    @property
    def option(self) -> str:
        return f"{self.name}_dtype"


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


class Rule(Protocol):
    """An update rule. The reference backend calls :meth:`derive` and :meth:`update`; engines know it by ``code``."""

    code: int
    states: tuple[StateSpec, ...]
    shown: tuple[str, ...]  # its hyperparameters that the optimizer's text shows
    has_torch_form: bool  # whether state dicts may have torch.optim.AdamW's form

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the whole optimizer that are the rule's, by the names of the constructor's arguments."""

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError for the rule's hyperparameters of a param group if they make no sense."""

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """beta1, beta2, eps, adam_w and bias_correction of :class:`Hyper`."""

    def derive(self, hyper: Hyper, lr: float, step: int, grad_factor: float) -> Scalars:
        """``lr``, ``step`` and ``grad_factor``, with the sign of ``maximize``: read from their device."""

    def update(self, scalars: Any) -> Update:
        """The update with what :meth:`derive` gave."""


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
