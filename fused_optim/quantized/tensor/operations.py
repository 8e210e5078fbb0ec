"""torch's operations on quantized weights: copies, views, collectives, embedding lookups.

An operation without a handler here or in ``fp8/mm.py`` sees a plain tensor that is decoded for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import return_and_correct_aliasing

from fused_optim.quantized.recipes import WHOLE, Position, as_matrix, codec, cut_component, matrix_range, shares_blocks
from fused_optim.quantized.tensor.dispatch import Args, Decodable, Kwargs, call_decoded, call_default, called_by
from fused_optim.quantized.tensor.patches import torch_makes_weights
from fused_optim.quantized.tensor.quantized_tensor import QuantizedTensor, implements, local_weight
from fused_optim.quantized.tensor.weight import Shared
from fused_optim.quantized.tensor.written import ensure_initial, keep_plain, take_before, write_initial
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
    return _aliasing(func, args, kwargs, source.view_with(source.components, padded_rows=source.padded_rows))


@implements(aten.clone.default)
def _clone(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    result = source.copied(lambda part: part.clone(memory_format=torch.contiguous_format))
    result.shared.has_optimizer = False
    return result


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
            source.release_if_frozen()
            return source.view_with(source.components, dtype=dtype)
        if source.requires_grad or torch_makes_weights():  # a model's, or what is to be trained on
            raise TypeError(
                f"{source.prefix}a quantized weight cannot be cast from {source.dtype} to {dtype}; "
                f"dequantize({dtype}) gives a plain copy, dequantize_model_(model) a plain model"
            )
        return call_decoded(func, args, kwargs)
    moved = {key: kwargs[key] for key in ("device", "non_blocking", "pin_memory") if kwargs.get(key) is not None}
    return source.copied(lambda part: aten._to_copy.default(part, **moved), source.padded_rows)


@implements(aten._pin_memory.default)
def _pin_memory(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    return source.copied(lambda part: part.pin_memory(), source.padded_rows)


def shared_of_shard(source: QuantizedTensor, shape: tuple[int, ...]) -> Shared:
    """The shared state of a new shard. FSDP2 asks a weight for as many rows as every rank gets, padding included."""
    rows, size, known = source.weight_shape[0], shape[0], source.position
    position = Position(
        known.rows_before if size == rows else source.recipe.block_rows - 1,
        known.shares_blocks
        or (0 < size < rows and shares_blocks(source.recipe, known.rows_before, range(0, rows, size))),
        known.rows_before if known.gathered is None else known.gathered,
        known=size == rows,
    )
    columns_cut = shape[1:] != source.weight_shape[1:] and 0 not in shape
    known_state = replace(source.shared, pending=False, loaded=(), source=None, before=None)
    return replace(known_state, shard=True, columns_cut=columns_cut, position=position)


@implements(aten.copy_.default)
def _copy(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    target: Tensor = args[0]
    source: Tensor = args[1]
    if not isinstance(target, QuantizedTensor):
        return func(target, local_weight(source).dequantize(target.dtype if target.dtype.is_floating_point else None))
    if isinstance(source, Decodable) and not isinstance(source, QuantizedTensor):
        source = source.dequantize(torch.float32)
    if tuple(target.shape) != tuple(source.shape):
        raise RuntimeError(
            f"copy_ into a quantized weight: expected shape {tuple(target.shape)}, got {tuple(source.shape)}"
        )
    check_takes_copies(target)
    if not target.shared.position.known:
        target.take_position(source.position if isinstance(source, QuantizedTensor) else WHOLE)
    if target.is_transposed:
        _copy(func, (target.t(), source.t()), {})
    elif _same_bytes(source, target):
        _copy_components(target, source)
    else:
        _copy_values(target, source)
    return target


def check_takes_copies(target: QuantizedTensor) -> None:
    target.check_cut_by_rows()  # FSDP2 copies into shards that it has made: within fully_shard
    if not target.has_initial and called_by(nn.init.orthogonal_):  # which goes on with mul_(gain)
        target.check_has_initial("torch.nn.init.orthogonal_")


def _same_bytes(source: Tensor, target: QuantizedTensor) -> TypeGuard[QuantizedTensor]:
    """True if the source is a weight whose components mean the same values in the target."""
    return (
        isinstance(source, QuantizedTensor)
        and target.recipe.same_format(source.recipe)
        and source.weight_shape == target.weight_shape
        and source.rows_before == target.rows_before
        and not source.is_transposed
        and (target.has_initial or not source.is_pending)
    )


def _copy_components(target: QuantizedTensor, source: QuantizedTensor) -> None:
    if target.is_part and not target.is_pending and not target.is_meta and _rescales(target, source):
        ensure_initial(target, torch.float32)  # which the rest decodes to until it is loaded, too
        target.mark_pending()
    values = source.initial
    if values is not None and (target.has_initial or target.shared.has_optimizer):
        ensure_initial(target, values.dtype).copy_(values)
    elif target.has_initial:
        write_initial(target, source.values())
    for part in target.recipe.components:
        target.components[part.name].copy_(source.components[part.name])
    take_before(target, source)
    if source.is_pending:
        target.mark_pending()
    else:
        target.mark_loaded()


def _rescales(target: QuantizedTensor, source: QuantizedTensor) -> bool:
    """True if the source's tensor-wide scale differs from that of the bytes in the target."""
    pairs = zip(target.of_whole_weight(), source.of_whole_weight(), strict=True)
    return any(bool(ours.any()) and not torch.equal(ours, theirs.to(ours.device)) for ours, theirs in pairs)


