"""Which elements of parameters have other bits than when they were last taken: one bit for each.

They are those of ``backends/changed_bits.py``, of the local shard; a quantized weight has such bits for each of its
parts: codes and scales.

Update passes of engines set bits themselves, from what a parameter and its master are in registers, and so do encoders
of quantized weights. Where they do not, or where the parameter may be another than its rounded master, parts are copied
before the step and compared after it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fused_optim.adapters import adapter_of
from fused_optim.backends import is_capturing
from fused_optim.backends.changed_bits import bit_bytes, compare, raw_bits, set_all
from fused_optim.backends.engine import CachedShard, EngineLook, EngineLooker
from fused_optim.backends.looks import looker_on, new_look
from fused_optim.memory.by_parameter import ByParameter, Held
from fused_optim.memory.layout import memory_of
from fused_optim.sharding.dtensor import local_tensor

WHOLE = ""  # the one part of a parameter that is not quantized
CODES, SCALES = "data", "scale"
_OF_ELEMENTS = (WHOLE, CODES)
_NO_STATES: dict[str, Tensor] = {}  # one for all: thousands of new objects let Python collect its garbage


def parts_of(param: Tensor) -> dict[str, Tensor]:
    """What this rank holds of a parameter, as far as reading its values needs it. No copies.

    Raises TypeError for weights that another package has quantized.
    """
    adapter = adapter_of(param)
    parts = {WHOLE: local_tensor(param)} if adapter is None else adapter.parts(param)
    if parts is None:
        kind = type(local_tensor(param)).__name__
        raise TypeError(f"changes of a {kind} of another package are not known: exclude it, or use plain weights")
    return parts


class BitMemory:
    """The bits of many parameters: those of elements first. ``owners``: parameters that have elements."""

    def __init__(self, device: torch.device, element_bytes: int, other_bytes: int, owners: int) -> None:
        self.bits = torch.zeros(element_bytes + other_bytes, dtype=torch.uint8, device=device)
        self.owners = owners
        self._others = self.bits[element_bytes:]
        self.is_stale = False  # nothing counts as changed, whatever the bits are

    def forget(self, at_once: bool) -> None:
        """Nothing counts as changed. On GPUs the next step need not read what it finds then."""
        self.is_stale = True
        if at_once or not self.bits.is_cuda:
            self.wipe()

    def wipe(self) -> None:
        """Before any of the bits is read or set."""
        if self.is_stale:
            if is_capturing():  # each replay would do it
                hint = "set it before them, or make a step before the capture"
                raise RuntimeError(f"CUDA graph capture: changes were taken without capturable=True: {hint}")
            self.bits.zero_()
            self.is_stale = False

    def wipe_others(self) -> None:
        """Before a step that stores all bits of elements."""
        self._others.zero_()
        self.is_stale = False


@dataclass
class Arrangement:
    """Counts how often bits or values have moved: whoever has taken their addresses must take them again."""

    moves: int = 0


@dataclass
class Tracked:
    """The bits of a parameter, by part, and what tells that someone else has written it.

    ``is_settled``: the parameter is what the last step made of its master, so that a pass can tell what it was without
    reading it.
    """

    bits: dict[str, Tensor]
    memory: BitMemory  # in which they lie, and others'
    numels: dict[str, int]
    look: EngineLook
    arrangement: Arrangement = field(default_factory=Arrangement)
    is_settled: bool = False
    _memory: weakref.ref[torch.UntypedStorage] | None = None

    @staticmethod
    def of(params: Iterable[Tensor]) -> dict[Tensor, Tracked]:
        """None marked. The bits of all that is on one device lie in one memory."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for param in params:
            by_device.setdefault(local_tensor(param).device, []).append(param)
        return {param: own for device, there in by_device.items() for param, own in Tracked._on(device, there).items()}

    @staticmethod
    def _on(device: torch.device, params: Sequence[Tensor]) -> dict[Tensor, Tracked]:
        numels = {param: {name: part.numel() for name, part in parts_of(param).items()} for param in params}
        parts = [(param, name, numel) for param, own in numels.items() for name, numel in own.items()]
        elements = [part for part in parts if part[1] in _OF_ELEMENTS]
        others = [part for part in parts if part[1] not in _OF_ELEMENTS]
        of_elements, of_others = (sum(bit_bytes(numel) for _, _, numel in each) for each in (elements, others))
        memory = BitMemory(device, of_elements, of_others, sum(numel > 0 for _, _, numel in elements))
        bits: dict[Tensor, dict[str, Tensor]] = {param: {} for param in numels}
        views = memory.bits.split([bit_bytes(numel) for _, _, numel in (*elements, *others)])
        for (param, name, _), view in zip((*elements, *others), views, strict=True):
            bits[param][name] = view
        return {
            param: Tracked(bits[param], memory, own, new_look(param, [name for name in own if name != WHOLE]))
            for param, own in numels.items()
        }

    def fits(self, param: Tensor) -> bool:
        parts = parts_of(param)
        return self.numels == {name: part.numel() for name, part in parts.items()} and all(
            part.device == self.bits[name].device for name, part in parts.items()
        )

    def set_all(self) -> None:
        """Someone else has written the parameter."""
        self.memory.wipe()
        for name, bits in self.bits.items():
            set_all(bits, self.numels[name])
        self.is_settled = False

    def watch_memory(self, param: Tensor) -> None:
        """Whatever lies at its address once this memory is gone."""
        look = self.look  # not this itself, which would live as long as the memory
        self._memory = memory_of(param, lambda _: look.forget())


