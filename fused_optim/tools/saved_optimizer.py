"""An optimizer as a checkpoint has it: parameters, and their states as FP32 values, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_optim.adapters import adapter_of
from fused_optim.checkpoint.open import Source, TensorInfo
from fused_optim.checkpoint.plan import Contents, NoStates, nested, read_contents
from fused_optim.formats.masters import Master
from fused_optim.formats.states import Kind
from fused_optim.memory.layout import MASTER
from fused_optim.rules import known_states
from fused_optim.state.native import scaled_format
from fused_optim.state.remainders import KINDS, misfits, unpack_remainder
from fused_optim.state.state_dict import check_state, check_version, read_state
from fused_optim.state.values import Joined, Stored, pieces

_KIND = {name: spec.kind for name, spec in known_states().items()} | {MASTER: Kind.MASTER}


@dataclass(frozen=True)
class SavedTensor:
    """A stored tensor under a key."""

    source: Source
    key: str

    @property
    def info(self) -> TensorInfo:
        return self.source.tensor_info(self.key)

    def value(self) -> Tensor:
        found: Tensor = self.source.value(self.key)
        return found

    def pieces(self) -> Iterator[Tensor]:
        return pieces_of(self.value())

    def values(self) -> Tensor:
        """All of it in FP32."""
        return _plain(self.value()).float()


def pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's values in FP32 (FP64 ones as they are), flat and in order; quantized ones are decoded."""
    flat = _plain(tensor).reshape(-1)
    for piece in pieces(flat.numel()):
        yield flat[piece] if flat.dtype == torch.float64 else flat[piece].float()


def _plain(tensor: Tensor) -> Tensor:
    adapter = adapter_of(tensor)
    return tensor if adapter is None else adapter.values(tensor)


