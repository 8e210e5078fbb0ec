"""Update rules: what Python and the engines both know of them, and what the optimizer and the backends ask of one."""

from __future__ import annotations

import abc
import ctypes
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from fused_optim.formats.arithmetic import fma
from fused_optim.formats.states import Kind

# FP32 values of one piece of a parameter: (gradient, parameter, states) -> (new parameter, new states). The update uses
# the new states before they are rounded.
Update = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateSpec:
    """A state of every parameter, ``optimizer.state[p][name]``. Param groups have its format as ``option``."""

    name: str
    kind: Kind
    option: str


@dataclass(frozen=True)
class RuleSpec:
    """A row of ``rules.toml``. ``hyperparameters``: names of the rule's own numbers, in the engines' order."""

    name: str  # in checkpoints and in the engines
    states: tuple[StateSpec, ...]
    hyperparameters: tuple[str, ...]
    torch_form: bool

    @property
    def engine_row(self) -> tuple[object, ...]:
        """The row as an engine that was built with it reports it."""
        return self.name, tuple(spec.kind.name for spec in self.states), self.hyperparameters


RULES: dict[str, RuleSpec] = {}  # by name; those of the package first, in the engines' order


def read_rules(path: str | Path) -> dict[str, RuleSpec]:
    """The rows of a file of the form of ``rules.toml``, by name. From then on checkpoints of these rules are known.

    Raises ValueError for a name that another rule has.
    """
    rows = tomllib.loads(Path(path).read_text())
    read = {name: _read_row(name, row) for name, row in rows.items()}
    for name, spec in read.items():
        if RULES.setdefault(name, spec) != spec:
            raise ValueError(f"{path}: there is an update rule {name} already, with other states or hyperparameters")
    return read


def _read_row(name: str, row: Mapping[str, Any]) -> RuleSpec:
    states = [
        StateSpec(state["name"], Kind[state["kind"].upper()], state.get("option", f"{state['name']}_dtype"))
        for state in row.get("states", ())
    ]
    return RuleSpec(name, tuple(states), tuple(row["hyperparameters"]), row.get("torch_form", False))


BUILT_IN = read_rules(Path(__file__).with_name("rules.toml"))
ADAM, LION, MUON, DESCENT, ADEMAMIX = BUILT_IN.values()


def known_states() -> dict[str, StateSpec]:
    """The states of all rules, by name."""
    return {spec.name: spec for rule in RULES.values() for spec in rule.states}


RULE_KEY = "fused_optim_rule"  # of saved param groups


def rule_of(group: Mapping[str, Any]) -> RuleSpec:
    """The update rule of a saved param group, also of torch.optim.Muon's. Raises ValueError for one that is unknown."""
    name = str(group.get(RULE_KEY, MUON.name if "ns_coefficients" in group else ADAM.name))
    saved = {spec.name: spec for spec in RULES.values() if spec.states}
    if name not in saved:
        raise ValueError(f"{RULE_KEY}: expected one of {', '.join(saved)}, found {name}")
    return saved[name]


# --- a step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Orthogonalization:
    """How an update is made from a matrix: its singular values become about 1, times ``scale`` of its shape.

    ``coefficients``: (a, b, c) of each Newton-Schulz step. ``eps``: the least Frobenius norm that is divided by.
    ``dtype``: of the products. ``scale``: a function of (rows, columns). ``splits``: rows of the matrices that a
    parameter joins; empty: it is one matrix. ``rotates``: the momentum is not FP32, so the pass that updates it uses
    rotating rounding, for the matrix that it writes, too.
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
    values: Mapping[str, float]  # the rule's own
    weight_decay: float
    decoupled: bool  # weight decay multiplies the parameter; else it is added to the gradient
    step: int  # number of this step, from 1; counts only without `steps_done`
    maximize: bool
    stochastic_rounding: bool
    grad_scale: Tensor | None = None  # FP32: gradients are divided by it, and left so
    grad_factor: Tensor | None = None  # FP32: gradients are multiplied by it
    found_inf: Tensor | None = None  # FP32: not 0 skips the step
    steps_done: Tensor | None = None  # int64: advanced by the backend unless the step is skipped
    orthogonalization: Orthogonalization | None = None  # None: the update is elementwise


@dataclass(frozen=True)
class Scalars:
    """Inputs of an element's update, derived once per step and param group; every number is rounded to FP32."""

    grad_factor: float
    step_size: float
    decay: float  # the parameter is multiplied by it
    l2_penalty: float
    own: Any  # the rule's own, by name


# --- rules ------------------------------------------------------------------------------------------------------------


