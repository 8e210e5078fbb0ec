"""Casts of activations and gradients to FP8, and the transposed copies that products on GPUs need.

Matrices only. A scale is what codes are multiplied by: the largest magnitude that shares it, over the format's largest.
Values that are not finite count as the largest, so everything that shares a scale with one becomes NaN.

The functions that begin with an underscore and a verb define the bits in PyTorch. The compiled engines do the same for
BF16 and FP16, in fewer passes, as operators (``torch.ops.fused_optim.fp8_*``) that compilers know. While something
traces, one-scale measurements and casts of rows stay in PyTorch, so that the compiler can fuse them with their
surroundings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_optim.backends.compiled import address, run_on
from fused_optim.backends.engine import Engine
from fused_optim.backends.tables import CastFormat
from fused_optim.quantized.recipes import Encoding, MXFP8BlockScaling, NVFP4BlockScaling, Recipe, Scaling, elements
from fused_optim.quantized.recipes.codec import absmax, compiled_engine, decode, encode

LARGEST = {torch.float8_e4m3fn: elements.FLOAT8_LARGEST, torch.float8_e5m2: 57344.0}
BLOCK = 128
VALUES = (torch.bfloat16, torch.float16)  # what the engines cast
_MULTIPLE = 16  # of the sizes of what the engines cast, and of addresses

# What is quantized as weights are.
AS_WEIGHTS: dict[Scaling, Recipe] = {"mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}

LIBRARY = torch.library.Library("fused_optim", "DEF")


FORMATS = {torch.float8_e4m3fn: CastFormat.E4M3, torch.float8_e5m2: CastFormat.E5M2}


class Codes(NamedTuple):
    """A matrix in FP8, or FP4: the codes, contiguous, and their scales, which are FP32 but for the last two.

    ``scaling`` "tensor": the scale has shape ``(1,)``; "row": ``(rows, 1)``; "block": ``(rows, columns / 128)``, one
    column after the other in memory, as products read it; "tile": ``(rows / 128, columns / 128)``, rounded up; "mxfp8"
    and "nvfp4": bytes and scales as weights have them, the latter with a scale of the ``whole``, too.
    """

    data: Tensor
    scale: Tensor
    scaling: Scaling
    whole: Tensor | None = None

    def values(self) -> Tensor:
        """The FP32 values."""
        if self.scaling in AS_WEIGHTS:
            parts = {"data": self.data, "scale": self.scale}
            if self.whole is not None:
                parts["tensor_scale"] = self.whole
            rows, columns = self.data.shape
            shape = (rows, 2 * columns if self.scaling == "nvfp4" else columns)
            return decode(AS_WEIGHTS[self.scaling], parts, shape, torch.float32)
        scale = self.scale
        if self.scaling in ("block", "tile"):
            tile = (BLOCK if self.scaling == "tile" else 1, BLOCK)
            scale = elements.expand_scales(scale, tile, tuple(self.data.shape))
        return self.data.float() * scale


def matrix_of(x: Tensor) -> Tensor:
    """Activations as a matrix, a row for each token."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def shaped(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrix in another shape, but no view to autograd: it may be changed in place, as torch's own outputs."""
    return matrix if len(shape) == 2 else torch.ops.aten._unsafe_view.default(matrix, shape)


# --- what products ask for ----------------------------------------------------------------------------------------


def cast(x: Tensor, dtype: torch.dtype, scaling: Scaling, power_of_two: bool) -> Codes:
    """``x`` in FP8. Blocks need columns that are multiples of 128."""
    codes, _ = cast_both(x, dtype, scaling, power_of_two, columns=False)
    assert codes is not None
    return codes


def cast_both(
    x: Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    power_of_two: bool,
    rows: bool = True,
    columns: bool = True,
    tiles: bool = False,
) -> tuple[Codes | None, Codes | None]:
    """:func:`cast` of ``x`` and of its transpose, as far as they are wanted.

    ``tiles``: the blocks of the latter are 128 x 128.
    """
    if not rows and not columns:
        return None, None
    x = x.contiguous()
    if scaling in AS_WEIGHTS:
        return _as_weight(x, scaling) if rows else None, _cast_columns(x, scaling) if columns else None
    if scaling == "row":
        if is_traced() and not columns:
            return Codes(*_cast_rows(x, dtype), scaling), None
        data, scale, transposed_data, transposed_scale = cast_rows(x, dtype, rows, columns)
        return (
            Codes(data, scale, scaling) if rows else None,
            Codes(transposed_data, transposed_scale, scaling) if columns else None,
        )
    if scaling == "block":
        data, scale, transposed_data, transposed_scale = cast_blocks(x, dtype, power_of_two, tiles, rows, columns)
        of_columns = None
        if columns:
            of_columns = Codes(
                transposed_data, *((transposed_scale, "tile") if tiles else (transposed_scale.t(), scaling))
            )
        return Codes(data, scale.t(), scaling) if rows else None, of_columns
    data, transposed_data, scale = cast_tensor(x, absmax_of(x) if is_traced() else None, dtype, rows, columns)
    return Codes(data, scale, scaling) if rows else None, Codes(transposed_data, scale, scaling) if columns else None


