"""Which elements of parameters have other bits than when they were last taken: one bit for each.

Bit ``e % 8`` of byte ``e // 8`` is that of element ``e`` of the local shard; those beyond the last element stay 0. A
quantized weight has such bits for each of its parts: codes and scales.

Update passes of engines set bits themselves, from what a parameter and its master are in registers. Where they do not,
or where the parameter may be another than its rounded master, parts are copied before the step and compared after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fused_optim.adapters import COMPARED, adapter_of
from fused_optim.backends import backend_of, is_capturing
from fused_optim.backends.compiled import mark_differences
from fused_optim.memory.by_parameter import ByParameter
from fused_optim.memory.layout import memory_of
from fused_optim.sharding.dtensor import dense, local_tensor

WHOLE = ""  # the one part of a parameter that is not quantized
CODES, SCALES = "data", "scale"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXTRACTED = 2**24  # bytes of bits that are turned into indices at a time
_BITS_OF_BYTES = 0x0102040810204080  # times eight bytes of 0 or 1: these as the bits of the highest byte


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


def bit_bytes(numel: int) -> int:
    """What the bits of so many elements take, in whole sectors of a GPU's memory."""
    return -(-numel // 256) * 32


def set_all(bits: Tensor, numel: int) -> None:
    """Mark every element."""
    bits[: numel // 8].fill_(0xFF)
    if numel % 8:
        bits[numel // 8].fill_((1 << numel % 8) - 1)


def indices_of(bits: Tensor) -> Tensor:
    """The elements that are marked, ascending: int64."""
    found = [_indices(piece) + 8 * _EXTRACTED * i for i, piece in enumerate(bits.split(_EXTRACTED))]
    return found[0] if len(found) == 1 else torch.cat(found) if found else bits.new_zeros(0, dtype=torch.int64)


def indices_of_all(bits: Sequence[Tensor]) -> list[Tensor]:
    """:func:`indices_of` each. Those that lie in one memory, all at once: the device is waited for a few times."""
    found: dict[int, Tensor] = {}
    by_memory: dict[int, list[int]] = {}
    for i, each in enumerate(bits):
        by_memory.setdefault(each.untyped_storage().data_ptr(), []).append(i)
    for members in by_memory.values():
        marked = indices_of(_memory_of(bits[members[0]]))
        firsts = [8 * int(bits[i].storage_offset()) for i in members]
        ends = [first + 8 * bits[i].numel() for first, i in zip(firsts, members, strict=True)]
        cuts = torch.searchsorted(marked, torch.tensor(firsts + ends, device=marked.device)).tolist()
        for i, first, start, end in zip(members, firsts, cuts, cuts[len(members) :], strict=False):
            found[i] = marked[start:end] - first
    return [found[i] for i in range(len(bits))]


def _memory_of(bits: Tensor) -> Tensor:
    """All of the memory that they lie in."""
    return torch.empty(0, dtype=torch.uint8, device=bits.device).set_(bits.untyped_storage())


def _indices(bits: Tensor) -> Tensor:
    """Bytes that are not 0 first: after most steps these are few."""
    at = bits.nonzero().view(-1)
    each = torch.arange(8, dtype=torch.uint8, device=bits.device)
    found = (bits[at].unsqueeze(1) >> each & 1).view(-1).nonzero().view(-1)
    return at[found >> 3].mul_(8).add_(found & 7)


def raw_bits(values: Tensor) -> Tensor:
    """Flat, as integers: NaN and negative zeros are compared by their bits."""
    return dense(values.detach()).view(-1).view(_INTEGERS[values.element_size()])


def compare(parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Mark elements whose bits differ: bits, before and after, both flat as of :func:`raw_bits`."""
    on_gpus: dict[torch.device, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for bits, before, after in parts:
        if backend_of(after) == "cuda":
            on_gpus.setdefault(after.device, []).append((bits, before, after))
        else:
            _mark_differences(bits, before, after)
    for device, rows in on_gpus.items():
        mark_differences(rows, device)


def _mark_differences(bits: Tensor, before: Tensor, after: Tensor) -> None:
    """Piece by piece, which bounds the memory."""
    for first in range(0, after.numel(), COMPARED):
        differs = before[first : first + COMPARED] != after[first : first + COMPARED]
        padded = torch.nn.functional.pad(differs, (0, -differs.numel() % 8))
        packed = padded.view(torch.int64).mul(_BITS_OF_BYTES).bitwise_right_shift_(56).to(torch.uint8)
        bits[first // 8 : first // 8 + packed.numel()] |= packed


def _numbers(tensor: Tensor) -> tuple[int, int]:
    """Version counter and address."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, 0 if type(tensor) is FakeTensor else tensor.data_ptr()


@dataclass
class Tracked:
    """The bits of a parameter, by part, and what tells that someone else has written it.

    ``is_settled``: the parameter is what the last step made of its master, so that a pass can tell what it was without
    reading it.
    """

    bits: dict[str, Tensor]
    numels: dict[str, int]
    is_settled: bool = False
    _own: tuple[int, ...] = ()  # version counters and addresses of the parameter
    _masters: tuple[int, ...] = ()
    _memory: weakref.ref[torch.UntypedStorage] | None = None

    @staticmethod
    def of(params: Iterable[Tensor]) -> dict[Tensor, Tracked]:
        """None marked. The bits of all that is on one device lie in one memory."""
        numels = {param: {name: part.numel() for name, part in parts_of(param).items()} for param in params}
        sizes: dict[torch.device, int] = {}
        starts = {}
        for param, parts in numels.items():
            device = local_tensor(param).device
            for name, numel in parts.items():
                starts[param, name] = sizes.get(device, 0)
                sizes[device] = starts[param, name] + bit_bytes(numel)
        memory = {device: torch.zeros(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}
        found = {}
        for param, parts in numels.items():
            own = memory[local_tensor(param).device]
            bits = {name: own.narrow(0, starts[param, name], bit_bytes(numel)) for name, numel in parts.items()}
            found[param] = Tracked(bits, parts)
        return found

    def fits(self, param: Tensor) -> bool:
        parts = parts_of(param)
        return self.numels == {name: part.numel() for name, part in parts.items()} and all(
            part.device == self.bits[name].device for name, part in parts.items()
        )

    def set_all(self) -> None:
        for name, bits in self.bits.items():
            set_all(bits, self.numels[name])

    def _look(self, param: Tensor) -> tuple[int, ...]:
        local = local_tensor(param)
        if WHOLE in self.bits:
            return param._version if not param.is_inference() else 0, *_numbers(local)
        parts = (number for part in parts_of(param).values() for number in _numbers(part))
        return param._version, local._version, *parts

    def see(self, param: Tensor, master: Tensor | None) -> None:
        """Remember the parameter as it is."""
        own = self._look(param)
        if self._is_freed() or own[2:] != self._own[2:]:
            self._memory = memory_of(param)
        self._own = own
        self._masters = () if master is None else _numbers(local_tensor(master))

    def _is_freed(self) -> bool:
        """Whether its memory is gone, whatever lies at that address by now."""
        return self._memory is not None and self._memory() is None

    def notice(self, param: Tensor, master: Tensor | None) -> None:
        """Mark all of it if someone else has written it."""
        is_written = self._is_freed() or self._look(param) != self._own
        if not is_written and self._masters == (() if master is None else _numbers(local_tensor(master))):
            return
        if is_capturing():
            hint = "take_changes() or a step before the capture notices it"
            raise RuntimeError(f"CUDA graph capture: a parameter or its master was written since the last step; {hint}")
        if is_written:
            self.set_all()
        self.is_settled = False
        self.see(param, master)


class Shard(NamedTuple):
    """A parameter in a step. ``marked``: the parts that the pass marks itself where the parameter is settled.

    ``always``: it reads the parameter's old bits, settled or not.
    """

    param: Tensor
    master: Tensor | None
    tracked: Tracked
    has_gradient: bool
    marked: Collection[str] = ()
    always: bool = False


class ChangeTracker:
    """The bits of an optimizer's parameters, and what tells that others have written these.

    Nothing of this is copied, pickled or saved.
    """

    def __init__(self) -> None:
        self._tracked: ByParameter[Tracked] = ByParameter()

    def start(self, params: Iterable[Tensor]) -> None:
        """From now on; nothing has changed so far. Raises TypeError for parameters that cannot be tracked."""
        for param, tracked in Tracked.of(params).items():
            tracked.see(param, None)
            self._tracked[param] = tracked

    def keep(self, params: Iterable[Tensor]) -> None:
        """Let go of all others."""
        self._tracked = ByParameter(self._tracked.of(params))

    def clear(self) -> None:
        """Nothing has changed."""
        every = (bits for tracked in self._tracked.values() for bits in tracked.bits.values())
        for memory in {bits.untyped_storage().data_ptr(): _memory_of(bits) for bits in every}.values():
            memory.zero_()

    def __getitem__(self, param: Tensor) -> Tracked:
        """Of a parameter that came later, or has another shard by now: all of it is marked."""
        tracked = self._tracked.get(param)
        if tracked is None or not tracked.fits(param):
            tracked = self._tracked[param] = Tracked.of([param])[param]
            tracked.set_all()
            tracked.see(param, None)
        return tracked

    def notice(self, params: Mapping[Tensor, Tensor | None]) -> None:
        """Mark all of the parameters that others have written since the last step. Values: their masters."""
        with torch._C.DisableTorchFunctionSubclass():
            for param, master in params.items():
                self[param].notice(param, master)

    @contextmanager
    def unchanged(self, param: Tensor) -> Iterator[None]:
        """What is written into a parameter within it are the bits that it has."""
        self.notice({param: None})
        yield
        self[param].see(param, None)


class StepChanges:
    """What a step changes: noticed before it, and after it where its pass does not mark it itself.

    ``may_skip``: on a device that nobody waits for, so parameters may be what they were.
    """

    def __init__(self, shards: Sequence[Shard], may_skip: bool = False) -> None:
        self._shards, self._may_skip = shards, may_skip
        self._copies: list[tuple[Tensor, str, Tensor, Tensor]] = []  # parameter, part, its bits; a copy from before
        self._marks: list[tuple[Tensor, Tensor]] = []  # bits, and what they were
        with torch._C.DisableTorchFunctionSubclass():
            for shard in shards:
                shard.tracked.notice(shard.param, shard.master)
        for shard in shards:
            if shard.has_gradient:
                self._copy(shard)

    def _copy(self, shard: Shard) -> None:
        tracked = shard.tracked
        knows = shard.marked if tracked.is_settled or shard.always else ()
        if WHOLE in knows:
            return
        for name, part in parts_of(shard.param).items():
            if name not in knows and part.numel():
                bits = tracked.bits[name]
                self._copies.append((shard.param, name, bits, raw_bits(part).clone()))
                if name in shard.marked:  # by what the pass takes the parameter for
                    self._marks.append((bits, bits.clone()))

    def finish(self) -> None:
        """After the step, of which version counters know."""
        for bits, before in self._marks:
            bits.copy_(before)
        compare([(bits, before, raw_bits(parts_of(param)[name])) for param, name, bits, before in self._copies])
        self._copies.clear()
        self._marks.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for shard in self._shards:
                shard.tracked.see(shard.param, shard.master)
                shard.tracked.is_settled |= shard.has_gradient and not self._may_skip
