"""torchtitan's optimizer container with FusedAdamW, its configuration class, and the usual configuration.

Imports torchtitan, 0.3 or newer; see ``docs/integrations.md``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state, load_flat_optim_state_dict

from fused_optim.adam import FusedAdam, FusedAdamW
from fused_optim.muon import FusedMuon
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.state.torch_form import unflattened

_NAME = "FusedAdamW"
_OPTIMIZERS: dict[str, type[ShardedOptimizer]] = {"FusedAdam": FusedAdam, _NAME: FusedAdamW, "FusedMuon": FusedMuon}
_OF_GROUPS = (
    *("lr", "betas", "eps", "weight_decay", "bias_correction", "maximize"),
    *("exp_avg_dtype", "exp_avg_sq_dtype"),
)


class FusedOptimizersContainer(OptimizersContainer):  # type: ignore[misc]  # untyped where torchtitan is not there
    """torchtitan's container, whose param groups may name ``FusedAdamW``, ``FusedAdam`` and ``FusedMuon``, too.

    It makes an optimizer for each name, so FusedMuon is given the matrices alone, and FusedAdamW the rest.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """torchtitan's configuration.

        Options of param groups are their ``optimizer_kwargs``; those of the whole optimizer, such as
        ``master_bits``, are in ``optimizer_factory_kwargs_by_name``. ``implementation`` is for torchtitan's
        own optimizers.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state.

        With ``checkpoint_format="torch"`` torch.optim.AdamW's loads, too: torchtitan expects running keys.
        """
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedOptimizer) and optimizer.checkpoint_format == "torch":
                optimizer.initialize_state()
                optimizer.load_state_dict(unflattened(optimizer.store, state_dict))
            else:
                init_optim_state(optimizer)
                load_flat_optim_state_dict(optimizer, state_dict)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        found: Callable[..., Optimizer] = _OPTIMIZERS.get(name) or OptimizersContainer._resolve_optimizer_factory(name)
        return found


def default_fused_adamw(lr: float = 8e-4, **options: Any) -> FusedOptimizersContainer.Config:
    """All parameters in one group, with the settings of torchtitan's ``default_adamw`` and FusedAdamW's ``options``.

    Dtypes may be given as such and are kept by name, so that the configuration can be dumped as JSON. Raises TypeError
    for what is no option of FusedAdamW.
    """
    known = inspect.signature(FusedAdamW).parameters.keys() - {"params"}
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"no options of FusedAdamW: {', '.join(unknown)}")
    usual = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    given = {
        key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for key, value in {**usual, **options}.items()
    }
    of_groups = {key: value for key, value in given.items() if key in _OF_GROUPS}
    of_all = {key: value for key, value in given.items() if key not in _OF_GROUPS}
    return FusedOptimizersContainer.Config(
        param_groups=[ParamGroupConfig(pattern=r".*", optimizer_name=_NAME, optimizer_kwargs=of_groups)],
        optimizer_factory_kwargs_by_name={_NAME: of_all} if of_all else {},
    )
