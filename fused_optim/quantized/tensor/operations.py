"""torch's operations on quantized weights: one table, at the end, of what real programs need, and a rule for the rest.

``benchmarks/results/2026-11-28-weight-operations`` has the programs. Operations that only read see decoded values,
views can be read (``views.py``), and everything else that writes is refused. ``fp8/mm.py`` adds products, and
``collectives.py`` what moves weights between ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import return_and_correct_aliasing

from fused_optim.quantized.recipes import WHOLE, Position, codec, shares_blocks
from fused_optim.quantized.tensor.dispatch import Args, Decodable, Handler, Kwargs, decoded, refuse, view_of
from fused_optim.quantized.tensor.quantized_tensor import QuantizedTensor
from fused_optim.quantized.tensor.views import WeightView, view
from fused_optim.quantized.tensor.weight import Shared
from fused_optim.sharding.dtensor import dense

aten = torch.ops.aten


# --- the same weight, copies of it, and weights like it ------------------------------------------------------------


def _aliasing(func: OpOverload, args: Args, kwargs: Kwargs, made: QuantizedTensor) -> QuantizedTensor:
    """The view, with its base's storage where the components are not plain: compilers look at that."""
    if type(made.components["data"]) is Tensor:
        return made
    aliasing: QuantizedTensor = return_and_correct_aliasing(func, args, kwargs, made)
    return aliasing


