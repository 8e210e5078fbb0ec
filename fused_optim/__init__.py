"""Fused Adam(W) for sharded parameters: one pass per step, low-precision states, FP32 master weights."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

# `python -m fused_optim` imports this first, then what its command needs: `info` and `--help` do without most of it.
# That is when Python, which looks for the module to run, has put "-m" in the place of its file.
_IS_COMMAND = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__

if not _IS_COMMAND:
    from fused_optim import rebuild as _rebuild  # noqa: F401  for torch.load of quantized weights
    from fused_optim.adam import FusedAdam, FusedAdamW
    from fused_optim.ademamix import FusedAdEMAMix
    from fused_optim.checkpoint.export import export_optimizer_checkpoint, save_master_safetensors
    from fused_optim.checkpoint.load import LoadReport, load_optimizer_checkpoint
    from fused_optim.checkpoint.verify import verify_checksums, write_checksums
    from fused_optim.lion import FusedLion
    from fused_optim.muon import FusedMuon
    from fused_optim.muon_groups import muon_param_groups
    from fused_optim.release import enable_gradient_release
    from fused_optim.step.clip import clip_grad_norm_

if TYPE_CHECKING:
    from fused_optim import quantized as quantized

__version__ = "0.2.0"
__all__ = [
    "FusedAdEMAMix",
    "FusedAdam",
    "FusedAdamW",
    "FusedLion",
    "FusedMuon",
    "LoadReport",
    "__version__",
    "clip_grad_norm_",
    "enable_gradient_release",
    "export_optimizer_checkpoint",
    "load_optimizer_checkpoint",
    "muon_param_groups",
    "save_master_safetensors",
    "verify_checksums",
    "write_checksums",
]


def __getattr__(name: str) -> ModuleType:
    """``fused_optim.quantized`` is imported when it is first asked for."""
    if name == "quantized":
        return importlib.import_module("fused_optim.quantized")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "quantized"})
