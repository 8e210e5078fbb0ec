"""State saved beside the model and the optimizer: schedulers, data loaders, averages; anything with a state dict.

Sharded tensors go into the checkpoint as those of the model do. The rest of a state is one entry; ranks with equal
states share it, since loaders' states may differ from rank to rank.
"""

from __future__ import annotations

import hashlib
import io
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.checkpoint.archives import saved
from fused_optim.checkpoint.metadata import load_object
from fused_optim.checkpoint.open import Source, buffer_for
from fused_optim.memory.host_memory import memory_of

_SHARDED = "fused_optim_sharded"  # the key, in a state, of where a sharded tensor's own is


class Stateful(Protocol):
    """An object that can be saved as an extra."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def check_extra(extra: Mapping[str, Any]) -> dict[str, Stateful]:
    """Raise TypeError for what has no state, ValueError for a name that keys cannot have."""
    for name, value in extra.items():
        if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
            kind = type(value).__name__
            raise TypeError(f"extra {name!r}: expected an object with state_dict() and load_state_dict(), got {kind}")
        if not name or "." in name:
            raise ValueError(f"extra {name!r}: expected a name without dots")
    return dict(extra)


@dataclass(frozen=True)
class Packed:
    """A staged state: its sharded tensors by key, and the rest as bytes.

    ``digest``: SHA-256, equal for equal states.
    """

    sharded: dict[str, Tensor]
    content: bytes
    digest: str


def pack(name: str, state: Any) -> Packed:
    sharded: dict[str, Tensor] = {}

    def take(path: str, tensor: DTensor) -> Any:
        sharded[path] = tensor
        return {_SHARDED: path}

    unsharded = _with_sharded(state, f"extra.{name}.sharded", take)
    digest = hashlib.sha256()
    for piece in _canonical(unsharded):
        digest.update(piece)
    return Packed(sharded, saved(unsharded), digest.hexdigest())


def _canonical(value: Any) -> Iterator[bytes]:
    """Bytes that are the same for values that are: whatever the order in which dicts and sets were filled."""
    if type(value) in (bool, int, float, complex, str, bytes, type(None)):
        yield f"{type(value).__name__} {value!r};".encode()
    elif isinstance(value, Tensor) and type(value) is Tensor and value.layout == torch.strided:
        yield f"{value.dtype} {tuple(value.shape)};".encode()
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield bytes(memory_of(plain)) if plain.nbytes else b""
    elif isinstance(value, dict | set | frozenset | list | tuple):
        items = value.items() if isinstance(value, dict) else value
        parts = [b"".join(_canonical(item)) for item in items]
        yield f"{type(value).__qualname__} {len(parts)};".encode()
        yield from parts if isinstance(value, list | tuple) else sorted(parts)
    else:
        yield saved(value)


def own_entries(packed: Mapping[str, Packed], owners: Mapping[str, Sequence[int]], rank: int) -> dict[str, Any]:
    """The entries that this rank adds to the checkpoint, by key."""
    entries: dict[str, Any] = {}
    for name, each in packed.items():
        entries |= each.sharded
        if owners[name][rank] == rank:
            entries[_key(name, rank)] = torch.frombuffer(bytearray(each.content), dtype=torch.uint8)
    return entries


def owners_of(digests: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """The first rank that has the same state, by name and rank."""
    first: dict[tuple[str, str], int] = {}
    for rank, own in enumerate(digests):
        for name, digest in own.items():
            first.setdefault((name, digest), rank)
    return {name: [first[name, own[name]] for own in digests] for name in digests[0]}


def owner_for(name: str, owners: Sequence[int], rank: int, ranks: int) -> int:
    """The rank whose state this rank loads.

    Raises ValueError if ranks saved different states and there are more or fewer ranks now.
    """
    if len(owners) == ranks:
        return owners[rank]
    if len(set(owners)) > 1:
        raise ValueError(
            f"extra {name!r} was saved with different states on {len(owners)} ranks, and these are {ranks}: give it a "
            f"state that does not depend on the rank, or load without it: load(step, without=[{name!r}])"
        )
    return owners[0]


def read(name: str, owner: int, current: Stateful, source: Source) -> dict[str, Any]:
    """The saved state of an extra. Its sharded tensors get the placements of their counterparts in ``current``."""
    key = _key(name, owner)
    info = source.entries.get(key)
    if info is None:
        raise ValueError(f"{source.path} does not hold extra {name!r} of rank {owner}, which its manifest has")
    source.check([key])  # before memory is reserved
    content = source.read({key: torch.empty(info.shape, dtype=torch.uint8)})[key]
    state = load_object(io.BytesIO(memory_of(content)), f"extra {name!r} in {source.path}")
    wanted = _paths(state)
    placed: dict[str, Tensor | None] = {}

    def note(path: str, tensor: DTensor) -> Any:
        stored = source.entries.get(path)
        if stored is not None and path in wanted:
            placed[path] = buffer_for(tensor, stored)
        return None

    if wanted:
        _with_sharded(current.state_dict(), f"extra.{name}.sharded", note)
    if lacking := sorted(wanted - placed.keys()):
        raise ValueError(f"extra {name!r} has no sharded tensor for {lacking[0]} yet: give it its state before loading")
    return cast(dict[str, Any], _filled(state, source.read(placed)) if wanted else state)


def _key(name: str, owner: int) -> str:
    return f"extra.{name}.rank{owner}"


def _with_sharded(value: Any, path: str, replace: Callable[[str, DTensor], Any]) -> Any:
    """A tree with something else in the places of DTensors."""
    if isinstance(value, DTensor):
        return replace(path, value)
    if isinstance(value, dict):
        return {key: _with_sharded(item, f"{path}.{key}", replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_sharded(item, f"{path}.{i}", replace) for i, item in enumerate(value))
    return value


def _paths(value: Any) -> set[str]:
    """The checkpoint keys of the sharded tensors that a packed state refers to."""
    if isinstance(value, dict):
        return {value[_SHARDED]} if _SHARDED in value else {path for item in value.values() for path in _paths(item)}
    return {path for item in value for path in _paths(item)} if type(value) in (list, tuple) else set()


def _filled(value: Any, tensors: Mapping[str, Any]) -> Any:
    """A packed state with its sharded tensors in the places that refer to them."""
    if isinstance(value, dict):
        if _SHARDED in value:
            return tensors[value[_SHARDED]]
        return {key: _filled(item, tensors) for key, item in value.items()}
    return type(value)(_filled(item, tensors) for item in value) if type(value) in (list, tuple) else value


# --- the states of random number generators --------------------------------------------------------------------------


RANDOM_STATES = "random_states"  # the extra's name


class RandomStates:
    """The random states of Python, NumPy (if imported) and torch: of the CPU and of all GPUs that this rank sees."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": []}
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        if (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, *rest = numpy.random.get_state()
            state["numpy"] = [kind, torch.tensor(keys.tolist(), dtype=torch.int64), *rest]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the states. Those of GPUs are skipped if their number has changed, NumPy's if it is not imported."""
        version, numbers, gauss = state_dict["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(state_dict["torch"])
        cuda: list[Tensor] = state_dict["cuda"]
        if cuda and len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
        if "numpy" in state_dict and (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, *rest = state_dict["numpy"]
            numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype="uint32"), *rest))
