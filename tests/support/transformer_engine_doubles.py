"""Doubles of TransformerEngine's quantized tensors and quantizers: their public calls, and how these behave."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

aten = torch.ops.aten
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class QuantizedTensor(torch.Tensor):
    """As TransformerEngine's: a wrapper whose quantizer writes its parts. Here all have codes and factors of these."""

    @staticmethod
    def __new__(cls, values: Tensor, quantizer: Any) -> QuantizedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16, device=values.device)

    def __init__(self, values: Tensor, quantizer: Any) -> None:
        self._quantizer, self.calls = quantizer, 0
        self._codes, self._factors = (
            torch.zeros_like(values, dtype=quantizer.codes),
            torch.ones(1, device=values.device),
        )
        self.quantize_(values)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
        self._quantizer.update_quantized(tensor, self)
        self.calls += 1
        return self

    def dequantize(self, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        codes = self._codes.view(torch.float8_e4m3fn) if self._codes.dtype == torch.uint8 else self._codes
        return (codes.float() * self._factors).to(dtype)

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        return None, self._codes

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

    def __init__(self, values: Tensor, quantizer: HybridQuantizer) -> None:
        parts = quantizer.rowwise_quantizer, quantizer.columnwise_quantizer
        self.rowwise, self.columnwise = (Float8Tensor(values, part) for part in parts)
        self._quantizer, self.calls = quantizer, 1

    def dequantize(self, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.rowwise.dequantize(dtype=dtype)

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        return self.rowwise.get_data_tensors() + self.columnwise.get_data_tensors()


def store(values: Tensor, scale: Tensor, out: QuantizedTensor) -> None:
    """In E4M3. ``scale``: of all, or of each row."""
    scale = scale.reshape(-1, *[1] * (values.dim() - 1))
    out._codes.copy_((values.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    out._factors = 1 / scale


class Quantizer:
    kind: type[QuantizedTensor] = Float8Tensor
    codes = torch.uint8

    def make_empty(self, shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> QuantizedTensor:
        return self.kind(torch.zeros(shape, device=device), self)

    def update_quantized(self, values: Tensor, out: QuantizedTensor) -> None:
        raise NotImplementedError


class Float8BlockQuantizer(Quantizer):
    """Each row is a block; with a power of two for its scale. The newer MXFP8 is alike."""

    def update_quantized(self, values: Tensor, out: QuantizedTensor) -> None:
        largest = values.flatten(1).float().abs().amax(1)
        store(values, torch.where(largest > 0, 448 / largest, 1.0).log2().floor().exp2(), out)


class NVFP4Quantizer(Quantizer):
    """One scale, as if a weight were one block."""

    codes = torch.float32  # the numbers themselves: nothing is packed here

    def update_quantized(self, values: Tensor, out: QuantizedTensor) -> None:
        largest, levels = values.float().abs().max(), FP4.to(values.device)
        factor = torch.where(largest > 0, largest / 6, 1.0)
        middle = (levels[1:] + levels[:-1]) / 2
        out._codes.copy_(levels[torch.bucketize(values.float().abs() / factor, middle)] * values.sign())
        out._factors = factor


class Float8Quantizer(Quantizer):
    """Delayed scaling: ``scale`` and ``amax`` are views of a module's buffers."""

    def __init__(self, device: str | torch.device, scale: float = 64.0) -> None:
        self.scale = torch.full((3,), scale, device=device)[1]
        self.amax = torch.zeros(4, 3, device=device)[0][1].reshape((1,))

    def update_quantized(self, values: Tensor, out: QuantizedTensor) -> None:
        if values.numel():
            store(values, self.scale, out)
            self.amax.copy_(torch.maximum(self.amax, values.abs().max()))


class Float8CurrentScalingQuantizer(Quantizer):
    """Reduces over the group of the tensor or else over its own; nothing where there are no values."""

    def __init__(self) -> None:
        self.with_amax_reduction, self.amax_reduction_group = False, None

    def update_quantized(self, values: Tensor, out: QuantizedTensor) -> None:
        group = getattr(out, "amax_reduction_group", None)
        if group is None and self.with_amax_reduction:
            group = self.amax_reduction_group
        amax = values.float().abs().max()
        if group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        store(values, torch.where(amax > 0, 448 / amax, 1.0), out)


class HybridQuantizer(Quantizer):
    """It forwards what is set to those of its parts that have it."""

    kind = HybridQuantizedTensor

    def __init__(self, rowwise: Quantizer, columnwise: Quantizer) -> None:
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise, columnwise

    def __setattr__(self, name: str, value: Any) -> None:
        if name.endswith("_quantizer"):
            return super().__setattr__(name, value)
        for part in (self.rowwise_quantizer, self.columnwise_quantizer):
            if hasattr(part, name):
                setattr(part, name, value)

    @property
    def with_amax_reduction(self) -> bool:
        parts = self.rowwise_quantizer, self.columnwise_quantizer
        return any(getattr(part, "with_amax_reduction", False) for part in parts)

    def update_quantized(self, values: Tensor, out: HybridQuantizedTensor) -> None:
        out.rowwise.quantize_(values)
        out.columnwise.quantize_(values)
