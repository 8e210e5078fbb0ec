"""The states of one parameter: how they are allocated, read and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adapters import COMPARED, Update, adapter_of, equal_or_nan
from fused_optim.formats.masters import Master, MasterTensors
from fused_optim.formats.states import FLOAT16, FLOAT32
from fused_optim.memory import copies
from fused_optim.memory.host_memory import host_copy
from fused_optim.memory.layout import MASTER, StateLayout, Versions, state_zeros
from fused_optim.memory.uploads import copy_into, moved
from fused_optim.rules import StateSpec
from fused_optim.sharding.dtensor import dense, is_dense, local_tensor, rewrap_like
from fused_optim.state.remainders import LoadedRemainder
from fused_optim.state.values import Joined, Stored, Values, materialize, pieces


def master_kind(param: Tensor, master_weights: bool, remainder_bits: int | None, dtype: torch.dtype) -> Master:
    """The kind of master that a parameter gets; ``remainder_bits`` None means a separate tensor of ``dtype``."""
    adapter = adapter_of(param)
    quantized = adapter is not None
    if adapter is not None and not master_weights and (reason := adapter.needs_master(param)):
        weight = f"a {type(local_tensor(param)).__name__} of shape {tuple(param.shape)}"
        raise ValueError(f"master_bits=0: {weight} needs a master: {reason}; use master_bits=32 (master_weights=True)")
    if not master_weights or (param.dtype == torch.float32 and not quantized):
        return Master.PARAMETER
    if remainder_bits is None or param.dtype != torch.bfloat16 or quantized:
        return Master.FLOAT16 if dtype == torch.float16 else Master.FLOAT32
    return Master.REMAINDER16 if remainder_bits == 16 else Master.REMAINDER8


def offloadable(param: Tensor, specs: Sequence[StateSpec], master: Master) -> tuple[str, ...]:
    """States that may lie in host memory: no masters of quantized weights, nor states beside FP16 masters of these."""
    names = tuple(spec.name for spec in specs)
    if adapter_of(param) is None:
        return (*names, MASTER)
    return () if master is Master.FLOAT16 else names


def read_parameter(param: Tensor) -> Tensor:
    """Local FP32 values of a parameter: the parameter itself where it is an FP32 tensor, else a new one."""
    local, adapter = local_tensor(param.detach()), adapter_of(param)
    return local.float() if adapter is None else adapter.values(local)


def initial_master(param: Tensor) -> Tensor:
    """New local FP32 values to start a master from: a quantized parameter's initial ones where it still has them."""
    adapter = adapter_of(param)
    return local_tensor(param.detach()).float().contiguous() if adapter is None else adapter.initial_values(param)


def discard_initial(param: Tensor) -> None:
    """Free the initial values of a quantized parameter, if it still has them."""
    adapter = adapter_of(param)
    if adapter is not None:
        adapter.discard_initial(param)


