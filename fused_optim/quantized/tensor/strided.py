"""Strided views of quantized weights that components cannot express: columns, diagonals, other dims, parts of blocks.

Such a view knows the places of its elements in the weight. Reading it decodes the rows that it touches; writing into it
writes into the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import Tensor
from torch._ops import OpOverload

from fused_optim.quantized.recipes import as_matrix
from fused_optim.quantized.tensor.dispatch import (
    Args,
    Decodable,
    Handler,
    Kwargs,
    OperatorKind,
    call_decoded,
    view_of,
)
from fused_optim.quantized.tensor.operations import cut
from fused_optim.quantized.tensor.quantized_tensor import QuantizedTensor, implements

aten = torch.ops.aten


class WeightView(Decodable):
    """A strided view of a quantized weight, of its dtype.

    ``weight``: whose elements it shows; its ``stride()`` and ``storage_offset()`` count elements of this weight, row
    after row. In-place operations change the weight's initial values as they do those of the weight itself, ``copy_``
    also works without these. Copies of it, also pickled ones, are plain tensors.
    """

    handlers: ClassVar[dict[OpOverload | OperatorKind, Handler]] = {}

    weight: QuantizedTensor

    @staticmethod
    def __new__(cls, weight: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int) -> WeightView:
        self = torch.Tensor._make_wrapper_subclass(
            cls, size, stride, offset, None, weight.dtype, torch.strided, weight.device
        )
        self.weight = weight
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.apply_to(self.weight.dequantize(dtype))

    def apply_to(self, values: Tensor) -> Tensor:
        """The same view of ``values``, which are shaped as the weight and contiguous."""
        return values.as_strided(self.shape, self.stride(), values.storage_offset() + self.storage_offset())

    @property
    def covers_weight(self) -> bool:
        """True if it shows all elements of the weight in order, in another shape."""
        return self.numel() == self.weight.numel() and self.is_contiguous()

    # What needs the memory of a tensor gets that of a copy, or an error.

    def data_ptr(self) -> int:
        raise RuntimeError(f"{self.weight.prefix}a view of a quantized weight has no memory; use dequantize()")

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0, device=self.device)

    def share_memory_(self) -> WeightView:
        self.weight.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.weight.is_shared()

    def numpy(self, *, force: bool = False) -> Any:
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    def __deepcopy__(self, _: dict[int, Any]) -> Tensor:
        return self.dequantize().clone()

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # of one without types
        return f"WeightView(shape={tuple(self.shape)}, stride={self.stride()}, of {self.weight})"

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        return self.dequantize().contiguous().__reduce_ex__(proto)

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["weight"], int(self.storage_offset())

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], offset: int, size: Sequence[int], stride: Sequence[int]
    ) -> WeightView:
        return WeightView(inner["weight"], size, stride, offset)


def located(tensor: Decodable) -> WeightView:
    """A weight, or a view of one, as a strided view."""
    if isinstance(tensor, WeightView):
        return tensor
    assert isinstance(tensor, QuantizedTensor)
    weight = tensor.view_with(tensor.components, transposed=False, flat=False) if tensor.is_rearranged else tensor
    return WeightView(weight, tensor.shape, tensor.stride(), 0)


@implements(OperatorKind.VIEW, of=Decodable)
def view(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Apply torch's view function to a weight. Raises TypeError for views as another dtype."""
    tensor: Decodable = args[0]
    whole = located(tensor)
    whole.weight.release_if_frozen()
    # Where elements lie is left to torch, which finds it without any.
    elements = torch.empty(whole.weight.shape, dtype=tensor.dtype, device="meta")
    shown = func(whole.apply_to(elements), *args[1:], **kwargs)
    several = shown if isinstance(shown, list | tuple) else [shown]
    if not all(shown_part.untyped_storage()._cdata == elements.untyped_storage()._cdata for shown_part in several):
        return call_decoded(func, args, kwargs)  # reshape and its like may copy
    views = [_shows(whole.weight, shown_part, func) for shown_part in several]
    return views if isinstance(shown, list | tuple) else views[0]


def _shows(weight: QuantizedTensor, shown: Tensor, func: OpOverload) -> WeightView:
    if shown.dtype != weight.dtype:
        raise TypeError(
            f"{weight.prefix}{func}: a quantized weight has no memory to be seen as {shown.dtype}, as "
            "Accelerate writes weights to disk; dequantize() gives a plain copy, dequantize_model_(model) a plain model"
        )
    size, stride, offset = shown.shape, shown.stride(), int(shown.storage_offset())
    start, end = _touched_rows(weight, shown)
    if (start, end) != (0, weight.shape[0]):
        weight, offset = cut(weight, 0, start, end), offset - start * as_matrix(weight.shape)[1]
    return view_of(weight, WeightView, weight, size, stride, offset)


def _touched_rows(weight: QuantizedTensor, shown: Tensor) -> tuple[int, int]:
    """(first, last + 1) of the rows that hold the view's elements, rounded to whole blocks."""
    rows, columns = as_matrix(weight.shape)
    if not shown.numel():
        return 0, rows
    first = shown.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(shown.shape, shown.stride(), strict=True))
    block = weight.recipe.block_rows
    return first // columns // block * block, min((last // columns // block + 1) * block, rows)


@implements(aten.detach.default, aten.alias.default, of=WeightView)
def _detach(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    tensor: WeightView = args[0]
    where = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    return view_of(tensor, WeightView, tensor.weight, *where)
