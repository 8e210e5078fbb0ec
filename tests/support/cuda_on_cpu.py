"""Lets code that names CUDA run on the CPU, as far as it only names it: devices of new tensors, and tensors' types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _CudaOnCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Within it the current CUDA device is the CPU, on which nothing waits for a stream."""
    here = mock.patch("torch.cuda.current_device", lambda: torch.device("cpu"))
    with here, mock.patch("torch.cuda.synchronize"), mock.patch("torch.cuda.current_stream"), _CudaOnCpu():
        yield
