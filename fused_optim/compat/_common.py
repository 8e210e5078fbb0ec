"""The common parts of the drop-in classes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fused_optim.adam import FusedAdam
from fused_optim.decorators import entry
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.table import OfDropIns, flag_of
from fused_optim.sharding.dtensor import local_tensor


class PeersSettings(ShardedOptimizer, OfDropIns):
    """A base of optimizers with the settings that only drop-in classes are given as arguments, and show."""

    _default_remainders: bool | None = None  # what `store_param_remainders=None` stands for

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if options.get("store_param_remainders") is None:
            options["store_param_remainders"] = self._default_remainders
        super().__init__(*arguments, **options)

    @entry
    def initialize_state(self, param: Tensor | None = None, store_param_remainders: bool | None = None) -> None:
        """Create the states of ``param``, or of all: zero moments, masters equal to the parameters. Idempotent.

        ``store_param_remainders`` overrides the optimizer's option for states that this call creates.
        """
        self._initialize(param, store_param_remainders)

    def _check_formats(self, group: Mapping[str, Any]) -> None:
        """Also torch.uint8: FP8 states, as TransformerEngine names them."""


class PeersAdam(PeersSettings, FusedAdam):
    """:class:`fused_optim.FusedAdam` with the words that its peers have for its options, and with two of their habits.

    ``amsgrad`` raises RuntimeError, not ValueError; with ``capturable`` each ``lr`` becomes a tensor on its device.
    """

    def __init__(self, *arguments: Any, adam_w_mode: bool, amsgrad: bool, **options: Any) -> None:
        if amsgrad:
            raise RuntimeError("amsgrad=True is not supported: use torch.optim.AdamW(amsgrad=True), or amsgrad=False")
        if options.get("decoupled_weight_decay") is None:
            options["decoupled_weight_decay"] = adam_w_mode
        super().__init__(*arguments, **options)
        if self.capturable:
            _put_rates_on_devices(self)

    @property
    def adam_w_mode(self) -> bool:
        """True for AdamW's decoupled weight decay, False for torch.optim.Adam's L2 penalty."""
        return self.rule.decoupled

    @adam_w_mode.setter
    @entry
    def adam_w_mode(self, mode: bool) -> None:
        self.rule.decoupled = mode


def arguments(scope: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a drop-in class's constructor by name, from its ``locals()``.

    Its own flags go by their truth, as in the original's. Text is read as text.
    """
    own = inspect.signature(scope["__class__"].__init__).parameters
    given = {**{name: scope[name] for name in [*own][1:-1]}, **scope["options"]}
    for name in [name for name, each in own.items() if isinstance(each.default, bool)]:
        given[name] = flag_of(name, given[name]) if isinstance(given[name], str) else bool(given[name])
    return given


def _put_rates_on_devices(optimizer: FusedAdam) -> None:
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
