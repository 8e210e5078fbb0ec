"""``python -m fused_optim info``: what is installed."""

from __future__ import annotations

import platform

import torch

import fused_optim
from fused_optim.backends import build_info, forced_backend, load_engine, why_reference
from fused_optim.torch_versions import RELEASES


def info() -> str:
    """Describe the installed versions, the backends that exist here, and why others do not."""
    lines = [f"fused_optim {fused_optim.__version__}, torch {torch.__version__}"]
    if ".".join(torch.__version__.split(".")[:2]) not in RELEASES:
        lines[0] += f", which was not tried: known are {RELEASES[0]} to {RELEASES[-1]}"
    lines.append(f"Python {platform.python_version()}, {platform.platform()}")
    lines.append("torch  available: the reference, and the fallback on any device")
    for name in ("cpu", "cuda"):
        engine, reason = load_engine(name)
        built = build_info().get(name, {})
        shown = {key: built[key] for key in ("compiler", "isas", "archs") if built.get(key)}
        details = ", ".join(f"{key} {value}" for key, value in shown.items())
        lines.append(f"{name:<6} " + (f"available ({details})" if engine else f"not available: {reason}"))
    lines.append(f"GPUs   {_gpus()}")
    if forced_backend():
        lines.append(f"FUSED_OPTIM_BACKEND={forced_backend()} forces that backend")
    return "\n".join(lines)


def _gpus() -> str:
    """The GPUs that torch sees, and why the engine does not update their tensors; or why there are none."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if names:
        problem = "" if forced_backend() else why_reference("cuda")
        return ", ".join(names) + (f"; torch updates what is on them: {problem}" if problem else "")
    if torch.version.cuda is None:
        return f"none: torch {torch.__version__} is a build without CUDA, so nothing uses the cuda engine"
    return "none visible, so nothing uses the cuda engine"
