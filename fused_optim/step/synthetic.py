"""Recognises synthetic first steps, by which other libraries make an optimizer create its states.

``torch.distributed.checkpoint.state_dict`` and Megatron-FSDP fill gradients with zeros and call ``step()``. Such a step
must leave the optimizer as ``initialize_state()`` would: a decoupled weight decay or a counted step would be damage.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fused_optim.sharding.collective import any_rank
from fused_optim.sharding.dtensor import has_values, local_tensor


def all_gradients_zero(params: Iterable[Tensor], grads: Iterable[Tensor]) -> bool:
    """Whether every element of every gradient is zero on every rank of the parameters' meshes.

    A collective over those meshes, made once in an optimizer's life: before its first step. Raises RuntimeError if
    another rank called :func:`announce_failure` instead.
    """
    nonzero = any(bool(torch.count_nonzero(local_tensor(grad))) for grad in grads if has_values(grad))
    nonzero, failed = any_rank(params, nonzero, False)
    if failed:
        raise RuntimeError("another rank refused its gradients before the first step; its error says why")
    return not nonzero
