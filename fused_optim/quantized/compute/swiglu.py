"""``silu(gate) * up`` and its gradients, cast to FP8 where they are computed.

:func:`hidden` and :func:`hidden_gradients` define the values: FP32, rounded once. Their codes are those that
``casts.py`` and ``delayed.py`` give these values. The CUDA engine makes the codes and those of the transpose in one
pass, or in two where scales are measured over more than a tile, and writes no values.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fused_optim.backends.compiled import address, run_on
from fused_optim.backends.engine import CudaEngine
from fused_optim.quantized.compute import casts, computed
from fused_optim.quantized.compute.casts import Codes
from fused_optim.quantized.recipes import ProductFormat


def hidden(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    g = gate.float()
    return (g * _sigmoid(g) * up.float()).to(gate.dtype)


def hidden_gradients(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Those of gate and up."""
    d, g = gradient.float(), gate.float()
    s = _sigmoid(g)
    of_gate = d * up.float() * (s * (1.0 + g * (1.0 - s)))
    return of_gate.to(gate.dtype), (d * (g * s)).to(gate.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    """0 where it would be a subnormal number."""
    return torch.where(x < -87.0, 0.0, torch.sigmoid(x))


def cast_hidden(gate: Tensor, up: Tensor, format: ProductFormat, history: Tensor | None) -> tuple[Codes, Codes]:
    """``silu(gate) * up`` in E4M3, and its transpose. ``history``: of a delayed scale, moved on."""
    scaling, tiles = computed.scaling_of(format, history), format.activation_tiles
    parts = _cast_hidden(gate, up, history, torch.float8_e4m3fn, scaling, format.power_of_two, tiles)
    return computed.codes_of(parts, format.scaling, tiles)


def cast_hidden_gradients(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    format: ProductFormat,
    gate_history: Tensor | None,
    up_history: Tensor | None,
) -> tuple[tuple[Codes, Codes], tuple[Codes, Codes]]:
    """The gradients of gate and up in the format's dtype, each with its transpose."""
    scaling = computed.scaling_of(format, gate_history)
    parts = _cast_gradients(
        gradient, gate, up, gate_history, up_history, format.gradients, scaling, format.power_of_two
    )
    return computed.codes_of(parts[:4], format.scaling, False), computed.codes_of(parts[4:], format.scaling, False)


# --- operators ----------------------------------------------------------------------------------------------------


def _room_of_hidden(
    gate: Tensor,
    up: Tensor,
    history: Tensor | None,
    dtype: torch.dtype,
    scaling: int,
    power_of_two: bool,
    tiles: bool,
) -> computed.Parts:
    return computed.room(gate, dtype, scaling, tiles)


@casts.operator(
    "fp8_swiglu(Tensor gate, Tensor up, Tensor(a!)? history, ScalarType dtype, int scaling, bool power_of_two, "
    "bool tiles) -> (Tensor, Tensor, Tensor, Tensor)",
    _room_of_hidden,
)
def _cast_hidden(
    gate: Tensor,
    up: Tensor,
    history: Tensor | None,
    dtype: torch.dtype,
    scaling: int,
    power_of_two: bool,
    tiles: bool,
) -> computed.Parts:
    if not computed.has_kernel(gate, up):
        return computed.cast_values(hidden(gate, up), history, dtype, scaling, power_of_two, tiles)
    parts = computed.room(gate, dtype, scaling, tiles)
    _run(None, gate, up, [(parts, history)], dtype, scaling, power_of_two, tiles)
    return parts


def _room_of_gradients(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_history: Tensor | None,
    up_history: Tensor | None,
    dtype: torch.dtype,
    scaling: int,
    power_of_two: bool,
) -> tuple[Tensor | None, ...]:
    return *computed.room(gate, dtype, scaling, False), *computed.room(gate, dtype, scaling, False)


@casts.operator(
    "fp8_swiglu_gradients(Tensor gradient, Tensor gate, Tensor up, Tensor(a!)? gate_history, Tensor(b!)? up_history, "
    "ScalarType dtype, int scaling, bool power_of_two) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _room_of_gradients,
)
def _cast_gradients(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_history: Tensor | None,
    up_history: Tensor | None,
    dtype: torch.dtype,
    scaling: int,
    power_of_two: bool,
) -> tuple[Tensor | None, ...]:
    histories = gate_history, up_history
    if not computed.has_kernel(gate, up, gradient):
        values = hidden_gradients(gradient, gate, up)
        of_gate, of_up = (
            computed.cast_values(x, history, dtype, scaling, power_of_two, False)
            for x, history in zip(values, histories, strict=True)
        )
        return *of_gate, *of_up
    of_gate, of_up = computed.room(gate, dtype, scaling, False), computed.room(gate, dtype, scaling, False)
    results = list(zip((of_gate, of_up), histories, strict=True))
    _run(gradient, gate, up, results, dtype, scaling, power_of_two, False)
    return *of_gate, *of_up


def _run(
    gradient: Tensor | None,
    gate: Tensor,
    up: Tensor,
    results: list[tuple[computed.Parts, Tensor | None]],
    dtype: torch.dtype,
    scaling: int,
    power_of_two: bool,
    tiles: bool,
) -> None:
    engine = cast(CudaEngine, casts.engine_for(gate, torch.bfloat16))
    history = results[0][1]
    absmax = computed.room_of_absmax(gate, scaling, len(results))
    engine.swiglu(
        gradient=address(gradient),
        gate=gate.data_ptr(),
        up=up.data_ptr(),
        results=[computed.row_of(*result) for result in results],
        absmax=address(absmax),
        remembered=0 if history is None else len(history) - 1,
        rows=gate.shape[0],
        columns=gate.shape[1],
        format=casts.FORMATS[dtype],
        scaling=scaling,
        power_of_two=power_of_two,
        tiles=tiles,
        **run_on(gate.device),
    )
