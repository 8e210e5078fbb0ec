"""How the states of one parameter are laid out: their formats, scales, master, and where they lie."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_optim.adapters import adapter_of
from fused_optim.formats.masters import Master
from fused_optim.formats.states import FLOAT16, FLOAT32, Kind, StateFormat, state_format
from fused_optim.memory.host_memory import host_zeros
from fused_optim.rules import StateSpec
from fused_optim.sharding.dtensor import Geometry, has_values, local_tensor, shard_geometry

MASTER = "master_param"
INITIAL_LR = "initial_lr"  # of a param group, as torch's schedulers call it
STEP = "step"  # of a param group; of each parameter where states are as torch.optim.AdamW's


class Versions(NamedTuple):
    """Version counters and memory of a parameter, which change with every write but those through ``.data``.

    A weak reference tells memory from other memory that has its address by now.
    """

    param: int
    local: int
    address: int
    memory: weakref.ref[torch.UntypedStorage] | None

    @staticmethod
    def read(param: Tensor) -> Versions:
        """The versions now. The optimizer's own steps change them, too."""
        with torch._C.DisableTorchFunctionSubclass():
            local = local_tensor(param)
            counters = [0 if tensor.is_inference() else tensor._version for tensor in (param, local)]
            values = _values_of(param)
            address = 0 if values is None else values.data_ptr()
            return Versions(counters[0], counters[1], address, memory_of(param))


def memory_of(
    param: Tensor, when_freed: Callable[[object], object] | None = None
) -> weakref.ref[torch.UntypedStorage] | None:
    """The memory of a parameter's shard, of a quantized one that of its codes; None without values."""
    with torch._C.DisableTorchFunctionSubclass():
        values = _values_of(param)
        return None if values is None else weakref.ref(values.untyped_storage(), when_freed)


def _values_of(param: Tensor) -> Tensor | None:
    """The plain tensor in whose memory a parameter's shard lies; None where there are no values."""
    local, adapter = local_tensor(param), adapter_of(param)
    values = local if adapter is None else adapter.codes(local)
    return values if values is not None and has_values(values) else None


def state_zeros(param: Tensor, shape: Sequence[int], dtype: torch.dtype, offloaded: bool) -> Tensor:
    """New memory for states of ``param``, or for scales of them."""
    if offloaded:
        return host_zeros(shape, dtype)
    return torch.zeros(tuple(shape), dtype=dtype, device=local_tensor(param).device)


def _chosen(dtypes: Sequence[torch.dtype | str], geometry: Geometry) -> tuple[StateFormat, ...]:
    """FP32 where no block fits."""
    return tuple(FLOAT32 if fmt.scaled and not geometry.block else fmt for fmt in map(state_format, dtypes))


@dataclass
class StateLayout:
    """Formats of one parameter's states and their block scales.

    ``formats``: of the rule's states, in the order of ``specs``. ``scales``: FP32, one per block of each scaled state
    in that order, then of the master. ``versions``: of the parameter when it was last known to be its rounded master,
    if it has a master of its own. ``offloaded``: the states that are in host memory, and so are the scales, while the
    parameter is on a GPU.
    """

    specs: tuple[StateSpec, ...]
    geometry: Geometry
    master: Master
    formats: tuple[StateFormat, ...]
    scales: Tensor
    versions: Versions | None = None
    offloaded: tuple[str, ...] = ()

    @staticmethod
    def create(
        param: Tensor,
        master: Master,
        specs: tuple[StateSpec, ...],
        dtypes: Sequence[torch.dtype | str],
        *,
        offloaded: tuple[str, ...] = (),
    ) -> StateLayout:
        """Choose formats (FP32 where no block fits) and allocate zero scales."""
        geometry = shard_geometry(param)
        formats = _chosen(dtypes, geometry)
        if master is Master.FLOAT16 and not geometry.block:
            master = Master.FLOAT32
        count = geometry.blocks * (sum(fmt.scaled for fmt in formats) + (master is Master.FLOAT16))
        scales = state_zeros(param, (count,), torch.float32, bool(offloaded))
        return StateLayout(specs, geometry, master, formats, scales, offloaded=offloaded)

    def is_for(self, dtypes: Sequence[torch.dtype | str]) -> bool:
        """True if :meth:`create` would choose the same formats."""
        return self.formats == _chosen(dtypes, self.geometry)

    def __getstate__(self) -> dict[str, Any]:
        """Versions are those of a parameter in this process: a copy's master is compared with the copy once."""
        return {**self.__dict__, "versions": None}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all states that a parameter may have: the rule's, and the master."""
        return (*(spec.name for spec in self.specs), MASTER)

    def format(self, state: str) -> StateFormat:
        """The format of a state; of masters FLOAT16 for FP16 ones, FLOAT32 for all others."""
        if state == MASTER:
            return FLOAT16 if self.master is Master.FLOAT16 else FLOAT32
        for spec, fmt in zip(self.specs, self.formats, strict=True):  # no generator: saves ask for each state
            if spec.name == state:
                return fmt
        raise KeyError(state)

    def kind(self, state: str) -> Kind:
        for spec in self.specs:
            if spec.name == state:
                return spec.kind
        return Kind.MASTER

    def is_encoded(self, state: str) -> bool:
        """True if a state needs its scales, or a master its parameter, to be decoded."""
        return self.format(state).scaled or (state == MASTER and self.master.is_remainder)

    def scale(self, state: str) -> Tensor | None:
        """The scales of one state, as a view; None where it has none."""
        first, blocks = 0, self.geometry.blocks
        for spec, fmt in zip(self.specs, self.formats, strict=True):
            if spec.name == state:
                return self.scales[first : first + blocks] if fmt.scaled else None
            first += blocks * fmt.scaled
        return self.scales[first : first + blocks] if self.format(state).scaled else None

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of each state of the local shard, and of the scales."""
        sizes = {name: self.geometry.numel * dtype.itemsize for name, dtype in self.dtypes().items()}
        return {**sizes, "scales": self.scales.nbytes}

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype that each stored state must have."""
        dtypes = {spec.name: fmt.dtype(spec.kind) for spec, fmt in zip(self.specs, self.formats, strict=True)}
        return dtypes if self.master is Master.PARAMETER else {**dtypes, MASTER: self.master.dtype}
