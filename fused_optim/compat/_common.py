"""What the drop-in classes share."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_optim.adam import FusedAdam
from fused_optim.sharding.dtensor import local_tensor


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
