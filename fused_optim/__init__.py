"""Fused Adam(W) for sharded parameters: one pass per step, low-precision states, FP32 master weights."""

from fused_optim.adam import FusedAdam, FusedAdamW
from fused_optim.checkpoint_files import LoadReport, export_optimizer_checkpoint, load_optimizer_checkpoint
from fused_optim.checksums import verify_checksums, write_checksums
from fused_optim.clip import clip_grad_norm_
from fused_optim.masters import save_master_safetensors

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
