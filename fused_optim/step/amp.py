"""torch.amp.GradScaler: the scale of the gradients and whether they overflowed, as scalars on a device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


def amp_scalars(optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> tuple[Tensor | None, Tensor | None]:
    """(what to divide the gradients by, whether to skip the step), each None where it does not apply.

    ``scaler.step(optimizer)`` has left both on the optimizer; with ``step(grad_scaler=scaler)`` the scaler is asked, in
    the same way: where ``scaler.unscale_(optimizer)`` was called, gradients are neither checked nor divided again.
    """
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scaler is not None and scaler.is_enabled():
        stage = scaler._per_optimizer_states[id(optimizer)]
        if stage["stage"] is OptState.STEPPED:
            raise RuntimeError("step(grad_scaler=...) has already been called since the last update() of the scaler")
        if stage["stage"] is OptState.READY:
            scaler._check_inf_per_device(optimizer)
            own = scaler._get_scale_async()
            assert own is not None  # it has scaled the gradients that it has just looked at
            scale = own * (1 if scale is None else scale)
        found_inf = _any_overflow(list(stage["found_inf_per_device"].values()))
    if scale is not None and not isinstance(found_inf, Tensor) and getattr(optimizer, "use_decoupled_grad", False):
        raise RuntimeError(
            "torch.amp.GradScaler looks for overflows in p.grad only, which use_decoupled_grad=True does not use: "
            "set optimizer.found_inf from p.decoupled_grad, or train without a GradScaler"
        )
    if scale is not None and not isinstance(scale, Tensor):
        scale = torch.tensor(float(scale), dtype=torch.float32)
    return scale, found_inf if isinstance(found_inf, Tensor) else None  # 0: no gradient was checked


def mark_stepped(optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    """Note in the scaler that the optimizer has stepped, as ``scaler.step(optimizer)`` does."""
    if scaler is not None and scaler.is_enabled():
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED


def _any_overflow(found: list[Tensor]) -> Tensor | None:
    return sum((flag.to(found[0].device) for flag in found[1:]), start=found[0]) if found else None
