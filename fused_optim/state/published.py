"""Published changes: copies of parameters as they were last published, and the elements that differ from them now.

A quantized weight has such a copy, and a bit for each element that has changed since, for each of its parts: codes and
scales. Names, parts and places of what is published are those of a model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_optim.adapters import Place, adapter_of
from fused_optim.backends import is_capturing
from fused_optim.backends.changed_bits import Compared, MarkedTensor, bit_bytes, collect, compare, raw_bits, set_all
from fused_optim.memory.by_parameter import ByParameter
from fused_optim.memory.host_memory import host_zeros
from fused_optim.options.checks import check_belongs, check_whole
from fused_optim.sharding.collective import gather as collective_gather
from fused_optim.sharding.collective import on_all_ranks, parameter_names
from fused_optim.sharding.dtensor import dense, local_tensor, shard_offsets
from fused_optim.wire.apply import part_name
from fused_optim.wire.form import Changes, PackedChanges

Where = Literal["device", "host"]


def parts_of(param: Tensor) -> dict[str, Tensor]:
    """The local tensors, by name, that hold a parameter's values: "" of a plain one. No copies.

    Raises TypeError for weights that another package has quantized.
    """
    adapter = adapter_of(param)
    parts = {"": local_tensor(param)} if adapter is None else adapter.parts(param)
    if parts is None:
        kind = type(local_tensor(param)).__name__
        raise TypeError(f"changes of a {kind} of another package are not known: exclude it, or use plain weights")
    return parts


class _Kept(NamedTuple):
    """``copy``: flat, as integers. ``bits``: as in ``changed_bits.py``, on the device of the parameter."""

    copy: Tensor
    bits: Tensor
    shape: torch.Size
    dtype: torch.dtype

    def fits(self, values: Tensor) -> bool:
        return (self.shape, self.dtype, self.bits.device) == (values.shape, values.dtype, values.device)


class Snapshot:
    """Copies of parameters' local tensors, on their devices or in page-locked host memory. In no pickle or copy."""

    def __init__(self, params: Iterable[Tensor], where: Where) -> None:
        if where not in get_args(Where):
            raise ValueError(f"where: expected 'device' or 'host', got {where!r}")
        self._where = where
        self._kept: ByParameter[dict[str, _Kept]] = ByParameter()
        for param in params:
            self._kept[param] = {name: self._keep(part) for name, part in parts_of(param).items()}

    def _keep(self, values: Tensor) -> _Kept:
        if values.element_size() > 8:
            raise TypeError(f"changes of a parameter in {values.dtype} cannot be taken: exclude it")
        raw = raw_bits(values)
        bits = torch.zeros(bit_bytes(raw.numel()), dtype=torch.uint8, device=raw.device)
        on_device = self._where == "device" or raw.device.type == "cpu"
        copy = raw.clone() if on_device else host_zeros(raw.shape, raw.dtype).copy_(raw)
        return _Kept(copy, bits, values.shape, values.dtype)

    def keep(self, params: Iterable[Tensor]) -> None:
        """Let go of all others."""
        self._kept = ByParameter(self._kept.of(params))

    def mark(self, param: Tensor) -> None:
        """Mark all elements of a parameter as changed."""
        for kept in self._kept.get(param, {}).values():
            set_all(kept.bits, kept.copy.numel())

    def update(self, parts: Sequence[tuple[Tensor, str, Tensor]]) -> list[Tensor]:
        """Compare: a parameter, the name of a part, its values. Returns the bits of each.

        Of a parameter that came later, or has another local shape, dtype or device by now, all elements are marked.
        """
        rows = []
        for param, name, values in parts:
            kept = self._kept.get(param, {}).get(name)
            if kept is None or not kept.fits(values):
                kept = self._keep(values)
                set_all(kept.bits, values.numel())
                self._kept[param] = {**self._kept.get(param, {}), name: kept}
            rows.append(Compared(kept.bits, kept.copy, raw_bits(values)))
        compare(rows)
        return [row.bits for row in rows]


class Part(NamedTuple):
    """A tensor that is published. ``local``: this rank's shard of it, not empty. ``part``: as in ``parts_of``."""

    name: str
    param: Tensor
    part: str
    local: Tensor
    place: Place

    @property
    def first(self) -> int | None:
        """The index in the whole of the local tensor's first element, if the others follow it as they do here."""
        offsets, shape = self.place.offsets, self.place.shape
        if tuple(self.local.shape[1:]) != tuple(shape[1:]):
            return None
        return math.prod(shape[1:]) * (offsets[0] if offsets else 0)


