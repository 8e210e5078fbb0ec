"""Peers' state formats, from their published definitions, in an AdamW that keeps its moments as they decode them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

Rounding = Callable[[Tensor], Tensor]  # FP32 values -> what is read back after they were stored

GROUP = 32  # elements per scale of FlashOptim's formats


def unrounded(x: Tensor) -> Tensor:
    return x


def per_tensor_e4m3(x: Tensor) -> Tensor:
    """TransformerEngine's FusedAdam, both moments: one scale per tensor, absmax / 448, rounded to nearest."""
    scale = x.abs().amax().clamp_min(1e-30) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def soft_sign_int8(m: Tensor) -> Tensor:
    """FlashOptim's first moment: y = 2x / (1 + |x|) of x = m / absmax in 127 levels."""
    x, scale = _normalized(m)
    y = (127 * (2 * x / (1 + x.abs())) + 0.5).floor() / 127
    return _ungrouped(y / (2 - y.abs()) * scale, m)


def sqrt_uint8(v: Tensor) -> Tensor:
    """FlashOptim's second moment: sqrt(v) / max in 255 levels."""
    x, scale = _normalized(v.sqrt())
    root = (255 * x + 0.5).floor() / 255 * scale
    return _ungrouped(root * root, v)


def _normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Groups of ``x`` divided by their absmax, and the FP16 scales that decoding multiplies by."""
    groups = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % GROUP)).view(-1, GROUP)
    absmax = groups.abs().amax(1, keepdim=True).clamp_min(1e-12)
    return groups / absmax, absmax.half().float()


def _ungrouped(groups: Tensor, like: Tensor) -> Tensor:
    return groups.flatten()[: like.numel()].view_as(like)


class RoundedAdamW(Optimizer):
    """AdamW in FP32; the update uses the moments of this step before they are rounded, as the fused kernels do."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float = 0.0,
        *,
        eps: float = 1e-8,
        round_m: Rounding = unrounded,
        round_v: Rounding = unrounded,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        self.round_m, self.round_v = round_m, round_v
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(m=torch.zeros_like(param), v=torch.zeros_like(param))
                m = state["m"].lerp_(param.grad, 1 - beta1)
                v = state["v"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                denominator = (v / (1 - beta2**self.steps)).sqrt_().add_(group["eps"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**self.steps))
                state["m"], state["v"] = self.round_m(m), self.round_v(v)


PEER_FORMATS: dict[str, tuple[Rounding, Rounding]] = {  # of m and of v
    "per-tensor E4M3 (TransformerEngine's)": (per_tensor_e4m3, per_tensor_e4m3),
    "soft-sign int8, sqrt uint8, 32 (FlashOptim's)": (soft_sign_int8, sqrt_uint8),
}
