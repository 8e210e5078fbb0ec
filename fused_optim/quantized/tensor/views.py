"""Views of quantized weights that no components can express: columns, diagonals, experts, other dims, parts of blocks.

They are read, as experts and ``einsum`` read them: each time the rows that they touch are decoded, so that autograd
keeps no decoded values. Nothing is written through them but rectangles of plain values, as DCP writes what it loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._ops import OpOverload

from fused_optim.quantized.recipes import as_matrix
from fused_optim.quantized.tensor.dispatch import Args, Decodable, Kwargs, decoded, view_of
from fused_optim.quantized.tensor.quantized_tensor import QuantizedTensor


class WeightView(Decodable):
    """A strided view of a quantized weight, of its dtype. Copies of it, also pickled ones, are plain tensors.

    ``weight``: whose elements it shows; ``stride()`` and ``storage_offset()`` count its elements, row after row.
    """

    weight: QuantizedTensor

    @staticmethod
    def __new__(cls, weight: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int) -> WeightView:
        self = torch.Tensor._make_wrapper_subclass(
            cls, size, stride, offset, None, weight.dtype, torch.strided, weight.device
        )
        self.weight = weight
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.of(self.weight.dequantize(dtype))

    def of(self, values: Tensor) -> Tensor:
        """The same view of ``values``, which are shaped as the weight and contiguous."""
        return values.as_strided(self.shape, self.stride(), values.storage_offset() + self.storage_offset())

    @property
    def covers_weight(self) -> bool:
        """True if it shows all elements of the weight in order, in another shape."""
        return self.numel() == self.weight.numel() and self.is_contiguous()

    @property
    def box(self) -> tuple[slice, ...] | None:
        """The part of each dim that it shows; None if it is no rectangle of the weight, with its dims."""
        if self.stride() != self.weight.stride():
            return None
        offset, slices = int(self.storage_offset()), []
        for size, stride in zip(self.shape, self.weight.stride(), strict=True):
            start, offset = divmod(offset, max(stride, 1))
            slices.append(slice(start, start + size))
        return tuple(slices)

    @property
    def prefix(self) -> str:
        return self.weight.prefix

    # What needs the memory of a tensor gets that of a copy, or an error.

    def data_ptr(self) -> int:
        raise RuntimeError(f"{self.prefix}a view of a quantized weight has no memory; use dequantize()")

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


def view(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Apply torch's view function to a weight or a view. Raises TypeError for views as another dtype."""
    tensor: Decodable = args[0]
    if isinstance(tensor, WeightView):
        whole, weight = tensor, tensor.weight
    else:
        assert isinstance(tensor, QuantizedTensor)
        weight = tensor.view_with(tensor.components, transposed=False, flat=False) if tensor.is_rearranged else tensor
        weight.release_if_frozen()
        whole = WeightView(weight, tensor.shape, tensor.stride(), 0)
    # The places of elements are left to torch, which finds them on the meta device.
    elements = torch.empty(weight.shape, dtype=tensor.dtype, device="meta")
    shown = func(whole.of(elements), *args[1:], **kwargs)
    several = shown if isinstance(shown, list | tuple) else [shown]
    if not all(each.untyped_storage()._cdata == elements.untyped_storage()._cdata for each in several):
        return func(*decoded(args), **decoded(kwargs))  # reshape and its like may copy
    views = [_shows(weight, each, func) for each in several]
    return views if isinstance(shown, list | tuple) else views[0]


def _shows(weight: QuantizedTensor, shown: Tensor, func: OpOverload) -> WeightView:
    if shown.dtype != weight.dtype:
        raise TypeError(
            f"{weight.prefix}{func}: a quantized weight has no memory to be seen as {shown.dtype}, as "
            "Accelerate writes weights to disk; dequantize() gives a plain copy, dequantize_model_(model) a plain model"
        )
    offset, (rows, columns), block = int(shown.storage_offset()), as_matrix(weight.shape), weight.recipe.block_rows
    if shown.numel():  # only the rows that it touches, rounded to whole blocks, are going to be decoded
        last = offset + sum((size - 1) * stride for size, stride in zip(shown.shape, shown.stride(), strict=True))
        start = offset // columns // block * block
        end = min((last // columns // block + 1) * block, rows)
        if (start, end) != (0, weight.shape[0]):
            weight, offset = weight.cut(0, start, end), offset - start * columns
    return view_of(weight, WeightView, weight, shown.shape, shown.stride(), offset)
