"""The states of one parameter: which formats they have, how they are allocated, read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.adapters import Update, adapter_of
from fused_optim.formats import (
    FLOAT32,
    STATE_FORMATS,
    Master,
    StateFormat,
    decode_state,
    encode_state,
    join_remainder,
    split_remainder,
)
from fused_optim.sharding.dtensor import Geometry, local_tensor, rewrap_like, shard_geometry

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
PIECE = 2**20  # elements decoded at a time: the codecs' temporaries take up to 50 bytes for each; a multiple of BLOCKS


@dataclass
class Slots:
    """Formats of one parameter's states and the block scales of its moments.

    ``scales``: FP32, shape ``(blocks of exp_avg + blocks of exp_avg_sq,)``, counting scaled moments only.
    """

    geometry: Geometry
    master: Master
    exp_avg: StateFormat
    exp_avg_sq: StateFormat
    scales: Tensor

    def format(self, state: str) -> StateFormat:
        return self.exp_avg if state == "exp_avg" else self.exp_avg_sq

    def scale(self, state: str) -> Tensor | None:
        """The scales of one moment, as a view."""
        if not self.format(state).scaled:
            return None
        first = self.geometry.blocks if state == "exp_avg_sq" and self.exp_avg.scaled else 0
        return self.scales[first : first + self.geometry.blocks]


def master_kind(param: Tensor, master_weights: bool, remainder_bits: int | None) -> Master:
    """Which master a parameter gets; ``remainder_bits`` None means a separate FP32 tensor."""
    adapter = adapter_of(param)
    quantized = adapter is not None
    if quantized and not master_weights and not adapter.ROUNDS_STOCHASTICALLY:
        raise ValueError(
            f"master_weights=False: a {type(local_tensor(param)).__name__} of shape {tuple(param.shape)} rounds to "
            "nearest, which loses small updates; use master_weights=True"
        )
    if not master_weights or (param.dtype == torch.float32 and not quantized):
        return Master.PARAMETER
    if remainder_bits is None or param.dtype != torch.bfloat16 or quantized:
        return Master.FLOAT32
    return Master.REMAINDER16 if remainder_bits == 16 else Master.REMAINDER8


def create_slots(param: Tensor, master: Master, exp_avg: torch.dtype, exp_avg_sq: torch.dtype) -> Slots:
    """Choose formats (FP32 where no block fits) and allocate zero scales."""
    geometry = shard_geometry(param)
    chosen = [STATE_FORMATS[exp_avg], STATE_FORMATS[exp_avg_sq]]
    chosen = [FLOAT32 if fmt.scaled and not geometry.block else fmt for fmt in chosen]
    count = geometry.blocks * sum(fmt.scaled for fmt in chosen)
    scales = torch.zeros(count, dtype=torch.float32, device=local_tensor(param).device)
    return Slots(geometry, master, chosen[0], chosen[1], scales)


def create_states(param: Tensor, slots: Slots) -> dict[str, Tensor]:
    """Zero moments and the master of ``param``, each sharded and placed as ``param`` is."""
    local = local_tensor(param.detach())
    dtypes = {name: slots.format(name).dtype(name) for name in MOMENTS}
    states = {name: torch.zeros(local.shape, dtype=dtype, device=local.device) for name, dtype in dtypes.items()}
    adapter = adapter_of(param)
    if slots.master is Master.FLOAT32:
        states[MASTER] = local.float().contiguous() if adapter is None else adapter.initial_values(param)
    elif slots.master is not Master.PARAMETER:
        states[MASTER] = torch.zeros(local.shape, dtype=slots.master.dtype, device=local.device)
    if adapter is not None:
        adapter.discard_initial(param)
    return {name: rewrap_like(state, param) for name, state in states.items()}


def adopt_states(param: Tensor, given: dict[str, Any], states: dict[str, Tensor], slots: Slots) -> None:
    """Fill newly created ``states`` with moments that someone else has made; FP32 ones are kept themselves.

    What is no state of this optimizer stays. Raises ValueError for masters, TypeError for moments that are no
    floating-point tensors of the parameter's local shape.
    """
    local = local_tensor(param)
    for name, value in given.items():
        if name == MASTER:
            raise ValueError(f"{MASTER} of a parameter of shape {tuple(param.shape)} was made elsewhere")
        if name not in MOMENTS:
            states[name] = value
            continue
        found = local_tensor(value)
        if found.shape != local.shape or not found.is_floating_point():
            expected = f"a floating-point tensor of local shape {tuple(local.shape)}"
            raise TypeError(f"{name} was made elsewhere: expected {expected}, got {found.dtype} {tuple(found.shape)}")
        fits = found.dtype == torch.float32 and found.device == local.device and found.is_contiguous()
        if fits and slots.format(name) is FLOAT32 and isinstance(value, DTensor) == isinstance(param, DTensor):
            states[name] = value
        else:
            write_moment(states, slots, name, found)


def state_dtypes(slots: Slots) -> dict[str, torch.dtype]:
    """The dtype that each stored state must have."""
    dtypes = {name: slots.format(name).dtype(name) for name in MOMENTS}
    return dtypes if slots.master is Master.PARAMETER else {**dtypes, MASTER: slots.master.dtype}


def read_moment(states: dict[str, Tensor], slots: Slots, name: str, device: str | None = None) -> Tensor:
    """Local FP32 values of a moment. FP32 states are returned themselves, others as a new tensor on ``device``."""
    bits, scale, fmt, block = local_tensor(states[name]), slots.scale(name), slots.format(name), slots.geometry.block
    if bits.dtype == torch.float32:
        return bits

    def decode(piece: slice) -> Tensor:
        scales = None if scale is None else scale[piece.start // block : -(-piece.stop // block)]
        return decode_state(bits.reshape(-1)[piece], scales, name, fmt, block)

    return _in_pieces(decode, bits, device)


def _in_pieces(decode: Callable[[slice], Tensor], like: Tensor, device: str | None) -> Tensor:
    """FP32 values shaped as ``like``, on its device or another one: there is one piece's worth of temporaries."""
    out = torch.empty(like.shape, dtype=torch.float32, device=device or like.device)
    flat, numel = out.view(-1), out.numel()
    for start in range(0, numel, PIECE):
        piece = slice(start, min(start + PIECE, numel))
        flat[piece] = decode(piece)
    return out


