"""FusedAdam: Adam and AdamW for sharded parameters, with low-precision states and FP32 master weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_optim.decorators import between_graphs
from fused_optim.formats.arithmetic import flush_denormals, fma, sqrt
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import check_decay_rates, check_number
from fused_optim.options.reading import Options
from fused_optim.options.table import documents_options, flag_of, takes_options
from fused_optim.rules import ADAM, Rule, Scalars, averaging, integer_power

EXP_AVG, EXP_AVG_SQ = ADAM.states
MOMENTS = (EXP_AVG.name, EXP_AVG_SQ.name)
LEAST_SQUARE = 2.0**-120  # below it a block of second moments is stored as 0; FP32's and BF16's from 2^-126 on


def average_square(average: Tensor, grad: Tensor, beta: float, one_minus_beta: float) -> Tensor:
    """``beta * average + one_minus_beta * grad**2``, with denormal terms and results as 0; all FP32."""
    return flush_denormals(fma(one_minus_beta * grad, grad, flush_denormals(beta * average)))


def check_eps(eps: float, beta2: float) -> None:
    """Raise TypeError for what is no number, and ValueError for an eps that stored second moments are too coarse for.

    Stored second moments below ``LEAST_SQUARE`` may be 0. So a root of at most ``sqrt(LEAST_SQUARE / (1 - beta2))`` is
    lost, the bias correction included, and beside an eps of that no step becomes more than twice as large.
    """
    check_number("eps", eps)
    if eps * eps * (1.0 - beta2) < LEAST_SQUARE:
        least = math.sqrt(LEAST_SQUARE / (1.0 - beta2))
        raise ValueError(
            f"eps: expected at least {least:.1e} where betas[1] is {beta2}, got {eps}: smaller roots of second "
            "moments are kept as 0, so that steps would be divided by eps alone"
        )


@dataclass
class Adam(Rule):
    """The update rule of Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019)."""

    spec = ADAM
    repr_keys = ("betas", "eps")
    decoupled: bool = True

    @property
    def options(self) -> dict[str, Any]:
        return {"adam_w_mode": self.decoupled}

    def check(self, group: Mapping[str, Any]) -> None:
        check_decay_rates(group["betas"])
        check_eps(group["eps"], group["betas"][1])
        if group.get("amsgrad"):
            raise ValueError("amsgrad=True is not supported: use torch.optim.AdamW(amsgrad=True), or amsgrad=False")

    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        beta1, beta2 = map(float, group["betas"])
        return {
            "beta1": beta1,
            "beta2": beta2,
            "eps": float(group["eps"]),
            "bias_correction": float(group["bias_correction"]),
        }

    def scalars(self, values: Mapping[str, float], lr: float, step: int) -> tuple[float, dict[str, float]]:
        beta1, beta2, corrects = values["beta1"], values["beta2"], values["bias_correction"] != 0.0
        correction1 = 1.0 - integer_power(beta1, step) if corrects else 1.0
        correction2 = 1.0 - integer_power(beta2, step) if corrects else 1.0
        return lr / correction1, {
            **averaging(beta1, beta2),
            "inverse_sqrt_correction2": 1.0 / math.sqrt(correction2),
            "eps": values["eps"],
        }

    def step(self, grad: Tensor, param: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
        exp_avg, exp_avg_sq = states
        exp_avg = fma(exp_avg, s.own.beta1, s.own.one_minus_beta1 * grad)
        exp_avg_sq = average_square(exp_avg_sq, grad, s.own.beta2, s.own.one_minus_beta2)
        denominator = fma(sqrt(exp_avg_sq), s.own.inverse_sqrt_correction2, s.own.eps)
        return fma(exp_avg / denominator, -s.step_size, param * s.decay), [exp_avg, exp_avg_sq]


@documents_options
class FusedAdam(ShardedOptimizer):
    """Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019), one pass per step over all local shards.

    Behaves as ``torch.optim.Adam``, and with ``decoupled_weight_decay=True`` as ``torch.optim.AdamW``: param groups,
    closures, schedulers, hooks, ``state_dict``. All arithmetic is FP32. ``optimizer.state[p]`` holds ``exp_avg``,
    ``exp_avg_sq`` and, for parameters that are not FP32, ``master_param``: tensors shaped, sharded and placed as ``p``.
    The step counter is ``param_group["step"]``.

    Configs may give dtypes by name ("int8", "torch.bfloat16", "fp32", "bf16", "fp16", "fp8", "8bit") and numbers, betas
    and flags as text ("1e-4", "(0.9, 0.95)", "false"). Param groups keep the names of dtypes that they were given, so
    that they can be written as JSON. Numbers and flags may be tensors or NumPy arrays of one element, which are read
    once, except ``lr``. A flag that is None has its default.

    Args:
        params: parameters, named parameters or param groups; FP32, BF16 or FP16, plain tensors or DTensors. Frozen ones
            may be of any dtype.
        lr: learning rate, a number or a tensor of one element.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the denominator, outside of the square root; at least ``2**-60 / sqrt(1 - betas[1])``, 2.7e-17 by
            default: smaller second moments are kept as 0.
        weight_decay: where it is not 0, here or in a param group, ``decoupled_weight_decay`` says how it is applied.
        amsgrad: not supported, must be False.

    Raises:
        ValueError, TypeError: for hyperparameters or parameters that cannot be used, and for a weight decay without
            ``decoupled_weight_decay``; nothing has been changed then.

    Works with ``torch.amp.GradScaler``: the update divides the gradients by the scale, and leaves them so in ``.grad``
    (without clipping, the sign of ``maximize`` or the L2 penalty), as torch's fused optimizers do. On GPUs a step
    with an overflow is skipped without the host knowing. So ``param_group["step"]`` counts skipped steps too, and
    replays of a CUDA graph not at all, until ``state_dict()`` brings it up to date. A value written to it that differs
    from the one it shows is obeyed by the next step that is called. With ``optimizer.unscales_gradients = False`` the
    scaler divides the gradients before it calls ``step()``, in a pass of its own, as for optimizers that know nothing
    of it; Lightning's ``gradient_clip_val`` asks for that.
    """

    rule: Adam

    @between_graphs
    @takes_options(Options)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        decoupled = options["decoupled_weight_decay"]
        rule = Adam(decoupled is None or flag_of("decoupled_weight_decay", decoupled))
        hyperparameters = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, rule, **hyperparameters, **options)


class FusedAdamW(FusedAdam):
    """:class:`FusedAdam` with torch.optim.AdamW's weight decay: decoupled, 0.01 by default."""

    @takes_options(Options)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if options["decoupled_weight_decay"] is None:
            options["decoupled_weight_decay"] = True
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
