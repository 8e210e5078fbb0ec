"""Backends that run one optimizer step: ``torch`` (the reference), ``cpu`` and ``cuda`` (compiled).

All three take the same :class:`ShardWork` and :class:`Hyper` and mean the same. ``FUSED_OPTIM_BACKEND`` forces one.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fused_optim.backends.tables import number_of, problem_of
from fused_optim.decorators import callers_level

if TYPE_CHECKING:  # torch's code for DTensors comes with them, and `python -m fused_optim info` does without it
    from types import ModuleType

    from fused_optim.adapters import FusedEncode
    from fused_optim.backends.engine import CpuEngine, CudaEngine, Engine
    from fused_optim.memory.layout import StateLayout
    from fused_optim.rules import Hyper, RuleSpec

Compiled = Literal["cpu", "cuda"]
Backend = Literal["torch", "cpu", "cuda"]
COMPILED: tuple[Compiled, ...] = get_args(Compiled)
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def uncounted(hypers: Sequence[Hyper]) -> list[Hyper]:
    """The same for a launch that others follow in this step: only the last one advances the counters."""
    return [h if h.steps_done is None else h._replace(steps_done=h.steps_done.clone()) for h in hypers]


@dataclass
class ShardWork:
    """One local shard: contiguous local tensors, ``states`` as in ``layout.specs``, and how these are encoded.

    With a ``target`` the parameter is a quantized weight, ``param`` is its FP32 master itself, and ``absmax`` (FP32,
    shape ``(1,)``), if the target measures it, is raised to the largest finite magnitude of the new values.
    """

    grad: Tensor
    param: Tensor
    master: Tensor | None
    states: tuple[Tensor, ...]
    layout: StateLayout
    key: int
    target: FusedEncode | None = None
    absmax: Tensor | None = None


@dataclass
class GroupWork:
    hyper: Hyper
    shards: list[ShardWork]


def build_info() -> dict[str, dict[str, object]]:
    """The record of the installation's build, by engine: if it was built, why not, its compiler. Empty without one."""
    path = Path(__file__).parent.parent / "_build_info.json"
    recorded: dict[str, dict[str, object]] = json.loads(path.read_text()) if path.exists() else {}
    return recorded


@overload
def load_engine(name: Literal["cuda"]) -> tuple[CudaEngine | None, str]: ...


@overload
def load_engine(name: Literal["cpu"]) -> tuple[CpuEngine | None, str]: ...


@overload
def load_engine(name: Compiled) -> tuple[Engine | None, str]: ...


def load_engine(name: Compiled) -> tuple[Engine | None, str]:
    """The compiled engine ``cpu`` or ``cuda``, or None with the reason why there is none."""
    try:
        engine = importlib.import_module(f"fused_optim._engine_{name}")
    except ImportError as error:
        recorded = build_info()
        return None, str(recorded.get(name, {}).get("reason") or error) if recorded else _unbuilt()
    problem = problem_of(engine)
    return (None, problem) if problem else (cast("Engine", engine), "")


def _unbuilt() -> str:
    """The reason for no engine without a build record: Python found a source folder before the installed package."""
    folder = Path(__file__).parent.parent
    return (
        f"{folder} is a source folder, in which nothing was built, and hides an installed package while Python runs in "
        f"{folder.parent}: run it in another folder, or install with pip install -e {folder.parent}"
    )


def forced_backend() -> Backend | None:
    """The value of ``FUSED_OPTIM_BACKEND``. Raises ValueError if it names no backend."""
    name = os.environ.get("FUSED_OPTIM_BACKEND") or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"FUSED_OPTIM_BACKEND={name!r}: expected one of {', '.join(BACKENDS)}")
    return name


def backend_for(device_type: str) -> Backend:
    """The backend that updates parameters on ``device_type``. Raises RuntimeError if a forced one cannot.

    Warns once where it is the reference because an engine is missing.
    """
    return _backend_for(device_type, forced_backend())


@functools.cache  # every step asks
def _backend_for(device_type: str, forced: Backend | None) -> Backend:
    if forced == "torch":
        return "torch"
    if forced is not None:
        engine, reason = load_engine(forced)
        if engine is None:
            raise RuntimeError(f"FUSED_OPTIM_BACKEND={forced}, but that engine is not available: {reason}")
        if device_type != forced:
            raise RuntimeError(f"FUSED_OPTIM_BACKEND={forced} cannot update parameters on {device_type}")
        return forced
    if device_type not in COMPILED:
        return "torch"
    problem = why_reference(device_type)
    if problem:
        _warn_of_the_reference(device_type, problem)
    return "torch" if problem else device_type