def published(model: nn.Module, params: Sequence[Tensor]) -> list[Part]:
    """The model's tensors that this rank publishes. ``params``: the optimizer's, which may have those of other models.

    Raises as ``take_changes`` does.
    """
    check_whole(model, params)
    check_belongs(model, params)
    names = parameter_names(model)
    own = [(param, parts_of(param)) for param in params if param in names and _is_first_replica(param)]
    called = {(param, part): part_name(names[param][0], part) for param, parts in own for part in parts}
    if twice := sorted(name for name, count in Counter(called.values()).items() if count > 1):
        raise ValueError(f"two tensors would be published as {', '.join(twice)}: rename the parameter of that name")
    return [
        Part(called[param, part], param, part, local, _place(param, part))
        for param, parts in own
        if next(iter(parts.values())).numel()  # a rank without elements gives no scales
        for part, local in parts.items()
    ]


def _place(param: Tensor, part: str) -> Place:
    adapter = adapter_of(param)
    if adapter is not None:
        return adapter.place(param, part)
    offsets = shard_offsets(param) if isinstance(param, DTensor) else (0,) * param.dim()
    return Place(tuple(param.shape), tuple(offsets))


def _is_first_replica(param: Tensor) -> bool:
    """True on the first of the ranks that hold the same shard of a DTensor."""
    if not isinstance(param, DTensor):
        return True
    at = param.device_mesh.get_coordinate()
    if at is None:  # a mesh of other ranks
        return False
    return all(i == 0 for i, placement in zip(at, param.placements, strict=True) if placement.is_replicate())


def changes(
    snapshot: Snapshot | None,
    model: nn.Module,
    params: Sequence[Tensor],
    gather: bool,
    taken: bool,
    prepare: Callable[[], None],
) -> dict[str, Changes]:
    """See ``ShardedOptimizer.take_changes``. ``params``: of the optimizer. ``taken``: they no longer count as changed.

    ``prepare`` raises where the optimizer is in the middle of a step: with ``gather`` on all ranks then.
    """
    with on_all_ranks("gathering changes") if gather else nullcontext():
        prepare()
        snapshot = tracked(snapshot)
        parts = published(model, params)
        values = [dense(part.local.detach()) for part in parts]
        bits = snapshot.update([(p.param, p.part, value) for p, value in zip(parts, values, strict=True)])
        firsts = [part.first or 0 for part in parts]
        pairs = collect([MarkedTensor(*marked) for marked in zip(bits, values, firsts, strict=True)])
        found: dict[str, Changes] = {}
        for part, (indices, changed) in zip(parts, pairs, strict=True):
            if indices.numel():
                if part.first is None:
                    indices = _in_whole(indices, tuple(part.local.shape), part.place)
                found[part.name] = Changes(indices, changed, part.place.shape)
        packed = PackedChanges.pack(found) if gather else None
    if packed is not None:
        found = _joined([of_rank.unpacked() for of_rank in collective_gather(packed)])
    if taken:  # last: where something above raises, they still count
        for tensor_bits in bits:
            tensor_bits.zero_()
    return found


def tracked(snapshot: Snapshot | None) -> Snapshot:
    """The snapshot. Raises RuntimeError if changes are not tracked, or cannot be taken now."""
    if snapshot is None:
        raise RuntimeError("changes are not tracked: call track_changes() first")
    if is_capturing():
        raise RuntimeError("CUDA graph capture: changes are taken between replays, not in a graph")
    return snapshot


def _in_whole(indices: Tensor, shape: tuple[int, ...], place: Place) -> Tensor:
    """Flat indices in a part of ``shape`` as those in the whole."""
    flat = torch.zeros_like(indices)
    for at, first, size in zip(torch.unravel_index(indices, shape), place.offsets, place.shape, strict=True):
        flat = flat * size + (at + first)
    return flat


def _joined(of_ranks: list[dict[str, Changes]]) -> dict[str, Changes]:
    """The changes of all ranks, ascending; an element that several ranks hold appears once."""
    names = dict.fromkeys(name for of_rank in of_ranks for name in of_rank)
    return {name: _of_ranks([of_rank[name] for of_rank in of_ranks if name in of_rank]) for name in names}


def _of_ranks(parts: list[Changes]) -> Changes:
    parts.sort(key=lambda part: int(part.indices[0]))
    if len(parts) == 1:
        return parts[0]
    indices, values = (
        torch.cat(pieces) for pieces in zip(*((part.indices, part.values) for part in parts), strict=True)
    )
    if all(int(a.indices[-1]) < int(b.indices[0]) for a, b in pairwise(parts)):  # rows, one rank's after the other's
        return Changes(indices, values, parts[0].shape)
    indices, order = indices.sort(stable=True)
    is_first = torch.ones_like(indices, dtype=torch.bool)
    is_first[1:] = indices[1:] != indices[:-1]
    return Changes(indices[is_first], values[order][is_first], parts[0].shape)
