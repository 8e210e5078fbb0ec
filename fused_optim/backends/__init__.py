"""Backends that run one optimizer step: ``torch`` (the reference), ``cpu`` and ``cuda`` (compiled).

All three take the same :class:`GroupWork` list and mean the same. ``FUSED_OPTIM_BACKEND`` forces one of them.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import Tensor

from fused_optim.state import Slots

BACKENDS = ("torch", "cpu", "cuda")


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of one param group for one step; ``lr`` is a tensor only where it lies on a GPU."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    adam_w: bool
    bias_correction: bool
    maximize: bool
    stochastic_rounding: bool


@dataclass
class ShardWork:
    """One local shard: contiguous local tensors, and how its states are encoded."""

    grad: Tensor
    param: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    slots: Slots
    key: int


@dataclass
class GroupWork:
    hyper: Hyper
    shards: list[ShardWork]


def build_info() -> dict[str, dict[str, object]]:
    """What the installation built: engine -> built, reason, compiler, ... (empty if nothing was recorded)."""
    path = Path(__file__).parent.parent / "_build_info.json"
    return json.loads(path.read_text()) if path.exists() else {}


def load_engine(name: str) -> tuple[ModuleType | None, str]:
    """The compiled engine ``cpu`` or ``cuda``, or None with the reason why there is none."""
    try:
        return importlib.import_module(f"fused_optim._engine_{name}"), ""
    except ImportError as error:
        reason = build_info().get(name, {}).get("reason")
        return None, str(reason or error)


def forced_backend() -> str | None:
    """The value of ``FUSED_OPTIM_BACKEND``. Raises ValueError if it names no backend."""
    name = os.environ.get("FUSED_OPTIM_BACKEND") or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"FUSED_OPTIM_BACKEND={name!r}: expected one of {', '.join(BACKENDS)}")
    return name


def backend_for(device_type: str) -> str:
    """The backend that updates parameters on ``device_type``. Raises RuntimeError if a forced one cannot."""
    forced = forced_backend()
    if forced == "torch":
        return "torch"
    if forced is not None:
        engine, reason = load_engine(forced)
        if engine is None:
            raise RuntimeError(f"FUSED_OPTIM_BACKEND={forced}, but that engine is not available: {reason}")
        if device_type != forced:
            raise RuntimeError(f"FUSED_OPTIM_BACKEND={forced} cannot update parameters on {device_type}")
        return forced
    return device_type if device_type in BACKENDS and load_engine(device_type)[0] is not None else "torch"


def run_step(groups: list[GroupWork]) -> None:
    """Run one step: the shards of each device by that device's backend."""
    from fused_optim.backends import compiled, torch_reference

    devices = {shard.param.device for group in groups for shard in group.shards}
    for device in sorted(devices, key=str):
        work = [GroupWork(g.hyper, [s for s in g.shards if s.param.device == device]) for g in groups]
        backend = backend_for(device.type)
        if backend == "torch":
            torch_reference.run(work)
        else:
            compiled.run(backend, device, work)
