"""The compiled engines: hands raw addresses, sizes and formats of one device's shards to C++."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from fused_optim.backends import Compiled, ShardWork, load_engine, rule_number
from fused_optim.backends.engine import CachedShard, Engine, EngineTensorReader
from fused_optim.formats.elements import ELEMENT_TYPES
from fused_optim.memory.by_parameter import ByParameter
from fused_optim.memory.layout import StateLayout
from fused_optim.rules import Hyper, Rule, RuleSpec


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def run_on(device: torch.device) -> dict[str, int]:
    """The device and stream, or threads, that an engine runs on, as arguments of its functions."""
    if device.type == "cuda":
        # Not torch.cuda.current_stream(), which makes a Python object: each weight that is decoded asks.
        return {"device": device.index, "stream": torch._C._cuda_getCurrentRawStream(device.index)}
    return {"threads": torch.get_num_threads()}


@functools.cache
def any_engine() -> Engine | None:
    """For what all engines do alike."""
    return load_engine("cpu")[0] or load_engine("cuda")[0]


def same_objects(left: Sequence[Any], right: list[Any]) -> bool:
    """True if both hold the same objects."""
    engine = any_engine()
    if engine is not None and isinstance(left, list):
        return engine.same_objects(left, right)
    return len(left) == len(right) and all(map(is_, left, right))


class Identities:
    """The ids of some objects, which are not kept alive. Compare only while they are known to live."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._list = list(map(id, objects))
        engine = any_engine()
        self._numbers = None if engine is None else engine.Numbers(self._list)

    def are(self, objects: Sequence[Any]) -> bool:
        """True if these are the same objects, in the same order."""
        engine = any_engine()
        if engine is not None and self._numbers is not None and isinstance(objects, list):
            return engine.are_objects(objects, self._numbers)
        return list(map(id, objects)) == self._list

    @staticmethod
    def are_items(mapping: Mapping[Any, Any], keys: Identities, values: Identities) -> bool:
        """True if a dict holds the same objects, in the same order."""
        engine, numbers, others = any_engine(), keys._numbers, values._numbers
        if engine is not None and numbers is not None and others is not None and isinstance(mapping, dict):
            return engine.are_items(mapping, numbers, others)
        return keys.are(list(mapping)) and values.are(list(mapping.values()))


class SameTensors:
    """The ids of some tensors, which are not kept alive. No list equals it once one of them was freed."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._ids, self._alive = Identities(tensors), ByParameter(dict.fromkeys(tensors, True))
        self._count = len(self._alive)

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """True if these are the same tensors, in the same order."""
        return len(self._alive) == self._count and self._ids.are(tensors)


def load_kernels(rules: Collection[RuleSpec], device: torch.device) -> None:
    """Load the CUDA engine's kernels of update rules: a later CUDA graph capture is no time for it."""
    engine, _ = load_engine("cuda")
    for rule in rules:
        number = rule_number(rule, "cuda")
        if engine is not None and number is not None:
            engine.load_kernels(number, device.index)


def tensor_reader(
    device: torch.device, backend: Compiled | None = None, checks_ends: bool = False
) -> EngineTensorReader:
    """How an engine, that of ``device`` unless it is given, looks at tensors there itself.

    ``checks_ends``: and at how many bytes their storages have, which takes longer.
    Without the exchange API of torch >= 2.10 all tensors are unusual, and every shard is set at every step: right, but
    slower.
    """
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    return _tensor_reader(device, backend, api, checks_ends)


@functools.cache
def _tensor_reader(
    device: torch.device, backend: Compiled | None, api: object, checks_ends: bool
) -> EngineTensorReader:
    engine, _ = load_engine(backend or cast(Compiled, device.type))
    assert engine is not None
    # By examples the engine finds where torch keeps a tensor's dispatch keys; the first is an ordinary one. What is
    # found is kept, so no mode that is on by now may make other tensors. Switching modes off imports half of torch.
    no_modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    with torch.inference_mode(False), no_modes:
        ordinary = torch.empty(1, device=device)
        examples = _layout_examples(device)
        copied = [torch._lazy_clone(torch.empty(1, device="cpu")) for _ in range(2)]  # alike on all devices
        keys = [(x, torch._C._dispatch_keys(x).raw_repr()) for x in (ordinary, torch._neg_view(ordinary))]
        return engine.TensorReader(api, Tensor, keys, [*map(_example, examples)], [*map(_example, copied)], checks_ends)


