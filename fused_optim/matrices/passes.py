"""The two elementwise passes of Muon, before and after the matrices are orthogonalized, as rules of the backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fused_optim.backends.tables import Rule as RuleNumber
from fused_optim.formats.arithmetic import fma
from fused_optim.formats.states import Kind
from fused_optim.rule import Hyper, LinearScalars, OneRule, StateSpec, Update

MOMENTUM_BUFFER = StateSpec("momentum_buffer", Kind.SIGNED, "momentum_dtype")


class _Pass(OneRule):
    def check(self, group: Mapping[str, Any]) -> None:
        """Nothing: Muon has checked it."""

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def derive(self, hyper: Hyper, lr: float, step: int, grad_factor: float) -> LinearScalars:
        return LinearScalars.of(hyper, lr, grad_factor)


@dataclass
class MomentumPass(_Pass):
    """The gradient goes into the momentum; the "parameter" takes what is to be orthogonalized, and is not read."""

    code: int = field(default=RuleNumber.MUON, init=False)
    states: tuple[StateSpec, ...] = field(default=(MOMENTUM_BUFFER,), init=False)
    shown: tuple[str, ...] = field(default=(), init=False)

    def update(self, scalars: LinearScalars) -> Update:
        s = scalars

        def update(grad: Tensor, param: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            grad = grad * s.grad_factor
            momentum = fma(states[0], s.beta1, s.one_minus_beta1 * grad)
            return fma(momentum, s.beta2, s.one_minus_beta2 * grad), [momentum]

        return update


@dataclass
class DescentPass(_Pass):
    """The parameter moves along the "gradient", which is the direction."""

    code: int = field(default=RuleNumber.DESCENT, init=False)
    states: tuple[StateSpec, ...] = field(default=(), init=False)
    shown: tuple[str, ...] = field(default=(), init=False)

    def update(self, scalars: LinearScalars) -> Update:
        s = scalars

        def update(grad: Tensor, param: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            return fma(grad * s.grad_factor, -s.step_size, param * s.decay), []

        return update


MOMENTUM, DESCENT = MomentumPass(), DescentPass()


def before_matrices(hyper: Hyper) -> Hyper:
    """For :class:`MomentumPass`. With FP32 momentum the matrix that comes out of it is rounded to nearest."""
    how = hyper.orthogonalization  # None: of a group of other parameters
    return hyper._replace(
        rule=MOMENTUM, stochastic_rounding=hyper.stochastic_rounding and how is not None and how.rotates
    )


def after_matrices(hyper: Hyper) -> Hyper:
    """For :class:`DescentPass`, whose direction has the gradient's scale, sign and clipping in it."""
    return hyper._replace(rule=DESCENT, grad_scale=None, grad_factor=None, maximize=False)
