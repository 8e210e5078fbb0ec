"""Apex's FusedAdam: its positional order, defaults, attributes and errors over :class:`fused_optim.FusedAdam`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_optim.compat._common import PeersAdam, arguments
from fused_optim.decorators import declared_without
from fused_optim.options.reading import OptionsBesideApex
from fused_optim.sharding.dtensor import local_tensor


class FusedAdam(PeersAdam):
    """:class:`fused_optim.FusedAdam` that is called as ``apex.optimizers.FusedAdam``.

    The arguments are in Apex's order and have its defaults. ``master_weights`` needs no ``capturable`` here; with
    ``capturable`` each group's ``lr`` becomes an FP32 tensor on its parameters' device. ``options`` are further ones of
    :class:`fused_optim.FusedAdam`, such as ``exp_avg_dtype``.

    Raises:
        RuntimeError: for ``amsgrad``, as Apex does. Otherwise as :class:`fused_optim.FusedAdam`.
    """

    _default_remainders = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **options: Unpack[OptionsBesideApex],
    ) -> None:
        super().__init__(**arguments(locals()))

    @declared_without("grad_scaler")
    def step(  # type: ignore[override]  # Apex's signature, which takes no others
        self,
        closure: Callable[[], Any] | None = None,
        grads: object = None,
        output_params: object = None,
        scale: object = None,
        grad_norms: object = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """As :meth:`fused_optim.FusedAdam.step`. Raises RuntimeError for the arguments that Apex has given up."""
        given_up = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        used = [name for name, value in given_up.items() if value is not None]
        if used:
            raise RuntimeError(f"step({', '.join(used)}): no longer accepted; gradients are read from the parameters")
        return super().step(closure, grad_scaler=grad_scaler)

    @property
    @torch.no_grad()
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]]:
        """The FP32 masters, local parts, by param group; None where there are none. Creates the states.

        Masters of FP32 parameters are these themselves; those kept as remainders are copies.
        """
        if self.master_weights:
            self.initialize_state()
            self.stepper.sync_written_masters()
        return [{"params": [self._master(param) for param in group["params"]]} for group in self.param_groups]

    def _master(self, param: Tensor) -> Tensor | None:
        has_master = self.master_weights and param in self.store
        return local_tensor(self.store.master(param)) if has_master else None
