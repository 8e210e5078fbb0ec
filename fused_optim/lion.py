"""FusedLion: Lion for sharded parameters, with one low-precision state and FP32 master weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_optim.decorators import between_graphs
from fused_optim.formats.arithmetic import fma
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import check_decay_rates
from fused_optim.options.reading import LionOptions
from fused_optim.options.table import documents_options, takes_options
from fused_optim.rules import LION, Rule, Scalars, averaging

(EXP_AVG,) = LION.states


@dataclass
class Lion(Rule):
    """The update rule of Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

    spec = LION
    repr_keys = ("betas",)

    def check(self, group: Mapping[str, Any]) -> None:
        check_decay_rates(group["betas"])

    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        beta1, beta2 = map(float, group["betas"])
        return {"beta1": beta1, "beta2": beta2}

    def scalars(self, values: Mapping[str, float], lr: float, step: int) -> tuple[float, dict[str, float]]:
        return lr, averaging(values["beta1"], values["beta2"])

    def step(self, grad: Tensor, param: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
        (exp_avg,) = states
        mixed = fma(exp_avg, s.own.beta1, s.own.one_minus_beta1 * grad)
        direction = torch.where(mixed.isnan(), mixed, mixed.sign())  # torch's sign of NaN is 0
        exp_avg = fma(exp_avg, s.own.beta2, s.own.one_minus_beta2 * grad)
        return fma(direction, -s.step_size, param * s.decay), [exp_avg]


@documents_options
class FusedLion(ShardedOptimizer):
    """Lion (Chen et al., 2023), one pass per step over all local shards: the sign of an average, one state.

    All of :class:`fused_optim.FusedAdam` holds here, too: formats, masters, sharding, checkpoints, quantized weights,
    clipping. ``optimizer.state[p]`` has ``exp_avg`` and, for parameters that are not FP32, ``master_param``. Every
    element moves by ``lr``, so the learning rate is 3 to 10 times smaller than AdamW's, and ``weight_decay`` larger.

    Args:
        params: as of :class:`fused_optim.FusedAdam`.
        lr: learning rate, a number or a tensor of one element.
        betas: the update is the sign of ``betas[0] * exp_avg + (1 - betas[0]) * grad``; ``exp_avg`` itself decays by
            ``betas[1]``. Both in [0, 1).
        weight_decay: decoupled: the parameter is multiplied by ``1 - lr * weight_decay``.
        exp_avg_dtype: as of :class:`fused_optim.FusedAdam`, of ``exp_avg``.

    Raises:
        ValueError, TypeError: for hyperparameters or parameters that cannot be used; nothing has been changed then.
    """

    rule: Lion

    @between_graphs
    @takes_options(LionOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[LionOptions],
    ) -> None:
        super().__init__(params, Lion(), lr=lr, betas=betas, weight_decay=weight_decay, **options)