_COMPILERS: dict[Compiled, str] = {"cpu": "a C++ compiler", "cuda": "CUDA's nvcc"}


def why_reference(device_type: str, rule: RuleSpec | None = None) -> str:
    """Why the reference updates parameters on a kind of device, and what to do; empty if an engine does."""
    if forced_backend() == "torch":
        return "FUSED_OPTIM_BACKEND=torch"
    if device_type not in COMPILED:
        return f"there is no engine for {device_type} tensors"
    engine, reason = load_engine(device_type)
    if engine is None:
        remedy = f"Install fused_optim again where there is {_COMPILERS[device_type]}"
        return f"its {device_type} engine is not available ({reason.splitlines()[0]}). {remedy}"
    if device_type == "cuda" and (problem := _unsupported_driver() or _unsupported_gpu()):
        return problem
    if rule is not None and rule_number(rule, device_type) is None:
        remedy = f"Install it again with FUSED_OPTIM_RULES set to the file that describes {rule.name}"
        return f"its {device_type} engine was built without the update rule {rule.name}. {remedy}"
    return ""


def is_capturing() -> bool:
    """True if the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def backend_of(local: Tensor, rule: RuleSpec | None = None) -> Backend:
    """The backend that works on a local tensor, and updates it by a rule.

    The reference does for tensors of a FakeTensorMode, which have no memory, and for rules that the engine was built
    without; it warns of the latter once.
    """
    backend: Backend = "torch" if isinstance(local, FakeTensor) else backend_for(local.device.type)
    if backend == "torch" or rule is None or rule_number(rule, backend) is not None:
        return backend
    problem = why_reference(backend, rule)
    if forced_backend() is not None:
        raise RuntimeError(f"FUSED_OPTIM_BACKEND={backend}, but {problem}")
    _warn_of_the_reference(backend, problem)
    return "torch"


def rule_number(rule: RuleSpec, name: Compiled) -> int | None:
    """The number by which an engine knows an update rule; None if it was built without it."""
    engine, _ = load_engine(name)
    return None if engine is None else number_of(rule, cast("ModuleType", engine))


@functools.cache
def _unsupported_driver() -> str:
    """The engine has a CUDA runtime of its own, maybe newer than torch's. A driver runs all of its major release."""
    engine, _ = load_engine("cuda")
    runtime, driver = engine.cuda_versions() if engine else (0, 0)
    if not driver or driver // 1000 >= runtime // 1000:
        return ""
    release = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
    remedy = f"Update the driver, or build fused_optim on a machine with a toolkit of CUDA {driver // 1000}"
    return f"its cuda engine was built with CUDA {runtime // 1000}, and the driver runs {release} at most. {remedy}"


@functools.cache
def _unsupported_gpu() -> str:
    """The engine runs on the oldest architecture that it was built for and on later ones; on none before 8.0."""
    archs = cast("list[str]", build_info().get("cuda", {}).get("archs", []))
    oldest = divmod(max(80, min((int(arch.rstrip("af")) for arch in archs), default=80)), 10)
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if (major, minor) < oldest:
            found = f"GPU {index} ({torch.cuda.get_device_name(index)}) has compute capability {major}.{minor}"
            needed = f"its cuda engine needs {oldest[0]}.{oldest[1]} of every GPU"
            return f"{found}, and {needed}. Hide older ones with CUDA_VISIBLE_DEVICES"
    return ""


@functools.cache
def _warn_of_the_reference(device_type: Compiled, problem: str) -> None:
    """Once per process: the reference is right, but many times slower, and nobody asked for it."""
    slower = "150 to 300 times slower" if device_type == "cuda" else "much slower"
    text = f"fused_optim updates parameters on {device_type} by its PyTorch reference, {slower}, because {problem}"
    hint = "`python -m fused_optim info` shows what is there; FUSED_OPTIM_BACKEND=torch accepts the reference"
    warnings.warn(f"{text}; {hint}.", stacklevel=callers_level())
