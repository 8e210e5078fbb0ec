"""The states of one parameter: how they are allocated, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim import copies
from fused_optim.adapters import Update, adapter_of
from fused_optim.formats import FLOAT16, FLOAT32, NEAREST, Master, encode_state, split_remainder
from fused_optim.host_memory import host_copy
from fused_optim.sharding.dtensor import dense, is_dense, local_tensor, rewrap_like
from fused_optim.slots import MASTER, MOMENTS, STATES, Slots, Versions, state_zeros
from fused_optim.state.remainders import LoadedRemainder
from fused_optim.state.values import Decoded, Joined, given, pieces

FOLLOWED = 2**26  # elements compared at a time


def master_kind(param: Tensor, master_weights: bool, remainder_bits: int | None, dtype: torch.dtype) -> Master:
    """Which master a parameter gets; ``remainder_bits`` None means a separate tensor of ``dtype``."""
    adapter = adapter_of(param)
    quantized = adapter is not None
    if adapter is not None and not master_weights and (reason := adapter.needs_master(param)):
        what = f"a {type(local_tensor(param)).__name__} of shape {tuple(param.shape)}"
        raise ValueError(f"master_weights=False: {what} needs a master: {reason}; use master_weights=True")
    if not master_weights or (param.dtype == torch.float32 and not quantized):
        return Master.PARAMETER
    if remainder_bits is None or param.dtype != torch.bfloat16 or quantized:
        return Master.FLOAT16 if dtype == torch.float16 else Master.FLOAT32
    return Master.REMAINDER16 if remainder_bits == 16 else Master.REMAINDER8


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
    """A parameter, ``optimizer.state[param]``, and what is known of these tensors."""

    param: Tensor
    tensors: dict[str, Tensor]
    slots: Slots

    @staticmethod
    def create(param: Tensor, slots: Slots) -> ParamState:
        """Zero moments and the master of ``param``, each sharded and placed as ``param`` is."""
        local = local_tensor(param.detach())
        tensors = {
            name: state_zeros(param, local.shape, dtype, name in slots.offloaded)
            for name, dtype in slots.dtypes().items()
            if name in MOMENTS or slots.master is not Master.FLOAT32
        }
        if slots.master is Master.FLOAT32:
            initial = initial_master(param)
            tensors[MASTER] = host_copy(initial) if MASTER in slots.offloaded else initial
        created = ParamState(param, {name: rewrap_like(tensor, param) for name, tensor in tensors.items()}, slots)
        if slots.master not in (Master.PARAMETER, Master.FLOAT32):
            created.seed_master(initial_master(param))
        discard_initial(param)
        return created

    def seed_master(self, value: Tensor) -> None:
        """Set the master from the parameter's local FP32 ``value``; the parameter stays as it is.

        An FP16 master may lack bits of elements that are 2^-32 or less of their block's largest.
        """
        if self.slots.master is Master.FLOAT16:
            self.write_moment(MASTER, value)
        elif self.slots.master is not Master.PARAMETER:
            self.write_master(value)

    def adopt(self, given: Mapping[str, Any]) -> None:
        """Fill these new states with those that someone else has made, or has moved here from another parameter.

        What fits is kept itself, and so is what is no state of this optimizer. Raises ValueError for a master of
        another kind, TypeError for moments that are no floating-point tensors of the parameter's local shape.
        """
        for name, value in given.items():
            if name not in STATES:
                self.tensors[name] = value
                continue
            if name == MASTER:
                self._check_adopted_master(value)
            if self.slots.format(name) is FLOAT32 and (name == MASTER or self._fits(name, value, torch.float32)):
                self.tensors[name] = self._locked(value) if name in self.slots.offloaded else value
            else:
                self.write_moment(name, self._checked_moment(name, value))

    def _locked(self, state: Tensor) -> Tensor:
        """The state in page-locked memory, without GPU just in host memory."""
        local = local_tensor(state)
        is_there = local.device.type == "cpu" and (local.is_pinned() or not torch.cuda.is_available())
        return state if is_there else rewrap_like(host_copy(local), self.param)

    def settle_in(self, offloaded: bool) -> None:
        """Of states that were copied or unpickled: go into page-locked memory again, or beside the parameter."""
        slots, own = self.slots, [name for name in STATES if name in self.tensors]
        device = local_tensor(self.param).device
        for name in own:
            if offloaded and name in slots.offloaded:
                self.tensors[name] = self._locked(self.tensors[name])
            else:
                self.tensors[name] = rewrap_like(local_tensor(self.tensors[name]).to(device), self.param)
        slots.scales = host_copy(slots.scales) if offloaded else slots.scales.to(device)
        slots.offloaded = slots.offloaded if offloaded else ()

    def _check_adopted_master(self, value: Tensor) -> None:
        dtype = None if self.slots.master is Master.PARAMETER else self.slots.master.dtype
        dtype = torch.float32 if dtype == torch.float16 else dtype
        if not self._fits(MASTER, value, dtype):
            shape, local = tuple(self.param.shape), local_tensor(value)
            raise ValueError(
                f"{MASTER} of a parameter of shape {shape} was made elsewhere: expected "
                f"{'none' if dtype is None else f'{dtype} of its local shape'}, got "
                f"{local.dtype} of shape {tuple(local.shape)}"
            )

    def _fits(self, name: str, value: Tensor, dtype: torch.dtype | None) -> bool:
        """Whether a state that was made elsewhere can be kept itself."""
        local, found = local_tensor(self.param), local_tensor(value)
        alike = isinstance(value, DTensor) == isinstance(self.param, DTensor)
        alike = alike and (name in self.slots.offloaded or found.device == local.device)
        return alike and found.dtype == dtype and found.shape == local.shape and is_dense(found)

    def _checked_moment(self, name: str, value: Tensor) -> Tensor:
        local, found = local_tensor(self.param), local_tensor(value)
        codes = found.dtype == torch.float16 and self.slots.format(name) is FLOAT16
        if found.shape != local.shape or not found.is_floating_point() or codes:
            raise TypeError(
                f"{name} was made elsewhere: expected a floating-point tensor of local shape {tuple(local.shape)}, got "
                f"{found.dtype} {tuple(found.shape)}; codes without their scales are no values: move them by "
                "get_unscaled_state() and set_scaled_state()"
            )
        return found

    def decoded(self, name: str) -> Decoded:
        """The local values of a moment, or of an FP16 master."""
        bits, slots = local_tensor(self.tensors[name]), self.slots
        return Decoded(bits, slots.scale(name), name, slots.format(name), slots.geometry.block)

    def joined(self) -> Joined:
        """The local values of a master of which remainders are kept; read where these are."""
        return Joined(local_tensor(self.tensors[MASTER]), self._local())

    def read_moment(self, name: str, device: str | None = None) -> Tensor:
        """Local FP32 values of a moment, or of an FP16 master: a new tensor on ``device`` unless the state is FP32."""
        stored = self.decoded(name)
        return stored.bits if stored.bits.dtype == torch.float32 else stored.read(device)

    def unscaled_moment(self, name: str, device: str | None) -> Tensor:
        """The values of :meth:`read_moment`, placed as the parameter; the state itself if it is FP32."""
        if self.slots.format(name).dtype(name) == torch.float32:
            return self.tensors[name]
        return rewrap_like(given(self.decoded(name), device), self.param)

    def write_moment(self, name: str, value: Tensor) -> None:
        """Encode local FP32 values into a moment, or into an FP16 master, rounding to nearest."""
        copies.wait()
        target, value, device = local_tensor(self.tensors[name]).view(-1), dense(value).view(-1), self._local().device
        fmt, stored, block = self.slots.format(name), self.slots.scale(name), self.slots.geometry.block
        for piece in pieces(target.numel()):
            source = value[piece].to(device=device, dtype=torch.float32)
            nearest = torch.full(source.shape, NEAREST, dtype=torch.int64, device=device)
            bits, scale = encode_state(source, name, fmt, block, nearest)
            target[piece] = bits
            if scale is not None and stored is not None:
                stored[piece.start // block : -(-piece.stop // block)] = scale

    def read_master(self, device: str | None = None) -> Tensor:
        """Local FP32 values of the master: itself where it is an FP32 tensor, else a new one on ``device``."""
        if self.slots.master is Master.PARAMETER:
            return read_parameter(self.param)
        master = local_tensor(self.tensors[MASTER])
        if self.slots.master is Master.FLOAT32:
            return master
        if self.slots.master is Master.FLOAT16:
            return self.read_moment(MASTER, device)
        return self.joined().read(device)

    def write_master(self, value: Tensor) -> list[Update]:
        """Set the master from local FP32 values, and the parameter from the master.

        Returns what is still to be written, with that of all other parameters at once: quantized parameters.
        """
        copies.wait()
        if self.slots.master.is_remainder:
            self._split_master(value)
            return []
        local = local_tensor(self.param.detach())
        value = dense(value.to(device=local.device, dtype=torch.float32))
        if self.slots.master is Master.FLOAT32:
            local_tensor(self.tensors[MASTER]).copy_(value)
        elif self.slots.master is Master.FLOAT16:
            self.write_moment(MASTER, value)
            value = self.read_moment(MASTER)
        if adapter_of(self.param) is not None:
            return [Update(self.param, value)]
        local.copy_(value)
        return []

    def _split_master(self, value: Tensor) -> None:
        """Piece by piece: splitting takes many times the memory of what is split."""
        local, flat = self._local(), dense(value).view(-1)
        high, low = torch.empty_like(local, memory_format=torch.contiguous_format), local_tensor(self.tensors[MASTER])
        for piece in pieces(flat.numel()):
            source = flat[piece].to(device=local.device, dtype=torch.float32)
            high.view(-1)[piece], low.view(-1)[piece] = split_remainder(source, self.slots.master)
        local.copy_(high)

    def write_remainder(self, loaded: LoadedRemainder) -> None:
        """Set the master from loaded remainders. The parameter has its high bits, or will have where they are kept."""
        copies.wait()
        if self.slots.master is loaded.kind:
            low = local_tensor(self.tensors[MASTER])
            low.copy_(loaded.bits(low.shape))
        else:
            self.write_master(loaded.master(self.param))

    def hold_remainder(self, loaded: LoadedRemainder) -> LoadedRemainder:
        """What is to be written once the parameter is there; its memory is nobody else's."""
        low = loaded.bits(local_tensor(self.param).shape).clone()
        return replace(loaded, low=low, checks=None if loaded.checks is None else loaded.checks.clone())

    def follow_parameter(self) -> None:
        """Take over what others have written into the parameter: the next step starts from there.

        Elementwise: where the parameter is its rounded master, the master stays as it is; elsewhere it becomes the
        parameter. Remainders complete any parameter.
        """
        if not self.slots.master.is_separate:
            return
        copies.wait()
        master, adapter = self.read_master(), adapter_of(self.param)
        if adapter is None:
            parts = zip(*(x.reshape(-1).split(FOLLOWED) for x in (master, self._local())), strict=True)
            for kept, written in parts:
                own = kept.to(written.device)
                rounded = own.to(written.dtype)
                kept.copy_(torch.where(_same(rounded, written), own, written.float()))
        else:
            rounded, written = adapter.rounded(self.param, master), initial_master(self.param)
            same = _same(rounded, written) if rounded is not None else _near(master, written)
            master = torch.where(same, master, written)
            adapter.discard_initial(self.param)
        if self.slots.master is Master.FLOAT16:
            self.write_moment(MASTER, master)
        elif adapter is not None:
            local_tensor(self.tensors[MASTER]).copy_(master)
        self.mark()

    def mark(self) -> None:
        """Remember the parameter as what belongs to the master now."""
        if self.slots.master.is_separate:
            self.slots.versions = Versions.of(self.param)

    @property
    def is_written(self) -> bool:
        """Whether someone else has written the parameter since :meth:`mark`."""
        return self.slots.master.is_separate and self.slots.versions != Versions.of(self.param)

    def _local(self) -> Tensor:
        return local_tensor(self.param).detach()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds: moments, master and scales."""
        own = [self.tensors[name] for name in self.slots.dtypes() if name in self.tensors]
        tensors = [*map(local_tensor, own), self.slots.scales]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _same(rounded: Tensor, written: Tensor) -> Tensor:
    """Elementwise; NaN is NaN."""
    return (rounded == written) | (rounded.isnan() & written.isnan())


def _near(master: Tensor, written: Tensor) -> Tensor:
    """Where ``written`` may be the rounded master in a format with three bits of mantissa."""
    return ((master - written).abs() <= master.abs() * 2.0**-4) | (master.isnan() & written.isnan())
