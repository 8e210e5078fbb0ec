"""What an engine needs to know of a parameter's states beyond their tensors: formats, scales, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fused_optim.formats import FLOAT16, FLOAT32, Master, StateFormat, state_format
from fused_optim.host_memory import host_zeros
from fused_optim.sharding.dtensor import Geometry, has_values, local_tensor, shard_geometry

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
STEP = "step"  # of a param group; of each parameter where states are as torch.optim.AdamW's
STATES = (*MOMENTS, MASTER)


class Versions(NamedTuple):
    """What changes when someone writes a parameter, but not through ``.data``: version counters, or its memory."""

    param: int
    local: int
    memory: int

    @staticmethod
    def of(param: Tensor) -> Versions:
        """As they are now. The optimizer's own steps count for the parameter, too."""
        with torch._C.DisableTorchFunctionSubclass():
            local = local_tensor(param)
            counters = [0 if tensor.is_inference() else tensor._version for tensor in (param, local)]
        components = getattr(local, "components", None)
        if components is not None:
            return Versions(counters[0], counters[1], id(components))
        return Versions(counters[0], counters[1], local.data_ptr() if has_values(local) else 0)


def state_zeros(param: Tensor, shape: Sequence[int], dtype: torch.dtype, offloaded: bool) -> Tensor:
    """New memory for states of ``param``, or for scales of them."""
    if offloaded:
        return host_zeros(shape, dtype)
    return torch.zeros(tuple(shape), dtype=dtype, device=local_tensor(param).device)


@dataclass
class Slots:
    """Formats of one parameter's states and their block scales.

    ``scales``: FP32, one per block of each scaled state, in the order exp_avg, exp_avg_sq, master_param. ``versions``:
    of the parameter when it was last known to be its rounded master, if it has a master of its own. ``offloaded``:
    the states that are in host memory, and so are the scales, while the parameter is on a GPU.
    """

    geometry: Geometry
    master: Master
    exp_avg: StateFormat
    exp_avg_sq: StateFormat
    scales: Tensor
    versions: Versions | None = None
    offloaded: tuple[str, ...] = ()

    @staticmethod
    def create(
        param: Tensor,
        master: Master,
        exp_avg: torch.dtype | str,
        exp_avg_sq: torch.dtype | str,
        *,
        offloaded: tuple[str, ...] = (),
    ) -> Slots:
        """Choose formats (FP32 where no block fits) and allocate zero scales."""
        geometry = shard_geometry(param)
        chosen = [state_format(exp_avg), state_format(exp_avg_sq)]
        chosen = [FLOAT32 if fmt.scaled and not geometry.block else fmt for fmt in chosen]
        if master is Master.FLOAT16 and not geometry.block:
            master = Master.FLOAT32
        count = geometry.blocks * (sum(fmt.scaled for fmt in chosen) + (master is Master.FLOAT16))
        scales = state_zeros(param, (count,), torch.float32, bool(offloaded))
        return Slots(geometry, master, chosen[0], chosen[1], scales, offloaded=offloaded)

    def format(self, state: str) -> StateFormat:
        """Of masters, only FP16 ones have one of these; it is FLOAT32 for all others."""
        if state == MASTER:
            return FLOAT16 if self.master is Master.FLOAT16 else FLOAT32
        return self.exp_avg if state == "exp_avg" else self.exp_avg_sq

    def scale(self, state: str) -> Tensor | None:
        """The scales of one state, as a view; None where it has none."""
        scaled = [name for name in STATES if self.format(name).scaled]
        if state not in scaled:
            return None
        first = self.geometry.blocks * scaled.index(state)
        return self.scales[first : first + self.geometry.blocks]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of each state of the local shard, and of the scales."""
        sizes = {name: self.geometry.numel * dtype.itemsize for name, dtype in self.dtypes().items()}
        return {**sizes, "scales": self.scales.nbytes}

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype that each stored state must have."""
        dtypes = {name: self.format(name).dtype(name) for name in MOMENTS}
        return dtypes if self.master is Master.PARAMETER else {**dtypes, MASTER: self.master.dtype}
