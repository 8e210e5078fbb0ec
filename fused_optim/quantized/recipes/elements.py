"""Elements and scales of quantized weights in plain PyTorch: E4M3, E2M1, E8M0 and blocks of rows x columns."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_optim.formats.arithmetic import SMALLEST_NORMAL
from fused_optim.formats.elements import scaled_bits

FLOAT8_LARGEST = 448.0
FLOAT8_NAN = 0x7F
FLOAT4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Where the code goes up by one, and whether it does so at the tie: to nearest even code.
_FLOAT4_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def shaped(fractions: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    return None if fractions is None else fractions.reshape(shape)


def divide(x: Tensor, divisor: float) -> Tensor:
    """The IEEE quotient; on GPUs ``Tensor / float`` multiplies by the reciprocal instead."""
    return x / torch.full_like(x, divisor)


# --- scales -----------------------------------------------------------------------------------------------------


def scale_for(absmax: Tensor, largest: float) -> Tensor:
    """The FP32 scale that maps ``absmax`` to ``largest``; at least the smallest normal number, so 1 / scale exists."""
    return divide(absmax, largest).clamp_min(SMALLEST_NORMAL)


def float8_scale(absmax: Tensor) -> Tensor:
    return scale_for(absmax, FLOAT8_LARGEST)


def next_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below a positive normal number."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def e8m0_exponent(absmax: Tensor, round_up: bool) -> Tensor:
    """The biased exponent (int32, 0 to 254) of an E8M0 scale for E4M3 elements, whose largest is 1.75 * 2 ** 8."""
    if round_up:
        return next_power_of_two(float8_scale(absmax)).view(torch.int32) >> 23
    return ((absmax.view(torch.int32) >> 23) - 8).clamp_min(0)


def power_of_two(exponent: Tensor) -> Tensor:
    """``2 ** (exponent - 127)`` of int32 exponents from 0 to 254, and NaN of 255."""
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).int().view(torch.float32)


# --- blocks -----------------------------------------------------------------------------------------------------


def finite_absmax(blocks: Tensor) -> Tensor:
    """The largest finite magnitude over the last dim; 0 of none."""
    magnitude = torch.where(blocks.isfinite(), blocks.abs(), 0.0)
    return magnitude.amax(-1) if magnitude.numel() else magnitude.new_zeros(magnitude.shape[:-1])


def tile_absmax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """The largest finite magnitude of each tile of a matrix; the last tiles may be short."""
    rows, columns = -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])
    x = torch.nn.functional.pad(x, (0, columns * tile[1] - x.shape[1], 0, rows * tile[0] - x.shape[0]))
    return finite_absmax(
        x.view(rows, tile[0], columns, tile[1]).transpose(1, 2).reshape(rows, columns, tile[0] * tile[1])
    )


def expand_scales(values: Tensor, tile: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Each tile's value at each of its elements: a matrix of ``shape``."""
    values = values.repeat_interleave(tile[1], dim=1)[:, : shape[1]]
    return values if tile[0] == 1 else values.repeat_interleave(tile[0], dim=0)[: shape[0]]


# --- elements ---------------------------------------------------------------------------------------------------


def float8_encode(x: Tensor, fractions: Tensor | None) -> Tensor:
    """FP32 -> E4M3 bits; magnitudes above 448 saturate, what is not finite becomes NaN."""
    if fractions is None:
        bits = x.clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        magnitude = x.nan_to_num(0.0).abs().clamp_max(FLOAT8_LARGEST)
        code = ((scaled_bits(magnitude, 120) + (fractions >> 12)) >> 20).clamp_max(0x7E)
        bits = torch.where(x.signbit(), code | 0x80, code).to(torch.uint8)
    return torch.where(x.isfinite(), bits, FLOAT8_NAN)


def float8_decode(bits: Tensor) -> Tensor:
    return bits.view(torch.float8_e4m3fn).float()


def float4_encode(x: Tensor, fractions: Tensor | None) -> Tensor:
    """FP32 -> E2M1 codes (uint8, 0 to 15); magnitudes above 6 saturate, NaN becomes 0."""
    magnitude = x.nan_to_num(0.0).abs()
    if fractions is None:
        steps = [(magnitude >= step) if at_tie else (magnitude > step) for step, at_tie in _FLOAT4_STEPS]
        code = torch.stack(steps).sum(0, dtype=torch.uint8)
    else:
        magnitude = magnitude.clamp_max(FLOAT4_LEVELS[-1])
        below = torch.stack([magnitude >= level for level in FLOAT4_LEVELS[1:-1]]).sum(0, dtype=torch.uint8)
        low, high = float4_decode(below), float4_decode(below + 1)
        part = ((magnitude - low) / (high - low)).double()
        code = below + (part + fractions.double() * 2.0**-32 >= 1.0).to(torch.uint8)
    return torch.where(x.signbit() & ~x.isnan(), code | 8, code)


def float4_decode(codes: Tensor) -> Tensor:
    exponent, half = (codes >> 1 & 3).int(), (codes & 1).float()
    magnitude = torch.where(exponent == 0, 0.5 * half, (2.0 + half) * power_of_two(exponent + 125))
    return torch.where(codes >= 8, -magnitude, magnitude)