def _copy_values(target: QuantizedTensor, source: Tensor) -> None:
    """Quantize plain values. If that needs values of other shards, keep them until it can be done."""
    values = source.dequantize(torch.float32) if isinstance(source, QuantizedTensor) else source
    values = dense(values.to(target.device))
    partial = target.cut_from is not None or target.shared.shard
    if target.is_pending or (target.recipe.scales_whole_tensor and partial) or not target.has_whole_blocks:
        keep_plain(target, values)
        return
    if target.has_initial or target.shared.has_optimizer:  # an optimizer's masters will start, or go on, from these
        values = write_initial(target, values)
    target.write(values)


# --- views ------------------------------------------------------------------------------------------------------


def cut(
    tensor: QuantizedTensor, dim: int, start: int, end: int, trims: bool = False, split: Position | None = None
) -> QuantizedTensor:
    """Rows (dim 0) or columns ``start`` to ``end``, as a view. Raises ValueError where a block cannot be cut.

    With ``trims`` the first rows or columns may end within the last block: the others are padding. ``split``: what
    copies of it, which are shards, will know of where they lie.
    """
    shape = tensor.weight_shape
    if tensor.is_rearranged or dim > 1:
        lines = "flat or transposed views" if dim < 2 else f"shape {tuple(shape)} in dim {dim}"
        raise RuntimeError(f"{tensor.prefix}quantized weights can be cut in dims 0 and 1 only, not {lines}")
    problem = _cut_problem(tensor, dim, start, end, trims)
    if problem is not None:
        ranks = ", ".join(map(str, tensor.recipe.fitting_ranks(tuple(shape), dim)))
        raise ValueError(f"{tensor.prefix}{problem}. It can be cut on {ranks} ranks")
    first, last = matrix_range(tuple(shape), dim, start, end)
    values, before = tensor.components, tensor.rows_before if dim == 0 else 0
    components = {
        part.name: cut_component(values[part.name], part, dim, first, last, before) for part in tensor.recipe.components
    }
    cut_shape = [*shape]
    cut_shape[dim] = end - start
    return tensor.view_with(components, cut_shape, cut_from=(tensor, dim, start, end), split=split)


def _cut_problem(tensor: QuantizedTensor, dim: int, start: int, end: int, trims: bool) -> str | None:
    shape = tuple(tensor.weight_shape)
    size, (first, last) = as_matrix(shape)[dim], matrix_range(shape, dim, start, end)
    if trims and start == 0:
        block = tensor.recipe.block_shape[dim]
        if -(-last // block) == -(-size // block):
            return None
    return tensor.recipe.cut_problem(first, last, size, dim)


@implements(aten.slice.Tensor)
def _slice(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    dim, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])[:4]
    if step != 1:
        return call_default(func, args, kwargs)
    start, end, _ = slice(start, end).indices(tensor.shape[dim])
    if (start, end) == (0, tensor.shape[dim]):
        return _detach(aten.alias.default, (tensor,), {})
    dim, end, trims = dim % tensor.dim(), max(start, end), tensor.shared.shard
    if tensor.is_rearranged or dim > 1 or _cut_problem(tensor, dim, start, end, trims) is not None:
        return call_default(func, args, kwargs)
    result = cut(tensor, dim, start, end, trims)
    if start == 0 and dim == 0:
        result.padded_rows = tensor.padded_rows
    return _aliasing(func, args, kwargs, result)


