"""What the tests run over. A new state format, master, shape or option is one row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pairwise import each_once
from reference import BlockCode, Float16Code, TaperedCode, e4m3_levels

BLOCKS = (128, 64, 32)


# --- state formats --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """How exactly a moment is kept: half the distance of two codes, where the roots are what is encoded.

    |root of decoded - root| <= relative * root + absolute * root of the block's largest, to nearest; twice that under
    rotating rounding.
    """

    relative: float
    absolute: float = 0.0
    code: BlockCode = field(default=BlockCode(np.zeros(1)), repr=False)


@dataclass(frozen=True)
class Format:
    dtype: torch.dtype
    bytes: int  # per element
    exp_avg: Moment
    exp_avg_sq: Moment
    # Bounds of how rounding exp_avg_sq enlarges an update, and of the relative RMS error of updates that it causes.
    largest_update: float
    update_error: tuple[float, float]  # at beta2 = 0.999 and 0.95
    scaled: bool = True

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def moment(self, state: str) -> Moment:
        return self.exp_avg if state == "exp_avg" else self.exp_avg_sq


E4M3 = e4m3_levels()
FORMATS = [
    Format(torch.float32, 4, Moment(0.0), Moment(0.0), 1.0, (0.0, 0.0), scaled=False),
    Format(torch.bfloat16, 2, Moment(2**-8), Moment(2**-8), 1.01, (0.008, 0.006), scaled=False),
    Format(
        torch.float16,
        2,
        Moment(2**-11, 2**-39, Float16Code()),
        Moment(2**-11, 2**-39, Float16Code()),
        1.5,
        (0.0012, 0.0008),
    ),
    Format(
        torch.float8_e4m3fn,
        1,
        Moment(2**-4, 2**-10 / 448, BlockCode(E4M3)),
        Moment(2**-4, 2**-10 / 448, BlockCode(E4M3, root=2, smallest_scale=2**-54)),
        2.0,
        (0.13, 0.11),
    ),
    Format(
        torch.int8,
        1,
        Moment(0.0, 0.5 / 127, TaperedCode(bits=4, smallest_scale=2**-103, fades_by_value=True)),
        Moment(0.0, 0.5 / 255, TaperedCode(bits=5, root=2)),
        16.0,  # 1.25 and 2 where second moments lie within factors of 1e8 and 1e14 in a block
        (0.049, 0.037),
    ),
]
SCALED_FORMATS = [fmt for fmt in FORMATS if fmt.scaled]
FORMAT = {str(fmt): fmt for fmt in FORMATS}
STATES = ("exp_avg", "exp_avg_sq")


# --- parameters and masters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Master:
    """A parameter dtype, the options that give it its master, and the master's dtype and significant bits."""

    name: str
    param_dtype: torch.dtype
    options: dict[str, Any]
    dtype: torch.dtype | None
    bits: int  # of the best value that parameter and master hold

    def __str__(self) -> str:
        return self.name

    @property
    def scaled(self) -> bool:
        """Whether it is kept by blocks, and in FP32 where no block fits."""
        return self.dtype == torch.float16

    def stored(self, has_blocks: bool) -> torch.dtype | None:
        """The dtype of a parameter's master."""
        return torch.float32 if self.scaled and not has_blocks else self.dtype


REMAINDERS = {"store_param_remainders": True}
HALF = {"master_weight_dtype": torch.float16}
MASTERS = [
    Master("float32", torch.float32, {}, None, 24),
    Master("bfloat16", torch.bfloat16, {"master_weights": False}, None, 8),
    Master("bfloat16+float32", torch.bfloat16, {"store_param_remainders": False}, torch.float32, 24),
    Master("bfloat16+rem16", torch.bfloat16, REMAINDERS, torch.int16, 24),
    Master("bfloat16+rem8", torch.bfloat16, {**REMAINDERS, "param_remainder_bits": 8}, torch.int8, 16),
    Master("bfloat16+float16", torch.bfloat16, HALF, torch.float16, 11),
    Master("float16", torch.float16, {"master_weights": False}, None, 11),
    Master("float16+float32", torch.float16, {}, torch.float32, 24),
    Master("float16+float16", torch.float16, HALF, torch.float16, 11),
]
MASTER = {master.name: master for master in MASTERS}
# For behaviour that depends on neither: the usual run has each of them once, the long one their product.
EACH_FORMAT_AND_MASTER = pytest.mark.parametrize("fmt, master", each_once(product(FORMATS, MASTERS)), ids=str)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# --- shapes and memory layouts --------------------------------------------------------------------------------------


def contiguous(x: Tensor) -> Tensor:
    return x


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def misaligned(x: Tensor) -> Tensor:
    """At an odd element of its storage."""
    base = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    base[1:].copy_(x.reshape(-1))
    return base[1:].view(x.shape)


@dataclass(frozen=True)
class Shape:
    name: str
    shape: tuple[int, ...]
    block: int  # 0: states of block-scaled formats stay FP32
    layout: Callable[[Tensor], Tensor] = contiguous

    def __str__(self) -> str:
        return self.name


SHAPES = [
    Shape("block128", (5, 256), 128),
    Shape("block64", (3, 192), 64),
    Shape("block32", (3, 96), 32),
    Shape("conv", (4, 8, 4, 4), 128),
    Shape("column", (128, 1), 0),
    Shape("odd", (7, 3, 5), 0),
    Shape("short_vector", (100,), 0),
    Shape("vector", (4096,), 128),
    Shape("uneven_vector", (4133,), 128),
    Shape("empty_rows", (0, 128), 128),
    Shape("empty_vector", (0,), 0),
    Shape("scalar", (), 0),
    Shape("transposed", (6, 128), 128, transposed),
    Shape("channels_last", (3, 8, 4, 4), 128, channels_last),
    Shape("misaligned", (6, 128), 128, misaligned),
    Shape("misaligned_vector", (4133,), 128, misaligned),
]


# --- options that torch.optim.Adam(W) has as well -------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "betas": {"betas": (0.8, 0.95)},
    "no_momentum": {"betas": (0.0, 0.99)},
    "eps": {"eps": 1e-3},
    "least_eps": {"eps": 2.8e-17},
    "lr": {"lr": 0.02},
    "maximize": {"maximize": True},
    "decoupled_weight_decay": {"weight_decay": 0.1, "lr": 0.01},
    "coupled_weight_decay": {"weight_decay": 0.1, "lr": 0.01, "decoupled_weight_decay": False},
    "coupled_maximize": {"weight_decay": 0.1, "decoupled_weight_decay": False, "maximize": True},
}


def values(shape: tuple[int, ...], dtype: torch.dtype, device: str, *, seed: int, spread: float = 1.0) -> Tensor:
    """Reproducible numbers, the same on every device, whose magnitudes span ``spread`` powers of e."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=generator).mul(spread).exp()
    return (torch.randn(shape, generator=generator) * sizes).to(device=device, dtype=dtype)


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    """Reproducible normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