class Rule(abc.ABC):
    """An update rule; elementwise, unless ``whole_matrices``. An optimizer with one rule uses it as its :class:`Rules`.

    ``repr_keys``: keys of param groups that the optimizer's text shows. ``collective_keys``: keys that change
    collectives or plans; all ranks must agree on them, which is checked with each plan. ``rank_uniform_keys``: keys to
    be alike because a rank computes parts of others' updates; they are checked once. ``needs_step``: states mean
    nothing without the number of their step. ``decoupled``: weight decay multiplies the parameter; else it is added to
    the gradient.
    """

    spec: RuleSpec
    repr_keys: tuple[str, ...] = ()
    whole_matrices = False
    needs_step = True
    collective_keys: tuple[str, ...] = ()
    rank_uniform_keys: tuple[str, ...] = ()
    decoupled: bool = True
    name: str
    states: tuple[StateSpec, ...]
    has_torch_form: bool  # whether state dicts may have torch.optim.AdamW's form

    def __init_subclass__(cls) -> None:
        cls.name, cls.states, cls.has_torch_form = cls.spec.name, cls.spec.states, cls.spec.torch_form

    # What a rule defines:

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError for the rule's hyperparameters of a param group if they make no sense."""
        return

    @abc.abstractmethod
    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of a param group that ``spec.hyperparameters`` names, in this order."""

    @abc.abstractmethod
    def scalars(self, values: Mapping[str, float], lr: float, step: int) -> tuple[float, dict[str, float]]:
        """The step size and the rule's own scalars, in double precision. ``step``: from 1."""

    @abc.abstractmethod
    def step(self, grad: Tensor, param: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
        """The new parameter and the new states, all FP32. ``grad`` is scaled, and has the L2 penalty in it.

        Every operation rounds as the engines' does: ``fma`` for fused ones, ``sqrt`` and ``/`` to nearest.
        """

    def problem_of(self, param: Tensor, group: Mapping[str, Any]) -> str:
        """Why a parameter cannot be in a param group of this rule; empty if it can."""
        return ""

    def orthogonalization(self, group: Mapping[str, Any]) -> Orthogonalization | None:
        """How a rule of whole matrices makes its updates."""
        return None

    # What the optimizer and the backends ask:

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the whole optimizer that are the rule's, by the names of the constructor's arguments."""
        return {}

    def for_group(self, group: Mapping[str, Any]) -> Self:
        return self

    def foreign_keys(self, group: Mapping[str, Any]) -> Collection[str]:
        return ()

    def derive(self, hyper: Hyper, lr: float, step: int, grad_factor: float) -> Scalars:
        """``lr``, ``step`` and ``grad_factor``, with the sign of ``maximize``: read from their device."""
        step_size, own = self.scalars(hyper.values, lr, step)
        return Scalars(
            grad_factor=float32(grad_factor),
            step_size=float32(step_size),
            decay=float32(1.0 - lr * hyper.weight_decay) if hyper.decoupled else 1.0,
            l2_penalty=0.0 if hyper.decoupled else float32(hyper.weight_decay),
            own=SimpleNamespace(**{name: float32(value) for name, value in own.items()}),
        )

    def update(self, s: Scalars) -> Update:
        """The update of a piece of a parameter with these scalars."""

        def update(grad: Tensor, param: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            grad = grad * s.grad_factor
            if s.l2_penalty != 0.0:
                grad = fma(param, s.l2_penalty, grad)
            return self.step(grad, param, states, s)

        return update


class Rules(Protocol):
    """The update rules of an optimizer: one, or one for each kind of param group.

    ``name``: of the one that it is called by. ``states`` and ``repr_keys``: of all of them.
    """

    @property
    def repr_keys(self) -> tuple[str, ...]: ...
    @property
    def name(self) -> str: ...
    @property
    def states(self) -> tuple[StateSpec, ...]: ...
    @property
    def has_torch_form(self) -> bool:
        """True if state dicts may have torch.optim.AdamW's form."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the whole optimizer that are the rules', by the names of the constructor's arguments."""

    def for_group(self, group: Mapping[str, Any]) -> Rule:
        """The rule of a param group."""

    def foreign_keys(self, group: Mapping[str, Any]) -> Collection[str]:
        """The optimizer's defaults that mean nothing in this param group."""


# --- arithmetic of scalars --------------------------------------------------------------------------------------------


def averaging(beta1: float, beta2: float) -> dict[str, float]:
    """The scalars of two averages, ``beta * average + (1 - beta) * value`` each."""
    return {
        "beta1": beta1,
        "one_minus_beta1": 1.0 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1.0 - beta2,
    }


def integer_power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring: the same bits as the engines', which library pow does not promise."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def exponential_minus_one(x: float) -> float:
    """``exp(x) - 1`` by a series and doublings: the same bits as the engines'. Accurate for x in [-40, 0]."""
    part = x / 4096.0
    sum_ = part * (1.0 + part / 2.0 * (1.0 + part / 3.0 * (1.0 + part / 4.0 * (1.0 + part / 5.0 * (1.0 + part / 6.0)))))
    for _ in range(12):
        sum_ *= 2.0 + sum_
    return sum_


def float32(x: float) -> float:
    """A number as FP32 has it."""
    return ctypes.c_float(x).value
