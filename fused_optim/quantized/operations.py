"""What torch's operations do with quantized weights: copies, views, collectives, rows that are looked up.

Whatever has no handler here or in ``compute.py`` sees a plain tensor that is decoded for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import return_and_correct_aliasing

from fused_optim.quantized import engine
from fused_optim.quantized.tensor import (
    INITIAL,
    INITIAL_COMPONENT,
    Args,
    Kwargs,
    QuantizedTensor,
    cut_component,
    implements,
    local_weight,
)
from fused_optim.sharding.dtensor import dense

aten = torch.ops.aten


def _aliasing(func: OpOverload, args: Args, kwargs: Kwargs, view: QuantizedTensor) -> QuantizedTensor:
    """The view, with its base's storage where the components are not plain: compilers look at that."""
    if type(view.components["data"]) is Tensor:
        return view
    aliasing: QuantizedTensor = return_and_correct_aliasing(func, args, kwargs, view)
    return aliasing


@implements(aten.detach.default, aten.alias.default)
def _detach(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    # The same components: what is written to one is seen in the other, also what discard_high_precision_init() drops.
    source: QuantizedTensor = args[0]
    return _aliasing(func, args, kwargs, source._view(source.components, padded_rows=source._padded_rows))


@implements(aten.clone.default)
def _clone(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    return source._copied(lambda part: part.clone(memory_format=torch.contiguous_format))


def _within_autocast() -> bool:
    """torch.is_autocast_enabled() is False while autocast itself casts."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0


@implements(aten._to_copy.default)
def _to_copy(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    dtype: torch.dtype | None = kwargs.get("dtype")
    if dtype is not None and dtype != source.dtype:
        if _within_autocast():  # a view that decodes to what the operation computes in
            return source._view(source.components, dtype=dtype)
        raise TypeError(
            f"{source.prefix}a quantized weight cannot be cast from {source.dtype} to {dtype}; "
            f"dequantize({dtype}) gives a plain copy"
        )
    moved = {key: kwargs[key] for key in ("device", "non_blocking", "pin_memory") if kwargs.get(key) is not None}
    return source._copied(lambda part: aten._to_copy.default(part, **moved), source._padded_rows)


@implements(aten._pin_memory.default)
def _pin_memory(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    return source._copied(lambda part: part.pin_memory(), source._padded_rows)


@implements(aten.empty_like.default)
def _empty_like(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    if kwargs.get("dtype") not in (None, source.dtype):
        return torch.empty(source.shape, dtype=kwargs["dtype"], device=kwargs.get("device") or source.device)
    device = kwargs.get("device") or source.device
    result = source._copied(lambda part: torch.empty(part.shape, dtype=part.dtype, device=device))
    result._shared.stale = source.has_initial  # to be initialised
    return result


@implements(aten.zeros_like.default, aten.ones_like.default, aten.rand_like.default, aten.randn_like.default)
def _plain_like(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    if func is aten.zeros_like.default and "device" in kwargs and kwargs.get("dtype", source.dtype) == source.dtype:
        # So torch.distributed.checkpoint makes what it copies a state dict into before it is written in the background.
        return QuantizedTensor.empty(source.recipe, source._weight_shape, source.dtype, torch.device(kwargs["device"]))
    kwargs = {"dtype": source.dtype, "device": source.device, **kwargs}
    return func(torch.empty(source.shape, dtype=source.dtype, device="meta"), **kwargs)


@implements(aten.new_zeros.default, aten.new_empty.default)
def _new(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Quantized if it is asked for a tensor with as many columns, or rows; FSDP2 and checkpoints do so."""
    source: QuantizedTensor = args[0]
    shape: tuple[int, ...] = tuple(args[1])
    device = torch.device(kwargs.get("device") or source.device)
    dtype = kwargs.get("dtype") or source.dtype
    rows, *columns = source._weight_shape
    similar = len(shape) == 1 + len(columns) and (shape[0] == rows or [*shape[1:]] == columns)
    if not similar or source.recipe.problem(shape) or dtype != source.dtype or source._flat or source._transposed:
        return torch.zeros(shape, dtype=dtype, device=device)
    initial = source.components[INITIAL].dtype if source.has_initial else None
    result = QuantizedTensor.empty(source.recipe, shape, dtype, device, initial)
    if not result.is_meta and not source.is_meta:  # FSDP2 copies no rows into empty shards
        for part, value in zip(result.of_whole_weight(), source.of_whole_weight(), strict=True):
            part.copy_(value)
    result._shared.name, result._shared.shard = source._shared.name, True
    result._shared.columns_cut = [*shape[1:]] != columns
    return result._copied(lambda part: part.pin_memory()) if kwargs.get("pin_memory") else result


@implements(aten.copy_.default)
def _copy(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    target: Tensor = args[0]
    source: Tensor = args[1]
    if not isinstance(target, QuantizedTensor):
        return func(target, local_weight(source).dequantize(target.dtype if target.dtype.is_floating_point else None))
    if tuple(target.shape) != tuple(source.shape):
        raise RuntimeError(
            f"copy_ into a quantized weight: expected shape {tuple(target.shape)}, got {tuple(source.shape)}"
        )
    target.check_cut_by_rows()  # FSDP2 copies into shards that it has made: within fully_shard
    if target._transposed:
        _copy(func, (target.t(), source.t()), {})
    elif _same_bytes(source, target):
        _copy_components(target, source)
    else:
        _copy_values(target, source)
    return target


def _same_bytes(source: Tensor, target: QuantizedTensor) -> TypeGuard[QuantizedTensor]:
    """Whether the source is a weight whose components mean the same values in the target."""
    return (
        isinstance(source, QuantizedTensor)
        and source.recipe == target.recipe
        and source._weight_shape == target._weight_shape
        and not source._transposed
    )


def _copy_components(target: QuantizedTensor, source: QuantizedTensor) -> None:
    for name, part in target.components.items():
        if name in source.components:
            part.copy_(source.components[name])
        elif name == INITIAL:
            part.copy_(source.values().view(part.shape))
    target._shared.stale = source._shared.stale


def _copy_values(target: QuantizedTensor, source: Tensor) -> None:
    """Quantizes, except where that needs the values of other shards: then the values are kept until it can be done."""
    values = source.dequantize(torch.float32) if isinstance(source, QuantizedTensor) else source
    values = dense(values.to(target.device))
    partial = target._cut_from is not None or target._shared.shard
    if target.is_stale or (target.recipe.scales_whole_tensor and partial):
        target.keep_plain(values)
        return
    if target.has_initial:
        target.components[INITIAL].copy_(values.reshape(target.components[INITIAL].shape))
    target.write(values)


# --- views ------------------------------------------------------------------------------------------------------


def cut(tensor: QuantizedTensor, dim: int, start: int, end: int, trims: bool = False) -> QuantizedTensor:
    """Rows (dim 0) or columns ``start`` to ``end``, as a view. Raises ValueError where a block would be cut.

    With ``trims`` the first rows may end within the last block: the others are padding.
    """
    shape = tensor._weight_shape
    if tensor._flat or tensor._transposed or (dim and len(shape) != 2):
        raise RuntimeError(f"this view of a quantized weight cannot be cut in dim {dim}")
    problem = tensor.recipe.cut_problem(start, end, shape[dim], dim)
    if problem is not None and not (trims and dim == 0 and start == 0 and _same_blocks(tensor, end)):
        raise ValueError(
            f"{tensor.prefix}{problem}. Choose a number of ranks that leaves blocks whole, or another recipe"
        )
    parts = {part.name: part for part in (*tensor.recipe.components, INITIAL_COMPONENT)}
    components = {name: cut_component(value, parts[name], dim, start, end) for name, value in tensor.components.items()}
    size = [*shape]
    size[dim] = end - start
    return tensor._view(components, size, cut_from=(tensor, dim, start, end))


def _same_blocks(tensor: QuantizedTensor, rows: int) -> bool:
    """Whether the first rows need all blocks of rows."""
    tiles = [part.tile[0] for part in tensor.recipe.components if part.tile is not None]
    return -(-rows // max(tiles)) == -(-tensor._weight_shape[0] // max(tiles))


@implements(aten.slice.Tensor)
def _slice(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    dim, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])[:4]
    if step != 1:
        return func(tensor.dequantize(), *args[1:], **kwargs)
    start, end, _ = slice(start, end).indices(tensor.shape[dim])
    if (start, end) == (0, tensor.shape[dim]):
        return _detach(aten.alias.default, (tensor,), {})
    result = cut(tensor, dim % tensor.dim(), start, max(start, end), trims=tensor._shared.shard)
    if start == 0 and dim % tensor.dim() == 0:
        result._padded_rows = tensor._padded_rows
    return _aliasing(func, args, kwargs, result)


@implements(aten.split.Tensor)
def _split(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    size: int = args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return _split_at(tensor, range(0, max(tensor.shape[dim], 1), size), dim)


@implements(aten.split_with_sizes.default)
def _split_with_sizes(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    sizes: Sequence[int] = args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return _split_at(tensor, [sum(sizes[:i]) for i in range(len(sizes))], dim)


def _split_at(tensor: QuantizedTensor, starts: Sequence[int], dim: int) -> list[QuantizedTensor]:
    ends = [*starts[1:], tensor.shape[dim]]
    return [cut(tensor, dim % tensor.dim(), start, end) for start, end in zip(starts, ends, strict=True)]


@implements(aten.t.default)
def _t(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    if tensor._flat or len(tensor._weight_shape) != 2:
        return func(tensor.dequantize())
    return _aliasing(func, args, kwargs, tensor._view(tensor.components, transposed=not tensor._transposed))


@implements(aten.transpose.int)
def _transpose(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    if tensor._flat or len(tensor._weight_shape) != 2:
        return func(tensor.dequantize(), *args[1:])
    swaps = len({(0, 1)[dim] for dim in args[1:]}) == 2  # an IndexError where there is no such dim
    return (_t if swaps else _detach)(func, args, kwargs)


@implements(aten.permute.default)
def _permute(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    dims: Sequence[int] = args[1]
    if tensor._flat or len(tensor._weight_shape) != 2 or len(dims) != 2 or dims[0] % 2 == dims[1] % 2:
        return func(tensor.dequantize(), dims)
    swaps = [(0, 1)[dim] for dim in dims] == [1, 0]
    return (_t if swaps else _detach)(func, args, kwargs)


@implements(aten.select.int)
def _select(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """A row is a view, so that what is written into it is not lost, where blocks lie within rows."""
    tensor: QuantizedTensor = args[0]
    dim, index = args[1:]
    rows = tensor.shape[0]
    if dim % tensor.dim() or len(tensor._weight_shape) != 2 or not -rows <= index < rows:
        return func(tensor.dequantize(), dim, index)
    start = index % rows
    if tensor._flat or tensor._transposed or tensor.recipe.cut_problem(start, start + 1, rows, 0) is not None:
        return func(tensor.dequantize(), dim, index)
    row = cut(tensor, 0, start, start + 1)
    return _aliasing(func, args, kwargs, row._view(row.components, flat=True))


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    shape: list[int] = list(args[1])
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = tensor.numel() // max(known, 1)
    if shape == list(tensor.shape):
        result = tensor._view(tensor.components, padded_rows=tensor._padded_rows)
    elif shape == [tensor.numel()] and not tensor._transposed:
        result = tensor._view(tensor.components, flat=True)
    elif shape == list(tensor._weight_shape) and tensor._flat:
        result = tensor._view(tensor.components, flat=False)
    else:
        return func(tensor.dequantize(), *args[1:], **kwargs)
    return _aliasing(func, args, kwargs, result)


@implements(aten.as_strided.default)
def _as_strided(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """FSDP2 trims what it gathered to the weight's rows this way; nothing else is possible."""
    tensor: QuantizedTensor = args[0]
    shape, stride = tuple(args[1]), tuple(args[2])
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    whole_rows = tuple(shape[1:]) == tuple(tensor.shape[1:]) and shape[0] <= tensor.shape[0]
    contiguous = stride == torch.empty(shape, device="meta").stride()
    if not (whole_rows and contiguous and not offset) or tensor._flat or tensor._transposed:
        raise RuntimeError(f"{tensor.prefix}as_strided of a quantized weight can only give its first rows")
    return _aliasing(func, args, kwargs, cut(tensor, 0, 0, shape[0], trims=True))


# Collectives go component by component. Where callers do not ask for asynchronous ones, NCCL gives no work to wait for.


@implements(torch.ops.c10d.broadcast_.default)
def _broadcast(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Bytes, as DistributedDataParallel does with the first rank's weights."""
    tensor: QuantizedTensor
    (tensor,), group, root, root_tensor = args[:4]
    for part in tensor.components.values():
        _, work = func([part], group, root, root_tensor, True, *args[5:], **kwargs)
        work.wait()
    return [tensor], work


@implements(torch.ops.c10d.scatter_.default)
def _scatter(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Bytes. With one rank, full state dicts hold the quantized weights themselves, and loading them scatters those."""
    output: QuantizedTensor
    (output,), inputs, group, root = args[:4]
    given = [tensor for row in inputs for tensor in row]
    if not all(isinstance(x, QuantizedTensor) and x.recipe == output.recipe for x in given):
        raise RuntimeError(f"{output.prefix}scattered are weights of other recipes; dequantize() gives plain copies")
    for tensor in given:
        tensor.check_fresh()
    for name, part in output.components.items():
        parts = [[x.components[name] for x in row] for row in inputs]
        _, work = func([part], parts, group, root, True, *args[5:], **kwargs)
        work.wait()
    output.mark_fresh()
    return [output], work


@implements(aten.is_pinned.default)
def _is_pinned(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    return source.is_pinned()


@implements(aten.embedding.default)
def _embedding(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Decodes only the rows that are looked up, where blocks lie within rows."""
    weight: QuantizedTensor = args[0]
    indices: Tensor = args[1]
    tiles = [part.tile[0] for part in weight.recipe.components if part.tile is not None]
    if max(tiles) > 1 or weight._transposed or weight._flat:
        return func(weight.dequantize(), indices, *args[2:], **kwargs)
    weight.check_not_freed()
    weight.check_fresh()
    rows = indices.reshape(-1)
    components = {
        part.name: weight.components[part.name]
        if part.tile is None
        else weight.components[part.name].index_select(0, rows)  # not [rows], which takes negative ones
        for part in weight.recipe.components
    }
    shape = (len(rows), *weight._weight_shape[1:])
    return engine.decode(weight.recipe, components, shape, weight.dtype).view(*indices.shape, *shape[1:])
