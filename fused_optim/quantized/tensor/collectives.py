"""torch's collectives on quantized weights: broadcasts and scatters move bytes, component by component.

Others see decoded values, or raise. Ranks first agree on the components that are sent: a rank that fails alone would
leave the others waiting.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import ProcessGroup

from fused_optim.formats.elements import ELEMENT_TYPES
from fused_optim.quantized.recipes import WHOLE, Component, Position, Recipe, as_matrix
from fused_optim.quantized.tensor.all_gather import padded_rows
from fused_optim.quantized.tensor.dispatch import Args, Kwargs, decoded
from fused_optim.quantized.tensor.quantized_tensor import QuantizedTensor, implements
from fused_optim.quantized.tensor.weight import INITIAL, INITIAL_COMPONENT

aten = torch.ops.aten
_INITIAL_DTYPES = (None, *ELEMENT_TYPES)


class _Sent(NamedTuple):
    """The root's initial values: their dtype, None if it sends none, and whether they are still to be quantized."""

    initial: torch.dtype | None
    pending: bool


def _agree(func: OpOverload, own: QuantizedTensor, sources: Sequence[Any], group: Any) -> _Sent:
    """The root's :class:`_Sent`, on every rank. ``sources``: the root's tensors, none elsewhere.

    RuntimeErrors reach all.
    """
    kind = zlib.crc32(_kind(own).encode())
    replaceable = own.cut_from is None or func is torch.ops.c10d.broadcast_.default
    alike = all(isinstance(x, QuantizedTensor) and _kind(x) == _kind(own) for x in sources)
    fits = replaceable and alike and not own.is_freed
    initial, pending = None, False
    if fits and sources:
        initial, pending = _dtype_of_initial(sources[0]), sources[0].is_pending
    facts = [int(not fits), kind, -kind, _INITIAL_DTYPES.index(initial), int(pending)]
    agreed = torch.tensor(facts, dtype=torch.int64, device=own.device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=ProcessGroup.unbox(group))
    failed, highest, lowest, number, pending = agreed.tolist()
    if failed or highest != -lowest:
        raise RuntimeError(
            f"{own.prefix}{func}: all ranks need quantized weights of one recipe, shape and dtype, in memory that was "
            f"not freed; this rank's is {_kind(own)}. dequantize() gives plain copies"
        )
    return _Sent(_INITIAL_DTYPES[number], bool(pending))


def _kind(tensor: QuantizedTensor) -> str:
    compared = [field.name for field in dataclasses.fields(tensor.recipe) if field.compare]
    options = ", ".join(f"{name}={getattr(tensor.recipe, name)}" for name in compared)
    layout = ("transposed " if tensor.is_transposed else "") + ("flat " if tensor.is_flat else "")
    return f"{layout}{tensor.recipe.name}({options}) of shape {tuple(tensor.weight_shape)} and {tensor.dtype}"


def _dtype_of_initial(tensor: QuantizedTensor) -> torch.dtype | None:
    if tensor.initial is None:
        return None
    return tensor.initial.dtype if tensor.initial.dtype in _INITIAL_DTYPES else torch.float32


