"""NAdamW, an update rule that the package does not have: AdamW with Nesterov's momentum (Dozat, 2016).

docs/custom_rule.md explains it. Without building anything, the reference updates in plain PyTorch. An engine that was
built with FUSED_OPTIM_RULES=examples/nadamw/nadamw.toml does it in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_optim.adam import average_square, check_eps
from fused_optim.formats.arithmetic import fma, sqrt
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import check_decay_rates
from fused_optim.options.reading import NativeOptions
from fused_optim.options.table import takes_options
from fused_optim.rules import Rule, Scalars, averaging, integer_power, read_rules

SPEC = read_rules(Path(__file__).with_name("nadamw.toml"))["nadamw"]


class NAdamW(Rule):
    spec = SPEC
    repr_keys = ("betas", "eps")

    def check(self, group: Mapping[str, Any]) -> None:
        check_decay_rates(group["betas"])
        check_eps(group["eps"], group["betas"][1])

    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        return {"beta1": beta1, "beta2": beta2, "eps": group["eps"]}

    def scalars(self, values: Mapping[str, float], lr: float, step: int) -> tuple[float, dict[str, float]]:
        beta1, beta2 = values["beta1"], values["beta2"]
        return lr / (1.0 - integer_power(beta1, step)), {
            **averaging(beta1, beta2),
            "inverse_sqrt_correction2": 1.0 / math.sqrt(1.0 - integer_power(beta2, step)),
            "eps": values["eps"],
        }

    def step(self, grad: Tensor, param: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
        exp_avg, exp_avg_sq = states
        exp_avg = fma(exp_avg, s.own.beta1, s.own.one_minus_beta1 * grad)
        exp_avg_sq = average_square(exp_avg_sq, grad, s.own.beta2, s.own.one_minus_beta2)
        direction = fma(exp_avg, s.own.beta1, s.own.one_minus_beta1 * grad)
        denominator = fma(sqrt(exp_avg_sq), s.own.inverse_sqrt_correction2, s.own.eps)
        return fma(direction / denominator, -s.step_size, param * s.decay), [exp_avg, exp_avg_sq]


class FusedNAdamW(ShardedOptimizer):
    """NAdamW, with all of the package's options: formats, masters, sharding, checkpoints, clipping."""

    rule: NAdamW

    @takes_options(NativeOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Unpack[NativeOptions],
    ) -> None:
        super().__init__(params, NAdamW(), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)
