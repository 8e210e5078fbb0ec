"""The two elementwise passes of Muon, before and after the matrices are orthogonalized, as rules of the backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fused_optim.formats.arithmetic import fma
from fused_optim.rules import DESCENT as DESCENT_SPEC
from fused_optim.rules import MUON, Rule, Scalars, averaging

(MOMENTUM_BUFFER,) = MUON.states


@dataclass
class MomentumPass(Rule):
    """The gradient goes into the momentum; the "parameter" takes what is to be orthogonalized, and is not read."""

    spec = MUON

    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        momentum = float(group["momentum"])
        return {"momentum": momentum, "mixing": momentum if group["nesterov"] else 1.0}

    def scalars(self, values: Mapping[str, float], lr: float, step: int) -> tuple[float, dict[str, float]]:
        return lr, averaging(values["momentum"], values["mixing"])

    def step(self, grad: Tensor, param: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
        momentum = fma(states[0], s.own.beta1, s.own.one_minus_beta1 * grad)
        return fma(momentum, s.own.beta2, s.own.one_minus_beta2 * grad), [momentum]


@dataclass
class DescentPass(Rule):
    """The parameter moves along the "gradient", which is the direction."""

    spec = DESCENT_SPEC

    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def scalars(self, values: Mapping[str, float], lr: float, step: int) -> tuple[float, dict[str, float]]:
        return lr, {}

    def step(self, grad: Tensor, param: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
        return fma(grad, -s.step_size, param * s.decay), []


MOMENTUM, DESCENT = MomentumPass(), DescentPass()