def _as_weight(x: Tensor, scaling: Scaling) -> Codes:
    recipe, values = AS_WEIGHTS[scaling], x.float().contiguous()
    parts = recipe.empty(tuple(x.shape), x.device)
    if recipe.scales_whole_tensor:
        recipe.rescale(parts, absmax([recipe], [values], x.device)[0], None, True)
    encode([Encoding(recipe, parts, values)])
    return Codes(parts["data"], parts["scale"], scaling, parts.get("tensor_scale"))


def _cast_columns(x: Tensor, scaling: Scaling) -> Codes:
    if scaling != "mxfp8":
        return _as_weight(x.t(), scaling)
    transposed_data, transposed_scale = cast_columns_mxfp8(x)
    return Codes(transposed_data, transposed_scale, scaling)


def transposed(codes: Codes, after: Tensor | None = None) -> Codes:
    """The transpose. Exact for one scale and for tiles; for MXFP8 see :class:`MXFP8BlockScaling`.

    ``after``: a tensor that exists before. Without one, compilers may transpose weights in forward and keep the copies.
    """
    if codes.scaling == "mxfp8":
        transposed_data, transposed_scale = transpose_mxfp8(codes.data, codes.scale, after)
        return Codes(transposed_data, transposed_scale, codes.scaling)
    if codes.scaling not in ("tensor", "tile"):
        raise ValueError(f"codes with scales per {codes.scaling} have other scales when they are transposed")
    scale = codes.scale if codes.scaling == "tensor" else codes.scale.t().contiguous()
    return Codes(transpose(codes.data, after), scale, codes.scaling)


_MODES = torch._C._TorchDispatchModeKey


def is_observed(x: Tensor) -> bool:
    """True if a compiler, a dispatch mode or a subclass must see an operator."""
    return type(x) is not Tensor or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_traced() -> bool:
    """True if operations are recorded, or run without values; False if they are only watched."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    tracers = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in tracers)


# --- the bits -----------------------------------------------------------------------------------------------------


def _encode(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes of FP32 values; no clamp is needed, as no product rounds to more than the largest code."""
    return (x.float() * (1.0 / scale)).to(dtype)


def absmax_of(x: Tensor) -> Tensor:
    """The largest magnitude, FP32 of shape (1,); by rows first, so that compilers fuse it with computing the rows."""
    return x.abs().amax(1).amax(0, keepdim=True).float()


def largest_magnitude(x: Tensor) -> Tensor:
    """:func:`absmax_of` in one pass, for code that is not compiled."""
    largest: Tensor = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    return largest.view(1)


