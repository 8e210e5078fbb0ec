"""Full tensors and full state dicts are plain, on any number of ranks.

What ranks gather of quantized weights is decoded for them. torch takes shortcuts where nothing is to be gathered: one
rank has all of a weight, or every rank has. And state dicts of models that are not sharded may be broadcast, to ranks
that wait for plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor

from fused_optim.quantized.tensor.dispatch import decoded
from fused_optim.quantized.tensor.quantized_tensor import QuantizedTensor


def _redistribute(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    @functools.wraps(original)
    def redistribute(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        result = original(self, *args, **kwargs)
        if isinstance(result._local_tensor, QuantizedTensor) and _gathers(self, result):
            result._local_tensor = result._local_tensor.dequantize()
        return result

    return redistribute


def _gathers(before: DTensor, after: DTensor) -> bool:
    pairs = zip(before.placements, after.placements, strict=True)
    return any(new.is_replicate() and not old.is_replicate() for old, new in pairs)


def _gather_state_dict(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def gather_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        gathered: dict[str, Any] = decoded(original(*args, **kwargs))
        return gathered

    return gather_state_dict


def _broadcast_tensors(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def broadcast_tensors(full: dict[str, Any], local: dict[str, Any], keys: Sequence[str], *rest: Any) -> None:
        original({key: decoded(full[key]) for key in keys}, local, keys, *rest)

    return broadcast_tensors


DTensor.redistribute = _redistribute(DTensor.redistribute)  # type: ignore[method-assign]
state_dict._gather_state_dict = _gather_state_dict(state_dict._gather_state_dict)
_state_dict_utils._broadcast_tensors = _broadcast_tensors(_state_dict_utils._broadcast_tensors)
