"""Replacements in torch, made for the first quantized weight; importing this package replaces nothing.

Each serves a case in which torch asks no tensor: it takes a tensor for what it is to gather, or waits for plain ones.
Full tensors and full state dicts are plain, on any number of ranks. What ranks gather of quantized weights is decoded
for them, but torch takes shortcuts if nothing is to be gathered: one rank has all of a weight, or every rank has. And
state dicts of models that are not sharded may be broadcast, to ranks that wait for plain tensors.

``w.new_zeros(rows, columns)`` may be FSDP2 that pads a shard, or a user who makes an adapter's weight.
``w.chunk(2, 1)`` may be a cut between ranks, which has to be possible, or between gates, which may be any view. The
arguments are the same. So torch's functions that make a weight's own shards and copies tell while they run:
:func:`torch_makes_weights`.

Averages move by small parts of a format's steps, which rounding would take away: they would stay what they were first.

docs/quantized.md lists all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.swa_utils import AveragedModel

from fused_optim.quantized.tensor.dispatch import Decodable, decoded
from fused_optim.sharding.dtensor import local_tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")
_torch_makes_weights = ContextVar("torch_makes_weights", default=False)


@functools.cache
def install() -> None:
    """Replace torch's functions, once."""
    DTensor.redistribute = _redistribute(DTensor.redistribute)  # type: ignore[method-assign]
    state_dict._gather_state_dict = _gather_state_dict(state_dict._gather_state_dict)
    _state_dict_utils._broadcast_tensors = _broadcast_tensors(_state_dict_utils._broadcast_tensors)
    AveragedModel.__init__ = _average(AveragedModel.__init__)  # type: ignore[method-assign]
    # shards, and what they are gathered from
    FSDPParam.__init__ = _makes_weights(FSDPParam.__init__)  # type: ignore[method-assign]
    FSDPParam.reset_sharded_param = _makes_weights(FSDPParam.reset_sharded_param)  # type: ignore[method-assign]
    Shard._split_tensor = _makes_weights(Shard._split_tensor)  # type: ignore[method-assign]
    _StridedShard._split_tensor = _makes_weights(_StridedShard._split_tensor)  # type: ignore[method-assign]
    # parameters in the places of others: ``to_empty``
    nn.Module._apply = _makes_weights(nn.Module._apply)  # type: ignore[method-assign]
    # what checkpoints are staged in, and loaded into
    StateDictStager.stage = _makes_weights(StateDictStager.stage)  # type: ignore[method-assign]
    _state_dict_utils._iterate_state_dict = _makes_weights(_state_dict_utils._iterate_state_dict)
    DefaultLoadPlanner.set_up_planner = _makes_weights(DefaultLoadPlanner.set_up_planner)  # type: ignore[method-assign]
    reader = BroadcastingTorchSaveReader
    reader.read_data = _makes_weights(reader.read_data)  # type: ignore[method-assign]


def torch_makes_weights() -> bool:
    """True while torch makes a weight's own shards and copies, so that tensors like a weight are weights."""
    return _torch_makes_weights.get()


def _makes_weights(original: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(original)
    def makes_weights(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = _torch_makes_weights.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _torch_makes_weights.reset(before)

    return makes_weights


def _redistribute(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    @functools.wraps(original)
    def redistribute(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        result = original(self, *args, **kwargs)
        if isinstance(result._local_tensor, Decodable) and _gathers(self, result):
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


def _average(original: Callable[..., None]) -> Callable[..., None]:
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
