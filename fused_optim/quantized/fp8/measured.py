"""Sizes at which products in FP8 take less time than others, as measured in ``measured_sizes.json``.

A size gains if it is at least as large in rows, inputs and outputs as a measured one that gains, since casts grow less
than products. Inputs and outputs may be exchanged: a layer's forward product is the other's input gradient. Nothing is
known of sizes below all measured ones, nor of GPUs of other compute capabilities.

Times of linear layers are the GPU's. With shorter ones the CPU limits a step, and FP8 layers need more CPU time to
launch: ``compute="auto"`` leaves those to BF16 (:data:`HOST_MS`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from fused_optim.quantized.recipes import ProductFormat

TABLE = Path(__file__).with_name("measured_sizes.json")
CAPABILITY = (9, 0)  # of the GPU that it was measured on
# What a layer with products in FP8 takes a host, forward and backward, at least: under FSDP2 1.1 ms and more.
HOST_MS = 0.5

Part = Literal["sizes", "experts"]  # of the table: linear layers, and those of experts with so many rows each
Baseline = Literal["BF16", "decoded"]  # products with plain weights, and with quantized ones that are decoded
BF16_WEIGHT_GRADIENTS, WEIGHTS_KEPT = ", weight gradients in BF16", ", weights kept"  # at the end of kinds


class Size(NamedTuple):
    """The size of a linear layer's product: rows of activations, inputs, outputs."""

    rows: int
    inputs: int
    outputs: int


def kind_of(format: ProductFormat, keeps_weights: bool = False) -> str:
    """The tables' name for such products. ``keeps_weights``: the weight is quantized for each product."""
    kind = format.scaling + ("" if format.weight_gradients else BF16_WEIGHT_GRADIENTS)
    return f"{kind}{WEIGHTS_KEPT}" if keeps_weights else kind


@functools.cache
def gaining_sizes(
    kind: str, baseline: str, part: Part = "sizes", table: Path = TABLE, least_ms: float = 0.0
) -> tuple[Size, ...]:
    """The measured sizes at which products of a kind took less time than the baseline, forward and backward.

    ``least_ms``: only sizes at which the baseline took at least as long.

    Raises KeyError if the table has no times of this kind.
    """
    rows = json.loads(table.read_text()).get(part, [])
    timed = [(row, time) for row in rows if (time := _time(row, kind)) is not None]
    if not timed:
        raise KeyError(kind)
    gained = [row for row, time in timed if baseline in row and time < row[baseline] and row[baseline] >= least_ms]
    return tuple(Size(row["rows"], row["inputs"], row["outputs"]) for row in gained)


def _time(row: Mapping[str, float], kind: str) -> float | None:
    """A row's time in ms for a kind of product. If a kind with kept weights and scales per row was not measured, its
    time is estimated: that without kept weights, and the extra time that kept weights cost with one scale.
    """
    gathered, one_scale = kind.removesuffix(WEIGHTS_KEPT), f"tensor{WEIGHTS_KEPT}"
    if kind not in row and kind.startswith("row") and {gathered, one_scale, "tensor"} <= row.keys():
        return row[gathered] + row[one_scale] - row["tensor"]
    return row.get(kind)


def gains(size: Size, gaining: tuple[Size, ...]) -> bool:
    return any(known.rows <= size.rows and _is_within(known, size.inputs, size.outputs) for known in gaining)


def _is_within(known: Size, inputs: int, outputs: int) -> bool:
    ends = (known.inputs, known.outputs), (known.outputs, known.inputs)
    return any(a <= inputs and b <= outputs for a, b in ends)


@functools.cache
def least_rows(kind: str, weight: tuple[int, ...], part: Part, baseline: str) -> int | None:
    """The least rows at which products with such a weight gain, by the package's table; None if at no known number."""
    outputs, inputs = weight
    try:
        # Experts were measured with the host's time.
        known = gaining_sizes(kind, baseline, part, least_ms=HOST_MS if part == "sizes" else 0.0)
    except KeyError:
        return None
    return min((size.rows for size in known if _is_within(size, inputs, outputs)), default=None)


@functools.cache
def _is_measured(kind: str, part: Part) -> bool:
    try:
        gaining_sizes(kind, "BF16", part)
    except KeyError:
        return False
    return True


def slower_reason(
    kind: str, device: torch.device, rows: int, weight: tuple[int, ...], part: Part, baseline: str
) -> str | None:
    """Why FP8 products with ``compute="auto"`` would not save time, or None."""
    ask = 'compute="fp8" asks for them all the same'
    if device.type == "cpu":
        return f"CPUs have no FP8 products: {ask}, in FP32"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != CAPABILITY:
        return f"FP8 products were not measured on GPUs like this one: {ask}"
    least = least_rows(kind, weight, part, baseline)
    if least is None and not _is_measured(kind, part):
        return f"FP8 products were not measured with {kind}: {ask}"
    if least is None:
        return f"FP8 products of this size were not measured to save time: {ask}"
    of_each = " of each expert" if part == "experts" else ""
    return None if rows >= least else f"FP8 products of this size save time from {least} rows{of_each} on: {ask}"
