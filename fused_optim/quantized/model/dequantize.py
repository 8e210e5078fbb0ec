"""The way out: makes quantized parameters of a model plain ones, or its state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_optim.memory.replaced import mark_replaced
from fused_optim.quantized.fp8.kept import kept_weight
from fused_optim.quantized.fp8.linear import revert
from fused_optim.quantized.tensor import QuantizedTensor, local_weight
from fused_optim.sharding import fsdp
from fused_optim.sharding.dtensor import local_tensor, rewrap_like


@runtime_checkable
class Optimizer(Protocol):
    """The method that an optimizer needs here; ``FusedAdam`` has it."""

    param_groups: list[dict[str, Any]]

    def replace_parameters(self, replacements: Mapping[Tensor, Tensor]) -> None:
        """Let others take the places of parameters, with their states, and write them from the masters."""


@torch.no_grad()
def dequantize_model_(model: nn.Module, optimizer: Optimizer | None = None) -> nn.Module:
    """Replace quantized parameters, and kept ones, by plain ones of the same shape, dtype and placements.

    They become the masters of ``optimizer``, which goes on with them and its states; where there is none, the initial
    values that are still kept; else the decoded values. Modules of FSDP2 stay as they are: call it on all ranks. Tied
    parameters stay tied. An optimizer that is not given holds the quantized parameters further on, as captured graphs
    and DistributedDataParallel do: one of this package raises in its next step.

    Raises TypeError for an optimizer that is no ``FusedAdam``, RuntimeError while FSDP2 has gradients to reduce.
    Nothing has been changed then.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected a FusedAdam, got a {type(optimizer).__name__}")
    fsdp.reshard(model)
    quantized = [
        param
        for param in model.parameters()
        if isinstance(local_tensor(param), QuantizedTensor) or kept_weight(param) is not None
    ]
    replaced: dict[Tensor, Tensor] = {param: _plain(param) for param in quantized}
    if optimizer is not None:
        updated = {param for group in optimizer.param_groups for param in group["params"]}
        optimizer.replace_parameters({old: new for old, new in replaced.items() if old in updated})
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and param in replaced:
                module._parameters[key] = replaced[param]  # type: ignore[assignment]
                revert(module)
    fsdp.follow_replaced(model)
    mark_replaced(replaced, "dequantize_model_ has replaced it; give it the optimizer, or make that afterwards")
    return model


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model with decoded values, in host memory, in place of quantized weights.

    Tied ones stay tied. Raises RuntimeError for weights that are sharded.
    """
    return decoded_state_dict(model.state_dict())


@torch.no_grad()
def decoded_state_dict(state: dict[str, Any]) -> dict[str, Any]:
    """:func:`plain_state_dict` of what ``model.state_dict()`` has returned."""
    plain: dict[str, Any] = {}
    of_codes: dict[int, str] = {}  # the same for all names of a weight
    for name, value in state.items():
        plain[name] = value
        if isinstance(value, DTensor) and isinstance(local_tensor(value), QuantizedTensor):
            raise RuntimeError(
                f"{name} is sharded: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
                "torch.distributed.checkpoint.state_dict gathers decoded values, on all ranks"
            )
        if isinstance(value, QuantizedTensor):
            first = of_codes.setdefault(value.components["data"].data_ptr(), name)
            plain[name] = value.dequantize().cpu() if first == name else plain[first]
    return plain


def _plain(param: Tensor) -> nn.Parameter:
    kept = kept_weight(param)
    if kept is not None:
        return _with_gradients(nn.Parameter(rewrap_like(kept.plain, param), requires_grad=param.requires_grad), param)
    local = local_weight(param)
    if local.is_meta:
        values = torch.empty(local.shape, dtype=local.dtype, device="meta")
    else:
        values = local.initial_values().to(local.dtype)
    return _with_gradients(nn.Parameter(rewrap_like(values, param), requires_grad=param.requires_grad), param)


def _with_gradients(plain: nn.Parameter, param: Tensor) -> nn.Parameter:
    for gradient in ("grad", "decoupled_grad"):
        if getattr(param, gradient, None) is not None:
            setattr(plain, gradient, getattr(param, gradient))
    return plain
