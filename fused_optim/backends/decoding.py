"""Stored states and split masters in host memory as FP32 values, by the CPU engine.

It holds neither the interpreter's lock nor torch's threads meanwhile: saves decode beside training.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fused_optim.backends import forced_backend, load_engine
from fused_optim.formats.states import Kind, StateFormat


def decode_state(bits: Tensor, scale: Tensor | None, kind: Kind, fmt: StateFormat, block: int, out: Tensor) -> bool:
    """Into ``out``, FP32 and as many elements. False where nothing was done: the reference has to."""
    tensors = [tensor for tensor in (bits, scale, out) if tensor is not None]
    engine = None if forced_backend() == "torch" else load_engine("cpu")[0]
    if (
        engine is None
        or fmt.code < 0
        or bits.dtype == torch.float32
        or not all(map(_is_plain, tensors))
        or not bits.numel()
    ):
        return False
    engine.decode_state(
        bits=bits.data_ptr(),
        scale=0 if scale is None else scale.data_ptr(),
        values=out.data_ptr(),
        numel=bits.numel(),
        block=block,
        format=fmt.code,
        square=kind is Kind.SQUARE,
    )
    return True


def join_remainder(high: Tensor, low: Tensor, out: Tensor) -> bool:
    """BF16 parameters and their remainders, likewise."""
    engine = None if forced_backend() == "torch" else load_engine("cpu")[0]
    if engine is None or not all(map(_is_plain, (high, low, out))) or not high.numel():
        return False
    engine.join_remainder(
        high=high.data_ptr(),
        low=low.data_ptr(),
        values=out.data_ptr(),
        numel=high.numel(),
        bits=8 * low.element_size(),
    )
    return True


def _is_plain(tensor: Tensor) -> bool:
    is_here = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
    return is_here and tensor.is_contiguous() and not tensor.is_neg()