@implements(aten.split.Tensor)
def _split(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    size: int = args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return _split_at(func, args, kwargs, range(0, max(tensor.shape[dim], 1), size), dim % tensor.dim())


@implements(aten.split_with_sizes.default)
def _split_with_sizes(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    sizes: Sequence[int] = args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return _split_at(func, args, kwargs, [sum(sizes[:i]) for i in range(len(sizes))], dim % tensor.dim())


def _split_at(func: OpOverload, args: Args, kwargs: Kwargs, starts: Sequence[int], dim: int) -> Any:
    """The parts of a weight: shards if torch makes them for ranks, or an error; else views of any kind."""
    tensor: QuantizedTensor = args[0]
    cuts = list(zip(starts, [*starts[1:], tensor.shape[dim]], strict=True))
    if not torch_makes_weights():
        if tensor.is_rearranged or dim > 1 or any(_cut_problem(tensor, dim, *cut, trims=False) for cut in cuts):
            return call_default(func, args, kwargs)
        return [cut(tensor, dim, start, end) for start, end in cuts]
    known, block_rows = tensor.position, tensor.recipe.block_rows
    shares = known.shares_blocks or (dim == 0 and shares_blocks(tensor.recipe, known.rows_before, starts))
    befores = [(known.rows_before + start) % block_rows if dim == 0 else known.rows_before for start in starts]
    return [
        cut(tensor, dim, start, end, split=Position(before, shares))
        for (start, end), before in zip(cuts, befores, strict=True)
    ]


@implements(aten.t.default)
def _t(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    tensor.release_if_frozen()
    if tensor.is_flat or len(tensor.weight_shape) != 2:
        return call_default(func, args, kwargs)
    return _aliasing(func, args, kwargs, tensor.view_with(tensor.components, transposed=not tensor.is_transposed))


@implements(aten.transpose.int)
def _transpose(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    if tensor.is_flat or len(tensor.weight_shape) != 2:
        return call_default(func, args, kwargs)
    swaps = len({(0, 1)[dim] for dim in args[1:]}) == 2  # an IndexError where there is no such dim
    return (_t if swaps else _detach)(func, args, kwargs)


@implements(aten.permute.default)
def _permute(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    dims: Sequence[int] = args[1]
    if tensor.is_flat or len(tensor.weight_shape) != 2 or len(dims) != 2 or dims[0] % 2 == dims[1] % 2:
        return call_default(func, args, kwargs)
    swaps = [(0, 1)[dim] for dim in dims] == [1, 0]
    return (_t if swaps else _detach)(func, args, kwargs)


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    shape: list[int] = list(args[1])
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = tensor.numel() // max(known, 1)
    if shape == list(tensor.shape):
        result = tensor.view_with(tensor.components, padded_rows=tensor.padded_rows)
    elif shape == [tensor.numel()] and not tensor.is_transposed:
        result = tensor.view_with(tensor.components, flat=True)
    elif shape == list(tensor.weight_shape) and tensor.is_flat:
        result = tensor.view_with(tensor.components, flat=False)
    else:
        return call_default(func, args, kwargs)
    return _aliasing(func, args, kwargs, result)


@implements(aten.as_strided.default)
def _as_strided(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """FSDP2 trims what it gathered to the weight's rows this way; nothing else is possible."""
    tensor: QuantizedTensor = args[0]
    shape, stride = tuple(args[1]), tuple(args[2])
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    whole_rows = tuple(shape[1:]) == tuple(tensor.shape[1:]) and shape[0] <= tensor.shape[0]
    contiguous = stride == torch.empty(shape, device="meta").stride()
    if not (whole_rows and contiguous and not offset) or tensor.is_flat or tensor.is_transposed:
        raise RuntimeError(f"{tensor.prefix}as_strided of a quantized weight can only give its first rows")
    return _aliasing(func, args, kwargs, cut(tensor, 0, 0, shape[0], trims=True))


@implements(aten.is_pinned.default)
def _is_pinned(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    return source.is_pinned()


@implements(aten.embedding.default)
def _embedding(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Decodes only the rows that are looked up, where blocks lie within rows."""
    weight: QuantizedTensor = args[0]
    indices: Tensor = args[1]
    weight.release_if_frozen()
    if weight.recipe.block_rows > 1 or weight.is_rearranged or weight.is_pending:
        return func(weight.dequantize(), indices, *args[2:], **kwargs)
    weight.check_not_freed()
    rows = indices.reshape(-1)
    components = {
        part.name: weight.components[part.name]
        if part.tile is None
        else weight.components[part.name].index_select(0, rows)  # not [rows], which takes negative ones
        for part in weight.recipe.components
    }
    shape = (len(rows), *weight.weight_shape[1:])
    return codec.decode(weight.recipe, components, shape, weight.dtype).view(*indices.shape, *shape[1:])
