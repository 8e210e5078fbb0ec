"""Fused Adam(W) for sharded parameters: one pass per step, low-precision states, FP32 master weights."""

from fused_optim.adam import FusedAdam, FusedAdamW
from fused_optim.clip import clip_grad_norm_

__version__ = "0.1.0"
__all__ = ["FusedAdam", "FusedAdamW", "__version__", "clip_grad_norm_"]
