"""Recognises synthetic first steps, by which other libraries make an optimizer create its states.

``torch.distributed.checkpoint.state_dict`` and Megatron-FSDP fill gradients with zeros, set every learning rate to 0
and call ``step()``. Such a step must leave the optimizer as ``initialize_state()`` would: a counted step would be
damage. A step with another learning rate is always real.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fused_optim.sharding.dtensor import has_values, local_tensor
from fused_optim.step.scalars import host_lr


def may_be_synthetic(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether no step was counted and every learning rate is exactly 0, as the hosts of all ranks know."""
    return all(host_lr(group) == 0.0 and int(group["step"]) == 0 for group in groups)


def any_nonzero(grads: Iterable[Tensor]) -> bool:
    """Whether some element of the local gradients is not zero. Waits for the device."""
    return any(bool(torch.count_nonzero(local_tensor(grad))) for grad in grads if has_values(grad))
