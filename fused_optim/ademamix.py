"""FusedAdEMAMix: AdEMAMix for sharded parameters, with low-precision states and FP32 master weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_optim.adam import average_square, check_eps
from fused_optim.decorators import between_graphs
from fused_optim.formats.arithmetic import fma, sqrt
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import check_decay_rates, check_number, whole_number
from fused_optim.options.reading import AdEMAMixOptions
from fused_optim.options.table import documents_options, takes_options
from fused_optim.rules import ADEMAMIX, Rule, Scalars, averaging, exponential_minus_one, integer_power


@dataclass
class AdEMAMix(Rule):
    """The update rule of AdEMAMix (Pagliardini et al., "The AdEMAMix Optimizer: Better, Faster, Older", 2024)."""

    spec = ADEMAMIX
    repr_keys = ("betas", "alpha", "t_alpha", "t_beta3", "eps")

    def check(self, group: Mapping[str, Any]) -> None:
        check_number("alpha", group["alpha"])
        check_decay_rates(group["betas"], 3)
        check_eps(group["eps"], group["betas"][1])
        for name in ("t_alpha", "t_beta3"):
            if group[name] is not None:
                whole_number(name, group[name], 1)
        if group["t_beta3"] is not None and not 0.0 < group["betas"][0] <= group["betas"][2]:
            raise ValueError(
                f"t_beta3: expected 0 < betas[0] <= betas[2], between which it warms up, got {group['betas']}"
            )

    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        beta1, beta2, beta3 = map(float, group["betas"])
        warms = group["t_beta3"] is not None
        return {
            "beta1": beta1,
            "beta2": beta2,
            "beta3": beta3,
            "alpha": float(group["alpha"]),
            "eps": float(group["eps"]),
            "t_alpha": float(group["t_alpha"] or 0),
            "t_beta3": float(group["t_beta3"] or 0),
            "log_beta1": math.log(beta1) if warms else 0.0,
            "log_beta3": math.log(beta3) if warms else 0.0,
        }

    def scalars(self, values: Mapping[str, float], lr: float, step: int) -> tuple[float, dict[str, float]]:
        one_minus_beta3 = 1.0 - values["beta3"]
        if step < values["t_beta3"]:
            share = step / values["t_beta3"]
            log_beta1, log_beta3 = values["log_beta1"], values["log_beta3"]
            mixed = (1.0 - share) * log_beta3 + share * log_beta1
            one_minus_beta3 = -exponential_minus_one(log_beta1 * log_beta3 / mixed)
        warming = step < values["t_alpha"]
        return lr, {
            **averaging(values["beta1"], values["beta2"]),
            "beta3": 1.0 - one_minus_beta3,
            "one_minus_beta3": one_minus_beta3,
            "inverse_correction1": 1.0 / (1.0 - integer_power(values["beta1"], step)),
            "alpha": values["alpha"] * step / values["t_alpha"] if warming else values["alpha"],
            "inverse_sqrt_correction2": 1.0 / math.sqrt(1.0 - integer_power(values["beta2"], step)),
            "eps": values["eps"],
        }

    def step(self, grad: Tensor, param: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
        exp_avg, exp_avg_slow, exp_avg_sq = states
        exp_avg = fma(exp_avg, s.own.beta1, s.own.one_minus_beta1 * grad)
        exp_avg_slow = fma(exp_avg_slow, s.own.beta3, s.own.one_minus_beta3 * grad)
        exp_avg_sq = average_square(exp_avg_sq, grad, s.own.beta2, s.own.one_minus_beta2)
        direction = fma(exp_avg_slow, s.own.alpha, exp_avg * s.own.inverse_correction1)
        denominator = fma(sqrt(exp_avg_sq), s.own.inverse_sqrt_correction2, s.own.eps)
        return fma(direction / denominator, -s.step_size, param * s.decay), [exp_avg, exp_avg_slow, exp_avg_sq]


@documents_options
class FusedAdEMAMix(ShardedOptimizer):
    """AdEMAMix (Pagliardini et al., 2024), one pass per step over all local shards: AdamW with a second, slow average.

    The update is ``(exp_avg / (1 - betas[0]**step) + alpha * exp_avg_slow) / (sqrt(exp_avg_sq / (1 - betas[1]**step)) +
    eps)``. All of :class:`fused_optim.FusedAdam` holds here, too: formats, masters, sharding, checkpoints, quantized
    weights, clipping. ``optimizer.state[p]`` has ``exp_avg``, ``exp_avg_slow``, ``exp_avg_sq`` and, for parameters that
    are not FP32, ``master_param``. Arguments are named as by bitsandbytes' AdEMAMix.

    Args:
        params: as of :class:`fused_optim.FusedAdam`.
        lr: learning rate, a number or a tensor of one element.
        betas: decay rates of the fast first moment, the second moment and the slow first moment, in [0, 1).
        alpha: the weight of the slow moment in the update.
        t_alpha: steps over which alpha grows linearly from 0; None: it does not.
        t_beta3: steps over which the slow moment's decay rate grows from ``betas[0]`` to ``betas[2]``, with a half-life
            that grows linearly; None: it is ``betas[2]`` from the first step.
        eps: as of :class:`fused_optim.FusedAdam`.
        weight_decay: decoupled: the parameter is multiplied by ``1 - lr * weight_decay``.

    Raises:
        ValueError, TypeError: for hyperparameters or parameters that cannot be used; nothing has been changed then.
    """

    rule: AdEMAMix

    @between_graphs
    @takes_options(AdEMAMixOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Unpack[AdEMAMixOptions],
    ) -> None:
        own = {"betas": betas, "alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3, "eps": eps}
        super().__init__(params, AdEMAMix(), lr=lr, weight_decay=weight_decay, **own, **options)