@dataclass(frozen=True)
class SavedState:
    """A state of a parameter. ``keys``: of its components; "" where it is one tensor."""

    source: Source
    parameter: str
    name: str
    keys: Mapping[str, str]
    weight: SavedTensor | None  # the parameter itself, where it is there

    def __str__(self) -> str:
        return f"{self.name} of {self.parameter} in {self.source.path}"

    @property
    def nbytes(self) -> int:
        return sum(map(self.source.nbytes, self.keys.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        component = next((each for each in ("", "bits", *KINDS) if each in self.keys), None)
        if component is None:
            raise ValueError(f"{self}: expected a tensor, bits or remainders, found {', '.join(self.keys)} alone")
        shape = self._info(component).shape
        return (*shape[:-1], shape[-1] // 2) if component == "rem16" else shape  # two bytes of each

    @property
    def format(self) -> str:
        """The format as text: "int8", "float32", "16-bit remainder"."""
        if self.remainder is not None:
            return self.remainder.codec.name
        if "bits" in self.keys:
            return scaled_format(self.source.value(self.keys["format"]), str(self)).name
        return str(self._info("").dtype).removeprefix("torch.")

    @property
    def remainder(self) -> Master | None:
        """The kind of remainder if the state is the low bits of masters; else None."""
        if "" in self.keys:  # as TransformerEngine saves them
            return Master.REMAINDER16 if self.name == MASTER and self._info("").dtype == torch.int16 else None
        return next((kind for component, kind in KINDS.items() if component in self.keys), None)

    @property
    def is_complete(self) -> bool:
        """True if its values can be read: remainders need the parameter."""
        return self.remainder is None or self.weight is not None

    def _info(self, component: str) -> TensorInfo:
        return self.source.tensor_info(self.keys[component])

    def pieces(self) -> Iterator[Tensor]:
        """The FP32 values (FP64 ones as they are), flat and in order. Raises ValueError for what does not fit."""
        if "" in self.keys and self.remainder is None:
            return SavedTensor(self.source, self.keys[""]).pieces()
        found = self._read()
        return (found.piece(piece) for piece in pieces(found.shape.numel()))

    def values(self) -> Tensor:
        """All of it in FP32. Raises ValueError as :meth:`pieces` does."""
        if "" in self.keys and self.remainder is None:
            return SavedTensor(self.source, self.keys[""]).values()
        return self._read().read()

    def _read(self) -> Stored | Joined:
        """The checked state, to be decoded piece by piece."""
        saved = nested(self.keys, {key: self.source.value(key) for key in self.keys.values()})
        param = torch.empty(self.shape, device="meta") if self.remainder is None else self._high_bits()
        try:
            check_state(param, _KIND[self.name], saved, str(self))
        except (KeyError, TypeError) as error:
            raise ValueError(error.args[0]) from error
        if self.remainder is None:
            stored = read_state(param, _KIND[self.name], saved)
            if not isinstance(stored, Stored):
                raise ValueError(f"{self}: expected rows with scales, found shape {self.shape}")
            return stored
        assert self.weight is not None
        loaded = unpack_remainder(param, saved, str(self))
        if misfits([(param, loaded)]):
            text = f"{self.weight.key} in {self.weight.source.path} is not what it was split from"
            raise ValueError(f"{self}: {text}")
        return Joined(loaded.bits(param.shape), param)

    def _high_bits(self) -> Tensor:
        """The BF16 parameter that remainders complete. Raises ValueError where it is missing."""
        if self.weight is None:
            raise ValueError(
                f"{self}: remainders complete BF16 parameters, and {self.parameter} itself is not there: give the "
                "checkpoint of the model, too"
            )
        return self.weight.value().to(torch.bfloat16)


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer's part of a checkpoint."""

    source: Source
    contents: Contents
    names: Mapping[str, str]  # of the parameters, by their ids, which may be numbers
    weights: Mapping[str, SavedTensor]  # the parameters themselves, by name
    states: Mapping[str, Mapping[str, SavedState]]  # by parameter's name and state

    @property
    def layout(self) -> str:
        """The writer of such states, and the form of this package's: "fused_optim, native form"."""
        if self.contents.writer != "fused_optim":
            return self.contents.writer
        components = {each for states in self.states.values() for state in states.values() for each in state.keys}
        return f"fused_optim, {'native' if components - {''} else 'unscaled'} form"


def read_optimizer(source: Source, model: Source | None = None) -> SavedOptimizer | None:
    """None where there are no states of an optimizer here. ``model``: where the parameters are, if not there, too.

    Raises ValueError for a newer version and for what does not fit together.
    """
    try:
        contents = read_contents(source)
    except NoStates:
        return None
    check_version(contents.settings.values(), str(source.path))
    names = _names(contents)
    known = {name for id_, name in names.items() if not contents.is_numbered or name != id_}
    weights = _weights(source if model is None else model, known, contents.state_keys)
    states = {
        names[id_]: {
            name: SavedState(source, names[id_], name, of_parameter[name], weights.get(names[id_]))
            for name in _KIND
            if name in of_parameter
        }
        for id_, of_parameter in contents.states.items()
    }
    return SavedOptimizer(source, contents, names, weights, states)


def _names(contents: Contents) -> dict[str, str]:
    """The parameters' names by their ids: the same, unless ids are positions and the param groups know names."""
    names = {id_: id_ for id_ in [*contents.states, *contents.settings]}
    for ids in contents.order:
        listed = contents.settings[ids[0]].get("param_names") if ids else None
        if isinstance(listed, list) and len(listed) == len(ids):
            names |= dict(zip(ids, map(str, listed), strict=True))
    return names


def _weights(source: Source, names: set[str], taken: set[str]) -> dict[str, SavedTensor]:
    """The model's tensors that belong to these names: under the prefix under which most of them are found."""
    by_prefix: dict[str, dict[str, SavedTensor]] = {}
    for key, info in source.entries.items():
        words = key.split(".") if info is not None and key not in taken else []
        for i in range(len(words)):
            if (name := ".".join(words[i:])) in names:
                by_prefix.setdefault(".".join(words[:i]), {})[name] = SavedTensor(source, key)
    ranked = sorted(by_prefix, key=lambda prefix: (len(by_prefix[prefix]), prefix == "model"))
    return by_prefix[ranked[-1]] if ranked else {}
