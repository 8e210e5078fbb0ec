"""torch.amp.GradScaler: the scale of the gradients and whether they overflowed, as scalars on a device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

_scaled_pass: weakref.ref[Callable[[], None]] | None = None  # the last backward pass of a scaled loss, while it runs


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
    """What ``scaler.step(optimizer)`` notes after a step."""
    if scaler is not None and scaler.is_enabled():
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED


def _any_overflow(found: list[Tensor]) -> Tensor | None:
    return sum((flag.to(found[0].device) for flag in found[1:]), start=found[0]) if found else None


# --- gradient release, whose updates come before the scaler says that there is one ----------------------------------


@functools.cache
def notice_scaled_losses() -> None:
    """From now on :func:`gradients_are_scaled` knows: replaces ``GradScaler.scale``, once."""
    torch.amp.GradScaler.scale = _noticed(torch.amp.GradScaler.scale)  # type: ignore[method-assign]


def gradients_are_scaled() -> bool:
    """Whether a backward pass of a loss runs that a GradScaler has scaled."""
    return _scaled_pass is not None and _scaled_pass() is not None


def _noticed(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def noticed(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        return tree_map_only(Tensor, _watched, scaled) if self.is_enabled() else scaled

    return noticed


def _watched(loss: Tensor) -> Tensor:
    if loss.requires_grad:
        loss.register_hook(_note_pass)
    return loss


def _note_pass(_: Tensor) -> None:
    """Autograd holds what it would call at the end of a pass, as long as that runs."""
    global _scaled_pass

    def at_end() -> None:
        global _scaled_pass
        _scaled_pass = None

    _scaled_pass = weakref.ref(at_end)
    Variable._execution_engine.queue_callback(at_end)