def _detach(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    # The same components: what is written to one is seen in the other, also what discard_high_precision_init() drops.
    source: QuantizedTensor = args[0]
    return _aliasing(func, args, kwargs, source.view_with(source.components, padded_rows=source.padded_rows))


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


def _to_copy(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    dtype: torch.dtype | None = kwargs.get("dtype")
    if dtype is not None and dtype != source.dtype:
        if _within_autocast():  # a view that decodes to what the operation computes in
            source.release_if_frozen()
            return source.view_with(source.components, dtype=dtype)
        if source.requires_grad or source.is_shard:  # model.to(dtype); PEFT casts frozen weights, to read them
            raise TypeError(
                f"{source.prefix}a quantized weight cannot be cast from {source.dtype} to {dtype}; "
                f"dequantize({dtype}) gives a plain copy, dequantize_model_(model) a plain model"
            )
        return func(*decoded(args), **kwargs)
    moved = {key: kwargs[key] for key in ("device", "non_blocking", "pin_memory") if kwargs.get(key) is not None}
    return source.copied(lambda part: aten._to_copy.default(part, **moved), source.padded_rows)


def _pin_memory(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    return source.copied(lambda part: part.pin_memory(), source.padded_rows)


def _plain_like(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """A plain tensor with the weight's shape, dtype and device, made without decoding it."""
    source: Decodable = args[0]
    like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    return func(like, *args[1:], **{**kwargs, "device": kwargs.get("device") or source.device})


def _empty_like(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """A weight without values: it raises where it is used until all of it was written."""
    source: QuantizedTensor = args[0]
    if kwargs.get("dtype") not in (None, source.dtype):
        return _plain_like(func, args, kwargs)
    device = kwargs.get("device") or source.device
    result = source.copied(lambda part: torch.zeros(part.shape, dtype=part.dtype, device=device))
    result.shared.pending, result.shared.filled = source.has_initial, ()
    return result


def _names_cpu(kwargs: Kwargs) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"


def _zeros_like(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Plain, as optimizers and gradients need it; a weight with device="cpu": DCP's stager copies into it."""
    source: QuantizedTensor = args[0]
    if kwargs.get("dtype") not in (None, source.dtype) or not _names_cpu(kwargs) or source.is_rearranged:
        return _plain_like(func, args, kwargs)
    shared = replace(source.shared_of_copy(), pending=False)
    device = torch.device(kwargs["device"])
    return QuantizedTensor.empty(source.recipe, source.weight_shape, source.dtype, device, shared=shared)


def _new(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """A weight for a shape with as many columns, or rows: FSDP2 pads shards by ``new_zeros``, DTensor makes empty ones.

    ``new_empty`` gives a plain one, which ``orthogonal_`` works in, but with device="cpu": DCP's stager copies into it.
    """
    source: QuantizedTensor = args[0]
    shape: tuple[int, ...] = tuple(args[1])
    device = torch.device(kwargs.get("device") or source.device)
    rows, *columns = source.weight_shape
    similar = len(shape) == 1 + len(columns) and (shape[0] == rows or [*shape[1:]] == columns)
    fits = similar and source.recipe.problem(shape) is None and kwargs.get("dtype") in (None, source.dtype)
    if (func is aten.new_empty.default and not _names_cpu(kwargs)) or not fits or source.is_rearranged:
        return _plain_like(func, args, kwargs)
    initial = None if source.initial is None else source.initial.dtype
    result = QuantizedTensor.empty(source.recipe, shape, source.dtype, device, initial, _shared_of_shard(source, shape))
    if not result.is_meta and not source.is_meta:  # FSDP2 copies no rows into empty shards
        for part, value in zip(result.of_whole_weight(), source.of_whole_weight(), strict=True):
            part.copy_(value)
    return result.copied(lambda part: part.pin_memory()) if kwargs.get("pin_memory") else result


def _shared_of_shard(source: QuantizedTensor, shape: tuple[int, ...]) -> Shared:
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
    known_state = replace(source.shared, pending=False, loaded=(), filled=None, source=None, before=None)
    return replace(known_state, shard=True, columns_cut=columns_cut, position=position)


# --- writing -------------------------------------------------------------------------------------------------------


def _copy(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Copies bytes between weights of one recipe; quantizes plain values, or keeps them until that can be done."""
    target: Tensor = args[0]
    source: Tensor = args[1]
    if not isinstance(target, Decodable):
        assert isinstance(source, Decodable)
        return func(target, source.dequantize(target.dtype if target.dtype.is_floating_point else None))
    if isinstance(source, WeightView):
        source = source.dequantize(torch.float32)
    if tuple(target.shape) != tuple(source.shape):
        raise RuntimeError(
            f"copy_ into a quantized weight: expected shape {tuple(target.shape)}, got {tuple(source.shape)}"
        )
    if isinstance(target, WeightView) and target.covers_weight:  # an expert
        _copy(func, (target.weight, source.reshape(target.weight.shape)), kwargs)
        return target
    weight = target.weight if isinstance(target, WeightView) else target
    assert isinstance(weight, QuantizedTensor)
    weight.check_cut_by_rows()  # FSDP2 copies into shards that it has made: within fully_shard
    if isinstance(target, WeightView):
        if target.box is None:
            refuse(target, func, " through a view that is no rectangle of it")
        weight.write_pending(dense(decoded(source).detach().to(weight.device)), target.box)
        return target
    if weight.is_transposed:
        refuse(weight, func, " through its transpose")
    if not weight.shared.position.known:
        weight.take_position(source.position if isinstance(source, QuantizedTensor) else WHOLE)
    if _same_bytes(source, weight):
        _copy_components(weight, source)
    else:
        _copy_values(weight, source)
    return target


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
        target.ensure_initial(torch.float32)  # which the rest decodes to until it is loaded, too
        target.mark_pending()
    filled, values = source.shared.filled, source.initial
    if values is not None and (target.has_initial or target.shared.has_optimizer):
        target.ensure_initial(values.dtype).copy_(values)
    elif target.has_initial:
        target.write_initial(source.values())
    for part in target.recipe.components:
        target.components[part.name].copy_(source.components[part.name])
    if source.before is not None and target.shared.before is None:  # into FSDP2's new memory
        target.shared.before = {
            part.name: target.whole.components[part.name].clone() for part in source.recipe.components
        }
        for name, known in (target.before or {}).items():
            known.copy_(source.before[name])
    if source.is_pending:
        target.mark_pending()
        target.mark_filled()
    else:
        target.mark_loaded()
    if source.is_unfilled:  # its copy is, too, as the padded shard that FSDP2 makes after to_empty
        target.shared.filled = filled


def _rescales(target: QuantizedTensor, source: QuantizedTensor) -> bool:
    """True if the source's tensor-wide scale differs from that of the bytes in the target."""
    pairs = zip(target.of_whole_weight(), source.of_whole_weight(), strict=True)
    return any(bool(ours.any()) and not torch.equal(ours, theirs.to(ours.device)) for ours, theirs in pairs)


def _copy_values(target: QuantizedTensor, source: Tensor) -> None:
    """Quantize plain values. If that needs values of other shards or parts, keep them until it can be done."""
    values = source.dequantize(torch.float32) if isinstance(source, QuantizedTensor) else source
    values = dense(values.to(target.device)).detach().reshape(target.weight_shape)
    partial = target.cut_from is not None or target.shared.shard
    if target.is_pending or (target.recipe.scales_whole_tensor and partial) or not target.has_whole_blocks:
        target.write_pending(values)
        target.forget_scales()
        return
    if target.has_initial or target.shared.has_optimizer:  # an optimizer's masters will start, or go on, from these
        values = target.write_initial(values)
    filled = target.shared.filled
    target.write(values)
    target.shared.filled = filled  # of the whole, of which this may be a part
    target.mark_filled()


def _copy_each(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """As AveragedModel and optimizers of others copy weights."""
    pairs = list(zip(*args[:2], strict=True))
    for index, (target, source) in enumerate(pairs):
        if target.shape != source.shape and isinstance(target, Decodable):
            shapes = f"{tuple(source.shape)} into one of shape {tuple(target.shape)}"
            raise RuntimeError(f"{func} cannot copy tensor {index}, of shape {shapes}")
    for target, source in pairs:
        target.copy_(source)


# What torch.nn.init calls. The first ones give all elements values; trunc_normal_ and orthogonal_ call the others, too.
_FILLS = (
    *(aten.uniform_.default, aten.normal_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default),
    aten.eye.m_out,
)
_CHANGES = (
    *(aten.erfinv_.default, aten.log_.default, aten.pow_.Scalar, aten.clamp_.default),
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor),
)


def _initialise(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Change the initial values of a weight, or of some of its rows or experts, as long as it has some."""
    target: Tensor = kwargs["out"] if "out" in kwargs else args[0]
    weight = target.weight if isinstance(target, WeightView) and target.covers_weight else target
    if not isinstance(weight, QuantizedTensor):
        return _write(func, args, kwargs)
    if isinstance(weight, nn.Parameter) and weight.grad is not None:
        refuse(weight, func, " that has a gradient")
    if weight.is_rearranged:
        refuse(weight, func, " through its transpose")
    initial = weight.ensure_initial(weight.dtype) if weight.is_unfilled else weight.initial
    if initial is None:
        refuse(weight, func, ": its initial values are not kept any more")
    if func not in _FILLS:
        weight.check_filled()
    if "out" in kwargs:
        func(*args, out=initial.view(target.shape))
    else:
        func(initial.view(target.shape), *decoded(args[1:]), **decoded(kwargs))
    weight.mark_pending()
    weight.mark_filled()
    return target


# --- views ------------------------------------------------------------------------------------------------------


def _slice(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    dim, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])[:4]
    if step != 1:
        return view(func, args, kwargs)
    start, end, _ = slice(start, end).indices(tensor.shape[dim])
    if (start, end) == (0, tensor.shape[dim]):
        return _detach(aten.alias.default, (tensor,), {})
    dim, end, trims = dim % tensor.dim(), max(start, end), tensor.shared.shard
    if tensor.is_rearranged or dim > 1 or tensor.cut_problem(dim, start, end, trims) is not None:
        return view(func, args, kwargs)
    result = tensor.cut(dim, start, end, trims)
    if start == 0 and dim == 0:
        result.padded_rows = tensor.padded_rows
    return _aliasing(func, args, kwargs, result)


def _split(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Shards, for ranks. Raises for a cut within a block: that part could be read only, and would be no weight."""
    tensor: QuantizedTensor = args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % tensor.dim()
    sizes: int | Sequence[int] = args[1]
    if isinstance(sizes, int):
        starts = [*range(0, max(tensor.shape[dim], 1), sizes)]
    else:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if tensor.is_rearranged or (tensor.is_flat and dim == 0):
        return view(func, args, kwargs)
    known, block_rows = tensor.position, tensor.recipe.block_rows
    shares = known.shares_blocks or (dim == 0 and shares_blocks(tensor.recipe, known.rows_before, starts))
    befores = [(known.rows_before + start) % block_rows if dim == 0 else known.rows_before for start in starts]
    ends = [*starts[1:], tensor.shape[dim]]
    return [
        tensor.cut(dim, start, end, split=Position(before, shares))
        for start, end, before in zip(starts, ends, befores, strict=True)
    ]


def _t(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: QuantizedTensor = args[0]
    tensor.release_if_frozen()
    if tensor.is_flat or len(tensor.weight_shape) != 2:
        return view(func, args, kwargs)
    return _aliasing(func, args, kwargs, tensor.view_with(tensor.components, transposed=not tensor.is_transposed))


def _transpose(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """``transpose`` and ``permute``."""
    tensor: QuantizedTensor = args[0]
    dims: Sequence[int] = args[1] if func is aten.permute.default else args[1:]
    if tensor.is_flat or len(tensor.weight_shape) != 2 or {(0, 1)[dim] for dim in dims} != {0, 1}:
        return view(func, args, kwargs)  # an IndexError where there is no such dim
    same = func is aten.permute.default and dims[0] % 2 == 0
    return (_detach if same else _t)(func, args, kwargs)


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
        return view(func, args, kwargs)
    return _aliasing(func, args, kwargs, result)


def _as_strided(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """FSDP2 trims what it gathered to the weight's rows this way; nothing else is possible."""
    tensor: QuantizedTensor = args[0]
    shape, stride = tuple(args[1]), tuple(args[2])
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    whole_rows = tuple(shape[1:]) == tuple(tensor.shape[1:]) and shape[0] <= tensor.shape[0]
    contiguous = stride == torch.empty(shape, device="meta").stride()
    if not (whole_rows and contiguous and not offset) or tensor.is_flat or tensor.is_transposed:
        raise RuntimeError(f"{tensor.prefix}as_strided of a quantized weight can only give its first rows")
    return _aliasing(func, args, kwargs, tensor.cut(0, 0, shape[0], trims=True))


# --- reading -------------------------------------------------------------------------------------------------------


def _is_pinned(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: QuantizedTensor = args[0]
    return source.is_pinned()


def _embedding(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Decodes only the rows that are looked up, where blocks lie within rows."""
    weight: QuantizedTensor = args[0]
    indices: Tensor = args[1]
    weight.release_if_frozen()
    if weight.recipe.block_rows > 1 or weight.is_rearranged or weight.is_pending or weight.is_unfilled:
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


# --- the table -----------------------------------------------------------------------------------------------------

QuantizedTensor.handlers.update(
    {
        aten.detach.default: _detach,
        aten.alias.default: _detach,
        aten.clone.default: _clone,  # deepcopy, torch.save, DTensor
        aten._to_copy.default: _to_copy,
        aten._pin_memory.default: _pin_memory,
        aten.is_pinned.default: _is_pinned,
        aten.empty_like.default: _empty_like,  # to_empty, loads into weights on the meta device
        aten.zeros_like.default: _zeros_like,
        aten.new_zeros.default: _new,
        aten.new_empty.default: _new,
        aten.copy_.default: _copy,
        aten._foreach_copy_.default: _copy_each,
        **dict.fromkeys((*_FILLS, *_CHANGES), _initialise),  # torch.nn.init
        aten.slice.Tensor: _slice,  # FSDP2, DCP
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split,
        aten.t.default: _t,  # layers
        aten.transpose.int: _transpose,
        aten.permute.default: _transpose,
        aten.view.default: _view,
        aten._unsafe_view.default: _view,
        aten.reshape.default: _view,
        aten.as_strided.default: _as_strided,
        aten.embedding.default: _embedding,
    }
)
_LIKE = (aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like, aten.new_ones, aten.new_full)
QuantizedTensor.handlers.update({packet.default: _plain_like for packet in (*_LIKE, aten.new_empty_strided)})


def _detach_view(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: WeightView = args[0]
    return view_of(source, WeightView, source.weight, source.shape, source.stride(), int(source.storage_offset()))


WeightView.handlers = {
    aten.detach.default: _detach_view,
    aten.alias.default: _detach_view,
    aten.copy_.default: _copy,
    aten._foreach_copy_.default: _copy_each,
    **dict.fromkeys((*_FILLS, *_CHANGES), _initialise),
    aten.empty_like.default: _plain_like,
    aten.zeros_like.default: _plain_like,
    aten.new_zeros.default: _plain_like,
    aten.new_empty.default: _plain_like,
}


@functools.cache
def _default_handler(func: OpOverload) -> Handler:
    """The function for an operation that is in no table."""
    if func.namespace == "c10d":  # these write into their arguments, but their schemas do not say so
        return _refuse
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return lambda func, args, kwargs: func.decompose(*args, **kwargs)  # as autograd does; inference mode leaves it
    if func._schema.is_mutable:
        return _write
    if any(result.alias_info is not None for result in func._schema.returns):
        return view
    return lambda func, args, kwargs: func(*decoded(args), **decoded(kwargs))


def _refuse(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    raise NotImplementedError(f"{func} takes no quantized weights; dequantize() gives a plain copy")


def _write(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Refuse an operation that writes into a weight; one that only reads weights sees them decoded."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, Decodable):
                    refuse(each, func)
    return func(*decoded(args), **decoded(kwargs))


Decodable.default_handler = staticmethod(_default_handler)
