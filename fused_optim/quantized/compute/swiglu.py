"""``silu(gate) * up`` and its gradients, cast to FP8 where they are computed.

:func:`hidden` and :func:`hidden_gradients` define the values: FP32, rounded once. Their codes are those that
``casts.py`` and ``delayed.py`` give these values. The CUDA engine makes the codes and those of the transpose in one
pass, or in two where scales are measured over more than a tile, and writes no values.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fused_optim.backends.compiled import address, run_on
from fused_optim.backends.engine import CudaEngine
from fused_optim.backends.tables import CastScaling
from fused_optim.quantized.compute import casts
from fused_optim.quantized.compute.casts import Codes
from fused_optim.quantized.recipes import ProductFormat, Scaling

Parts = tuple[Tensor, Tensor, Tensor, Tensor | None]  # codes and scale, and both of the transpose

_SCALINGS: dict[Scaling, CastScaling] = {
    "tensor": CastScaling.TENSOR,
    "row": CastScaling.ROW,
    "block": CastScaling.BLOCK,
}


def is_supported(format: ProductFormat) -> bool:
    """Whether there are casts of this kind here."""
    return format.scaling in _SCALINGS


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
    scaling, tiles = _scaling(format, history), format.activation_tiles
    parts = _cast_hidden(gate, up, history, torch.float8_e4m3fn, scaling, format.power_of_two, tiles)
    return _codes(parts, format.scaling, tiles)


def cast_hidden_gradients(
    gradient: Tensor,
    gate: Tensor,
    up: Tensor,
    format: ProductFormat,
    gate_history: Tensor | None,
    up_history: Tensor | None,
) -> tuple[tuple[Codes, Codes], tuple[Codes, Codes]]:
    """The gradients of gate and up in the format's dtype, each with its transpose."""
    scaling = _scaling(format, gate_history)
    parts = _cast_gradients(
        gradient, gate, up, gate_history, up_history, format.gradients, scaling, format.power_of_two
    )
    return _codes(parts[:4], format.scaling, False), _codes(parts[4:], format.scaling, False)


def _scaling(format: ProductFormat, history: Tensor | None) -> CastScaling:
    return _SCALINGS[format.scaling] if history is None else CastScaling.DELAYED


def _codes(parts: Any, scaling: Scaling, tiles: bool) -> tuple[Codes, Codes]:
    data, scale, transposed, transposed_scale = parts
    if scaling == "tensor":
        return Codes(data, scale, scaling), Codes(transposed, scale, scaling)
    if scaling == "row":
        return Codes(data, scale, scaling), Codes(transposed, transposed_scale, scaling)
    columns = Codes(transposed, transposed_scale, "tile") if tiles else Codes(transposed, transposed_scale.t(), scaling)
    return Codes(data, scale.t(), scaling), columns


# --- operators ----------------------------------------------------------------------------------------------------


def _room(x: Tensor, dtype: torch.dtype, scaling: int, tiles: bool) -> Parts:
    if scaling == CastScaling.ROW:
        return cast(Parts, casts.room_of_rows(x, dtype, True, True))
    if scaling == CastScaling.BLOCK:
        return cast(Parts, casts.room_of_blocks(x, dtype, False, tiles, True, True))
    data, transposed, scale = casts.room_of_tensor(x, None, dtype, True, True)
    assert data is not None and transposed is not None
    return data, scale, transposed, None


def _cast(
    x: Tensor, history: Tensor | None, dtype: torch.dtype, scaling: int, power_of_two: bool, tiles: bool
) -> Parts:
    """Of values that are there."""
    if scaling == CastScaling.ROW:
        return cast(Parts, casts.cast_rows(x, dtype, True, True))
    if scaling == CastScaling.BLOCK:
        return cast(Parts, casts.cast_blocks(x, dtype, power_of_two, tiles, True, True))
    if history is None:
        data, transposed, scale = casts.cast_tensor(x, None, dtype, True, True)
    else:
        data, transposed, scale = casts.cast_delayed(x, history, dtype, True, True)
    assert data is not None and transposed is not None
    return data, scale, transposed, None


def _room_of_hidden(
    gate: Tensor,
    up: Tensor,
    history: Tensor | None,
    dtype: torch.dtype,
    scaling: int,
    power_of_two: bool,
    tiles: bool,
) -> Parts:
    return _room(gate, dtype, scaling, tiles)


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
) -> Parts:
    if not _has_kernel(gate):
        return _cast(hidden(gate, up), history, dtype, scaling, power_of_two, tiles)
    parts = _room(gate, dtype, scaling, tiles)
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
    return *_room(gate, dtype, scaling, False), *_room(gate, dtype, scaling, False)


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
    if not _has_kernel(gate):
        values = hidden_gradients(gradient, gate, up)
        of_gate, of_up = (
            _cast(x, history, dtype, scaling, power_of_two, False) for x, history in zip(values, histories, strict=True)
        )
        return *of_gate, *of_up
    of_gate, of_up = _room(gate, dtype, scaling, False), _room(gate, dtype, scaling, False)
    results = list(zip((of_gate, of_up), histories, strict=True))
    _run(gradient, gate, up, results, dtype, scaling, power_of_two, False)
    return *of_gate, *of_up


def _has_kernel(x: Tensor) -> bool:
    return x.device.type == "cuda" and casts.engine_for(x, torch.bfloat16) is not None


def _run(
    gradient: Tensor | None,
    gate: Tensor,
    up: Tensor,
    results: list[tuple[Parts, Tensor | None]],
    dtype: torch.dtype,
    scaling: int,
    power_of_two: bool,
    tiles: bool,
) -> None:
    engine = cast(CudaEngine, casts.engine_for(gate, torch.bfloat16))
    history = results[0][1]
    words = sum(gate.shape) if scaling == CastScaling.ROW else 2  # of absmax, for each result
    absmax = None if scaling == CastScaling.BLOCK else casts.room(gate, (words * len(results),), torch.float32)
    engine.swiglu(
        gradient=address(gradient),
        gate=gate.data_ptr(),
        up=up.data_ptr(),
        results=[_row(*result) for result in results],
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


def _row(parts: Parts, history: Tensor | None) -> tuple[int, int, int, int, int]:
    data, scale, transposed, transposed_scale = parts
    pointers = data, transposed, scale, transposed_scale, history
    return tuple(map(address, pointers))  # type: ignore[return-value]