class Watch:
    """Parameters on one device, looked at to see whether others have written them or their masters.

    ``cached``: the caller's own list, of which the parameters and masters count.
    """

    def __init__(self, device: torch.device, cached: list[CachedShard], tracked: Sequence[Tracked]) -> None:
        self._looker, self._cached, self._tracked = _looker_on(device), cached, tracked
        self._looks = [each.look for each in tracked]

    def notice(self) -> None:
        """Mark all of what others have written."""
        with torch._C.DisableTorchFunctionSubclass():
            params, masters = self._looker.find_written(self._cached, self._looks)
            if not params and not masters:
                return
            if is_capturing():
                hint = "take_changes() or a step before the capture notices it"
                raise RuntimeError(
                    f"CUDA graph capture: a parameter or its master was written since the last step; {hint}"
                )
            for i in params:
                self._tracked[i].set_all()
            for i in masters:
                self._tracked[i].is_settled = False
        self.see()

    def see(self) -> None:
        """Remember them as they are."""
        with torch._C.DisableTorchFunctionSubclass():
            for i in self._looker.remember(self._cached, self._looks):
                self._tracked[i].arrangement.moves += 1
                if (param := self._cached[i].param_ref()) is not None:
                    self._tracked[i].watch_memory(param)


@functools.cache
def _looker_on(device: torch.device) -> EngineLooker:
    return looker_on(device)


class ChangeTracker:
    """The bits of an optimizer's parameters, and what tells that others have written these.

    Nothing of this is copied, pickled or saved.
    """

    def __init__(self) -> None:
        self._tracked: ByParameter[Tracked] = ByParameter()
        self.arrangement = Arrangement()

    def start(self, params: Iterable[Tensor]) -> None:
        """From now on; nothing has changed so far. Raises TypeError for parameters that cannot be tracked."""
        started = Tracked.of(params)
        for param, tracked in started.items():
            self._put(param, tracked)
        for watch in self._watches(dict.fromkeys(started)):
            watch.see()

    def _put(self, param: Tensor, tracked: Tracked) -> None:
        tracked.arrangement = self.arrangement
        self.arrangement.moves += 1
        self._tracked[param] = tracked

    def keep(self, params: Iterable[Tensor]) -> None:
        """Let go of all others."""
        self._tracked = ByParameter(self._tracked.of(params))

    def clear(self, at_once: bool) -> None:
        """Nothing has changed. ``at_once``: the next step may be a graph's, which ORs bits at each replay."""
        for memory in self._memories():
            memory.forget(at_once)

    def clear_of(self, params: Iterable[Tensor]) -> None:
        """Nothing of these has changed."""
        for param in params:
            tracked = self._tracked[param]
            tracked.memory.wipe()
            for bits in tracked.bits.values():
                bits.zero_()

    def __getitem__(self, param: Tensor) -> Tracked:
        """Of a parameter that came later, or has another shard by now: all of it is marked."""
        tracked = self._tracked.get(param)
        if tracked is None or not tracked.fits(param):
            tracked = Tracked.of([param])[param]
            tracked.set_all()
            self._put(param, tracked)
            for watch in self._watches({param: None}):
                watch.see()
        return tracked

    def _watches(self, masters: Mapping[Tensor, Tensor | None]) -> list[Watch]:
        by_device: dict[torch.device, tuple[list[CachedShard], list[Tracked]]] = {}
        for param, master in masters.items():
            cached, tracked = by_device.setdefault(local_tensor(param).device, ([], []))
            cached.append(CachedShard(Held((param,)), None, None, master, None, _NO_STATES))
            tracked.append(self._tracked[param])
        return [Watch(device, *own) for device, own in by_device.items()]

    def notice(self, masters: Mapping[Tensor, Tensor | None]) -> None:
        """Mark all of the parameters that others have written since the last step. Values: their masters."""
        for param in masters:
            if param not in self._tracked:
                self[param]
        for watch in self._watches(masters):
            watch.notice()

    def bits_of(self, param: Tensor, part: str, values: Tensor) -> Tensor:
        """Those of a part that has these values by now."""
        tracked = self._tracked[param]
        if tracked.numels.get(part) != values.numel() or tracked.memory.bits.device != values.device:
            tracked = self[param]
        return tracked.bits[part]

    def wipe(self) -> None:
        """Before bits are read."""
        for memory in self._memories():
            memory.wipe()

    def _memories(self) -> Iterable[BitMemory]:
        return {id(tracked.memory): tracked.memory for tracked in self._tracked.values()}.values()

    @contextmanager
    def unchanged(self, param: Tensor) -> Iterator[None]:
        """What is written into a parameter within it are the bits that it has."""
        self.notice({param: None})
        yield
        for watch in self._watches({param: None}):
            watch.see()


