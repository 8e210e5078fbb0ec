"""What the drop-in classes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fused_optim.adam import FusedAdam
from fused_optim.decorators import between_graphs, between_steps, ungraded
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.reading import PEERS_WORDS
from fused_optim.options.settings import Setting
from fused_optim.sharding.dtensor import local_tensor


class PeersSettings(ShardedOptimizer):
    """A base of optimizers with the settings that only drop-in classes are given as arguments, and show.

    Masters: ``master_weights`` says whether parameters that are not FP32 have them. ``master_weight_dtype`` is
    ``torch.float32`` or ``torch.float16``: with one FP32 scale per block, and FP32 where no block fits; it rounds in
    the rotating way, and the parameter is its rounded value. ``store_param_remainders``: keep only the bits that a BF16
    parameter lacks instead of a whole FP32 master. ``param_remainder_bits``: 16 for lossless ones, 8 for 24-bit ones.

    ``use_decoupled_grad``: read gradients from ``p.decoupled_grad`` instead of ``p.grad``. ``set_grad_none``: what
    ``zero_grad()`` does by default; None means True. ``unscales_gradients``: True: ``step()`` divides gradients by the
    scale of a GradScaler; False: the scaler does.
    """

    master_weights = Setting[bool]()
    master_weight_dtype = Setting[torch.dtype]()
    store_param_remainders = Setting[bool | None]()
    param_remainder_bits = Setting[int]()
    set_grad_none = Setting[bool | None]()

    _default_remainders: bool | None = None  # what `store_param_remainders=None` stands for

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._peers = peers = {word: options.pop(word) for word in PEERS_WORDS if word in options}
        if peers.get("store_param_remainders") is None:
            peers["store_param_remainders"] = self._default_remainders
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