def _layout_examples(device: torch.device) -> list[Tensor]:
    """Tensors that differ in all that DLPack tells: none is like the others by chance."""
    examples = [torch.empty(97, dtype=dtype, device=device) for dtype in ELEMENT_TYPES]
    shapes = [((3,), (2,), 5), ((5, 2), (7, 3), 11), ((2, 3, 4), (1, 29, 2), 3), ((2, 1, 3, 2), (17, 4, 8, 3), 13)]
    strided = [torch.empty(97, dtype=torch.int16, device=device).as_strided(*shape) for shape in shapes]
    narrow = torch.empty(97, dtype=torch.uint8, device=device).as_strided((2, 1, 2, 3, 2), (31, 9, 6, 11, 2), 17)
    return [*examples, *strided, narrow, torch.empty((), dtype=torch.int8, device=device)]


def _example(tensor: Tensor) -> tuple[Tensor, int, int, int]:
    storage = tensor.untyped_storage()
    return tensor, storage._cdata, storage.nbytes(), int(tensor.storage_offset())


def increment_versions(tensors: list[Tensor]) -> None:
    """Count a write of each, which torch does not see: an engine has made it."""
    torch.autograd.graph.increment_version(tensors)


class CompiledShards:
    """The shards of one device in the ``cpu`` or ``cuda`` engine, which looks for changes itself (``shard_table.h``).

    ``states_on``: where the states are, if not on ``device``. Torch cuts such shards into chunks while the step is
    made, which must not raise then: so storages that were made shorter are noticed, too.
    """

    def __init__(
        self,
        device: torch.device,
        backend: Compiled,
        groups: list[int],
        group_count: int,
        rule: Rule,
        states_on: torch.device | None = None,
    ) -> None:
        engine, _ = load_engine(backend)
        assert engine is not None
        number = rule_number(rule.spec, backend)
        assert number is not None  # `backend_of` has chosen it
        self._device, self._backend, self._number = device, backend, number
        self._writes_weights = engine.writes_weights
        is_apart = states_on is not None
        reader, state_reader = (tensor_reader(each, backend, is_apart) for each in (device, states_on or device))
        names = [spec.name for spec in rule.states]
        self._table = table = engine.ShardTable(
            number, names, groups, group_count, reader, state_reader, ELEMENT_TYPES, DTensor
        )
        self.works: dict[int, ShardWork] = {}
        self.written, self.sharing, self.updated = table.written, table.sharing, table.updated
        self.with_gradients, self.groups_with_gradients = table.with_gradients, table.groups_with_gradients

    def refresh(self, cached: list[CachedShard], attribute: str) -> Sequence[int]:
        self.works.clear()  # of a step that was begun and refused
        # Reading `.grad` of a DTensor takes three times as long where torch looks for overrides.
        with torch._C.DisableTorchFunctionSubclass():
            return self._table.refresh(cached, attribute)

    def find_written(self, cached: list[CachedShard]) -> Sequence[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return self._table.find_written(cached)

    def set(self, shard: int, work: ShardWork, cached: CachedShard | None) -> bool:
        self._table.set_shard(shard, work)
        self.works[shard] = work
        with torch._C.DisableTorchFunctionSubclass():
            return cached is not None and self._table.cache(shard, cached)

    def takes_target(self, layout: StateLayout) -> bool:
        return self._writes_weights(self._number, [fmt.code for fmt in layout.formats])

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        self._table.launch(**self._set_groups(hypers, workspace))

    def mark(self, cached: list[CachedShard]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._table.mark(cached)
        self.works.clear()

    def run_matrix_pass(
        self, first: bool, values: Mapping[int, Tensor], hypers: list[Hyper], workspace: Tensor | None
    ) -> None:
        """Muon's pass before orthogonalization, or after it, over shards in ascending order.

        ``values``: flat, contiguous: what the first writes, or the second reads.
        """
        where = self._set_groups(hypers, workspace)
        addresses = [value.data_ptr() for value in values.values()]
        types = [ELEMENT_TYPES[value.dtype] for value in values.values()]
        self._table.launch_matrix_pass(first, list(values), addresses, types, **where)

    def _set_groups(self, hypers: list[Hyper], workspace: Tensor | None) -> dict[str, int]:
        """Give the engine the hyperparameters of a step. Returns its device and stream, as arguments of launches."""
        for group, h in enumerate(hypers):
            rate, lr = (h.lr, 0.0) if isinstance(h.lr, Tensor) else (None, h.lr)
            self._table.set_group(  # in its order: keywords would cost a microsecond per group
                group,
                lr,
                h.weight_decay,
                [*h.values.values()],
                h.step,
                h.decoupled,
                h.maximize,
                h.stochastic_rounding,
                0 if rate is None else rate.data_ptr(),
                0 if h.grad_scale is None else h.grad_scale.data_ptr(),
                0 if h.grad_factor is None else h.grad_factor.data_ptr(),
                0 if h.found_inf is None else h.found_inf.data_ptr(),
                0 if h.steps_done is None else h.steps_done.data_ptr(),
            )
        where = run_on(self._device)
        if self._backend == "cuda":
            where["workspace"] = address(workspace)
            where["workspace_size"] = 0 if workspace is None else workspace.nbytes
        return where
