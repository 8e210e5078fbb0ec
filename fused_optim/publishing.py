"""What users ask of changes: which elements of the parameters have other bits since they were last taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from fused_optim.adapters import Place
from fused_optim.backends import is_capturing
from fused_optim.decorators import between_graphs, between_steps, ungraded
from fused_optim.memory.layout import MASTER
from fused_optim.sharding.collective import gather as collective_gather
from fused_optim.sharding.collective import on_all_ranks
from fused_optim.state.changes import ChangeTracker
from fused_optim.state.published import Published
from fused_optim.state.store import StateStore
from fused_optim.step.run import Stepper
from fused_optim.wire.form import Changes, PackedChanges


class Publisher(Optimizer):
    """The part of an optimizer that knows which bits of its parameters have changed."""

    store: StateStore
    stepper: Stepper

    @between_graphs
    @between_steps
    def track_changes(self, enabled: bool = True) -> None:
        """From now on, know which elements of the parameters change: one bit for each. Nothing has changed so far.

        Steps mark the elements whose stored bits they change, of quantized weights codes and scales. What others write
        into a parameter is noticed as by ``step()`` (version counters and addresses), and marks all of it; writes
        through ``.data`` are not noticed: :meth:`mark_changed` says so. Called again, it starts anew. The bits are in
        no state dict, copy or pickle.

        Raises TypeError for weights that another package has quantized.
        """
        self.stepper.leave_plan()
        self.store.published = None
        if not enabled:
            self.store.changes = None
            return
        tracker = self.store.changes or ChangeTracker()
        tracker.start(self.store.params)
        self.store.changes = tracker

    @between_graphs
    @between_steps
    def mark_changed(self, param: Tensor | None = None) -> None:
        """All elements of ``param``, or of all parameters, count as changed: after writes that nothing notices."""
        tracker = self._tracker()
        if param is not None:
            self.store.describe(param)
        for each in self.store.params if param is None else [param]:
            tracker[each].set_all()

    @between_graphs
    @ungraded
    def take_changes(self, model: nn.Module, gather: bool = False) -> dict[str, Changes]:
        """What has changed since the last call, or since :meth:`track_changes`: by name, where in the whole tensor, and
        what it is now. Nothing of the model counts as changed afterwards; parameters of other models, which the
        optimizer has as well, still do.

        Names are those of :meth:`master_state_dict`; a tied parameter has its first one. The codes of a quantized
        weight have its name (uint8), its scales ``NAME_scale`` and ``NAME_tensor_scale``. Tensors without changes are
        absent.

        A rank gives what it holds; of replicas (HSDP, or whole parameters on a mesh) the first gives it. Plain
        parameters, DistributedDataParallel's for one, are given on every rank. ``gather``: everything on every rank, a
        collective of all of them. Waits for the device.

        Raises RuntimeError without :meth:`track_changes`, KeyError and TypeError as :meth:`master_state_dict` does;
        with ``gather`` on every rank where one of them raises.
        """
        changes = self._look_at_changes("take_changes()", model, gather)
        assert self.store.published is not None
        in_model = self.store.published.in_model(self.store.params)
        if in_model is not None:
            self._tracker().clear_of(in_model)
        else:
            self._tracker().clear(at_once=self.store.settings.capturable or self.stepper.is_captured)
        return changes

    @between_graphs
    @ungraded
    def peek_changes(self, model: nn.Module, gather: bool = False) -> dict[str, Changes]:
        """:meth:`take_changes`, which still count as changed afterwards."""
        return self._look_at_changes("peek_changes()", model, gather)

    def _look_at_changes(self, asked: str, model: nn.Module, gather: bool) -> dict[str, Changes]:
        with on_all_ranks("gathering changes") if gather else nullcontext():
            self.stepper.check_idle(asked)
            own = dict(self._own_changes(model))
            packed = PackedChanges.of(own) if gather else None
        if packed is None:
            return own
        return _joined([each.unpacked() for each in collective_gather(packed)])

    def _tracker(self) -> ChangeTracker:
        if self.store.changes is None:
            raise RuntimeError("changes are not tracked: call track_changes() first")
        if is_capturing():
            raise RuntimeError("CUDA graph capture: changes are taken between replays, not in a graph")
        return self.store.changes

    def _own_changes(self, model: nn.Module) -> Iterator[tuple[str, Changes]]:
        params, state = self.store.params, self.store.state
        tracker = self._tracker()
        published = self.store.published
        if published is None or not published.is_of(model, params):
            self.store.published = published = Published(model, params)
        self.store.offloading.synchronize()
        tracker.notice({param: state.get(param, {}).get(MASTER) for param in params})
        sources = published.sources(params, tracker)
        tracker.wipe()
        for (name, at), (indices, values) in zip(sources.named, sources.collect(), strict=True):
            if indices.numel():
                indices = indices if at.first is not None else _in_whole(indices, tuple(at.local), at.place)
                yield name, Changes(indices, values, at.place.shape)


def _in_whole(indices: Tensor, shape: tuple[int, ...], place: Place) -> Tensor:
    """Flat indices in a part of ``shape`` as those in the whole."""
    found = torch.zeros_like(indices)
    for at, first, size in zip(torch.unravel_index(indices, shape), place.offsets, place.shape, strict=True):
        found = found * size + (at + first)
    return found


def _joined(of_ranks: list[dict[str, Changes]]) -> dict[str, Changes]:
    """Those of all ranks, ascending; elements that several hold, once."""
    names = dict.fromkeys(name for own in of_ranks for name in own)
    return {name: _of_ranks([own[name] for own in of_ranks if name in own]) for name in names}


def _of_ranks(parts: list[Changes]) -> Changes:
    parts.sort(key=lambda part: int(part.indices[0]))
    if len(parts) == 1:
        return parts[0]
    indices, values = (torch.cat(own) for own in zip(*((part.indices, part.values) for part in parts), strict=True))
    if all(int(a.indices[-1]) < int(b.indices[0]) for a, b in pairwise(parts)):  # rows, one rank's after the other's
        return Changes(indices, values, parts[0].shape)
    indices, order = indices.sort(stable=True)
    is_first = torch.ones_like(indices, dtype=torch.bool)
    is_first[1:] = indices[1:] != indices[:-1]
    return Changes(indices[is_first], values[order][is_first], parts[0].shape)
