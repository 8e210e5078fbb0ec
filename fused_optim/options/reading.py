"""The types of options, for type checkers: the second spelling of what ``options/table.py`` describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import torch

CheckpointFormat = Literal["unscaled", "native", "torch"]
CheckpointDevice = Literal["cpu", "stager"] | None


class OptionsOfAll(TypedDict, total=False):
    """Options of every optimizer here, and of neither Apex's nor TransformerEngine's FusedAdam."""

    state_dtype: torch.dtype | str | None
    master_bits: int | None
    stochastic_rounding: bool
    seed: int
    decoupled_lr: bool
    skip_nonfinite: bool
    offload_states: bool
    offload_fraction: float
    checkpoint_format: CheckpointFormat
    checkpoint_device: CheckpointDevice
    fused: bool | None
    foreach: bool | None
    differentiable: bool


class NativeOptions(OptionsOfAll, total=False):
    """Options of every native class, whatever its rule."""

    capturable: bool
    maximize: bool


class LionOptions(NativeOptions, total=False):
    """Options of :class:`fused_optim.FusedLion`."""

    exp_avg_dtype: torch.dtype | str | None


class AdamOptions(LionOptions, total=False):
    """Options of :class:`fused_optim.FusedAdam` and of FusedMuon's groups with ``algorithm="adamw"``."""

    bias_correction: bool
    exp_avg_sq_dtype: torch.dtype | str | None


class Options(AdamOptions, total=False):
    """Options of :class:`fused_optim.FusedAdam`."""

    decoupled_weight_decay: bool | None


class MuonOptions(AdamOptions, total=False):
    """Options of :class:`fused_optim.FusedMuon`, beside torch.optim.Muon's."""

    ns_dtype: torch.dtype | str
    experts: bool
    momentum_dtype: torch.dtype | str | None
    betas: Sequence[float]


class AdEMAMixOptions(LionOptions, total=False):
    """Options of :class:`fused_optim.FusedAdEMAMix`."""

    exp_avg_slow_dtype: torch.dtype | str | None
    exp_avg_sq_dtype: torch.dtype | str | None


class OptionsBesideTransformerEngine(OptionsOfAll, total=False):
    """Options of drop-in classes, and not of TransformerEngine's FusedAdam."""

    maximize: bool
    decoupled_weight_decay: bool | None
    param_remainder_bits: int | None
    unscales_gradients: bool


class OptionsBesideApex(OptionsBesideTransformerEngine, total=False):
    """Options of drop-in classes, and not of Apex's FusedAdam."""

    master_weight_dtype: torch.dtype | str
    store_param_remainders: bool | None
    exp_avg_dtype: torch.dtype | str | None
    exp_avg_sq_dtype: torch.dtype | str | None
    use_decoupled_grad: bool