@dataclass(frozen=True)
class ParamState:
    """A parameter, ``optimizer.state[param]``, and the layout of these tensors."""

    param: Tensor
    tensors: dict[str, Tensor]
    layout: StateLayout

    @staticmethod
    def create(param: Tensor, layout: StateLayout) -> ParamState:
        """Zero moments and the master of ``param``, each sharded and placed as ``param`` is."""
        local = local_tensor(param.detach())
        tensors = {
            name: state_zeros(param, local.shape, dtype, name in layout.offloaded)
            for name, dtype in layout.dtypes().items()
            if name != MASTER or layout.master is not Master.FLOAT32
        }
        if layout.master is Master.FLOAT32:
            initial = initial_master(param)
            tensors[MASTER] = host_copy(initial) if MASTER in layout.offloaded else initial
        created = ParamState(param, {name: rewrap_like(tensor, param) for name, tensor in tensors.items()}, layout)
        if layout.master not in (Master.PARAMETER, Master.FLOAT32):
            created.seed_master(initial_master(param))
        discard_initial(param)
        return created

    def seed_master(self, value: Tensor) -> None:
        """Set the master from the parameter's local FP32 ``value``; the parameter stays as it is."""
        copies.wait_for_saves()
        for master, piece in self._master_pieces(value, None):
            self.layout.master.codec.seed(master, piece)

    def import_external(self, given: Mapping[str, Any]) -> None:
        """Fill these new states with those that someone else has made, or has moved here from another parameter.

        What fits is kept itself, and so is what is no state of this optimizer; what was decoded is written. Raises
        ValueError for a master of another kind, TypeError for moments that are no floating-point tensors of the
        parameter's local shape.
        """
        for name, value in given.items():
            if name not in self.layout.names:
                self.tensors[name] = value
                continue
            if name == MASTER:
                self._import_master(value)
            elif isinstance(value, Stored):
                self.write(name, value)
            elif self.layout.format(name) is FLOAT32 and self._fits(name, value, torch.float32):
                self.tensors[name] = self._locked(value) if name in self.layout.offloaded else value
            else:
                self.write(name, self._checked_values(name, value))

    def _import_master(self, value: Any) -> None:
        """Remainders complete the parameter; whole masters become its value where they are kept as remainders."""
        master = self.layout.master
        if isinstance(value, LoadedRemainder) and master is not Master.PARAMETER:
            self.write_remainder(value)
        elif isinstance(value, Stored) and master is not Master.PARAMETER:
            self.write_master(value.read())
        elif master.is_remainder and self._fits(MASTER, value, torch.float32):
            self.write_master(local_tensor(value))
        else:
            self._check_external_master(value)
            if master is Master.FLOAT16:
                self.write(MASTER, self._checked_values(MASTER, value))
            else:
                self.tensors[MASTER] = self._locked(value) if MASTER in self.layout.offloaded else value

    def _locked(self, state: Tensor) -> Tensor:
        """The state in page-locked memory, without GPU just in host memory."""
        local = local_tensor(state)
        is_there = local.device.type == "cpu" and (local.is_pinned() or not torch.cuda.is_available())
        return state if is_there else rewrap_like(host_copy(local), self.param)

    def place_states(self, offloaded: bool) -> None:
        """Move states that were copied or unpickled into page-locked memory again, or to the parameter's device."""
        layout, names = self.layout, [name for name in self.layout.names if name in self.tensors]
        device = local_tensor(self.param).device
        for name in names:
            if offloaded and name in layout.offloaded:
                self.tensors[name] = self._locked(self.tensors[name])
            else:
                self.tensors[name] = rewrap_like(local_tensor(self.tensors[name]).to(device), self.param)
        layout.scales = host_copy(layout.scales) if offloaded else layout.scales.to(device)
        layout.offloaded = layout.offloaded if offloaded else ()

    def _check_external_master(self, value: Any) -> None:
        dtype = None if self.layout.master is Master.PARAMETER else self.layout.master.dtype
        dtype = torch.float32 if dtype == torch.float16 else dtype
        if not self._fits(MASTER, value, dtype):
            expected = "none" if dtype is None else f"{dtype} of its local shape"
            got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "one in native form"
            shape = tuple(self.param.shape)
            raise ValueError(
                f"{MASTER} of a parameter of shape {shape} was made elsewhere: expected {expected}, got {got}"
            )

    def _fits(self, name: str, value: Any, dtype: torch.dtype | None) -> bool:
        """True if a state that was made elsewhere can be used itself."""
        if not isinstance(value, Tensor):
            return False
        local, values = local_tensor(self.param), local_tensor(value)
        alike = isinstance(value, DTensor) == isinstance(self.param, DTensor)
        alike = alike and (name in self.layout.offloaded or values.device == local.device)
        return alike and values.dtype == dtype and values.shape == local.shape and is_dense(values)

    def _checked_values(self, name: str, value: Tensor) -> Tensor:
        local, values = local_tensor(self.param), local_tensor(value)
        codes = values.dtype == torch.float16 and self.layout.format(name) is FLOAT16
        if values.shape != local.shape or not values.is_floating_point() or codes:
            raise TypeError(
                f"{name} was made elsewhere: expected a floating-point tensor of local shape {tuple(local.shape)}, got "
                f"{values.dtype} {tuple(values.shape)}; codes without their scales are no values: move them by "
                "get_unscaled_state() and set_scaled_state()"
            )
        return values

    def stored(self, name: str) -> Stored:
        """A state or a separate master, undecoded."""
        bits, layout = local_tensor(self.tensors[name]), self.layout
        return Stored(bits, layout.scale(name), layout.kind(name), layout.format(name), layout.geometry.block)

    def values(self, name: str) -> Values:
        """Reader of a state or a stored master."""
        if name == MASTER and self.layout.master.is_remainder:
            return Joined(local_tensor(self.tensors[MASTER]), self._local())
        return self.stored(name)

    def read(self, name: str, device: str | None = None) -> Tensor:
        """Local FP32 values of a state or a stored master: itself if it is FP32, else a new tensor on ``device``."""
        tensor = local_tensor(self.tensors[name])
        return tensor if tensor.dtype == torch.float32 else self.values(name).read(device)

    def converted(self, layout: StateLayout) -> ParamState:
        """The same values in other formats. States in their format already, and the master, keep their bits."""
        like, tensors = local_tensor(self.param), dict(self.tensors)
        for spec, fmt in zip(layout.specs, layout.formats, strict=True):
            zeros = state_zeros(self.param, like.shape, fmt.dtype(spec.kind), spec.name in layout.offloaded)
            tensors[spec.name] = rewrap_like(zeros, self.param)
        states = ParamState(self.param, tensors, replace(layout, versions=self.layout.versions))
        for name in layout.names:
            if name != MASTER or layout.master is Master.FLOAT16:
                states.write(name, self.stored(name))
        return states

    def unscaled(self, name: str, device: str | None) -> Tensor:
        """The values of :meth:`read`, placed as the parameter; the state itself if it is FP32."""
        if self.tensors[name].dtype == torch.float32:
            return self.tensors[name]
        return rewrap_like(materialize(self.values(name), device), self.param)

    def write(self, name: str, value: Tensor | Stored) -> None:
        """Encode local FP32 values into a state, or an FP16 master, rounding to nearest; or copy what is stored."""
        copies.wait_for_saves()
        if isinstance(value, Stored):
            self.stored(name).copy_(value, self._local().device)
        else:
            self.stored(name).write(value, self._local().device)

    def read_master(self, device: str | None = None) -> Tensor:
        """Local FP32 values of the master: itself where it is an FP32 tensor, else a new one on ``device``."""
        return read_parameter(self.param) if self.layout.master is Master.PARAMETER else self.read(MASTER, device)

    def write_master(self, value: Tensor) -> list[Update]:
        """Set the master from local FP32 values, and the parameter from the master.

        Returns the update of a quantized parameter, to be written with those of all other parameters at once.
        """
        copies.wait_for_saves()
        local = self._local()
        if adapter_of(self.param) is not None:
            value = dense(moved(value, local.device).float())
            if self.layout.master is not Master.PARAMETER:
                self.write(MASTER, value)
                value = self.read(MASTER)
            return [Update(self.param, value)]
        param = dense(local)
        for master, piece in self._master_pieces(value, param):
            self.layout.master.codec.write(master, piece)
        if param is not local:
            local.copy_(param)
        return []

    def _master_pieces(self, value: Tensor, param: Tensor | None) -> Iterator[tuple[MasterTensors, Tensor]]:
        """The master's tensors and local ``value`` in FP32, piece by piece: codecs need many times the memory."""
        device, block, flat = self._local().device, self.layout.geometry.block, dense(value).view(-1)
        tensors, scale = (param, self.tensors.get(MASTER)), self.layout.scale(MASTER)
        for piece in pieces(flat.numel()):
            high, stored = (None if tensor is None else local_tensor(tensor).view(-1)[piece] for tensor in tensors)
            scales = None if scale is None else scale[piece.start // block : -(-piece.stop // block)]
            yield MasterTensors(high, stored, scales, block), moved(flat[piece], device).float()

    def write_remainder(self, loaded: LoadedRemainder) -> None:
        """Set the master from loaded remainders. The parameter has its high bits, or will have where they are kept."""
        copies.wait_for_saves()
        if self.layout.master is loaded.kind:
            low = local_tensor(self.tensors[MASTER])
            copy_into(low, loaded.bits(low.shape))
        else:
            self.write_master(loaded.master(self.param))

    def hold_remainder(self, loaded: LoadedRemainder) -> LoadedRemainder:
        """Keep a remainder to be written once the parameter is there. Its memory is not shared."""
        low = loaded.bits(local_tensor(self.param).shape).clone()
        return replace(loaded, low=low, checks=None if loaded.checks is None else loaded.checks.clone())

    def sync_master_from_param(self) -> None:
        """Take over what others have written into the parameter: the next step starts from there.

        Elementwise: where the parameter is its rounded master, the master stays as it is; elsewhere it becomes the
        parameter. Remainders complete any parameter.
        """
        if not self.layout.master.is_separate:
            return
        copies.wait_for_saves()
        master, adapter = self.read_master(), adapter_of(self.param)
        if adapter is None:
            parts = zip(*(x.reshape(-1).split(COMPARED) for x in (master, self._local())), strict=True)
            for kept, written in parts:
                master_there = kept.to(written.device)
                rounded = master_there.to(written.dtype)
                kept.copy_(torch.where(equal_or_nan(rounded, written), master_there, written.float()))
        else:
            written = initial_master(self.param)
            master = torch.where(adapter.is_master(self.param, master, written), master, written)
            adapter.discard_initial(self.param)
        if adapter is not None or self.layout.master is Master.FLOAT16:
            self.write(MASTER, master)
        self.record_versions()

    def record_versions(self) -> None:
        """Remember that the parameter is the rounded master now."""
        if self.layout.master.is_separate:
            self.layout.versions = Versions.read(self.param)

    @property
    def is_written(self) -> bool:
        """True if someone else has written the parameter since :meth:`record_versions`."""
        return self.layout.master.is_separate and self.layout.versions != Versions.read(self.param)

    def _local(self) -> Tensor:
        return local_tensor(self.param).detach()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds: moments, master and scales."""
        stored = [self.tensors[name] for name in self.layout.dtypes() if name in self.tensors]
        tensors = [*map(local_tensor, stored), self.layout.scales]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
