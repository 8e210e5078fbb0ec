"""Check that tensors which ranks hold as a whole are equal: a checkpoint has one of each."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.backends.checksum import crc32
from fused_optim.checkpoint.writing.staging import plain_tensors
from fused_optim.memory.host_memory import memory_of
from fused_optim.options.checks import some_of
from fused_optim.sharding.collective import distinct


def check_replicas(
    tensors: Mapping[str, Any], prefixes: tuple[str, ...], may_differ: Collection[str], group: dist.ProcessGroup | None
) -> None:
    """Raise ValueError, on all ranks, for keys under ``prefixes`` that ranks of ``group`` have different tensors for.

    A collective. All bytes are summed up, so this is for the first save.
    """
    digests_here = {
        key: _digest(value)
        for key, value in tensors.items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
        if key.startswith(prefixes) and key not in may_differ
    }
    first: dict[str, int] = {}
    differing: dict[str, None] = {}
    for digests in distinct(sorted(digests_here.items()), group):
        differing |= {key: None for key, digest in digests if first.setdefault(key, digest) != digest}
    if differing:
        reason = "neither is it sharded (a DTensor), so a checkpoint can hold only one of them"
        hint = "let ranks start from the same weights and average gradients (DDP), or save each rank in its own folder"
        raise ValueError(f"ranks have different values of {some_of(list(differing))}: {reason}; {hint}")


def _digest(value: Tensor) -> int:
    crc = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode())
    for part in plain_tensors(value):
        plain = part.detach().cpu().contiguous()
        crc = crc32(memory_of(plain), crc) if plain.nbytes else crc
    return crc
