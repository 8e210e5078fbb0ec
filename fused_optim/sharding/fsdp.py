"""FSDP2's own record of parameters, updated when others take their places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(model: nn.Module) -> None:
    """Put the sharded parameters back into their modules, where FSDP2 may have left gathered ones.

    Raises RuntimeError, before anything is changed, while gradients wait to be reduced.
    """
    for kept in _kept(model):
        gathered = getattr(kept, "_unsharded_param", None)
        if kept.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None):
            name = kept._param_fqn or kept._module_info.param_name
            raise RuntimeError(f"{name}: FSDP2 has not reduced its gradients yet: do this after the last micro-batch")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def follow_replaced(model: nn.Module) -> None:
    """Let FSDP2 gather the parameters that now are in the modules, and drop what it made of the earlier ones."""
    for kept in _kept(model):
        before = kept.sharded_param
        kept.reset_sharded_param()  # as after load_state_dict(assign=True)
        if kept.sharded_param is not before:
            kept.all_gather_outputs = []
            kept._unsharded_inner_tensors = []
            kept.__dict__.pop("_unsharded_param", None)


def _kept(model: nn.Module) -> Iterator[Any]:
    """FSDP2's own record of every parameter, for which torch has no public name."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                yield from () if group is None else group.fsdp_params