def _cast_tensor(x: Tensor, absmax: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = elements.scale_for(absmax_of(x) if absmax is None else absmax, LARGEST[dtype])
    return _encode(x, scale, dtype), scale


def _cast_delayed(x: Tensor, history: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Larger magnitudes than those of the history saturate. The scale is NaN where something is not finite."""
    scale, largest = torch.where(history[:1] > 0, history[:1], 1.0), LARGEST[dtype]
    codes = (x.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)
    absmax = absmax_of(x)
    finite = absmax.isfinite()
    magnitudes = torch.cat([torch.where(finite, absmax, history[1:2]), history[1:-1]])
    history.copy_(torch.cat([delayed_scale(magnitudes, dtype), magnitudes]))
    return codes, torch.where(finite, scale, torch.nan)


def delayed_scale(magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale for the next values, from the largest magnitudes of earlier ones; 1 if they are all 0."""
    seen = magnitudes.amax(0, keepdim=True)
    return torch.where(seen > 0, elements.scale_for(seen, LARGEST[dtype]), 1.0)


def _cast_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = elements.scale_for(x.abs().amax(1, keepdim=True).float(), LARGEST[dtype])
    return _encode(x, scale, dtype), scale


def _block_scales(absmax: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    scale = elements.scale_for(absmax, LARGEST[dtype])
    return torch.where(scale.isfinite(), elements.next_power_of_two(scale), scale) if power_of_two else scale


def _cast_blocks(x: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales transposed) with a scale for each block of a row."""
    blocks = x.view(x.shape[0], -1, BLOCK)
    scale = _block_scales(blocks.abs().amax(2).float(), dtype, power_of_two)
    return _encode(blocks, scale[:, :, None], dtype).view(x.shape), scale.t().contiguous()


def _columns_of_blocks(x: Tensor, dtype: torch.dtype, power_of_two: bool, tiles: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of the transpose."""
    if not tiles:
        return _cast_blocks(x.t().contiguous(), dtype, power_of_two)
    m, n = x.shape
    padded = torch.nn.functional.pad(x.abs(), (0, -n % BLOCK)).view(m // BLOCK, BLOCK, -1, BLOCK)
    scale = _block_scales(padded.amax((1, 3)).t().contiguous().float(), dtype, power_of_two)
    return _encode(x.t().contiguous(), elements.expand_scales(scale, (BLOCK, BLOCK), (n, m)), dtype), scale


# --- operators ----------------------------------------------------------------------------------------------------


def operator(schema: str, results: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function an operator, too, which runs where something looks on: see :func:`is_observed`.

    ``results``: makes the memory of its results.
    """
    name = schema.split("(")[0]

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, _without_missing(function), key)
        torch.library.register_fake(f"fused_optim::{name}", _without_missing(results), lib=LIBRARY)
        registered = getattr(torch.ops.fused_optim, name)

        @functools.wraps(function)
        def run(x: Tensor, *args: Any) -> Any:
            return registered(x, *args) if is_observed(x) else function(x, *args)

        return run

    return define


def _without_missing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Operators have no missing results: what is not wanted is empty."""

    def run(x: Tensor, *args: Any) -> Any:
        found = function(x, *args)
        return found if isinstance(found, Tensor) else tuple(x.new_empty(0) if y is None else y for y in found)

    return run


def engine_for(x: Tensor, *dtypes: torch.dtype) -> Engine | None:
    if x.dtype not in dtypes or x.numel() == 0 or x.shape[0] % _MULTIPLE or x.shape[1] % _MULTIPLE or not is_aligned(x):
        return None
    return compiled_engine(x.device)


def is_aligned(x: Tensor) -> bool:
    """True if the address is aligned for engines; a part of a larger buffer may not be."""
    return x.data_ptr() % _MULTIPLE == 0


def _matrix(x: Tensor) -> dict[str, Any]:
    """Arguments of an engine that describe a matrix, and its device."""
    m, n = x.shape
    return {"values": x.data_ptr(), "rows": m, "columns": n, "half": x.dtype == torch.float16, **run_on(x.device)}


def _room(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return x.new_empty(shape, dtype=dtype)  # cheaper for the host than torch.empty(device=)


def _room_of_tensor(
    x: Tensor, absmax: Tensor | None, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    m, n = x.shape
    return (
        _room(x, (m, n), dtype) if rows else None,
        _room(x, (n, m), dtype) if columns else None,
        _room(x, (1,), torch.float32),
    )


@operator(
    "fp8_cast_tensor(Tensor x, Tensor? absmax, ScalarType dtype, bool rows, bool columns) -> (Tensor, Tensor, Tensor)",
    _room_of_tensor,
)
def cast_tensor(
    x: Tensor, absmax: Tensor | None, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Codes, those of the transpose, and the scale of shape ``(1,)``.

    ``absmax``: the largest magnitude, FP32 of shape ``(1,)``, where it is known.
    """
    engine = engine_for(x, *VALUES)
    if engine is None:
        codes, scale = _cast_tensor(x, absmax, dtype)
        return codes if rows else None, codes.t().contiguous() if columns else None, scale
    data, transposed_data, scale = _room_of_tensor(x, absmax, dtype, rows, columns)
    largest = torch.empty_like(scale) if absmax is None else absmax
    engine.cast_tensor(
        **_matrix(x),
        codes=address(data),
        transposed=address(transposed_data),
        scale=scale.data_ptr(),
        absmax=largest.data_ptr(),
        format=FORMATS[dtype],
        measured=absmax is not None,
    )
    return data, transposed_data, scale


def _room_of_delayed(
    x: Tensor, history: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    return _room_of_tensor(x, None, dtype, rows, columns)


@operator(
    "fp8_cast_delayed(Tensor x, Tensor(a!) history, ScalarType dtype, bool rows, bool columns)"
    " -> (Tensor, Tensor, Tensor)",
    _room_of_delayed,
)
def cast_delayed(
    x: Tensor, history: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Codes, those of the transpose, and the scale, of shape ``(1,)``. Moves ``history`` on: see ``delayed.py``."""
    engine = engine_for(x, *VALUES)
    if engine is None:
        codes, scale = _cast_delayed(x, history, dtype)
        return codes if rows else None, codes.t().contiguous() if columns else None, scale
    data, transposed_data, scale = _room_of_tensor(x, None, dtype, rows, columns)
    absmax = _room(x, (2,), torch.float32)
    engine.cast_delayed(
        **_matrix(x),
        codes=address(data),
        transposed=address(transposed_data),
        scale=scale.data_ptr(),
        absmax=absmax.data_ptr(),
        history=history.data_ptr(),
        remembered=len(history) - 1,
        format=FORMATS[dtype],
    )
    return data, transposed_data, scale


def _room_of_rows(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    m, n = x.shape
    return (
        *((_room(x, (m, n), dtype), _room(x, (m, 1), torch.float32)) if rows else (None, None)),
        *((_room(x, (n, m), dtype), _room(x, (n, 1), torch.float32)) if columns else (None, None)),
    )


@operator(
    "fp8_cast_rows(Tensor x, ScalarType dtype, bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)",
    _room_of_rows,
)
def cast_rows(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes and scales of shape ``(rows, 1)``, and both of the transpose."""
    engine = engine_for(x, *VALUES)
    if engine is None:
        return (
            *(_cast_rows(x, dtype) if rows else (None, None)),
            *(_cast_rows(x.t().contiguous(), dtype) if columns else (None, None)),
        )
    data, scale, transposed_data, transposed_scale = _room_of_rows(x, dtype, rows, columns)
    absmax = _room(x, (sum(x.shape),), torch.float32) if columns else None
    engine.cast_rows(
        **_matrix(x),
        codes=address(data),
        scale=address(scale),
        transposed=address(transposed_data),
        transposed_scale=address(transposed_scale),
        absmax=address(absmax),
        format=FORMATS[dtype],
    )
    return data, scale, transposed_data, transposed_scale


def _room_of_blocks(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, tiles: bool, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    m, n = x.shape
    of_columns = (-(-n // BLOCK), m // BLOCK) if tiles else (m // BLOCK, n)
    return (
        *((_room(x, (m, n), dtype), _room(x, (n // BLOCK, m), torch.float32)) if rows else (None, None)),
        *((_room(x, (n, m), dtype), _room(x, of_columns, torch.float32)) if columns else (None, None)),
    )


@operator(
    "fp8_cast_blocks(Tensor x, ScalarType dtype, bool power_of_two, bool tiles, bool rows, bool columns)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _room_of_blocks,
)
def cast_blocks(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, tiles: bool, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes and scales of shape ``(columns / 128, rows)``, and both of the transpose, or with ``tiles`` scales of shape
    ``(columns / 128, rows / 128)`` there."""
    engine = engine_for(x, *VALUES)
    if engine is None:
        return (
            *(_cast_blocks(x, dtype, power_of_two) if rows else (None, None)),
            *(_columns_of_blocks(x, dtype, power_of_two, tiles) if columns else (None, None)),
        )
    data, scale, transposed_data, transposed_scale = _room_of_blocks(x, dtype, power_of_two, tiles, rows, columns)
    engine.cast_blocks(
        **_matrix(x),
        codes=address(data),
        scale=address(scale),
        transposed=address(transposed_data),
        transposed_scale=address(transposed_scale),
        power_of_two=power_of_two,
        tiles=tiles,
        format=FORMATS[dtype],
    )
    return data, scale, transposed_data, transposed_scale


def _room_of_transpose(codes: Tensor, after: Tensor | None = None) -> Tensor:
    m, n = codes.shape
    return _room(codes, (n, m), codes.dtype)


@operator(
    "fp8_transpose(Tensor codes, Tensor? after=None) -> Tensor",
    _room_of_transpose,
)
def transpose(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """A contiguous transpose of a contiguous matrix in FP8. ``after``: see :func:`transposed`."""
    engine = engine_for(codes, codes.dtype)
    if engine is None or not codes.is_contiguous():
        return codes.t().contiguous()
    result = _room_of_transpose(codes)
    engine.transpose(
        codes=codes.data_ptr(),
        transposed=result.data_ptr(),
        rows=codes.shape[0],
        columns=codes.shape[1],
        **run_on(codes.device),
    )
    return result


def _room_of_columns_mxfp8(x: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    m, n = x.shape
    block = AS_WEIGHTS["mxfp8"].block_shape[1]
    return _room(x, (n, m), torch.uint8), _room(x, (n, -(-m // block)), torch.uint8)


@operator(
    "mxfp8_cast_columns(Tensor x) -> (Tensor, Tensor)",
    _room_of_columns_mxfp8,
)
def cast_columns_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of the transpose."""
    codes = _as_weight(x.t(), "mxfp8")
    return codes.data, codes.scale


@operator(
    "mxfp8_transpose(Tensor codes, Tensor scale, Tensor? after=None) -> (Tensor, Tensor)",
    _room_of_columns_mxfp8,
)
def transpose_mxfp8(codes: Tensor, scale: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of the transpose of an MXFP8 matrix. ``after``: see :func:`transposed`."""
    found: tuple[Tensor, Tensor] = cast_columns_mxfp8(Codes(codes, scale, "mxfp8").values())
    return found
