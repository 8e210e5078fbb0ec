"""What the drop-in classes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_optim.adam import FusedAdam
from fused_optim.decorators import between_steps
from fused_optim.options.reading import Options
from fused_optim.sharding.dtensor import local_tensor


class PeersAdam(FusedAdam):
    """:class:`fused_optim.FusedAdam` with the words that other libraries have for its options."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        **options: Unpack[Options],
    ) -> None:
        if options.get("decoupled_weight_decay") is None:
            options["decoupled_weight_decay"] = adam_w_mode
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    @property
    def adam_w_mode(self) -> bool:
        """True for AdamW's decoupled weight decay, False for torch.optim.Adam's L2 penalty."""
        return self.rule.adam_w_mode

    @adam_w_mode.setter
    @between_steps
    def adam_w_mode(self, mode: bool) -> None:
        self.rule.adam_w_mode = mode


def refuse_amsgrad(amsgrad: bool) -> None:
    """Raise RuntimeError, as Apex and TransformerEngine do, where :class:`fused_optim.FusedAdam` has a ValueError."""
    if amsgrad:
        raise RuntimeError("amsgrad=True is not supported: use torch.optim.AdamW(amsgrad=True), or amsgrad=False")


def put_rates_on_devices(optimizer: FusedAdam) -> None:
    """Make every ``lr`` an FP32 scalar on its group's device: replays of CUDA graphs read what is filled in."""
    for group in optimizer.param_groups:
        if group["params"]:
            device = local_tensor(group["params"][0]).device
            rate = (
                group["lr"]
                if isinstance(group["lr"], Tensor)
                else torch.tensor(float(group["lr"]), dtype=torch.float32)
            )
            group["lr"] = rate.detach().to(device=device, dtype=torch.float32)
