"""State dicts of a model and its optimizer, named as ``torch.distributed.checkpoint.state_dict`` names them.

Names are looked up once: at every save that would take longer than all else that the host has to do.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from fused_optim.checkpoint.plan import ENTRIES
from fused_optim.decorators import callers_level
from fused_optim.optimizer import ShardedOptimizer, state_dict_as
from fused_optim.options.checks import check_belongs, check_order, check_whole
from fused_optim.options.reading import CheckpointDevice, CheckpointFormat
from fused_optim.rules import RULES
from fused_optim.sharding.collective import distinct, parameter_names, state_name
from fused_optim.sharding.dtensor import has_own_chunks

_ADAMS_OF_TORCH = ("torch.optim.Adam", "torch.optim.AdamW")
NO_MASTERS = (
    "this checkpoint has no masters of quantized weights, as these have had no step: after a load they start from "
    "codes, not from the values before quantization. Call optimizer.initialize_state() before such a save"
)


def check_ours(model: Any, optimizer: Any) -> None:
    """Raise TypeError for an optimizer that saves cannot ask for its states, and where the two are exchanged."""
    check_order(model, optimizer)
    if not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"optimizer: expected FusedAdamW, FusedLion or FusedMuon, got {type(optimizer).__name__}; torch's "
            "optimizers are saved by torch.distributed.checkpoint"
        )
    if type(optimizer).state_dict is not ShardedOptimizer.state_dict:
        raise TypeError(
            f"optimizer: {type(optimizer).__name__} has a state_dict() of its own, which saves would leave out: use "
            "register_state_dict_post_hook(), which they call"
        )


def check_kind(optimizer: ShardedOptimizer, saved: str | None, what: str, any_rule: bool = False) -> None:
    """Raise ValueError if a checkpoint is of another kind of optimizer, such as "adam", "lion", "torch.optim.AdamW".

    ``saved``: the kind; None: unknown, and accepted. ``any_rule``: accept other update rules of this package, too.
    """
    expected = optimizer.rule.name
    kinds = {expected, *(RULES if any_rule else ()), *(_ADAMS_OF_TORCH if optimizer.rule.has_torch_form else ())}
    if saved is not None and saved not in kinds:
        hint = "model_only=True loads the model alone"
        raise ValueError(f"{what} is of another optimizer: expected {expected}, found {saved}; {hint}")


class Collector:
    """Collects the state dicts that a Checkpointer saves.

    Making it is a collective over the default group. Raises TypeError for flat shards of FSDP1, KeyError for an
    optimizer that has none of the model's parameters.
    """

    def __init__(self, model: nn.Module, optimizer: ShardedOptimizer) -> None:
        check_whole(model, optimizer.store.params)
        check_belongs(model, optimizer.store.params)
        self._model, self._optimizer = model, optimizer
        self.kind = optimizer.rule.name
        self._names: dict[Tensor, str] = {}
        self._keys: dict[str, str] = {}
        # Keys of what is no parameter, of which each rank may have its own: batch statistics, say.
        self.buffers: set[str] = set()
        self._wrapped = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        names = sorted(name for names in parameter_names(model).values() for name in names)
        # Of nested param groups torch saves those of one rank: where ranks own different parameters (pipeline stages),
        # every parameter has its settings.
        self._is_flat = len(distinct(names)) > 1

    def check_form(self, form: CheckpointFormat) -> None:
        """Raise ValueError for a form that the optimizer's shards cannot be loaded from."""
        self._optimizer.store.exchange_offsets()
        if form == "native" and any(map(has_own_chunks, self._optimizer.store.params)):
            raise ValueError("shards with chunk lists of their own load from format='unscaled' only")

    def formats(self) -> dict[str, list[str]]:
        """The formats of the optimizer's states, of all param groups."""
        groups = self._optimizer.store.groups
        specs = self._optimizer.rule.states
        found = {spec.name: {str(group[spec.option]) for group in groups if spec.option in group} for spec in specs}
        return {name: sorted(dtype.removeprefix("torch.") for dtype in dtypes) for name, dtypes in found.items()}

    def warn_of_masters(self) -> None:
        """Warn if masters of quantized weights are still to start from initial values, which no file holds."""
        if self._optimizer.store.wants_initial_values():
            warnings.warn(NO_MASTERS, UserWarning, stacklevel=callers_level())

    def model_state(self) -> dict[str, Any]:
        state = get_model_state_dict(self._model) if self._wrapped else self._model.state_dict()
        if not self._keys.keys() >= state.keys():
            self._keys = {key: key if self._wrapped else state_name(self._model, key) for key in state}
            parameters = {name for names in parameter_names(self._model).values() for name in names}
            self.buffers = {f"model.{name}" for name in self._keys.values() if name not in parameters}
        return {self._keys[key]: value for key, value in state.items()}

    def optimizer_state(self, form: CheckpointFormat, device: CheckpointDevice) -> dict[str, Any]:
        """The optimizer's state dict with the parameters' names in place of their numbers."""
        optimizer, params = self._optimizer, self._optimizer.store.params
        state = state_dict_as(optimizer, form, device)
        if not all(param in self._names for param in params):
            self._names = {param: names[0] for param, names in parameter_names(self._model).items()}
        names = [self._names[param] for param in params]
        groups = [{**group, "params": [names[id_] for id_ in group["params"]]} for group in state["param_groups"]]
        states = {names[id_]: of_param for id_, of_param in state["state"].items() if type(id_) is int}
        users = [[key, value] for key, value in optimizer.state.items() if not isinstance(key, Tensor)]
        entries = {ENTRIES: users} if users else {}
        if not self._is_flat:
            return {"state": states, "param_groups": groups, **entries}
        of_params = [(name, group) for group in groups for name in group["params"]]
        settings = {
            f"param_groups.{name}.{key}": value
            for name, group in of_params
            for key, value in group.items()
            if key != "params"
        }
        return {**{f"state.{name}": of_param for name, of_param in states.items()}, **settings, **entries}
