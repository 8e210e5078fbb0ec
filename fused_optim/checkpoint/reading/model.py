"""The model's part of a checkpoint: what of it fits the model that it is loaded into."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.checkpoint.reading.dcp_folder import DcpFolder
from fused_optim.checkpoint.reading.leeway import Differences, Leeway, Naming
from fused_optim.checkpoint.reading.source import TensorInfo
from fused_optim.checkpoint.storage.nested import Path, assembled, flat, path_after
from fused_optim.memory.host_memory import empty_host
from fused_optim.options.checks import some_of

_PREFIX, _STATES = "model.", "optimizer.state."
_EXTRA_STATE = re.compile(r"(?P<name>(?:.+\.)?_extra_state)(?:\.(?P<rest>.*))?")


def misfit(current: Any, info: TensorInfo | None) -> str:
    """How a checkpoint's entry differs from what it is to be loaded into, if it does."""
    expected = f"shape {tuple(current.shape)}" if isinstance(current, Tensor) else "an object"
    found = "an object" if info is None else f"shape {tuple(info.shape)}"
    return "" if expected == found else f"expected {expected}, found {found}"


def flat_names(state: dict[str, Any]) -> list[str]:
    """Of what is in a model's state dict."""
    return sorted(_flat(state)[0])


def _flat(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Values and places by name. What modules save beside tensors is one value, of any structure, if it has no shards.

    Its parts may be other ones in the checkpoint, and are not compared.
    """
    whole = {name: value for name, value in state.items() if _is_extra(name) and not _has_shards(value)}
    values, places = flat({"model": {name: value for name, value in state.items() if name not in whole}})
    names = {key: key.removeprefix(_PREFIX) for key in values}
    return (
        {names[key]: value for key, value in values.items()} | whole,
        {names[key]: place[1:] for key, place in places.items()} | {name: (name,) for name in whole},
    )


def _is_extra(name: str) -> bool:
    return _EXTRA_STATE.fullmatch(name) is not None and name.endswith("_extra_state")


def _has_shards(value: Any) -> bool:
    return any(isinstance(each, DTensor) for each in flat({"": value})[0].values())


class ModelLoader:
    """Compares a model's state dict with a checkpoint when it is made; nothing is changed before :meth:`load`.

    ``everyone``: the names of all ranks' models. ``tied``: names of one parameter each. Raises ValueError for the
    checkpoint of another model.
    """

    def __init__(
        self,
        state: dict[str, Any],
        source: DcpFolder,
        everyone: Collection[str],
        tied: Iterable[list[str]],
        leeway: Leeway,
    ) -> None:
        self.state = state
        self._source = source
        self._current, self._places = _flat(state)
        naming = Naming(everyone, leeway.rename)
        self._keys = self._saved(naming)
        self._untied = {name for names in tied for name in self._drop_aliases(names)}
        new = [name for name in self._current if name not in self._keys]
        removed = sorted((self._keys.keys() - naming.known) | self._untied)
        reshaped = [name for name in self._current if name in self._keys and self._misfit(name)]
        self.differences = Differences(tuple(new), tuple(removed), tuple(reshaped), naming.renamed)
        self._fitting = [name for name in self._current if name not in {*new, *reshaped}]
        self._refuse(*([name for name in names if not leeway.admits(name)] for names in (new, removed, reshaped)))

    def _saved(self, naming: Naming) -> dict[str, dict[str, Path]]:
        """By name in the model, the keys of each value and the places in it: () of what is one whole."""
        saved: dict[str, dict[str, Path]] = {}
        for key in self._source.entries:
            if not key.startswith(_PREFIX):
                continue
            name, rest = key.removeprefix(_PREFIX), None
            extra = _EXTRA_STATE.fullmatch(name)
            if extra and naming(extra["name"]) in naming.known:
                name, rest = extra["name"], extra["rest"]
            saved.setdefault(naming.note(name), {})[key] = (
                () if rest is None else path_after(self._source.place(key), rest)
            )
        return saved

    def _drop_aliases(self, names: list[str]) -> list[str]:
        """Only the first of a parameter's names is loaded. Returns those of others in the checkpoint."""
        saved = [name for name in names if name in self._keys]
        for name in names if saved else ():
            if name != saved[0]:
                self._current.pop(name, None)
        return [name for name in saved if self._has_states(name)][1:]

    def _has_states(self, name: str) -> bool:
        first = tuple(f"{_STATES}{key.removeprefix(_PREFIX)}." for key in self._keys[name])
        return any(key.startswith(first) for key in self._source.entries)

    def _misfit(self, name: str) -> str:
        if self._is_whole(name):
            return ""
        return misfit(self._current[name], self._source.entries[next(iter(self._keys[name]))])

    def _refuse(self, missing: list[str], unexpected: list[str], reshaped: list[str]) -> None:
        texts = []
        if missing:
            texts.append(
                f"it lacks {len(missing)} of the {len(self._current)} tensors of the model: {some_of(missing)}"
            )
        if unexpected:
            shown = [f"{name} (tied in the model)" if name in self._untied else name for name in unexpected]
            texts.append(f"the model lacks {len(unexpected)} of its tensors: {some_of(shown)}")
        if reshaped:
            texts.append(f"{len(reshaped)} differ in shape: {some_of([f'{n}: {self._misfit(n)}' for n in reshaped])}")
        if texts:
            hint = "strict=False loads what fits, rename= what is called otherwise"
            raise ValueError(f"{self._source.path} is of another model: {'; '.join(texts)}; {hint}")

    def load(self) -> dict[str, Any]:
        """Fill the state dict's tensors; what the checkpoint lacks stays."""
        wanted = {key: self._target(name, key) for name in self._fitting for key in self._keys[name]}
        self._source.load(wanted)
        for name in self._fitting:
            value = assembled({place: wanted[key] for key, place in self._keys[name].items()})
            _put(self.state, self._places[name], value)
        return self.state

    def _target(self, name: str, key: str) -> Tensor | None:
        """What an entry is read into; None for an object."""
        current, info = self._current[name], self._source.entries[key]
        if info is None:
            return None
        if isinstance(current, Tensor) and (not self._is_whole(name) or (*current.shape,) == info.shape):
            return current
        return empty_host(info.shape, info.dtype)

    def _is_whole(self, name: str) -> bool:
        """Whether it is an extra state, which may be of any structure."""
        return _is_extra(name) and not isinstance(self._current[name], DTensor)


def _put(state: Any, place: Path, value: Any) -> None:
    *outer, last = place
    for step in outer:
        state = state[_own_key(state, step)]
    state[_own_key(state, last)] = value


def _own_key(state: Any, step: str | int) -> Any:
    """Keys of mappings are texts in places, whatever they are."""
    return next((key for key in state if str(key) == step), step) if isinstance(state, Mapping) else step
