"""In-place operations on quantized weights: they change the initial values, or raise.

This includes operations that write into several tensors or into ``out``, and those on views. ``copy_`` works without
initial values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from fused_optim.quantized.tensor.dispatch import Args, Decodable, Kwargs, OperatorKind, decoded
from fused_optim.quantized.tensor.operations import check_takes_copies
from fused_optim.quantized.tensor.quantized_tensor import implements
from fused_optim.quantized.tensor.strided import WeightView, located
from fused_optim.quantized.tensor.written import ensure_initial, is_shown

aten = torch.ops.aten


@dataclass(frozen=True)
class Place:
    """The plain ``memory`` that values of ``target`` are written to.

    ``copies``: (from, to) pairs to copy afterwards, until the values are in the weight's initial values.
    """

    target: Decodable
    memory: Tensor
    copies: list[tuple[Tensor, Tensor]]

    def finish(self) -> None:
        for source, into in self.copies:
            into.copy_(source)
        located(self.target).weight.mark_pending()


def place_of(target: Decodable, is_result: bool = False, is_copy: bool = False) -> Place:
    """The place of a tensor whose weight has initial values. torch may resize ``is_result``, hence has its own.

    ``is_copy``: of these values, so that an operation that fails may have changed them.
    """
    shown = located(target)
    initial = shown.weight.initial
    assert initial is not None
    copies = []
    if initial.is_contiguous():
        memory = shown.apply_to(initial.view(shown.weight.shape))
    elif shown.covers_weight and shown.shape == shown.weight.shape:  # all of some columns
        memory = initial.view(shown.shape)
    else:  # some of them
        whole = initial.contiguous()
        memory, copies = shown.apply_to(whole.view(shown.weight.shape)), [(whole, initial)]
    if is_result or is_copy:
        apart = torch.empty_like(memory) if is_result else memory.clone()
        memory, copies = apart, [(apart, memory), *copies]
    return Place(target, memory, copies)


@implements(OperatorKind.MUTABLE, of=Decodable)
def change(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Call a function that writes into its arguments. Raises RuntimeError before it has changed a weight."""
    places: list[Place] = []
    arguments = func._schema.arguments
    by_position = [_given(func, *pair, places) for pair in zip(arguments, args, strict=False)]
    by_name = {
        argument.name: _given(func, argument, kwargs[argument.name], places)
        for argument in arguments
        if argument.name in kwargs
    }
    result = func(*by_position, **by_name)
    for place in places:
        if place.memory.shape != place.target.shape:
            shapes = f"{tuple(place.memory.shape)} into a quantized weight of shape {tuple(place.target.shape)}"
            raise RuntimeError(f"{located(place.target).weight.prefix}{func} cannot write a result of shape {shapes}")
    for place in places:
        place.finish()
    return _with_targets(result, {id(place.memory): place.target for place in places})


def _given(func: OpOverload, argument: torch.Argument, value: Any, places: list[Place], is_copy: bool = False) -> Any:
    """The argument for ``func``: plain memory, noted in ``places``, if it writes into a weight; else decoded values."""
    if argument.alias_info is None or not argument.alias_info.is_write:
        return decoded(value)
    if isinstance(value, list | tuple):
        return [_given(func, argument, item, places, _are_apart(value)) for item in value]
    if not isinstance(value, Decodable):
        return value
    _check(func, value)
    places.append(place_of(value, argument.is_out, is_copy))
    return places[-1].memory


def _are_apart(tensors: Sequence[Any]) -> bool:
    """True if these tensors are of different weights; otherwise a write through one would not see the other's."""
    weights = [id(located(each).weight.whole.components) for each in tensors if isinstance(each, Decodable)]
    return len(set(weights)) == len(weights)


def _check(func: OpOverload, target: Decodable) -> None:
    weight = located(target).weight
    if torch.Tag.inplace_view in func.tags:
        raise RuntimeError(f"{weight.prefix}{func} cannot change the shape of a quantized weight in place")
    problem = f"{weight.prefix}{func} cannot change a quantized weight in place"
    if isinstance(weight, nn.Parameter) and weight.grad is not None:
        raise RuntimeError(f"{problem} that has a gradient: it is updated by FusedAdam")
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{problem} in compiled code, whose graphs decode it only")
    weight.check_has_initial(str(func))


@implements(aten.copy_.default, of=WeightView)
def _copy(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Quantizes whole rows of blocks at once; other parts are kept as initial values, to be quantized later."""
    target, source = args[:2]
    if not isinstance(target, WeightView):
        dtype = target.dtype if target.dtype.is_floating_point else None
        return func(target, source.dequantize(dtype), *args[2:], **kwargs)
    values = source.dequantize(torch.float32) if isinstance(source, Decodable) else source
    values = values.expand(target.shape)
    if target.covers_weight:
        target.weight.copy_(values.reshape(target.weight.shape))
        return target
    check_takes_copies(target.weight)
    shown = is_shown(target.weight, values, target.apply_to)
    ensure_initial(target.weight, torch.float32)
    place = place_of(target)
    place.memory.copy_(values if shown is None else torch.where(shown, place.memory, values))
    place.finish()
    return target


@implements(aten._foreach_copy_.default)
@implements(aten._foreach_copy_.default, of=WeightView)
def _copy_each(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    pairs = list(zip(*args[:2], strict=True))
    for index, (target, source) in enumerate(pairs):
        if target.shape != source.shape and isinstance(target, Decodable):
            shapes = f"{tuple(source.shape)} into one of shape {tuple(target.shape)}"
            raise RuntimeError(f"{func} cannot copy tensor {index}, of shape {shapes}")
    for target, source in pairs:
        target.copy_(source)


def _with_targets(result: Any, targets: dict[int, Decodable]) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(_with_targets(item, targets) for item in result)
    return targets.get(id(result), result)
