"""What several modules need of the ranks together: failures that reach every rank, and parameter names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def gather(value: T, no_dist: bool = False, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ranks' values in rank order, over the default group; only this one where there is none, or ``no_dist``.

    ``group``: another one of all ranks.
    """
    if no_dist or not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class FailedElsewhere(ValueError):
    """Raised where nothing is wrong because another rank failed, whose error says what is."""


@contextmanager
def on_all_ranks(doing: str, no_dist: bool = False, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Where the body fails on one rank, raise on all: its own error there, a RuntimeError that quotes it elsewhere."""
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as caught:
        error = caught
    own = None if isinstance(error, FailedElsewhere) else error
    texts = gather(None if own is None else f"{type(own).__name__}: {own}", no_dist, group)
    if own is not None:
        raise own
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"{doing}: rank {rank} failed: {text}")
    if error is not None:
        raise error


def any_rank(params: Iterable[Tensor], nonzero: bool, failed: bool) -> tuple[bool, bool]:
    """Whether each is true on any rank of the parameters' meshes: a collective over these."""
    for mesh in _meshes(params):
        flags = torch.tensor([nonzero, failed], dtype=torch.int32, device=mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        nonzero, failed = (bool(flag) for flag in flags.tolist())
    return nonzero, failed


def announce_failure(params: Iterable[Tensor]) -> None:
    """Take part in the other ranks' :func:`any_rank` as one that failed, so that they raise instead of waiting.

    Without waiting for them, who may have failed elsewhere.
    """
    for mesh in _meshes(params):
        for dim in range(mesh.ndim):
            flags = torch.tensor([False, True], dtype=torch.int32, device=mesh.device_type)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(dim), async_op=True)


def _meshes(params: Iterable[Tensor]) -> list[DeviceMesh]:
    return list(dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)))


def state_name(model: torch.nn.Module, key: str) -> str:
    """The name that torch.distributed.checkpoint writes for a key of the model's state dict."""
    return min(_get_fqns(model, key))


# What wrappers of modules put before the names of parameters: torch.compile, activation checkpointing, FSDP1.
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def unwrapped_name(name: str) -> str:
    """A parameter's name in the model inside of wrappers, but for DistributedDataParallel's."""
    return _WRAPPERS.sub("", name)


def bare_name(name: str) -> str:
    """A parameter's name in the model inside of all wrappers."""
    return unwrapped_name(name).removeprefix("module.")


def parameter_names(model: torch.nn.Module) -> dict[Tensor, list[str]]:
    """Every parameter's names as torch.distributed.checkpoint writes them; tied parameters have several."""
    names: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).extend(sorted(_get_fqns(model, name)))
    return names
