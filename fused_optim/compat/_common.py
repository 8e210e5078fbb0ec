"""What the drop-in classes share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fused_optim.adam import FusedAdam
from fused_optim.decorators import between_graphs, between_steps, ungraded
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.reading import flag_of
from fused_optim.options.table import OfDropIns
from fused_optim.sharding.dtensor import local_tensor

F = TypeVar("F", bound=Callable[..., Any])


class PeersSettings(ShardedOptimizer, OfDropIns):
    """A base of optimizers with the settings that only drop-in classes are given as arguments, and show."""

    _default_remainders: bool | None = None  # what `store_param_remainders=None` stands for

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if options.get("store_param_remainders") is None:
            options["store_param_remainders"] = self._default_remainders
        super().__init__(*arguments, **options)

    @between_graphs
    @ungraded
    @between_steps
    def initialize_state(self, param: Tensor | None = None, store_param_remainders: bool | None = None) -> None:
        """Create the states of ``param``, or of all: zero moments, masters equal to the parameters. Idempotent.

        ``store_param_remainders`` overrides the optimizer's option for states that this call creates.
        """
        self._initialize(param, store_param_remainders)

    def _check_formats(self, group: Mapping[str, Any]) -> None:
        """Also torch.uint8: FP8 states, as TransformerEngine names them."""


class PeersAdam(PeersSettings, FusedAdam):
    """:class:`fused_optim.FusedAdam` with the words that its peers have for its options."""

    def __init__(self, *arguments: Any, adam_w_mode: bool = True, **options: Any) -> None:
        if options.get("decoupled_weight_decay") is None:
            options["decoupled_weight_decay"] = adam_w_mode
        super().__init__(*arguments, **options)

    @property
    def adam_w_mode(self) -> bool:
        """True for AdamW's decoupled weight decay, False for torch.optim.Adam's L2 penalty."""
        return self.rule.adam_w_mode

    @adam_w_mode.setter
    @between_steps
    def adam_w_mode(self, mode: bool) -> None:
        self.rule.adam_w_mode = mode


def reads_flags_by_truth(function: F) -> F:
    """A decorator of a drop-in class's constructor: its own flags go by their truth, as in the original's.

    Text is read as text.
    """
    signature = inspect.signature(function)
    flags = {name for name, each in signature.parameters.items() if isinstance(each.default, bool)}

    @functools.wraps(function)
    def with_truths(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        for name in flags & given.arguments.keys():
            value = given.arguments[name]
            given.arguments[name] = flag_of(name, value) if isinstance(value, str) else bool(value)
        return function(*given.args, **given.kwargs)

    return cast(F, with_truths)


def arguments(scope: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor with ``**options``, by name, from its ``locals()``."""
    named = {name: value for name, value in scope.items() if name not in ("self", "options", "__class__")}
    return {**named, **scope["options"]}


def refuse_amsgrad(amsgrad: bool) -> None:
    """Raise RuntimeError, as Apex and TransformerEngine do, where :class:`fused_optim.FusedAdam` has a ValueError."""
    if amsgrad:
        raise RuntimeError("amsgrad=True is not supported: use torch.optim.AdamW(amsgrad=True), or amsgrad=False")


def put_rates_on_devices(optimizer: FusedAdam) -> None:
    """Make every ``lr`` an FP32 scalar on its group's device: replays of CUDA graphs read what is filled in."""
    for group in optimizer.param_groups:
        if group["params"]:
            device = local_tensor(group["params"][0]).device
            rate = (
                group["lr"]
                if isinstance(group["lr"], Tensor)
                else torch.tensor(float(group["lr"]), dtype=torch.float32)
            )
            group["lr"] = rate.detach().to(device=device, dtype=torch.float32)
