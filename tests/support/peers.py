"""This package's optimizers with the settings of drop-in classes: whole and FP16 masters, and other gradients."""

from __future__ import annotations

import fused_optim
from fused_optim.compat._common import PeersSettings


class FusedAdam(PeersSettings, fused_optim.FusedAdam): ...


class FusedAdamW(FusedAdam, fused_optim.FusedAdamW): ...


class FusedLion(PeersSettings, fused_optim.FusedLion): ...


class FusedMuon(PeersSettings, fused_optim.FusedMuon): ...


class FusedAdEMAMix(PeersSettings, fused_optim.FusedAdEMAMix): ...
