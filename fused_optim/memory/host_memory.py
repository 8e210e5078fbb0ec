"""Host memory beside GPUs: that they copy to and from, allocated and page-locked once, from which files are written
directly; and that files are read into."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

_ALIGNMENT = 4096  # bytes, of a buffer in its segment
_SEGMENT = 1 << 26  # bytes that are allocated, and page-locked, at once; a larger buffer has a segment of its own
_HUGE = 1 << 21  # bytes of a huge page
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all GPUs


class HostBuffers:
    """Buffers of given sizes in bytes, each a flat uint8 tensor.

    ``locked``: GPUs copy into them without waiting for the host. ``shared``: other processes can map them. Every
    tensor has a storage of its own size, which torch writes without another copy. ``rest``: is called whenever a part
    of the memory is page-locked, with the seconds that took: meanwhile the driver lets nobody launch kernels. Raises
    RuntimeError where the memory cannot be page-locked.
    """

    def __init__(
        self, sizes: Sequence[int], *, locked: bool, shared: bool, rest: Callable[[float], object] | None = None
    ) -> None:
        self.sizes = tuple(sizes)
        self.locked = locked
        found: dict[int, Tensor] = {}
        # Other processes get storages: each buffer has one of its own, that torch may pickle alone.
        segments = [({i: 0}, max(size, 1)) for i, size in enumerate(sizes)] if shared else _segments(sizes)
        for members, size in segments:
            segment = _Shared(size) if shared else _Mapped(size)
            if locked:
                taken = segment.lock()
                if rest is not None:
                    rest(taken)
            found.update({i: segment.part(offset, sizes[i]) for i, offset in members.items()})
        self.tensors = [found[i] for i in range(len(sizes))]
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._shaped: list[Tensor] = []

    def like(self, others: Sequence[Tensor]) -> list[Tensor]:
        """The buffers as tensors of these dtypes and shapes, which are made once for all that are alike."""
        kinds = [(other.dtype, other.shape) for other in others]
        if kinds != self._kinds:
            pairs = zip(self.tensors, kinds, strict=True)
            self._kinds, self._shaped = kinds, [own.view(dtype).view(shape) for own, (dtype, shape) in pairs]
        return self._shaped


def empty_host(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in host memory; a large one is in huge pages, made by whoever writes to them first."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE:
        return torch.empty(tuple(shape), dtype=dtype)
    return _Mapped(nbytes).part(0, nbytes).view(dtype).view(tuple(shape))


def host_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in host memory, page-locked where there is a GPU.

    Not by ``pin_memory()``, which takes up to twice the memory: torch rounds sizes up to powers of two.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(tuple(shape), dtype=dtype)
    flat = HostBuffers([size], locked=torch.cuda.is_available(), shared=False).tensors[0]
    return flat.view(dtype).view(tuple(shape))


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, as long as it lives. NumPy would know no bfloat16."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def can_be_streamed(tensor: Tensor, device: torch.device) -> bool:
    """True if a tensor in host memory is copied to and from ``device`` without the host: for GPUs it is page-locked."""
    return device.type != "cuda" or not tensor.numel() or tensor.is_pinned()


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in such memory."""
    return host_zeros(tensor.shape, tensor.dtype).copy_(tensor)


def _segments(sizes: Sequence[int]) -> list[tuple[dict[int, int], int]]:
    """(the offset of each buffer, bytes) of every segment."""
    segments: list[tuple[dict[int, int], int]] = []
    members: dict[int, int] = {}
    used = 0
    for i, size in enumerate(sizes):
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if used + rounded > _SEGMENT and members:
            segments.append((members, used))
            members, used = {}, 0
        members[i] = used
        used += rounded
    return [*segments, (members, max(used, _ALIGNMENT))] if members else segments


class _Mapped(mmap.mmap):
    """Memory of this process, in huge pages where the system has them: they are made and page-locked much faster.

    A child process does not get it while it is page-locked: its first write would move pages from under the GPU.
    """

    _address = 0  # of page-locked memory

    def __new__(cls, size: int) -> _Mapped:
        self = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise("MADV_HUGEPAGE")
        return self

    def __init__(self, size: int) -> None:
        super().__init__()

    def part(self, offset: int, size: int) -> Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self, dtype=torch.uint8, count=size, offset=offset)

    def _advise(self, advice: str) -> None:
        if hasattr(mmap, advice):
            with suppress(OSError):  # of a kernel that was built without it
                self.madvise(getattr(mmap, advice))

    def lock(self) -> float:
        """The seconds that page-locking took."""
        self._advise("MADV_DONTFORK")
        # Pages are made on several threads, and before the driver has its locks.
        whole = self.part(0, len(self)).zero_()
        started = time.perf_counter()
        _lock(whole)
        self._address = whole.data_ptr()
        return time.perf_counter() - started

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            _unlock(self._address)


class _Shared:
    """Memory in a file that other processes can map."""

    def __init__(self, size: int) -> None:
        self._storage = torch.UntypedStorage._new_shared(size, device="cpu")
        self._whole = torch.empty(0, dtype=torch.uint8).set_(self._storage)

    def part(self, offset: int, size: int) -> Tensor:
        return self._whole[offset : offset + size]

    def lock(self) -> float:
        self._whole.zero_()
        started = time.perf_counter()
        _lock(self._whole)
        weakref.finalize(self._storage, _unlock, self._whole.data_ptr()).atexit = False
        return time.perf_counter() - started


def _lock(whole: Tensor) -> None:
    error = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, _PORTABLE))
    if error:
        _forget_error()
        raise RuntimeError(f"{whole.nbytes} bytes of host memory cannot be page-locked: CUDA error {error}")


def _forget_error() -> None:
    """Clear the CUDA runtime's last error, which torch would raise at its next kernel launch.

    Nothing of torch's reads it but such a launch.
    """
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
