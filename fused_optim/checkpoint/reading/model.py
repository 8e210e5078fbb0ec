"""The model's part of a checkpoint: what of it fits the model that it is loaded into."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element

from fused_optim.checkpoint.reading.dcp_folder import DcpFolder
from fused_optim.checkpoint.reading.leeway import Differences, Leeway, Naming
from fused_optim.options.checks import some_of

_PREFIX = "model."


def flat_names(state: dict[str, Any]) -> list[str]:
    """Of what is in a model's state dict."""
    return sorted(flatten_state_dict(state)[0])


class ModelLoader:
    """Compares a model's state dict with a checkpoint when it is made; nothing is changed before :meth:`load`.

    ``everyone``: the names of all ranks' models. Raises ValueError for the checkpoint of another model.
    """

    def __init__(self, state: dict[str, Any], source: DcpFolder, everyone: Collection[str], leeway: Leeway) -> None:
        self.state = state
        self._source = source
        self._current, self._places = flatten_state_dict(state)
        naming = Naming(everyone, leeway.rename)
        saved = [key.removeprefix(_PREFIX) for key in source.entries if key.startswith(_PREFIX)]
        self._keys = {naming.note(name): _PREFIX + name for name in saved}  # by name in the model
        new = [name for name in self._current if name not in self._keys]
        removed = sorted(self._keys.keys() - naming.known)
        reshaped = [name for name in self._current if name in self._keys and self._misfit(name)]
        self.differences = Differences(tuple(new), tuple(removed), tuple(reshaped), naming.renamed)
        self._fitting = [name for name in self._current if name not in {*new, *reshaped}]
        self._refuse(*([name for name in names if not leeway.admits(name)] for names in (new, removed, reshaped)))

    def _misfit(self, name: str) -> str:
        """How the checkpoint's differs from the model's, if it does."""
        current, info = self._current[name], self._source.entries[self._keys[name]]
        expected = f"shape {tuple(current.shape)}" if isinstance(current, Tensor) else "an object"
        found = "an object" if info is None else f"shape {tuple(info.shape)}"
        return "" if expected == found else f"{name}: expected {expected}, found {found}"

    def _refuse(self, missing: list[str], unexpected: list[str], reshaped: list[str]) -> None:
        texts = []
        if missing:
            texts.append(
                f"it lacks {len(missing)} of the {len(self._current)} tensors of the model: {some_of(missing)}"
            )
        if unexpected:
            texts.append(f"the model lacks {len(unexpected)} of its tensors: {some_of(unexpected)}")
        if reshaped:
            texts.append(f"{len(reshaped)} differ in shape: {some_of(list(map(self._misfit, reshaped)))}")
        if texts:
            hint = "strict=False loads what fits, rename= what is called otherwise"
            raise ValueError(f"{self._source.path} is of another model: {'; '.join(texts)}; {hint}")

    def load(self) -> dict[str, Any]:
        """Fill the state dict's tensors; what the checkpoint lacks stays."""
        loaded = {self._keys[name]: self._current[name] for name in self._fitting}
        self._source.load(loaded)
        for name in self._fitting:  # objects, which are not filled
            set_element(self.state, self._places[name], loaded[self._keys[name]])
        return self.state
