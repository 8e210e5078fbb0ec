"""Fused Adam(W) for sharded parameters: one pass per step, low-precision states, FP32 master weights."""

from fused_optim.adam import FusedAdam, FusedAdamW
from fused_optim.checkpoint.checksums import verify_checksums, write_checksums
from fused_optim.checkpoint.export import export_optimizer_checkpoint
from fused_optim.checkpoint.load import LoadReport, load_optimizer_checkpoint
from fused_optim.checkpoint.masters import save_master_safetensors
from fused_optim.clip import clip_grad_norm_

__version__ = "0.1.0"
__all__ = [
    "FusedAdam",
    "FusedAdamW",
    "LoadReport",
    "__version__",
    "clip_grad_norm_",
    "export_optimizer_checkpoint",
    "load_optimizer_checkpoint",
    "save_master_safetensors",
    "verify_checksums",
    "write_checksums",
]
