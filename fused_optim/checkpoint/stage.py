"""Copies state dicts to host memory while training goes on, for ``torch.distributed.checkpoint.async_save``."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fused_optim.memory import copies
from fused_optim.memory.copies import Copy
from fused_optim.memory.host_memory import HostBuffers
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.sharding.dtensor import finished_local, keep_chunks, portable
from fused_optim.state.values import LazyTensor, parts, with_parts

_KEPT = 2  # sets of buffers: one is written to disk while the next state is copied into the other
_UNCHANGING = frozenset((bool, int, float, str, bytes, type(None)))
_PLAIN = (Tensor, torch.nn.Parameter)


class Staged(dict[str, Any]):
    """A copy of a state dict in host memory. The memory is used again once nobody refers to this dict any more."""


class PinnedStager(AsyncStager):
    """Copies state dicts into page-locked host memory, on a stream of its own beside what the GPU does next.

    ``dcp.async_save(state, async_stager=stager)``; one stager serves all saves. ``stage`` returns a future of the copy
    at once. What it holds is the state at the call, bit for bit:

    * parameters and states of ``optimizers`` change in their steps only, so they are copied while the next forward and
      backward pass run, and the next step waits for the copies, on the device;
    * everything else (buffers of modules, which change in the forward pass, frozen parameters, averages of weights) the
      current stream waits for at once. So it does for all, where an optimizer's steps were captured in a CUDA graph,
      which cannot wait for what comes later;
    * tensors in host memory, and objects, are copied before ``stage`` returns.

    When a save was just started, call :func:`wait_for_copies` before parameters are written otherwise than by an
    optimizer's step. Writes that move a parameter's version counter, and did not wait, make the save fail.

    State dicts that were made with ``optimizer.checkpoint_device = "stager"`` take no GPU memory: what they convert is
    converted from the copies, on the host, when it is written.

    Memory is allocated for the first state dict, or by :meth:`prepare` before it, and kept: one set of buffers and, if
    a state is staged while another one is still being written, a second one. ``shared``: in shared memory, for
    ``AsyncCheckpointerType.PROCESS``, which otherwise copies it once more. Freed with the stager.
    """

    _synchronize_after_execute = False

    def __init__(self, *optimizers: Optimizer, shared: bool = False) -> None:
        self._optimizers = optimizers
        self._memory = _Memory(shared)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="PinnedStager")
        self._last: Callable[[], Future[dict[str, Any]] | None] = lambda: None
        for optimizer in optimizers:
            if not isinstance(optimizer, ShardedOptimizer):  # which asks by itself
                optimizer.register_step_pre_hook(_wait_before_step)

    def prepare(self, state_dict: dict[str, Any]) -> Future[None]:
        """Allocate, in the background, the memory for state dicts like this one."""
        sources = _Sources()
        sources.collect(state_dict)
        return self._memory.prepare(sources.sizes, sources.on_gpu)

    @torch.no_grad()
    def outline(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what :meth:`stage` would, with tensors without memory (``meta``)."""
        sources = _Sources()
        tree = sources.collect(state_dict)
        without_memory = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in sources.tensors]
        rebuilt: dict[str, Any] = sources.rebuild(tree, without_memory)
        return rebuilt

    @torch.inference_mode(False)  # the memory would be for no other mode
    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Copy ``state_dict``. The future is done when the original is no longer needed."""
        sources = _Sources()
        tree = sources.collect(state_dict)
        buffers = self._memory.take(sources.sizes, sources.on_gpu)
        try:
            targets = buffers.like(sources.tensors)
            underway = self._copy(sources.tensors, targets)
        except BaseException:
            self._memory.give_back(buffers)
            raise
        for copy_ in underway:
            copies.register_save(copy_)

        def finish() -> dict[str, Any]:
            for copy_ in underway:
                copy_.done.synchronize()
                copy_.look()
                copies.finish(copy_)
            staged = Staged(sources.rebuild(tree, targets))
            weakref.finalize(staged, self._memory.give_back, buffers).atexit = False
            written = next((copy_.written for copy_ in underway if copy_.written), None)
            if written is not None:
                raise RuntimeError(
                    f"{written} was written while it was copied for a save: call "
                    "fused_optim.checkpoint.wait_for_copies() before writing parameters otherwise than by a step"
                )
            return staged

        future: Future[dict[str, Any]] = Future()
        if underway:
            future = self._thread.submit(finish)
        else:
            future.set_result(finish())
        self._last = weakref.ref(future)  # which holds the copy as long as somebody waits for it
        return future

    def synchronize_staging(self) -> None:
        """Wait for the last copy."""
        future = self._last()
        if future is not None:
            future.result()

    def close(self) -> None:
        """Do nothing: torch 2.11 closes stagers with every save. This one's memory is freed with it."""

    # --- copying ------------------------------------------------------------------------------------------------

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Copy]:
        """The copies under way on GPUs, which others must wait for; tensors in host memory are copied at once."""
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for source, target in zip(sources, targets, strict=True):
            if source.device.type == "cuda":
                by_device.setdefault(source.device, []).append((source, target))
            else:
                target.copy_(source)
        if not by_device:
            return []
        steady = set() if any(map(_is_captured, self._optimizers)) else _memory_of(self._optimizers)
        return [self._copy_from(device, pairs, steady) for device, pairs in by_device.items()]

    def _copy_from(self, device: torch.device, pairs: list[tuple[Tensor, Tensor]], steady: set[int]) -> Copy:
        """Copy tensors that may change at any time first: the current stream waits at once for these only."""
        current = torch.cuda.current_stream(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        side.wait_stream(current)
        late = [pair for pair in pairs if _address(pair[0]) in steady]
        early = [pair for pair in pairs if _address(pair[0]) not in steady]
        with torch.cuda.stream(side):
            _copy_all(early)
            if early:
                current.wait_stream(side)
            _copy_all(late)
            done = torch.cuda.Event(blocking=True)  # the thread that waits for it sleeps
            done.record(side)
        return Copy(device, done, list(_named(self._optimizers)) if late else [])


def _copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Queue copies on the current stream."""
    if pairs := list(pairs):
        sources, targets = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)  # one call: the host is not free for training yet


def wait_for_copies() -> None:
    """Let what is queued next on the current streams wait for the copies that saves are making on the GPUs.

    Steps of optimizers and ``load_state_dict`` of this package's do so themselves. No host synchronisation.
    """
    copies.wait_for_saves()


def _wait_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    copies.wait_for_saves()


def _is_captured(optimizer: Optimizer) -> bool:
    """True if the optimizer's steps may be replays of CUDA graphs, which wait for nothing."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.stepper.is_captured
    return any(group.get("capturable") for group in optimizer.param_groups)


def _named(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """(name for messages, parameter) of all parameters."""
    for optimizer in optimizers:
        index = 0
        for group in optimizer.param_groups:
            params, names = group["params"], group.get("param_names", ())
            fits = len(names) == len(params)  # not where users have changed one of the two alone
            for param, name in zip(params, names if fits else [None] * len(params), strict=True):
                yield name or f"parameter {index} of shape {tuple(param.shape)}", param
                index += 1


def _memory_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """The addresses of all memory that only steps of these optimizers change."""
    addresses: set[int] = set()
    for optimizer in optimizers:
        tensors: list[Any] = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        tensors += chain.from_iterable(
            states.values() for states in optimizer.state.values() if isinstance(states, Mapping)
        )
        if isinstance(optimizer, ShardedOptimizer):
            tensors += (layout.scales for layout in optimizer.store.layouts.of(optimizer.state).values())
        for tensor in tensors:
            if type(tensor) in _PLAIN:
                addresses.add(_address(tensor))
            elif isinstance(tensor, Tensor):
                addresses.update(map(_address, plain_tensors(tensor)))
    return addresses


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# --- what is in a state dict --------------------------------------------------------------------------------------


Rebuild = Callable[[Iterator[Tensor]], Tensor]  # the same kind of tensor, of others instead of those with memory


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory that a tensor consists of on this rank."""
    plain: list[Tensor] = []
    _take_apart(tensor, plain)
    return plain


def _take_apart(tensor: Tensor, plain: list[Tensor]) -> Rebuild:
    """Add the plain tensors of a tensor to ``plain``. Returns the function that rebuilds it of others.

    That function reads nothing that may have changed meanwhile.
    """
    if isinstance(tensor, DTensor):
        local = _take_apart(finished_local(tensor), plain)
        return lambda copied: keep_chunks(portable(local(copied), tensor), tensor)
    if isinstance(tensor, LazyTensor):
        source = tensor.source
        made_of = {name: _take_apart(part, plain) for name, part in parts(source).items()}
        return lambda copied: LazyTensor(with_parts(source, {name: make(copied) for name, make in made_of.items()}))
    if isinstance(tensor, AsyncCollectiveTensor):
        return _take_apart(tensor.wait(), plain)
    if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
        return _take_wrapper_apart(tensor, plain)
    plain.append(tensor.detach() if tensor.requires_grad else tensor)
    return next


def _take_wrapper_apart(tensor: Any, plain: list[Tensor]) -> Rebuild:
    """:func:`_take_apart` of a wrapper subclass.

    Dataclasses in its context are copied: tensors share ones that change.
    """
    names, context = tensor.__tensor_flatten__()
    if isinstance(context, tuple):
        context = tuple(copy.copy(note) if is_dataclass(note) else note for note in context)
    kind, shape, stride = type(tensor), tensor.shape, tensor.stride()
    inner = {name: _take_apart(getattr(tensor, name), plain) for name in names}

    def rebuild(copied: Iterator[Tensor]) -> Tensor:
        made = {name: make(copied) for name, make in inner.items()}
        rebuilt: Tensor = kind.__tensor_unflatten__(made, context, shape, stride)
        return rebuilt

    return rebuild


def _has_memory(tensor: Tensor) -> bool:
    """True for a plain tensor whose bytes are its values."""
    return type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_meta


@dataclass
class _Sources:
    """The tensors of a state dict that are to be copied, each once."""

    tensors: list[Tensor] = field(default_factory=list)
    _at: dict[int, int] = field(default_factory=dict)  # the first at an address
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)  # those at an address that several have

    @property
    def sizes(self) -> list[int]:
        return [tensor.numel() * tensor.element_size() for tensor in self.tensors]

    @property
    def on_gpu(self) -> bool:
        return any(tensor.device.type == "cuda" for tensor in self.tensors)

    def collect(self, value: Any) -> Any:
        """The same tree with deep copies of objects, and tensors replaced by their numbers in ``tensors``."""
        kind = type(value)
        if kind in _UNCHANGING:
            return value
        if kind in (dict, OrderedDict):
            return {key: self.collect(item) for key, item in value.items()}
        if isinstance(value, Tensor):
            return self._collect_tensor(value)
        if kind in (list, tuple):
            return kind(map(self.collect, value))
        return copy.deepcopy(value)

    def _collect_tensor(self, tensor: Tensor) -> Any:
        if type(tensor) in _PLAIN and _has_memory(tensor):  # most of them: training waits
            return _Number(self._number(tensor.detach() if tensor.requires_grad else tensor))
        plain: list[Tensor] = []
        rebuild = _take_apart(tensor, plain)
        if not all(map(_has_memory, plain)):
            return _Copied(_copied_by_torch(tensor))
        return _Place(rebuild, [self._number(each) for each in plain])

    def _number(self, plain: Tensor) -> int:
        added = len(self.tensors)
        number = first = self._at.setdefault(plain.data_ptr(), added)
        if first != added:
            self._numbers.setdefault(_key(self.tensors[first]), first)
            number = self._numbers.setdefault(_key(plain), added)
        if number == added:
            self.tensors.append(plain)
        return number

    def rebuild(self, tree: Any, copied: Sequence[Tensor]) -> Any:
        """The tree with ``copied`` in the places of the tensors."""
        if type(tree) is _Number:
            return copied[tree]
        if type(tree) is _Place:
            return tree.rebuild(copied[number] for number in tree.numbers)
        if type(tree) is _Copied:
            return tree.tensor
        if type(tree) is dict:
            return {key: self.rebuild(item, copied) for key, item in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(self.rebuild(item, copied) for item in tree)
        return tree


class _Number(int):
    """A plain tensor of a tree: which of the sources it is."""


@dataclass
class _Place:
    """A tensor of a tree: how it is rebuilt, and which of the sources it consists of."""

    rebuild: Rebuild
    numbers: list[int]


@dataclass
class _Copied:
    tensor: Tensor


def _copied_by_torch(tensor: Tensor) -> Tensor:
    """A copy by torch's stager, for kinds that only torch can copy; meta tensors as they are."""
    if tensor.is_meta:
        return tensor
    if type(tensor) is Tensor:  # sparse, for instance
        return tensor.to("cpu", copy=True)
    staged: Any = DefaultStager(StagingOptions(False, False, False, False)).stage({"": tensor})
    copied: Tensor = staged[""]
    return copied


def _key(plain: Tensor) -> tuple[Any, ...]:
    """Equal for views of the same bytes, such as tied weights, which are copied once."""
    return plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride(), plain.is_neg(), plain.is_conj()


# --- memory -------------------------------------------------------------------------------------------------------


class _Memory:
    """Sets of page-locked buffers. Free ones are kept, as many as saves need that follow each other closely."""

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._free: list[HostBuffers] = []
        self._lock = threading.Lock()
        self._preparing: Future[None] | None = None
        self._is_wanted = threading.Event()  # somebody waits for what is being prepared
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="PinnedStager memory")

    def prepare(self, sizes: Sequence[int], locked: bool) -> Future[None]:
        def allocate() -> None:
            self.give_back(HostBuffers(sizes, locked=locked, shared=self._shared, rest=self._is_wanted.wait))

        self._preparing = self._thread.submit(allocate)
        return self._preparing

    def take(self, sizes: Sequence[int], locked: bool) -> HostBuffers:
        if self._preparing is not None:
            preparing, self._preparing = self._preparing, None
            self._is_wanted.set()
            try:
                preparing.result()
            finally:
                self._is_wanted.clear()
        with self._lock:
            fitting = [b for b in self._free if (b.sizes, b.locked) == (tuple(sizes), locked)]
            self._free = fitting[1:]  # others were for a state dict that has changed
        return fitting[0] if fitting else HostBuffers(sizes, locked=locked, shared=self._shared)

    def give_back(self, buffers: HostBuffers) -> None:
        with self._lock:
            self._free = [*self._free, buffers][-_KEPT:]
