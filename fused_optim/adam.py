"""FusedAdam: Adam and AdamW for sharded parameters, with low-precision states and FP32 master weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_optim.backends.tables import Rule as RuleNumber
from fused_optim.decorators import between_graphs
from fused_optim.formats.arithmetic import flush_denormals, fma, sqrt
from fused_optim.formats.states import Kind
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import check_decay_rates, check_number
from fused_optim.options.reading import Options
from fused_optim.options.table import documents_options, flag_of, takes_options
from fused_optim.rule import Hyper, OneRule, StateSpec, Update, float32, integer_power

EXP_AVG = StateSpec("exp_avg", Kind.SIGNED, "exp_avg_dtype")
EXP_AVG_SQ = StateSpec("exp_avg_sq", Kind.SQUARE, "exp_avg_sq_dtype")
ADAM_STATES = (EXP_AVG, EXP_AVG_SQ)
MOMENTS = (EXP_AVG.name, EXP_AVG_SQ.name)
LEAST_SQUARE = 2.0**-120  # below it a block of second moments is stored as 0; FP32's and BF16's from 2^-126 on


@dataclass(frozen=True)
class AdamScalars:
    """What the update of an element reads; every float is rounded to FP32."""

    grad_factor: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inverse_sqrt_correction2: float
    eps: float
    step_size: float
    decay: float
    l2_penalty: float


@dataclass
class Adam(OneRule):
    """The update rule of Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019)."""

    adam_w_mode: bool = True

    code: int = field(default=RuleNumber.ADAM, init=False)
    states: tuple[StateSpec, ...] = field(default=ADAM_STATES, init=False)
    shown: tuple[str, ...] = field(default=("betas", "eps"), init=False)
    has_torch_form: bool = field(default=True, init=False)

    @property
    def options(self) -> dict[str, Any]:
        return {"adam_w_mode": self.adam_w_mode}

    def check(self, group: Mapping[str, Any]) -> None:
        check_number("eps", group["eps"])
        check_decay_rates(group["betas"])
        # Stored second moments below LEAST_SQUARE may be 0. So a root of at most sqrt(LEAST_SQUARE / (1 - beta2)) is
        # lost, the bias correction included, and beside an eps of that no step becomes more than twice as large.
        beta2, eps = group["betas"][1], group["eps"]
        if eps * eps * (1.0 - beta2) < LEAST_SQUARE:
            least = math.sqrt(LEAST_SQUARE / (1.0 - beta2))
            raise ValueError(
                f"eps: expected at least {least:.1e} where betas[1] is {beta2}, got {eps}: smaller roots of second "
                "moments are kept as 0, so that steps would be divided by eps alone"
            )
        if group.get("amsgrad"):
            raise ValueError("amsgrad=True is not supported: use torch.optim.AdamW(amsgrad=True), or amsgrad=False")

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "eps": float(group["eps"]),
            "adam_w": self.adam_w_mode,
            "bias_correction": group["bias_correction"],
        }

    def derive(self, hyper: Hyper, lr: float, step: int, grad_factor: float) -> AdamScalars:
        """Bias corrections and step size in double precision, then rounded to FP32."""
        correction1 = 1.0 - integer_power(hyper.beta1, step) if hyper.bias_correction else 1.0
        correction2 = 1.0 - integer_power(hyper.beta2, step) if hyper.bias_correction else 1.0
        return AdamScalars(
            grad_factor=float32(grad_factor),
            beta1=float32(hyper.beta1),
            one_minus_beta1=float32(1.0 - hyper.beta1),
            beta2=float32(hyper.beta2),
            one_minus_beta2=float32(1.0 - hyper.beta2),
            inverse_sqrt_correction2=float32(1.0 / math.sqrt(correction2)),
            eps=float32(hyper.eps),
            step_size=float32(lr / correction1),
            decay=float32(1.0 - lr * hyper.weight_decay) if hyper.adam_w else 1.0,
            l2_penalty=0.0 if hyper.adam_w else float32(hyper.weight_decay),
        )

    def update(self, scalars: AdamScalars) -> Update:
        s = scalars

        def update(grad: Tensor, param: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            m, v = states
            grad = grad * s.grad_factor
            if s.l2_penalty != 0.0:
                grad = fma(param, s.l2_penalty, grad)
            m = fma(m, s.beta1, s.one_minus_beta1 * grad)
            v = flush_denormals(fma(s.one_minus_beta2 * grad, grad, flush_denormals(s.beta2 * v)))
            denominator = fma(sqrt(v), s.inverse_sqrt_correction2, s.eps)
            return fma(m / denominator, -s.step_size, param * s.decay), [m, v]

        return update


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
