"""FusedLion: Lion for sharded parameters, with one low-precision state and FP32 master weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_optim.backends.tables import Rule as RuleNumber
from fused_optim.decorators import between_graphs
from fused_optim.formats.arithmetic import fma
from fused_optim.formats.states import Kind
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import check_decay_rates
from fused_optim.options.reading import LionOptions
from fused_optim.options.table import documents_options, takes_options
from fused_optim.rule import Hyper, LinearScalars, OneRule, StateSpec, Update

EXP_AVG = StateSpec("exp_avg", Kind.SIGNED, "exp_avg_dtype")


@dataclass
class Lion(OneRule):
    """The update rule of Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

    code: int = field(default=RuleNumber.LION, init=False)
    states: tuple[StateSpec, ...] = field(default=(EXP_AVG,), init=False)
    shown: tuple[str, ...] = field(default=("betas",), init=False)

    def check(self, group: Mapping[str, Any]) -> None:
        check_decay_rates(group["betas"])

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        beta1, beta2 = map(float, group["betas"])
        return {"beta1": beta1, "beta2": beta2, "eps": 0.0, "adam_w": True, "bias_correction": False}

    def derive(self, hyper: Hyper, lr: float, step: int, grad_factor: float) -> LinearScalars:
        return LinearScalars.of(hyper, lr, grad_factor)

    def update(self, scalars: LinearScalars) -> Update:
        s = scalars

        def update(grad: Tensor, param: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            (m,) = states
            grad = grad * s.grad_factor
            mixed = fma(m, s.beta1, s.one_minus_beta1 * grad)
            direction = torch.where(mixed.isnan(), mixed, mixed.sign())  # torch's sign of NaN is 0
            return fma(direction, -s.step_size, param * s.decay), [fma(m, s.beta2, s.one_minus_beta2 * grad)]

        return update


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
