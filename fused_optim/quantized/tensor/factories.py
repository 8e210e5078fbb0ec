"""Tensors like a quantized weight: plain, but for the parts of torch that make a weight's own shards and copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from fused_optim.quantized.tensor.dispatch import Args, Decodable, Kwargs
from fused_optim.quantized.tensor.operations import shared_of_shard
from fused_optim.quantized.tensor.patches import torch_makes_weights
from fused_optim.quantized.tensor.quantized_tensor import QuantizedTensor, implements
from fused_optim.quantized.tensor.strided import WeightView

aten = torch.ops.aten


def _plain(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Create a plain tensor with the weight's shape, dtype and device, without decoding it."""
    source: Decodable = args[0]
    like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    return func(like, *args[1:], **{**kwargs, "device": kwargs.get("device") or source.device})


_LIKE = (aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like)
_NEW = (aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided)
for _class in (QuantizedTensor, WeightView):
    implements(*(packet.default for packet in (*_LIKE, *_NEW)), of=_class)(_plain)


@implements(aten.empty_like.default)
def _empty_like(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    split_for_rank = source.rank_position is not None  # which DTensor scatters into one like it
    if kwargs.get("dtype") not in (None, source.dtype) or not (torch_makes_weights() or split_for_rank):
        return _plain(func, args, kwargs)
    device = kwargs.get("device") or source.device
    # Zeros, since a part may be all that is ever copied into it: what was left in the memory would be read as a weight.
    result = source.copied(lambda part: torch.zeros(part.shape, dtype=part.dtype, device=device))
    result.shared.pending = source.has_initial  # to be initialised
    return result


@implements(aten.zeros_like.default)
def _zeros_like(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    if kwargs.get("dtype") not in (None, source.dtype) or not torch_makes_weights():
        return _plain(func, args, kwargs)
    device = kwargs.get("device") or source.device
    shared = replace(source.shared_of_copy(), pending=False)
    return QuantizedTensor.empty(source.recipe, source.weight_shape, source.dtype, torch.device(device), shared=shared)


@implements(aten.new_zeros.default, aten.new_empty.default)
def _new(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """A weight if it is asked for a tensor with as many columns, or rows."""
    source: QuantizedTensor = args[0]
    shape: tuple[int, ...] = tuple(args[1])
    device = torch.device(kwargs.get("device") or source.device)
    rows, *columns = source.weight_shape
    similar = len(shape) == 1 + len(columns) and (shape[0] == rows or [*shape[1:]] == columns)
    fits = similar and source.recipe.problem(shape) is None and kwargs.get("dtype") in (None, source.dtype)
    if not fits or source.is_rearranged or not torch_makes_weights():
        return _plain(func, args, kwargs)
    initial = None if source.initial is None else source.initial.dtype
    shared = shared_of_shard(source, shape)
    result = QuantizedTensor.empty(source.recipe, shape, source.dtype, device, initial, shared)
    if not result.is_meta and not source.is_meta:  # FSDP2 copies no rows into empty shards
        for part, value in zip(result.of_whole_weight(), source.of_whole_weight(), strict=True):
            part.copy_(value)
    return result.copied(lambda part: part.pin_memory()) if kwargs.get("pin_memory") else result
