"""FusedAdam: Adam and AdamW for sharded parameters, with low-precision states and FP32 master weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_optim.decorators import between_graphs
from fused_optim.formats.arithmetic import flush_denormals, fma, sqrt
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import check_decay_rates, check_differentiable, check_number
from fused_optim.options.reading import (
    CheckpointDevice,
    CheckpointFormat,
    Options,
    flag_of,
    reads_arguments,
    shows_options_of,
)
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
    adam_w_mode: bool = True

    @property
    def decoupled(self) -> bool:
        return self.adam_w_mode

    @property
    def options(self) -> dict[str, Any]:
        return {"adam_w_mode": self.adam_w_mode}

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
        bias_correction: divide the moments by ``1 - beta ** step``.
        maximize: ascend instead of descend.
        capturable: ``step()`` can be captured into a CUDA graph, after one warm-up step or ``initialize_state()``. The
            step counters are on the devices then. A replay uses the learning rate that a tensor ``lr`` on the GPU has
            at that time; a float ``lr`` is copied to the GPU by ``step()`` and ``initialize_state()`` outside of
            captures, so replays use the value of the last one of these. All other hyperparameters, and which
            parameters have gradients, are those of the capture. No effect on parameters on the CPU.
        master_bits: 32: parameters that are not FP32 have exact FP32 masters; BF16 parameters store only the bits that
            they lack, in 2 bytes per element. 24: BF16 parameters have 24-bit masters, in 1 byte, which round in the
            rotating way, and others FP32 ones. 0: no masters. None means 32.
        exp_avg_dtype: how the first moment is kept: ``torch.float32``, ``bfloat16``, ``float16``, ``float8_e4m3fn``
            or ``int8``; the last three with one FP32 scale per 128, 64 or 32 elements of a row, and FP32 where no such
            block divides the rows of all shards or a one-dimensional parameter has fewer than 4096 elements. Also as a
            param-group option.
        exp_avg_sq_dtype: the same of the second moment.
        state_dtype: of all states whose own option is None.
        stochastic_rounding: rotating rounding, not nearest, of states that are not FP32, of 24-bit masters, and of
            parameters without master. Rounded to nearest, changes below half a last place are lost forever.
        seed: of the rounding sequence, a function of (seed, step, parameter, global element index). A parameter counts
            by its name where ``params`` has names, so that optimizers of parts of a model round as one of all of it
            does; else by its position.
        skip_nonfinite: a step whose gradients hold a NaN or an infinity, on any rank, changes nothing and does not
            count; nothing is read back. It costs one pass over the gradients, none where the optimizer's own
            ``clip_grad_norm_`` was called for the step, and a reduction over the default process group, which makes
            ``step()`` a collective; ``skip_nonfinite_group`` may be set to another one. ``skipped_steps`` counts.
        offload_states: moments, masters beside the parameters, and scales live in page-locked host memory. ``step()``
            brings them to the GPU in chunks, through 96 MB of buffers, and back; it returns when they are in host
            memory again. The same bits as without. No effect on parameters in host memory, whose states are there
            anyway; masters of quantized weights stay on the GPU. Not with ``capturable``.
        offload_fraction: the share of the parameters' elements whose states are offloaded, in [0, 1]; parameters are
            chosen as wholes, evenly over the model.
        checkpoint_format: the form of ``state_dict()``. ``"unscaled"``: FP32 tensors; ``"native"``: the stored bits
            and scales, several times smaller; ``"torch"``: what torch.optim.AdamW has, for going over from it and back
            to it: FP32 moments without masters, a ``step`` per parameter, and the running param groups show AdamW's
            keys. All of them load whatever this is; it may be changed at any time.
        checkpoint_device: where ``state_dict()`` puts the states that it converts. None: where the parameters are;
            "cpu": in host memory, one state after the other, so that a save takes no more of a GPU's memory than the
            unscaled states of one parameter do (or 64 MB). What it hands over by reference (FP32 states; in the native
            form BF16 ones, too) stays where it is. "stager": all is handed over by reference, or made when it is read,
            to be copied by ``fused_optim.checkpoint.PinnedStager``. It may be changed at any time.
        fused: which of its implementations torch.optim.AdamW is to take; without effect here.
        foreach: the same.
        differentiable: not supported, must be False.
        decoupled_weight_decay: False: weight decay is added to the gradient, as by torch.optim.Adam (L2). True: the
            parameter is multiplied by ``1 - lr * weight_decay``, as by torch.optim.AdamW, and by TransformerEngine's
            and Apex's FusedAdam. None: not said. The ``defaults`` of torch.optim.Adam and AdamW are arguments.

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
    @reads_arguments
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        maximize: bool = False,
        capturable: bool = False,
        exp_avg_dtype: torch.dtype | str | None = None,
        exp_avg_sq_dtype: torch.dtype | str | None = None,
        state_dtype: torch.dtype | str | None = None,
        master_bits: int | None = None,
        stochastic_rounding: bool = True,
        seed: int = 0,
        skip_nonfinite: bool = False,
        offload_states: bool = False,
        offload_fraction: float = 1.0,
        checkpoint_format: CheckpointFormat = "unscaled",
        checkpoint_device: CheckpointDevice = None,
        fused: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool = False,
        decoupled_weight_decay: bool | None = None,
    ) -> None:
        check_differentiable(differentiable)
        if decoupled_weight_decay is not None:
            decoupled_weight_decay = flag_of("decoupled_weight_decay", decoupled_weight_decay)
        super().__init__(
            params,
            Adam(decoupled_weight_decay is not False),
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "bias_correction": bias_correction,
                "maximize": maximize,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
            {EXP_AVG.option: exp_avg_dtype, EXP_AVG_SQ.option: exp_avg_sq_dtype},
            state_dtype,
            {
                "capturable": capturable,
                "master_bits": master_bits,
                "stochastic_rounding": stochastic_rounding,
                "seed": seed,
                "skip_nonfinite": skip_nonfinite,
                "offload_states": offload_states,
                "offload_fraction": offload_fraction,
                "checkpoint_format": checkpoint_format,
                "checkpoint_device": checkpoint_device,
                "fused": fused,
                "foreach": foreach,
            },
        )


class FusedAdamW(FusedAdam):
    """:class:`FusedAdam` with torch.optim.AdamW's weight decay: decoupled, 0.01 by default."""

    @shows_options_of(FusedAdam.__init__)
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
        if options.get("decoupled_weight_decay") is None:
            options["decoupled_weight_decay"] = True
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