@implements(torch.ops.c10d.broadcast_.default)
def _broadcast(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Broadcast a weight, as DistributedDataParallel does with the first rank's."""
    tensor: QuantizedTensor
    (tensor,), group, root, root_tensor = args[:4]
    is_root = ProcessGroup.unbox(group).rank() == root
    sent = _agree(func, tensor, [tensor] if is_root else [], group)
    for component in _sent_components(tensor.recipe, sent):
        part = tensor.parts.get(component.name) if is_root or component is not INITIAL_COMPONENT else None
        if part is None:
            part = torch.empty(as_matrix(tuple(tensor.weight_shape)), dtype=sent.initial, device=tensor.device)
        dense = part.contiguous()  # columns of a weight are not
        _, work = func([dense], group, root, root_tensor, True, *args[5:], **kwargs)
        work.wait()  # where callers do not ask for asynchronous collectives, NCCL gives no work to wait for
        if not is_root:
            _receive(tensor, component, dense, sent)
    if not is_root:
        _finish(tensor, sent)
    return [tensor], work


@implements(torch.ops.c10d.scatter_.default)
def _scatter(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Scatter a weight, as tensor parallelism does with the first rank's."""
    output: QuantizedTensor
    (output,), inputs, group, root = args[:4]
    sent = _agree(func, output, [tensor for row in inputs for tensor in row], group)

    def receive(buffer: Tensor, sources: list[list[Tensor]]) -> Any:
        _, work = func([buffer], sources, group, root, True, *args[5:], **kwargs)
        work.wait()
        return work

    block_rows, shape = output.recipe.block_rows, tuple(output.weight_shape)
    if block_rows > 1:  # shards of the same size may touch more blocks, or fewer
        position = _as_numbers(WHOLE, output.device)
        receive(position, [[_as_numbers(x.position, output.device) for x in row] for row in inputs])
        _lay_out(output, _as_position(position))
    for component in _sent_components(output.recipe, sent):
        dtype = component.dtype if component is not INITIAL_COMPONENT else sent.initial
        most = output.recipe.component_shape(component, shape, block_rows - 1)
        buffer = torch.empty(most, dtype=dtype, device=output.device)
        sources = [[padded_rows(x.parts[component.name], most[0]).to(dtype) for x in row] for row in inputs]
        work = receive(buffer, sources)
        _receive(output, component, buffer, sent)
    _finish(output, sent)
    output.shared.shard = ProcessGroup.unbox(group).size() > 1
    return [output], work


def _sent_components(recipe: Recipe, sent: _Sent) -> list[Component]:
    return [*([] if sent.initial is None else [INITIAL_COMPONENT]), *recipe.components]


def _receive(tensor: QuantizedTensor, component: Component, buffer: Tensor, sent: _Sent) -> None:
    """Copy a received component in; ``buffer`` may have more rows."""
    if component is not INITIAL_COMPONENT:
        part = tensor.components[component.name]
        if buffer is not part:
            part.copy_(buffer[: part.shape[0]])
    elif tensor.cut_from is None and not tensor.shared.has_optimizer:
        tensor.components[INITIAL] = buffer
    else:
        tensor.ensure_initial(torch.float32).copy_(buffer)


def _finish(tensor: QuantizedTensor, sent: _Sent) -> None:
    """Leave a rank that has received everything in the root's state."""
    if sent.initial is None and tensor.cut_from is None:
        tensor.drop_initial()
    elif sent.initial is None and tensor.initial is not None:
        tensor.initial.copy_(tensor.values().view(tensor.initial.shape))
    if tensor.cut_from is None:
        tensor.shared.filled = None
    if sent.pending:
        tensor.mark_pending()
    elif tensor.cut_from is None:
        tensor.shared.pending = False


def _as_numbers(position: Position, device: torch.device) -> Tensor:
    rows = -1 if position.rows is None else position.rows
    return torch.tensor([position.rows_before, position.shares_blocks, rows], dtype=torch.int64, device=device)


def _as_position(numbers: Tensor) -> Position:
    rows_before, shares_blocks, rows = numbers.tolist()
    return Position(rows_before, bool(shares_blocks), rows=None if rows < 0 else rows)


def _lay_out(output: QuantizedTensor, position: Position) -> None:
    """Give a tensor this position, with memory for the scales of the blocks that it touches."""
    output.shared.position = position
    for component in output.recipe.components:
        shape = output.recipe.component_shape(component, tuple(output.weight_shape), position.rows_before)
        part = output.components[component.name]
        if part.shape != shape:
            output.components[component.name] = part.new_empty(shape)


@implements(aten.constant_pad_nd.default)
def _pad(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Shards of different sizes are padded before they are scattered."""
    source: QuantizedTensor = args[0]
    shape = _padded_shape(source, args[1]) if source.is_shard and args[2:] in ((), (0,), (0.0,)) else None
    if shape is None or source.recipe.problem(shape) is not None:
        return func(*decoded(args), **kwargs)
    shared = source.shared_of_copy()
    shared.position = dataclasses.replace(shared.position, rows=source.weight_shape[0])
    initial = None if source.initial is None else source.initial.dtype
    result = QuantizedTensor.empty(source.recipe, shape, source.dtype, source.device, initial, shared)
    for name, part in source.parts.items():
        result.components[name][tuple(map(slice, part.shape))].copy_(part)
    return result


def _padded_shape(source: QuantizedTensor, padding: Sequence[int]) -> tuple[int, ...] | None:
    """The shape with more rows, or columns, at the end; None for any other padding."""
    shape = list(source.weight_shape)
    after = list(padding[1::2])[::-1]  # of the last dims
    after = [0] * (len(shape) - len(after)) + after
    if any(padding[::2]) or any(after[2:]) or source.is_rearranged:
        return None
    return tuple(size + more for size, more in zip(shape, after, strict=True))
