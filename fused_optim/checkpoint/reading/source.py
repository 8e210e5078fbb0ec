"""A checkpoint on disk, whatever its files: tensors and other objects by the flat keys of a state dict."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.checkpoint.storage.folders import Folder
from fused_optim.sharding.dtensor import local_tensor


@dataclass(frozen=True)
class TensorInfo:
    """The shape and dtype of a stored tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source(ABC):
    """``kind``: of the files, in words. ``ranks``: how many have written them; None where that is not known."""

    kind: str
    path: Folder | Path
    ranks: int | None
    entries: dict[str, TensorInfo | None]  # by flat key; None: not a tensor
    published: bytes | None = None  # the manifest of a run's checkpoint

    def tensor_info(self, key: str) -> TensorInfo:
        found = self.entries[key]
        if found is None:
            raise ValueError(f"{key} in {self.path}: expected a tensor, found another object")
        return found

    def place(self, key: str) -> tuple[str | int, ...]:
        """The entry's path in the nested state dict, as far as it is known."""
        return (key,)

    @abstractmethod
    def nbytes(self, key: str) -> int:
        """Bytes that an entry takes in its file."""

    @abstractmethod
    def value(self, key: str) -> Any:
        """A whole tensor, or another object, as it was saved. Raises ValueError or OSError for another one."""

    def check(self, keys: Collection[str] | None = None) -> None:  # noqa: B027  nothing where opening checks it
        """Raise ValueError or OSError where the files cannot hold what is described of some keys, or of all."""

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Fill the tensors, this rank's part of DTensors; read what is no tensor where there is None."""
        return {
            key: self.value(key) if buffer is None else _copy_part(buffer, self.value(key))
            for key, buffer in wanted.items()
        }


def _copy_part(buffer: Tensor, full: Tensor) -> Tensor:
    if isinstance(buffer, DTensor):
        (chunk,) = buffer.__create_chunk_list__()
        full = full[tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))]
    local_tensor(buffer).copy_(full)
    return buffer