class Shard(NamedTuple):
    """A parameter in steps. ``marked``: the parts that a step marks itself where the parameter is settled.

    ``always``: also where it is not. ``by_pass``: the update pass is what marks its elements.
    """

    tracked: Tracked
    marked: Collection[str]
    always: bool
    by_pass: bool = False


class StepChanges:
    """What steps change of the parameters of one device: noticed before a step, and after it where it does not mark it.

    What to do is found out once for all steps that take the same shards in the same way. ``cached``: the plan's own
    list; the parameters themselves are not kept. ``can_overwrite``: whether the pass can store bits unread.
    """

    def __init__(
        self, device: torch.device, cached: list[CachedShard], shards: Sequence[Shard], can_overwrite: bool = False
    ) -> None:
        self._cached, self._tracked = cached, [shard.tracked for shard in shards]
        self._watch = Watch(device, cached, self._tracked)
        self._unmarked = [self._names(shard, shard.marked) for shard in shards]
        self._marked = [self._names(shard, ()) if not shard.always else () for shard in shards]
        self._compared = [i for i, names in enumerate(self._unmarked) if names]
        self._to_settle = [i for i, names in enumerate(self._marked) if names]
        self._memories = list({id(tracked.memory): tracked.memory for tracked in self._tracked}.values())
        owners = [any(tracked.numels.get(name) for name in _OF_ELEMENTS) for tracked in self._tracked]
        self._overwritten = (
            can_overwrite
            and not self._compared
            and all(shard.by_pass for shard, is_owner in zip(shards, owners, strict=True) if is_owner)
        )
        self._overwritten &= sum(owners) == sum(memory.owners for memory in self._memories)
        self._owners = {i for i, is_owner in enumerate(owners) if is_owner}
        self._unsettled: list[int] = []
        self._copies: list[tuple[int, str, Tensor]] = []  # shard, part, what it was
        self._marks: list[tuple[Tensor, Tensor]] = []  # bits, and what they were

    @staticmethod
    def _names(shard: Shard, but: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name, numel in shard.tracked.numels.items() if name not in but and numel)

    def begin(self, stepped: Sequence[int], may_be_skipped: bool = False) -> bool:
        """``stepped``: the shards that have a gradient. Whether the pass is to store bits, whatever is there."""
        self._copies.clear()
        self._marks.clear()
        self._watch.notice()
        have_gradients = set(stepped)
        self._unsettled = [i for i in self._to_settle if i in have_gradients and not self._tracked[i].is_settled]
        overwrites = (
            self._overwritten
            and not may_be_skipped
            and not self._unsettled
            and not is_capturing()
            and all(memory.is_stale for memory in self._memories)
            and self._owners <= have_gradients
        )
        for memory in self._memories:
            memory.wipe_others() if overwrites else memory.wipe()
        if self._compared or self._unsettled:
            self._copy_unmarked(have_gradients)
        return overwrites

    def _copy_unmarked(self, have_gradients: set[int]) -> None:
        for i in have_gradients.intersection(self._compared).difference(self._unsettled):
            self._copy(i, self._unmarked[i])
        for i in self._unsettled:
            self._copy(i, self._marked[i])
            for name in set(self._marked[i]).difference(self._unmarked[i]):  # by what the pass takes it for
                bits = self._tracked[i].bits[name]
                self._marks.append((bits, bits.clone()))

    def _copy(self, i: int, names: Iterable[str]) -> None:
        if (param := self._cached[i].param_ref()) is not None:
            parts = parts_of(param)
            self._copies += [(i, name, raw_bits(parts[name]).clone()) for name in names]

    def finish(self, found_inf: Tensor | None) -> None:
        """After the step, of which version counters know.

        ``found_inf``: not 0 has skipped it. Waits for that where it tells whether parameters are settled, which is in
        the first step, and after writes of others, of those with a separate master alone. A step that is captured has
        not been made.
        """
        for bits, before in self._marks:
            bits.copy_(before)
        compare(self._differing())
        self._copies.clear()
        self._marks.clear()
        self._watch.see()
        if self._unsettled and not is_capturing() and (found_inf is None or not bool(found_inf)):
            for i in self._unsettled:
                self._tracked[i].is_settled = True

    def _differing(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for i, name, before in self._copies:
            if (param := self._cached[i].param_ref()) is not None:
                yield self._tracked[i].bits[name], before, raw_bits(parts_of(param)[name])