def write_moment(states: dict[str, Tensor], slots: Slots, name: str, value: Tensor) -> None:
    """Encode local FP32 values into a moment, rounding to nearest."""
    target = local_tensor(states[name])
    nearest = torch.full((target.numel(),), 1 << 31, dtype=torch.int64, device=target.device)
    value = value.to(device=target.device, dtype=torch.float32)
    bits, scale = encode_state(value, name, slots.format(name), slots.geometry.block, nearest)
    target.copy_(bits)
    if scale is not None:
        slots.scale(name).copy_(scale)


def read_parameter(param: Tensor) -> Tensor:
    """Local FP32 values of a parameter: the parameter itself where it is an FP32 tensor, else a new one."""
    local, adapter = local_tensor(param.detach()), adapter_of(param)
    return local.float() if adapter is None else adapter.values(local)


def read_master(param: Tensor, states: dict[str, Tensor], slots: Slots, device: str | None = None) -> Tensor:
    """Local FP32 values of the master: the master itself where it is an FP32 tensor, else a new one on ``device``."""
    local = local_tensor(param.detach())
    if slots.master is Master.PARAMETER:
        return read_parameter(param)
    master = local_tensor(states[MASTER])
    if slots.master is Master.FLOAT32:
        return master
    high, low = local.reshape(-1), master.reshape(-1)
    return _in_pieces(lambda piece: join_remainder(high[piece], low[piece]), local, device)


def write_master(param: Tensor, states: dict[str, Tensor], slots: Slots, value: Tensor) -> list[Update]:
    """Set the master from local FP32 values, and the parameter from the master.

    Returns what is still to be written, with that of all other parameters at once: quantized parameters.
    """
    local = local_tensor(param.detach())
    value = value.to(device=local.device, dtype=torch.float32)
    if slots.master in (Master.REMAINDER16, Master.REMAINDER8):
        high, low = split_remainder(value, slots.master)
        local_tensor(states[MASTER]).copy_(low)
        local.copy_(high)
        return []
    if slots.master is Master.FLOAT32:
        local_tensor(states[MASTER]).copy_(value)
    if adapter_of(param) is not None:
        return [Update(param, value)]
    local.copy_(value)
    return []


def state_bytes(states: dict[str, Tensor], slots: Slots) -> int:
    """Bytes that this rank holds for a parameter: moments, master and scales."""
    tensors = [local_tensor(state) for state in states.values()] + [slots.scales]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
