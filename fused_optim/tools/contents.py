"""What a checkpoint holds, seen as an optimizer's: parameters, and their states as FP32 values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_optim.adam import ADAM_STATES
from fused_optim.adapters import adapter_of
from fused_optim.checkpoint.reading.sources import Contents, NoStates, Stored, read_contents
from fused_optim.formats import STATE_FORMATS, Kind, StateFormat, decode_state, join_remainder
from fused_optim.layout import MASTER
from fused_optim.state.groups import VERSION
from fused_optim.state.remainders import KINDS, row_checks
from fused_optim.tools.reading import Checkpoint

PIECE = 2**22  # elements that are decoded at a time; a multiple of all blocks
_BY_CODE = {fmt.code: fmt for fmt in STATE_FORMATS.values()}


@dataclass(frozen=True)
class Weight:
    """A parameter itself, as it is stored."""

    checkpoint: Checkpoint
    key: str

    @property
    def stored(self) -> Stored:
        stored = self.checkpoint.entries[self.key]
        assert stored is not None
        return stored

    def value(self) -> Any:
        return self.checkpoint.value(self.key)


@dataclass(frozen=True)
class State:
    """A state of a parameter, as it is stored. ``keys``: its parts in the checkpoint; "" where it is one tensor."""

    checkpoint: Checkpoint
    parameter: str
    name: str
    keys: Mapping[str, str]
    weight: Weight | None  # the parameter itself, where it is there

    @property
    def nbytes(self) -> int:
        return sum(map(self.checkpoint.nbytes, self.keys.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's."""
        name = next(part for part in ("", "bits", *KINDS) if part in self.keys)
        shape = self._stored(name).shape
        return (*shape[:-1], shape[-1] // 2) if name == "rem16" else shape  # two bytes of each

    @property
    def format(self) -> str:
        """In words: "int8", "float32", "16-bit remainder"."""
        if self._remainder is not None:
            return f"{8 if self._remainder == 'rem8' else 16}-bit remainder"
        return self.scaled_format.name if "bits" in self.keys else str(self._stored("").dtype).removeprefix("torch.")

    @property
    def _remainder(self) -> str | None:
        """Its part with the low bits of masters, if it has one."""
        if "" in self.keys:  # as TransformerEngine saves them
            return "" if self.name == MASTER and self._stored("").dtype == torch.int16 else None
        return next((part for part in KINDS if part in self.keys), None)

    @property
    def scaled_format(self) -> StateFormat:
        """Of a state with scales. Raises ValueError for a format that is not known."""
        code = int(self.checkpoint.value(self.keys["format"]))
        if code not in _BY_CODE or not _BY_CODE[code].scaled:
            raise ValueError(f"{self}: unknown state format {code}: update fused_optim")
        return _BY_CODE[code]

    @property
    def is_complete(self) -> bool:
        """Whether its values can be read: low bits mean nothing alone."""
        return self._remainder is None or self.weight is not None

    def __str__(self) -> str:
        return f"{self.name} of {self.parameter} in {self.checkpoint.path}"

    def _stored(self, part: str) -> Stored:
        stored = self.checkpoint.entries[self.keys[part]]
        if stored is None:
            raise ValueError(f"{self}: expected a tensor, found another object")
        return stored

    def part(self, name: str) -> Any:
        """A part as it is stored."""
        return self.checkpoint.value(self.keys[name])

    def pieces(self) -> Iterator[Tensor]:
        """The FP32 values, flat and in order, ``PIECE`` at a time. Raises ValueError for what does not fit together."""
        if "bits" in self.keys:
            return self._decoded()
        if self._remainder is not None:
            return self._joined()
        return pieces_of(self.part(""))

    def _decoded(self) -> Iterator[Tensor]:
        fmt, block = self.scaled_format, int(self.part("block"))
        bits, scale = self.part("bits"), self.part("scale")
        row = math.prod(self.shape[1:])
        if block <= 0 or row % block or tuple(scale.shape) != (self.shape[0], row // block):
            raise ValueError(f"{self}: scales of shape {tuple(scale.shape)} do not fit blocks of {block}")
        kind = next((spec.kind for spec in ADAM_STATES if spec.name == self.name), Kind.MASTER)
        dtype = fmt.dtype(kind)
        if bits.dtype.itemsize != dtype.itemsize:
            raise ValueError(f"{self}: expected bits of {dtype} for {fmt.name}, found {bits.dtype}")
        flat, scales = bits.reshape(-1).view(dtype), scale.reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            part = scales[start // block : (start + PIECE) // block]
            yield decode_state(flat[start : start + PIECE], part, kind, fmt, block)

    def _joined(self) -> Iterator[Tensor]:
        low, high = self.low_bits().reshape(-1), self.high_bits().reshape(-1)
        for start in range(0, low.numel(), PIECE):
            yield join_remainder(high[start : start + PIECE], low[start : start + PIECE])

    def high_bits(self) -> Tensor:
        """The BF16 parameter that remainders complete. Raises ValueError where it is missing or another one."""
        if self.weight is None:
            raise ValueError(
                f"{self}: remainders complete BF16 parameters, and {self.parameter} itself is not there: give the "
                "checkpoint of the model, too"
            )
        high: Tensor = self.weight.value().to(torch.bfloat16)
        if tuple(high.shape) != self.shape:
            raise ValueError(f"{self}: {self.weight.key} has shape {tuple(high.shape)}, expected {self.shape}")
        if "check" in self.keys and not torch.equal(row_checks(high), self.part("check")):
            raise ValueError(
                f"{self}: {self.weight.key} in {self.weight.checkpoint.path} is not what it was split from"
            )
        return high

    def low_bits(self) -> Tensor:
        """Remainders as an optimizer keeps them: int16 or int8, the parameter's shape."""
        name = self._remainder
        assert name is not None
        stored: Tensor = self.part(name)
        return stored.reshape(-1).clone().view(KINDS[name].dtype).view(self.shape) if name else stored

    def values(self) -> Tensor:
        """All of it: a new FP32 tensor of the parameter's shape."""
        return joined(self.pieces(), self.shape)


def pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """A stored tensor's values in FP32 (FP64 ones as they are), flat and in order; quantized ones are decoded."""
    adapter = adapter_of(tensor)
    flat = (adapter.values(tensor) if adapter is not None else tensor).reshape(-1)
    for piece in flat.split(PIECE):
        yield piece if piece.dtype == torch.float64 else piece.float()


def joined(pieces: Iterator[Tensor], shape: tuple[int, ...]) -> Tensor:
    """One FP32 tensor of the pieces."""
    whole = torch.empty(shape)
    flat, start = whole.view(-1), 0
    for piece in pieces:
        flat[start : start + piece.numel()] = piece
        start += piece.numel()
    return whole


# --- the whole --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's part of a checkpoint."""

    checkpoint: Checkpoint
    contents: Contents
    prefix: str  # of the keys
    names: Mapping[str, str]  # of the parameters, by their ids, which may be numbers
    weights: Mapping[str, Weight]  # the parameters themselves, by name
    states: Mapping[str, Mapping[str, State]]  # by parameter's name and state

    @property
    def layout(self) -> str:
        """Who writes it so."""
        settings = next(iter(self.contents.settings.values()), {})
        if "fused_optim_version" in settings or "exp_avg_dtype" in settings:
            parts = {part for states in self.states.values() for state in states.values() for part in state.keys}
            return f"fused_optim, {'native' if parts - {''} else 'unscaled'} form"
        if any("step" in states for states in self.contents.states.values()):
            return "torch.optim.AdamW" if settings.get("decoupled_weight_decay", True) else "torch.optim.Adam"
        return "TransformerEngine's or Apex's FusedAdam"

    @property
    def own_keys(self) -> set[str]:
        """The optimizer's keys in the checkpoint."""
        return {key for states in self.contents.states.values() for parts in states.values() for key in parts.values()}


def read_optimizer(checkpoint: Checkpoint, model: Checkpoint | None = None) -> Optimizer | None:
    """None where there are no Adam states. ``model``: where the parameters are, if not there, too.

    Raises ValueError for a newer version and for what does not fit together.
    """
    try:
        contents = read_contents(checkpoint, ())
    except NoStates:
        return None
    versions = {int(of.get("fused_optim_version", VERSION)) for of in contents.settings.values()}
    if versions and max(versions) > VERSION:
        text = f"it has version {max(versions)}, this fused_optim reads versions up to {VERSION}: update fused_optim"
        raise ValueError(f"{checkpoint.path}: {text}")
    names = _names(contents)
    taken = {key for states in contents.states.values() for parts in states.values() for key in parts.values()}
    weights = _weights(checkpoint if model is None else model, set(names.values()), taken)
    states = {
        names[id_]: {
            name: State(checkpoint, names[id_], name, found[name], weights.get(names[id_]))
            for name in (*(spec.name for spec in ADAM_STATES), MASTER)
            if name in found
        }
        for id_, found in contents.states.items()
    }
    return Optimizer(checkpoint, contents, _prefix(contents), names, weights, states)


def _prefix(contents: Contents) -> str:
    """What is before ``state.`` in the keys."""
    for id_, states in contents.states.items():
        return next(iter(next(iter(states.values())).values())).partition(f"state.{id_}.")[0]
    return ""


def _names(contents: Contents) -> dict[str, str]:
    """The parameters' names by their ids: the same, unless ids are positions and the param groups know names."""
    names = {id_: id_ for id_ in [*contents.states, *contents.settings]}
    for ids in contents.order:
        listed = contents.settings[ids[0]].get("param_names") if ids else None
        if isinstance(listed, list) and len(listed) == len(ids):
            names |= dict(zip(ids, map(str, listed), strict=True))
    return names


def _weights(checkpoint: Checkpoint, names: set[str], taken: set[str]) -> dict[str, Weight]:
    """Those under the prefix under which most of the names are found."""
    found: dict[str, dict[str, Weight]] = {}
    for key, stored in checkpoint.entries.items():
        parts = key.split(".") if stored is not None and key not in taken else []
        for i in range(len(parts)):
            if (name := ".".join(parts[i:])) in names:
                found.setdefault(".".join(parts[:i]), {})[name] = Weight(checkpoint, key)
    ranked = sorted(found, key=lambda prefix: (len(found[prefix]), prefix == "model"))
    return found[ranked[-1]] if ranked else {}
