"""Replacements in torch, made for the first quantized weight; importing this package replaces nothing.

Each serves a program in which torch asks no tensor: it takes one for what it is to gather, or waits for plain ones.
``torch_versions.REPLACED`` lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from fused_optim.quantized.tensor.dispatch import Decodable, decoded
from fused_optim.sharding.dtensor import local_tensor


@functools.cache
def install() -> None:
    """Replace torch's functions, once."""
    DTensor.redistribute = _redistribute(DTensor.redistribute)  # type: ignore[method-assign]
    state_dict._gather_state_dict = _gather_state_dict(state_dict._gather_state_dict)
    _state_dict_utils._broadcast_tensors = _broadcast_tensors(_state_dict_utils._broadcast_tensors)
    AveragedModel.__init__ = _average(AveragedModel.__init__)  # type: ignore[method-assign]


def _redistribute(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """For ``full_tensor()`` on one rank, which has nothing to gather: full tensors are plain on any number of ranks."""

    @functools.wraps(original)
    def redistribute(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        result = original(self, *args, **kwargs)
        pairs = zip(self.placements, result.placements, strict=True)
        gathers = any(new.is_replicate() and not old.is_replicate() for old, new in pairs)
        if gathers and isinstance(result._local_tensor, Decodable):
            result._local_tensor = result._local_tensor.dequantize()
        return result

    return redistribute


def _gather_state_dict(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """For ``get_model_state_dict(full_state_dict=True)``, which takes weights that are not sharded as they are."""

    @functools.wraps(original)
    def gather_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        gathered: dict[str, Any] = decoded(original(*args, **kwargs))
        return gathered

    return gather_state_dict


def _broadcast_tensors(original: Callable[..., None]) -> Callable[..., None]:
    """For ``set_model_state_dict(broadcast_from_rank0=True)`` of quantized weights: the others wait for plain ones."""

    @functools.wraps(original)
    def broadcast_tensors(full: dict[str, Any], local: dict[str, Any], keys: Sequence[str], *rest: Any) -> None:
        original({key: decoded(full[key]) for key in keys}, local, keys, *rest)

    return broadcast_tensors


def _average(original: Callable[..., None]) -> Callable[..., None]:
    """For ``AveragedModel``, whose averages move by less than a format's steps: they would not change."""

    @functools.wraps(original)
    def initialise(self: AveragedModel, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        for name, param in model.named_parameters():
            if isinstance(local_tensor(param), Decodable):
                raise TypeError(
                    f"{name}: AveragedModel would round the average to a quantized format at every update; "
                    "average the masters, optimizer.master_state_dict(model), as docs/quantized.md shows"
                )
        original(self, model, *args, **kwargs)

    return initialise
