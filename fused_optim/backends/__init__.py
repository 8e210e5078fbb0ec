"""Backends that run one optimizer step: ``torch`` (the reference), ``cpu`` and ``cuda`` (compiled).

All three take the same :class:`ShardWork` and :class:`Hyper` and mean the same. ``FUSED_OPTIM_BACKEND`` forces one.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:  # states of quantized parameters need the engines
    from fused_optim.adapters import Target
    from fused_optim.slots import Slots

BACKENDS = ("torch", "cpu", "cuda")


class Hyper(NamedTuple):
    """Hyperparameters of one param group for one step. Tensors are scalars on the device that runs the step."""

    lr: float | Tensor  # a tensor is FP32
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # number of this step, from 1; counts only without `steps_done`
    adam_w: bool
    bias_correction: bool
    maximize: bool
    stochastic_rounding: bool
    grad_scale: Tensor | None = None  # FP32: gradients are divided by it, and left so
    grad_factor: Tensor | None = None  # FP32: gradients are multiplied by it
    found_inf: Tensor | None = None  # FP32: not 0 skips the step
    steps_done: Tensor | None = None  # int64: advanced by the backend unless the step is skipped


@dataclass
class ShardWork:
    """One local shard: contiguous local tensors, and how its states are encoded.

    With a ``target`` the parameter is a quantized weight, ``param`` is its FP32 master itself, and ``absmax`` (FP32,
    shape ``(1,)``), if the target measures it, is raised to the largest finite magnitude of the new values.
    """

    grad: Tensor
    param: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    slots: Slots
    key: int
    target: Target | None = None
    absmax: Tensor | None = None


@dataclass
class GroupWork:
    hyper: Hyper
    shards: list[ShardWork]


class Shards(Protocol):
    """The shards of one device from step to step, in one backend.

    A step is ``refresh``, ``set`` for each shard that it returns (and that ``sharing`` returns), ``run``. ``watched`` holds a tuple per shard: the
    parameter, its DTensorSpec or None, its dict of states, exp_avg, exp_avg_sq and the master or None; of a quantized
    weight with a target also what ``Plan::watch`` in csrc/multi_tensor/bindings/plan.h names.
    """

    def refresh(self, watched: list[tuple[Any, ...]], attribute: str) -> Sequence[int]:
        """Take this step's gradients; the numbers of the shards that have one and must be set (again)."""

    def set(self, shard: int, work: ShardWork, watched: tuple[Any, ...] | None) -> None:
        """Describe a shard for this step, and with ``watched`` for later ones, as long as nothing else changes."""

    def sharing(self) -> Sequence[int]:
        """The shards whose gradients have memory in common with another's, which a pass that writes them must not."""

    def takes_target(self, slots: Slots) -> bool:
        """Whether a shard with these states may have a target."""

    def updated(self, watched: list[tuple[Any, ...]]) -> list[Tensor]:
        """The parameters that have a gradient in this step."""

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        """Update them. ``workspace``: memory of a GPU, needed where hyperparameters lie there."""


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
    if device_type == "cuda" and not _gpus_are_supported():
        return "torch"
    return device_type if device_type in BACKENDS and load_engine(device_type)[0] is not None else "torch"


@functools.cache
def _gpus_are_supported() -> bool:
    """The engine needs compute capability 8.0 of every visible GPU."""
    return all(torch.cuda.get_device_capability(i) >= (8, 0) for i in range(torch.cuda.device_count()))


def shards_on(device: torch.device, backend: str, groups: list[int], group_count: int) -> Shards:
    """The shards of ``device``; ``groups``: the param group of each, ascending."""
    from fused_optim.backends.compiled import CompiledShards

    if backend == "torch":
        return ReferenceShards(groups)
    return CompiledShards(device, backend, groups, group_count)


class ReferenceShards:
    """Shards of the ``torch`` backend: described anew at every step."""

    def __init__(self, groups: list[int]) -> None:
        self._groups = groups
        self._work: dict[int, ShardWork] = {}

    def refresh(self, watched: list[tuple[Any, ...]], attribute: str) -> Sequence[int]:
        self._work.clear()
        return [i for i, (param, *_) in enumerate(watched) if getattr(param, attribute, None) is not None]

    def set(self, shard: int, work: ShardWork, watched: tuple[Any, ...] | None) -> None:
        self._work[shard] = work

    def sharing(self) -> Sequence[int]:
        extents = {i: (work.grad.data_ptr(), work.grad.data_ptr() + work.grad.nbytes) for i, work in self._work.items()}
        found: set[int] = set()
        last, end = -1, 0
        for i in sorted(extents, key=extents.__getitem__):
            if extents[i][0] < end:
                found |= {last, i}
            if extents[i][1] > end:
                last, end = i, extents[i][1]
        return sorted(found)

    def takes_target(self, slots: Slots) -> bool:
        return False

    def updated(self, watched: list[tuple[Any, ...]]) -> list[Tensor]:
        return [watched[i][0] for i in self._work]

    def run(self, hypers: list[Hyper], workspace: Tensor | None) -> None:
        from fused_optim.backends import torch_reference

        groups = [GroupWork(hyper, []) for hyper in hypers]
        for i, work in sorted(self._work.items()):
            groups[self._groups[i]].shards.append(work)
        self._work.clear()
        torch_reference.run(groups)
