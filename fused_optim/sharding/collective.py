"""Collectives that several modules need: gathering objects, failures that reach every rank, names of parameters."""

from __future__ import annotations

import ctypes
import hashlib
import heapq
import pickle
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def gather(value: T, no_dist: bool = False, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ranks' values in rank order, over the default group or ``group``.

    Only this rank's if there is no group, or with ``no_dist``.
    """
    if no_dist or not dist.is_initialized():
        return [value]
    sent, lengths = _pickled_alike(value, group)
    received = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(received, sent, group=group)
    return list(map(_unpickled, received, lengths))


def gather_at_first(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """:func:`gather` whose result only the first rank gets; empty elsewhere."""
    if not dist.is_initialized():
        return [value]
    sent, lengths = _pickled_alike(value, group)
    received = [torch.empty_like(sent) for _ in lengths] if dist.get_rank(group) == 0 else []
    dist.gather(sent, received or None, group=group, group_dst=0)
    return list(map(_unpickled, received, lengths)) if received else []


def scatter_from_first(values: list[T], group: dist.ProcessGroup | None = None) -> T:
    """The value for this rank from the first rank's ``values``, one for each rank; empty elsewhere."""
    if not dist.is_initialized():
        return values[0]
    contents = list(map(pickle.dumps, values))
    device = distributed_c10d._get_object_coll_device(group)
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    if contents:
        lengths.copy_(torch.tensor(list(map(len, contents))))
    dist.broadcast(lengths, group=group, group_src=0)
    longest = int(lengths.max())
    received = torch.empty(longest, dtype=torch.uint8, device=device)
    sent = [_padded(content, longest, device) for content in contents]
    dist.scatter(received, sent or None, group=group, group_src=0)
    value: T = _unpickled(received, int(lengths[dist.get_rank(group)]))
    return value


# torch's collectives of objects read with numpy, which need not be installed.


def _pickled_alike(value: object, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """A pickle, padded to the longest one of the ranks, and how long each rank's is."""
    content, device = pickle.dumps(value), distributed_c10d._get_object_coll_device(group)
    length = torch.tensor([len(content)], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, length, group=group)
    lengths: list[int] = torch.cat(everyone).tolist()
    return _padded(content, max(lengths), device), lengths


def _padded(content: bytes, length: int, device: str | torch.device) -> Tensor:
    return torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8).to(device)


def _unpickled(received: Tensor, length: int) -> Any:
    received = received.cpu()
    return pickle.loads(ctypes.string_at(received.data_ptr(), length))


def on_any(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """True if the flag is true on any rank: one number is reduced."""
    return bool(_largest([int(flag)], group)[0])


def distinct(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """:func:`gather`, but a single value if all ranks have the same, by its repr: it is not sent then."""
    digest = digest_of(value)
    largest, smallest = _largest([digest, -digest], group)
    return [value] if largest == -smallest else gather(value, group=group)


def digest_of(value: object) -> int:
    """A hash of the value's repr: positive, within int64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])


def check_alike(who: str, options: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError, on all ranks, if ranks were given different options, compared by their reprs."""
    given = distinct({name: repr(value) for name, value in options.items()}, group)
    if differing := differences(dict(enumerate(given))):
        raise ValueError(f"{who}: ranks were given different options: {differing}: give all of them the same")


def differences(given: Mapping[int, Mapping[str, str]]) -> str:
    """``name: value on ranks 0, 1; value on rank 2`` for each name whose values differ between ranks.

    ``given``: values by name, by rank. A missing name counts as the value "nothing".
    """
    names = dict.fromkeys(name for of_rank in given.values() for name in of_rank)
    texts = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, of_rank in given.items():
            ranks.setdefault(of_rank.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {some_ranks(of_rank)}" for value, of_rank in ranks.items())
            texts.append(f"{name}: {values}")
    return "; ".join(texts)


def some_ranks(ranks: Sequence[int]) -> str:
    """The first four ranks as text, and how many more there are."""
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _largest(numbers: list[int], group: dist.ProcessGroup | None) -> list[int]:
    """The maximum of each number over the ranks."""
    if not dist.is_initialized():
        return numbers
    device = distributed_c10d._get_object_coll_device(group)
    reduced = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group)
    return [int(number) for number in reduced.tolist()]


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def shared_out(sizes: Sequence[int], takers: int, holders: Sequence[Collection[int]] | None = None) -> list[int]:
    """The taker, from 0 to ``takers - 1``, of each item: the largest first, each to the one that has least so far.

    ``holders``: of each item, the takers that can take it; None: all. The same on all ranks that give the same.
    """
    load, least = [0] * takers, [(0, taker) for taker in range(takers)]
    found = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        taker = least[0][1] if holders is None else min(holders[item], key=load.__getitem__)
        load[taker] += max(sizes[item], 1)
        if holders is None:
            heapq.heapreplace(least, (load[taker], taker))
        found[item] = taker
    return found


class FailedElsewhere(ValueError):
    """Raised on ranks where nothing is wrong, because another rank failed and raises its own error."""


class RaisedElsewhere(RuntimeError):
    """Raised on other ranks than the one that failed; quotes its error."""


@contextmanager
def on_all_ranks(doing: str, no_dist: bool = False, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """If the body fails on one rank, raise on all: its own error there, a RuntimeError that quotes it elsewhere."""
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as caught:
        error = caught
    raised = None if isinstance(error, FailedElsewhere) else error
    if not no_dist and on_any(raised is not None, group):
        texts = gather(None if raised is None else f"{type(raised).__name__}: {raised}", group=group)
        if raised is None:
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
            raise RaisedElsewhere(f"{doing}: rank {rank} failed: {text}")
    if raised is not None:
        raise raised
    if error is not None:
        raise error


def any_rank(params: Iterable[Tensor], nonzero: bool, failed: bool) -> tuple[bool, bool]:
    """Both flags reduced over the ranks of the parameters' meshes: True if true on any rank.

    A collective over these.
    """
    nonzero, failed = each_on_any_rank(params, [nonzero, failed])
    return nonzero, failed


def each_on_any_rank(params: Iterable[Tensor], flags: list[bool]) -> list[bool]:
    """:func:`any_rank` for any number of flags."""
    for mesh in meshes_of(params):
        reduced = torch.tensor(flags, dtype=torch.int32, device=mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(reduced, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        flags = [bool(flag) for flag in reduced.tolist()]
    return flags


def announce_failure(params: Iterable[Tensor]) -> None:
    """Take part in the other ranks' :func:`any_rank` as one that failed, so that they raise instead of waiting.

    Does not wait for them: they may have failed elsewhere.
    """
    for mesh in meshes_of(params):
        for dim in range(mesh.ndim):
            flags = torch.tensor([False, True], dtype=torch.int32, device=mesh.device_type)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(dim), async_op=True)


@contextmanager
def failing_together(params: Collection[Tensor], elsewhere: str) -> Iterator[None]:
    """If the body fails on one rank of the parameters' meshes, raise on all; a collective over these meshes.

    The failing rank raises its own error, the others FailedElsewhere with the text ``elsewhere``.
    """
    try:
        yield
    except Exception:
        announce_failure(params)
        raise
    if any_rank(params, False, False)[1]:
        raise FailedElsewhere(elsewhere)


def meshes_of(params: Iterable[Tensor]) -> list[DeviceMesh]:
    """The meshes of all DTensors that have this rank, each once, in the same order on all ranks."""
    meshes = dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor))
    own = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    return sorted(own, key=mesh_order) if len(own) > 1 else own


def by_mesh(params: Mapping[int, Tensor]) -> list[tuple[DeviceMesh | None, dict[int, Tensor]]]:
    """Parameters, by their numbers, grouped by mesh; meshes in the same order on all ranks."""
    groups: dict[DeviceMesh | None, dict[int, Tensor]] = {}
    for i, param in params.items():
        groups.setdefault(param.device_mesh if isinstance(param, DTensor) else None, {})[i] = param
    return sorted(groups.items(), key=lambda each: mesh_order(each[0]))


def mesh_order(mesh: DeviceMesh | None) -> tuple[tuple[str, ...], list[int]]:
    """The sort key of meshes: the same on all ranks, whatever their parameters' order.

    Names come first, so that all ranks are at the same dim of a larger mesh. None, for plain tensors, sorts first.
    """
    return ((), []) if mesh is None else (tuple(mesh.mesh_dim_names or ()), mesh.mesh.flatten().tolist())


def largest_on(mesh: DeviceMesh, numbers: list[int], limit: timedelta | None = None) -> list[int]:
    """The maximum of each number over the ranks of a mesh; a collective.

    ``limit``: raise RuntimeError if the others do not take part within that time. The process groups are unusable then.
    """
    reduced = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    for dim in range(mesh.ndim):
        work = dist.all_reduce(reduced, dist.ReduceOp.MAX, group=mesh.get_group(dim), async_op=True)
        assert work is not None
        work.wait(*(() if limit is None else (limit,)))
    return [int(number) for number in reduced.tolist()]


def gather_on(mesh: DeviceMesh, value: T) -> dict[int, T]:
    """The values of a mesh's ranks, by rank: a collective."""
    by_rank = {dist.get_rank(): value}
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        by_rank = {rank: each for own in gather(by_rank, group=group) for rank, each in own.items()}
    return dict(sorted(by_rank.items()))


def announce_on(mesh: DeviceMesh, numbers: list[int]) -> None:
    """Take part in the other ranks' :func:`largest_on` without waiting for them."""
    for dim in range(mesh.ndim):
        reduced = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=mesh.get_group(dim), async_op=True)


def mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh. If it has to be made, the first time, a collective over them."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    return mesh._flatten().get_group()


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


def tied_names(model: torch.nn.Module) -> list[list[str]]:
    """The names of each parameter that several modules have; not those of FSDP1's flat ones, which one module has."""
    found = model.named_parameters(remove_duplicate=False)
    modules: Counter[Tensor] = Counter(param for _, param in found)
    return [names for param, names in parameter_names(model).items() if modules[param] > 1]
