"""The public methods for changes: elements of the parameters whose bits differ since they were last taken."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from fused_optim.adapters import Place
from fused_optim.backends import is_capturing
from fused_optim.backends.changed_bits import MarkedTensor, collect
from fused_optim.decorators import entry
from fused_optim.sharding.collective import gather as collective_gather
from fused_optim.sharding.collective import on_all_ranks
from fused_optim.sharding.dtensor import dense
from fused_optim.state.published import Part, published
from fused_optim.state.snapshot import Snapshot, Where
from fused_optim.state.store import StateStore
from fused_optim.step.run import Stepper
from fused_optim.wire.form import Changes, PackedChanges


class Publisher(Optimizer):
    """Base of optimizers with the methods that track changed bits of their parameters."""

    store: StateStore
    stepper: Stepper

    @entry
    def track_changes(self, enabled: bool = True, where: Where = "device") -> None:
        """Track from now on which elements of the parameters change. Nothing counts as changed so far.

        Keeps a copy of this rank's shards: 2 bytes for a BF16 element, 1 for a code, and a bit. The copy lies
        on the parameters' device, or with ``where="host"`` in page-locked memory, to which and from which every take
        moves all of it. Steps cost nothing. Called again, it starts from the current values. Copies are in no state
        dict and no pickle.

        Raises TypeError for weights that another package has quantized and for complex128, ValueError for another
        ``where``.
        """
        self.store.snapshot = Snapshot(self.store.params, where) if enabled else None

    @entry
    def mark_changed(self, param: Tensor | None = None) -> None:
        """Count all elements of ``param``, or of all parameters, as changed: the next take returns them all."""
        snapshot = self._snapshot()
        if param is not None:
            self.store.describe(param)
        for each in self.store.params if param is None else [param]:
            snapshot.mark(each)

    def _snapshot(self) -> Snapshot:
        if self.store.snapshot is None:
            raise RuntimeError("changes are not tracked: call track_changes() first")
        if is_capturing():
            raise RuntimeError("CUDA graph capture: changes are taken between replays, not in a graph")
        return self.store.snapshot

    @entry(idle=False)
    def take_changes(self, model: nn.Module, gather: bool = False) -> dict[str, Changes]:
        """Elements that changed since the last call, or since :meth:`track_changes`: by name, indices in the whole
        tensor and values. Nothing of the model counts as changed afterwards; parameters of the optimizer's other models
        still do.

        Names are those of :meth:`master_state_dict`; a tied parameter has its first one. The codes of a quantized
        weight have its name (uint8), its scales ``NAME_scale`` and ``NAME_tensor_scale``. Tensors without changes are
        absent.

        A rank gives what it holds; of replicas (HSDP, or whole parameters on a mesh) the first gives it. Plain
        parameters, DistributedDataParallel's for one, are given on every rank. ``gather``: everything on every rank, a
        collective of all of them. Waits for the device.

        Raises RuntimeError without :meth:`track_changes`, KeyError and TypeError as :meth:`master_state_dict` does;
        with ``gather`` on every rank where one of them raises.
        """
        return self._changes("take_changes()", model, gather, taken=True)

    @entry(idle=False)
    def peek_changes(self, model: nn.Module, gather: bool = False) -> dict[str, Changes]:
        """Return the same as :meth:`take_changes`, and keep the elements marked as changed."""
        return self._changes("peek_changes()", model, gather, taken=False)

    def _changes(self, asked: str, model: nn.Module, gather: bool, taken: bool) -> dict[str, Changes]:
        with on_all_ranks("gathering changes") if gather else nullcontext():
            self.stepper.check_idle(asked)
            snapshot = self._snapshot()
            parts = published(model, self.store.params)
            self.store.offloading.synchronize()
            values = [dense(part.local.detach()) for part in parts]
            bits = snapshot.update([(p.param, p.part, value) for p, value in zip(parts, values, strict=True)])
            firsts = [part.first or 0 for part in parts]
            pairs = collect([MarkedTensor(*marked) for marked in zip(bits, values, firsts, strict=True)])
            changes = {p.name: _of_part(p, *pair) for p, pair in zip(parts, pairs, strict=True) if pair[0].numel()}
            packed = PackedChanges.pack(changes) if gather else None
        if packed is not None:
            changes = _joined([of_rank.unpacked() for of_rank in collective_gather(packed)])
        if taken:  # last: where something above raises, they still count
            for tensor_bits in bits:
                tensor_bits.zero_()
        return changes


def _of_part(part: Part, indices: Tensor, values: Tensor) -> Changes:
    if part.first is None:
        indices = _in_whole(indices, tuple(part.local.shape), part.place)
    return Changes(indices, values, part.place.shape)


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
