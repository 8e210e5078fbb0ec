"""Clipping that the next step's pass does: the factors of the gradients that were measured last."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fused_optim.options.checks import describe, some_of
from fused_optim.state.store import StateStore
from fused_optim.step import clip
from fused_optim.step.agreement import Agreement, CollectivesOfRank
from fused_optim.step.scalars import DeviceScalars, is_capturable_on
from fused_optim.step.signature import signature_of
from fused_optim.step.skip import Skips


class DeferredClip:
    """The clipping of one optimizer's next step. The step uses it once; gradients that are dropped take it with them.

    A CUDA graph reads the optimizer's own scalar, into which every call of :meth:`measure` writes.
    """

    def __init__(self, store: StateStore, scalars: DeviceScalars, skips: Skips, agreement: Agreement) -> None:
        self._store, self._scalars, self._skips, self._agreement = store, scalars, skips, agreement
        self.due: clip.Clip | None = None

    def measure(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip the next step's gradients; see ``ShardedOptimizer.clip_grad_norm_``."""
        store = self._store
        grads = store.gradients()
        asked = {"max_norm": max_norm, "norm_type": norm_type}
        facts = signature_of(store, asked=asked) if self._agreement.is_first else None
        self._agreement.check_alike(CollectivesOfRank.of(store.params, grads, store.names, facts))
        measured = clip.measure(store.params, grads, max_norm, norm_type, error_if_nonfinite)
        if self.due is not None and not self.due.changed(grads):
            measured = measured.after(self.due, float(max_norm))
        self.due = measured
        if store.settings.skip_nonfinite:
            self._skips.note(measured)
        for device, factor in measured.factors.items():
            if is_capturable_on(device, store.settings):
                self._scalars.factor(device).copy_(factor)
        return measured.norm

    def drop(self) -> None:
        if self.due is not None:
            self.serve(self.due.factors)
        self._skips.forget()

    def check(self) -> None:
        """Raise RuntimeError for gradients that are not as they were measured: these the next step cannot clip."""
        if self.due is None:
            return
        grads, names = self._store.gradients(), self._store.names
        if all(grad is None for grad in grads):
            self.drop()
        elif changed := self.due.changed(grads):
            who = [describe(self._store.params[i], i, names[i]) for i in changed]
            raise RuntimeError(
                f"clip_grad_norm_() was called for this step, which clips what was measured, and since then gradients "
                f"were written or replaced, of {some_of(who)}: call it after all that changes gradients, or use "
                "fused_optim.clip_grad_norm_, which clips at once; if these are new ones, after a step that was not "
                "made, call optimizer.zero_grad() before backward"
            )

    def factor(self, device: torch.device) -> Tensor | None:
        """The factor of gradients on a device: a float32 scalar, which may be on another one."""
        if is_capturable_on(device, self._store.settings):
            return self._scalars.factor(device)
        return None if self.due is None else self.due.factors.get(device)

    def serve(self, devices: Iterable[torch.device]) -> None:
        """After a step, also in a graph: each clipping serves one."""
        for device in devices:
            if is_capturable_on(device, self._store.settings):
                self._scalars.factor(device).fill_(1.0)
        self.due = None
