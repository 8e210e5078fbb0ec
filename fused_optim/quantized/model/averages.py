"""Averages of quantized weights, which torch.optim.swa_utils.AveragedModel would make in their own format.

An average moves by small parts of the format's steps, which rounding would take away: it would stay what it was first.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from fused_optim.quantized.tensor import QuantizedTensor
from fused_optim.sharding.dtensor import local_tensor


def _refuse_average(module: nn.Module, name: str, averaged: nn.Module | None) -> None:
    if not isinstance(module, AveragedModel) or averaged is None:
        return
    for weight, param in averaged.named_parameters():
        local = local_tensor(param)
        if isinstance(local, QuantizedTensor):
            raise TypeError(
                f"{weight}: AveragedModel would round the average to {local.recipe} at every update; "
                "average the masters, optimizer.master_state_dict(model), as docs/quantized.md shows"
            )


register_module_module_registration_hook(_refuse_average)
