"""Recognises synthetic first steps, by which other libraries make an optimizer create its states.

``torch.distributed.checkpoint.state_dict`` fills gradients with zeros, sets every learning rate to 0 and calls
``step()``; Megatron-FSDP does so with the learning rates as they are. Such a step must leave the optimizer as
``initialize_state()`` would: weight decay or a counted step would be damage. A step with another learning rate is
always real, except of Megatron-FSDP's parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fused_optim.sharding.dtensor import has_values, local_tensor
from fused_optim.state.groups import Group
from fused_optim.step.scalars import host_lr

_MEGATRON_FSDP = "_megatron_fsdp_model"  # the attribute by which its parameters know their model


def may_be_synthetic(groups: Sequence[Group]) -> bool:
    """True if no step was counted and every learning rate is exactly 0 or parameters are Megatron-FSDP's.

    All ranks answer alike, but for one whose groups cannot be read. It has no error here: it is to tell the others.
    """
    try:
        for group in groups:
            if int(group["step"]):
                return False
        at_rest = all(host_lr(group) == 0.0 for group in groups)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError):
        at_rest = False
    return at_rest or any(hasattr(param, _MEGATRON_FSDP) for group in groups for param in group["params"])


def any_nonzero(grads: Iterable[Tensor]) -> bool:
    """True if some element of the local gradients is not zero. Waits for the device."""
    return any(bool(torch.count_nonzero(local_tensor(grad))) for grad in grads if has_values(grad))
