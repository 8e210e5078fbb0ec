"""TransformerEngine's FusedAdam: its signature, attributes and errors over :class:`fused_optim.FusedAdam`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from fused_optim.adam import MOMENTS
from fused_optim.compat._common import PeersAdam, arguments
from fused_optim.formats.dtypes import as_dtype
from fused_optim.formats.states import STATE_FORMATS
from fused_optim.memory.layout import MASTER
from fused_optim.options.reading import OptionsBesideTransformerEngine
from fused_optim.sharding.dtensor import local_tensor


class FusedAdam(PeersAdam):
    """:class:`fused_optim.FusedAdam` that is called as ``transformer_engine.pytorch.optimizers.FusedAdam``.

    Param remainders are int16 tensors wherever TransformerEngine has them so: in ``state_dict()``, which loads into its
    optimizer and from it, and in ``get_unscaled_state`` and ``set_scaled_state``. Like its own they belong to the
    parameters of the same step, which must be loaded first.

    The arguments have TransformerEngine's defaults. ``master_weight_dtype`` counts with ``master_weights`` only and
    must be FP32 or FP16 then; ``store_param_remainders`` has no effect without ``master_weights`` or with FP16 masters;
    with ``capturable`` each group's ``lr`` becomes an FP32 tensor on its parameters' device. ``set_grad_none`` is
    deprecated and warns; ``zero_grad`` refuses another ``set_to_none`` then. ``options`` are further ones of
    :class:`fused_optim.FusedAdam`, such as ``seed``.

    Raises:
        RuntimeError: for ``amsgrad`` and dtypes of states and masters that are not supported, as TransformerEngine
            does. Otherwise as :class:`fused_optim.FusedAdam`.
    """

    _saves_int16_remainders = True
    _default_remainders = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype | str = torch.float32,
        exp_avg_dtype: torch.dtype | str = torch.float32,
        exp_avg_sq_dtype: torch.dtype | str = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
        **options: Unpack[OptionsBesideTransformerEngine],
    ) -> None:
        given = arguments(locals())
        if not given["master_weights"]:
            given["master_weight_dtype"] = torch.float32
        _check_dtypes(given["master_weight_dtype"], exp_avg_dtype, exp_avg_sq_dtype)
        if not given["master_weights"] or as_dtype(given["master_weight_dtype"]) != torch.float32:
            given["store_param_remainders"] = False
        super().__init__(**given)
        if set_grad_none is not None:
            text = "set_grad_none of FusedAdam is deprecated: use zero_grad(set_to_none=...)"
            warnings.warn(text, DeprecationWarning, stacklevel=2)

    @property
    def exp_avg_dtype(self) -> torch.dtype:
        """The optimizer's default; param groups may differ."""
        return _as_dtype(self.defaults["exp_avg_dtype"])

    @property
    def exp_avg_sq_dtype(self) -> torch.dtype:
        """The optimizer's default; param groups may differ."""
        return _as_dtype(self.defaults["exp_avg_sq_dtype"])

    @property
    def name_to_dtype_map(self) -> dict[str, torch.dtype]:
        """The dtypes that the states were asked for in."""
        moments = {name: _as_dtype(self.defaults[f"{name}_dtype"]) for name in MOMENTS}
        return {**moments, MASTER: self.master_weight_dtype}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As :meth:`fused_optim.FusedAdam.zero_grad`; ValueError where ``set_grad_none`` says otherwise."""
        asked = self.set_grad_none
        if asked is not None and set_to_none not in (None, asked):
            raise ValueError(f"set_to_none={set_to_none}, but FusedAdam was made with set_grad_none={asked}")
        given = asked if set_to_none is None else set_to_none
        super().zero_grad(True if given is None else given)

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """As :meth:`fused_optim.FusedAdam.get_unscaled_state`; with ``skip_unscale`` a BF16 state as it is kept."""
        kept = self.store[param].tensors.get(state_name)
        if skip_unscale and kept is not None and local_tensor(kept).dtype == torch.bfloat16:
            return local_tensor(kept)
        return super().get_unscaled_state(param, state_name)

    def _keeping(self, state_dict: dict[str, Any]) -> set[Tensor]:
        """Parameters whose states are not loaded: slices of Megatron-LM's distributed optimizer.

        It hands over uninitialised memory for them, or what ``state_dict()`` gave, only to have states, and sets their
        values afterwards.
        """
        ids = [id_ for group in state_dict["param_groups"] for id_ in group["params"]]
        pairs = list(zip(self.store.params, [state_dict["state"].get(id_) or {} for id_ in ids], strict=False))
        found = {param for param, states in pairs if self._are_placeholders(param, states)}
        for param in found:
            self.initialize_state(param)
        return found

    @staticmethod
    def _are_placeholders(param: Tensor, states: Mapping[str, Any]) -> bool:
        """8-bit tensors, which are values of neither moments nor masters, of a one-dimensional slice."""
        return has_bytes(states) and param.dim() == 1 and not isinstance(param, nn.Parameter)


def has_bytes(states: Mapping[str, Any]) -> bool:
    """True if some state has elements of 8 bits."""
    own = [states[name] for name in (*MOMENTS, MASTER) if isinstance(states.get(name), Tensor)]
    return any(state.element_size() == 1 for state in own)


def _as_dtype(checked: torch.dtype | str) -> torch.dtype:
    dtype = as_dtype(checked)
    assert dtype is not None
    return dtype


def _check_dtypes(master: torch.dtype | str, *moments: torch.dtype | str) -> None:
    if as_dtype(master) not in (torch.float32, torch.float16):
        raise RuntimeError(f"master_weight_dtype={master}: expected torch.float32 or torch.float16")
    for name, dtype in zip(MOMENTS, moments, strict=True):
        if as_dtype(dtype) not in STATE_FORMATS:
            raise RuntimeError(f"{name}_dtype: expected one of {', '.join(map(str, STATE_FORMATS))}, got {dtype}")
