"""Doubles of TransformerEngine's quantized tensors and quantizers: the attributes and methods that adapters use."""

from __future__ import annotations

import enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

aten = torch.ops.aten
TE = "transformer_engine.pytorch.tensor.float8_tensor"
E4M3 = torch.float8_e4m3fn


class DType(enum.IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class QuantizedTensor(torch.Tensor):
    """As TransformerEngine's: a wrapper whose quantizer writes its parts. Here all have FP8 codes and one scale."""

    _data: Tensor
    _scale_inv: Tensor
    _transpose: Tensor
    _transpose_invalid: bool
    _fp8_dtype = DType.kFloat8E4M3

    @staticmethod
    def __new__(cls, values: Tensor, quantizer: Any) -> QuantizedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16, device=values.device)

    def __init__(self, values: Tensor, quantizer: Any) -> None:
        self._quantizer, self.calls = quantizer, 0
        self._data = torch.zeros_like(values, dtype=torch.uint8)
        self._scale_inv = torch.ones(1, device=values.device)
        self.quantize_(values)

    def quantize_(self, values: Tensor) -> None:
        self._quantizer.update_quantized(values, self)
        self.calls += 1

    def dequantize(self, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (self._data.view(E4M3).float() * self._scale_inv).to(dtype)

    def untyped_storage(self) -> torch.UntypedStorage:
        """A new one each time, without a byte."""
        return torch.UntypedStorage(0, device=self.device)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        """The parts of another tensor, which moves no counter."""
        self.__dict__.update(other.__dict__)

    def _reset_caches(self) -> None:
        self._transpose_invalid = True

    def _create_transpose(self) -> None:
        self._transpose, self._transpose_invalid = self._data.movedim(-1, 0).contiguous(), False

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            alias = cls.__new__(cls, args[0], None)
            alias.__dict__ = args[0].__dict__
            return alias
        if func is aten.copy_.default and isinstance(args[0], cls):
            args[0].quantize_(args[1].dequantize() if isinstance(args[1], cls) else args[1])
            return args[0]
        decode = lambda tree: torch.utils._pytree.tree_map_only(cls, lambda t: t.dequantize(), tree)  # noqa: E731
        return func(*decode(args), **decode(kwargs or {}))


QuantizedTensor.__module__ = "transformer_engine.pytorch.quantized_tensor"


class Float8Tensor(QuantizedTensor):
    """Found by its base."""

    amax_reduction_group: dist.ProcessGroup | None = None


class OlderFloat8Tensor(QuantizedTensor):
    """Of versions in which the quantizer holds the group."""


class HybridQuantizedTensor(QuantizedTensor):
    """Of two tensors."""

    def __init__(self, values: Tensor, quantizer: Any) -> None:
        parts = quantizer.rowwise_quantizer, quantizer.columnwise_quantizer
        self._rowwise_storage, self._columnwise_storage = (Float8Tensor(values, part) for part in parts)
        self._quantizer, self.calls = quantizer, 0

    def dequantize(self, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self._rowwise_storage.dequantize(dtype=dtype)


def encode(values: Tensor, scale: Tensor) -> Tensor:
    return (values * scale).clamp(-448, 448).to(E4M3).view(torch.uint8)


def store(values: Tensor, scale: Tensor, out: QuantizedTensor) -> None:
    out._data.copy_(encode(values, scale))
    out._scale_inv.copy_(1 / scale)
    out._create_transpose()


class Quantizer:
    kind: type[QuantizedTensor] = Float8Tensor

    def make_empty(self, shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> QuantizedTensor:
        return self.kind(torch.zeros(shape, device=device), self)


class Float8BlockQuantizer(Quantizer):
    """Stands for all that need nothing from outside."""

    def update_quantized(self, values: Tensor, out: QuantizedTensor) -> None:
        store(values, torch.tensor(64.0, device=values.device), out)


class Float8Quantizer(Quantizer):
    """Delayed scaling: ``scale`` and ``amax`` are views of a module's buffers."""

    def __init__(self, device: str | torch.device) -> None:
        self.scale = torch.full((3,), 64.0, device=device)[1]
        self.amax = torch.zeros(4, 3, device=device)[0][1].reshape((1,))
        self.dtype = DType.kFloat8E4M3
        self.rowwise_usage = True

    def update_quantized(self, values: Tensor, out: QuantizedTensor) -> None:
        if values.numel():
            store(values, self.scale, out)
            self.amax.copy_(torch.maximum(self.amax, values.abs().max()))


class OwnFloat8Quantizer(Float8Quantizer):
    """May quantize in another way."""


class Float8CurrentScalingQuantizer:
    """Reduces over the group of the tensor or else over its own; nothing where there are no values."""

    def __init__(self, force_pow_2_scales: bool = False, amax_epsilon: float = 0.0) -> None:
        self.with_amax_reduction, self.amax_reduction_group = False, None
        self.dtype = DType.kFloat8E4M3
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, amax_epsilon

    def update_quantized(self, values: Tensor, out: QuantizedTensor) -> None:
        group = getattr(out, "amax_reduction_group", None)
        if group is None and self.with_amax_reduction:
            group = self.amax_reduction_group
        amax = values.abs().max()
        if group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        store(values, torch.where(amax > 0, 448 / amax, 1.0), out)


class BlockQuantizer:
    """Blocks of 128 x 128 or, with ``block_scaling_dim`` 1, of 128 elements; powers of two for scales."""

    def __init__(self, block_scaling_dim: int, force_pow_2_scales: bool = True, amax_epsilon: float = 0.0) -> None:
        self.dtype, self.block_scaling_dim = DType.kFloat8E4M3, block_scaling_dim
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, amax_epsilon

    def by_rows(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of a matrix, and the scales to decode them by, one per block."""
        tile = (128 if self.block_scaling_dim == 2 else 1, 128)
        rows, columns = (-(-size // side) for size, side in zip(values.shape, tile, strict=True))
        padded = torch.zeros(rows * tile[0], columns * tile[1])
        padded[: values.shape[0], : values.shape[1]] = values
        amax = padded.view(rows, tile[0], columns, tile[1]).abs().amax((1, 3)).clamp_min(self.amax_epsilon)
        scale = torch.where(amax > 0, 448 / amax, 1.0)
        if self.force_pow_2_scales:
            scale = torch.exp2(scale.log2().floor())
        spread = scale.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
        return encode(values, spread[: values.shape[0], : values.shape[1]]), 1 / scale

    def update_quantized(self, values: Tensor, out: Float8BlockwiseQTensor) -> None:
        codes, scales = self.by_rows(values)
        out._rowwise_data, out._rowwise_scale_inv = codes, self.laid_out(scales)
        if self.block_scaling_dim == 2:
            out._columnwise_data = None
            out._create_columnwise()
        else:
            codes, scales = self.by_rows(values.t().contiguous())
            out._columnwise_data, out._columnwise_scale_inv = codes, self.laid_out(scales)

    def laid_out(self, scales: Tensor) -> Tensor:
        """As matrix products want them: transposed where they are of rows, the last dim padded to a multiple of 4."""
        scales = scales if self.block_scaling_dim == 2 else scales.t()
        return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4)).contiguous()


class Float8BlockwiseQTensor(QuantizedTensor):
    """A matrix; its columnwise codes are transposed."""

    _rowwise_data: Tensor | None
    _rowwise_scale_inv: Tensor
    _columnwise_data: Tensor | None
    _columnwise_scale_inv: Tensor

    def __init__(self, values: Tensor, quantizer: BlockQuantizer) -> None:
        self._quantizer, self.calls = quantizer, 0
        self._is_2D_scaled = quantizer.block_scaling_dim == 2
        self.quantize_(values)

    def dequantize(self, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.decoded(self._rowwise_data, self._rowwise_scale_inv).to(dtype)

    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        """FP32 values of one of the copies."""
        if not self._is_2D_scaled:
            scales = scales.t()
        spread = scales.repeat_interleave(128, 1)
        spread = spread.repeat_interleave(128, 0) if self._is_2D_scaled else spread
        return codes.view(E4M3).float() * spread[: codes.shape[0], : codes.shape[1]]

    def _create_columnwise(self) -> None:
        rows, columns = (-(-size // 128) for size in self._rowwise_data.shape)
        self._columnwise_data = self._rowwise_data.t().contiguous()
        self._columnwise_scale_inv = self._quantizer.laid_out(self._rowwise_scale_inv[:rows, :columns].t())


class HybridQuantizer(Quantizer):
    kind = HybridQuantizedTensor

    def __init__(self, rowwise: Any, columnwise: Any) -> None:
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise, columnwise

    @property
    def with_amax_reduction(self) -> bool:
        return any(
            getattr(q, "with_amax_reduction", False) for q in (self.rowwise_quantizer, self.columnwise_quantizer)
        )

    def update_quantized(self, values: Tensor, out: HybridQuantizedTensor) -> None:
        self.rowwise_quantizer.update_quantized(values, out._rowwise_storage)
        self.columnwise_quantizer.update_quantized(values, out._columnwise_storage)


for kind in (Float8Tensor, OlderFloat8Tensor, Float8Quantizer, OwnFloat8Quantizer, Float8CurrentScalingQuantizer):
    kind.__module__ = TE
BlockQuantizer.__module__ = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
BlockQuantizer.__qualname__ = "Float8BlockQuantizer"
