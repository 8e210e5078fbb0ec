"""Norms and scaling of one device's local gradients, by that device's engine or, where there is none, by torch.

Norms are accumulated in double precision and by group, because each group is reduced over ranks of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_optim.backends import backend_of, load_engine
from fused_optim.backends.compiled import run_on, tensor_reader
from fused_optim.backends.engine import Engine, EngineGradients
from fused_optim.formats.elements import ELEMENT_TYPES
from fused_optim.sharding.dtensor import dense

ENGINE_NORMS = (2.0, math.inf)
ENGINE_GROUPS = 16

_workspaces: dict[tuple[torch.device, int], Tensor] = {}  # by CUDA device and stream; zero when new


@dataclass(frozen=True)
class NormRequest:
    norm_type: float
    group_count: int
    max_norm: float


def power_sums(tensors: list[Tensor], groups: list[int], request: NormRequest) -> tuple[Tensor, Tensor | None]:
    """For each group the sum of ``|x| ** norm_type``, or the largest ``|x|``: float64 of shape (group_count,).

    The tensors are local and lie on one device. Second, where the engine computed it: the norm over all groups and the
    clipping factor, float32 of shape (2,). The order of the sums depends on the tensors alone: equal inputs give equal
    bits. Enqueued on the current stream; nothing is read back.
    """
    device = tensors[0].device
    engine = _engine(tensors)
    if engine is None or request.norm_type not in ENGINE_NORMS or request.group_count > ENGINE_GROUPS:
        return _reference_sums(tensors, groups, request), None
    tensors = list(tensors)
    for i in tensor_reader(device).unusual(tensors):
        tensors[i] = dense(tensors[i])
    sums = torch.empty(request.group_count, dtype=torch.float64, device=device)
    result = torch.empty(2, dtype=torch.float32, device=device)
    where = run_on(device)
    if device.type == "cuda":
        workspace = _workspace(device, where["stream"])
        where["workspace"] = workspace.data_ptr()
    _table(engine, tensors, groups).norm(
        infinity=request.norm_type == math.inf,
        group_count=request.group_count,
        max_norm=request.max_norm,
        sums=sums.data_ptr(),
        result=result.data_ptr(),
        **where,
    )
    return sums, result


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply local tensors of one device in place by ``factor``: a float32 scalar there, read by the device alone.

    Computed in float32 and rounded to nearest. Nothing is written where the factor is 1.
    """
    engine = _engine(tensors)
    others = set(range(len(tensors)) if engine is None else tensor_reader(tensors[0].device).unusual(tensors))
    fitting = [tensor for i, tensor in enumerate(tensors) if i not in others]
    if engine is not None and fitting:
        table = _table(engine, fitting, [0] * len(fitting))
        table.scale(factor=factor.data_ptr(), **run_on(fitting[0].device))
        torch.autograd.graph.increment_version(fitting)
    for tensor in (tensors[i] for i in others):
        write_(tensor, tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor)


def unscaled(tensor: Tensor, scale: Tensor) -> Tensor:
    """``tensor / scale`` in float32, as torch's fused optimizers leave it; ``scale`` is a float32 scalar beside it."""
    return tensor.to(torch.float32) / scale


def write_(tensor: Tensor, value: Tensor) -> None:
    """Copy ``value`` into a gradient of any layout: expanded ones too, and those made in inference mode."""
    if tensor._is_zerotensor():  # cannot be written, and stays zero by whatever it is multiplied
        return
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # elements that share memory, and so have one value
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(value)


def _engine(tensors: list[Tensor]) -> Engine | None:
    backend = backend_of(tensors[0])
    if backend == "torch" or any(tensor.dtype not in ELEMENT_TYPES for tensor in tensors):
        return None
    return load_engine(backend)[0]


def _table(engine: Engine, tensors: list[Tensor], groups: list[int]) -> EngineGradients:
    return engine.Gradients(
        addresses=[tensor.data_ptr() for tensor in tensors],
        numels=[tensor.numel() for tensor in tensors],
        types=[ELEMENT_TYPES[tensor.dtype] for tensor in tensors],
        groups=groups,
    )


def _workspace(device: torch.device, stream: int) -> Tensor:
    """A graph that is being captured gets its own: memory of the graph's, zeroed at each replay."""
    key = (device, stream)
    if torch.cuda.is_current_stream_capturing():
        return _new_workspace(device)
    if key not in _workspaces:
        _workspaces[key] = _new_workspace(device)
    return _workspaces[key]


def _new_workspace(device: torch.device) -> Tensor:
    engine, _ = load_engine("cuda")
    assert engine is not None  # it has the gradients already
    return torch.zeros(engine.norm_workspace_bytes(device.index), dtype=torch.uint8, device=device)


def _reference_sums(tensors: list[Tensor], groups: list[int], request: NormRequest) -> Tensor:
    sums = torch.zeros(request.group_count, dtype=torch.float64, device=tensors[0].device)
    for tensor, group in zip(tensors, groups, strict=True):
        norm = torch.linalg.vector_norm(tensor, request.norm_type, dtype=torch.float64)
        if request.norm_type == math.inf:
            sums[group] = torch.maximum(sums[group], norm)
        else:
            sums[group] += norm.pow(request.norm_type)
    return sums
