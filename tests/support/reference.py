"""What the optimizer should do, in NumPy and plain Python. Shares no code with the package."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

MASK32 = 2**32 - 1
GOLDEN_RATIO = 0x9E3779B9  # 2**32 / 1.6180339887...
NEAREST = 2**31  # as a rounding fraction: 1/2
SQUARE_ROOT_OF_TWO = 0x6A09E667  # 2**32 * (2**0.5 - 1)
# Blocks whose largest value lies below become zeros.
SMALLEST = {"exp_avg": 2.0**-100, "exp_avg_sq": 2.0**-120, "master_param": 2.0**-126}
TOP_NUDGE, ONE = np.float32(1 + 2.0**-20), np.float32(1)

Array = np.ndarray


# --- rotating rounding: u = frac(hash(seed, parameter, element) + step * golden ratio), in 32-bit integers -----------


def murmur3_finalizer(h: int) -> int:
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK32
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK32
    return h ^ h >> 16


def rounding_fraction(seed: int, param_index: int, element: int, step: int) -> int:
    """The 32-bit fraction by which an element rounds at a step.

    Eight elements share a hash; from one to the next of them the fraction moves by another irrational number.
    """
    folded = murmur3_finalizer(seed & MASK32 ^ murmur3_finalizer(seed >> 32 & MASK32))
    key = murmur3_finalizer((folded + param_index * GOLDEN_RATIO) & MASK32)
    high, low = divmod(element // 8, 2**32)
    h = murmur3_finalizer((low + high * GOLDEN_RATIO & MASK32) ^ key)
    return (h + element % 8 * SQUARE_ROOT_OF_TWO + step * GOLDEN_RATIO) & MASK32


def rounding_fractions(seed: int, param_index: int, count: int, step: int) -> Array:
    fractions = [rounding_fraction(seed, param_index, element, step) for element in range(count)]
    return np.array(fractions, dtype=np.int64)


def last_place(x: Array, bits: int, smallest_exponent: int) -> Array:
    """The distance of neighbours at ``x`` in a binary format of ``bits`` significant bits."""
    _, exponent = np.frexp(np.abs(x, dtype=np.float64))
    exponent = np.where(x == 0, smallest_exponent, exponent - 1)
    return np.exp2(np.maximum(exponent, smallest_exponent) - bits + 1.0)


# --- block-scaled states --------------------------------------------------------------------------------------------


def e4m3_levels() -> Array:
    """The non-negative finite values of float8_e4m3fn, by code."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0))


def float16_levels() -> Array:
    """The non-negative finite float16 values, by code."""
    return np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)


@dataclass(frozen=True, eq=False)
class BlockCode:
    """Values are stored as the code of their root in units of a scale, which maps the block's largest to the top."""

    levels: Array  # value of each code, ascending from 0
    root: int = 1  # 1, 2, 4 or 8
    smallest_scale: float = 0.0
    nudge: np.float32 = TOP_NUDGE
    fades_by_value: bool = False  # below code 1 it is the value that is a part of code 1's, not its root

    @property
    def largest(self) -> tuple[float, float]:
        """The lowest and the highest level that the block's largest may have."""
        return self.levels[-1], self.levels[-1]

    def rounded(self, x: Array, u: Array) -> Array:
        """Magnitudes from whose largest the scale follows."""
        return x

    def scale(self, absmax: Array, state: str) -> Array:
        """FP32 scales of blocks whose largest magnitude is ``absmax``."""
        scale = self._root(absmax.astype(np.float32)) / np.float32(self.levels[-1])
        scale = np.maximum(scale, np.float32(self.smallest_scale))
        scale = np.where(absmax < SMALLEST[state], np.float32(0), scale)
        return np.where(np.isfinite(absmax), scale, np.float32("nan"))

    def position(self, x: Array, scale: Array) -> Array:
        """Where FP32 magnitudes lie among the codes: 2.25 is a quarter of the way from code 2 to code 3."""
        inverse = np.where(scale > 0, np.float32(1) / np.where(scale > 0, scale, 1), 0).astype(np.float32) * self.nudge
        return self.place(np.minimum((self._root(x) * inverse).astype(np.float64), self.levels[-1]))

    def place(self, y: Array) -> Array:
        """Of roots in units of the scale."""
        places = np.interp(y, self.levels, np.arange(len(self.levels)))
        return np.minimum(places, places**self.root) if self.fades_by_value else places

    def decode(self, codes: Array, scale: Array) -> Array:
        """FP32 magnitudes of codes."""
        y = self.levels.astype(np.float32)[codes] * scale
        for _ in range(self.root.bit_length() - 1):
            y = y * y
        return y

    def _root(self, x: Array) -> Array:
        for _ in range(self.root.bit_length() - 1):
            x = np.sqrt(x)
        return x

    # The same without rounding, in float64.

    def coded(self, x: Array, largest: Array) -> Array:
        """What is coded of magnitudes whose block has that largest one."""
        return np.asarray(x, np.float64) ** (1 / self.root)

    def value(self, y: Array, largest: Array) -> Array:
        return np.asarray(y, np.float64) ** self.root

    @property
    def steepest(self) -> float:
        """How much larger a value's relative error may be than that of what is coded."""
        return self.root


@dataclass(frozen=True, eq=False)
class TaperedCode(BlockCode):
    """The four highest powers of two have ``2**bits`` levels each, the four below them half as many, and so on."""

    levels: Array = field(init=False)
    bits: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", self._level(np.arange(2.0 ** (self.bits + 3))))

    def scale(self, absmax: Array, state: str) -> Array:
        scale = super().scale(absmax, state)
        return np.where(scale > 0, (scale.view(np.uint32) | 1).view(np.float32), scale)  # odd

    def place(self, y: Array) -> Array:
        places = self._place(y)
        return np.minimum(places, y / self.levels[1]) if self.fades_by_value else places

    def coded(self, x: Array, largest: Array) -> Array:
        scale = super().coded(largest, largest) / self.levels[-1]
        return self._place(super().coded(x, largest) / np.where(scale > 0, scale, 1.0))

    def value(self, y: Array, largest: Array) -> Array:
        return super().value(self._level(y) * super().coded(largest, largest) / self.levels[-1], largest)

    @property
    def steepest(self) -> float:
        return 8 * self.root  # 4 * (1 + f) / (1 + F) with fractions f and F

    def _place(self, y: Array) -> Array:
        exponent = np.floor(np.log2(np.maximum(y, 2.0**-120)))
        fours = (exponent - 1 + y / np.exp2(exponent) - 1) / 4  # exponent 1 is where the highest four begin
        whole = np.floor(fours)
        return np.where(np.asarray(y) > 0, np.exp2(whole + self.bits + 2) * (1 + fours - whole), 0.0)

    def _level(self, place: Array) -> Array:
        exponent = np.floor(np.log2(np.maximum(place, 2.0**-20)))
        fours = 4 * (exponent - self.bits - 2 + place / np.exp2(exponent) - 1)
        whole = np.floor(fours)
        return np.where(np.asarray(place) > 0, np.exp2(whole + 1) * (1 + fours - whole), 0.0)


@dataclass(frozen=True, eq=False)
class Float16Code(BlockCode):
    """float16 values in units of a power of two, which maps the block's largest between 2**14 and 2**15."""

    levels: Array = field(default_factory=float16_levels)
    smallest_scale: float = 2.0**-102
    nudge: np.float32 = ONE

    @property
    def largest(self) -> tuple[float, float]:
        return 2.0**14, 2.0**15

    def rounded(self, x: Array, u: Array) -> Array:
        unit = last_place(x, 11, -1000)
        finite = np.where(np.isfinite(x), x, 0).astype(np.float64)
        places = np.floor(finite / unit + (u >> 19) / 2.0**13)
        return np.where(np.isfinite(x), places * unit, x)

    def scale(self, absmax: Array, state: str) -> Array:
        finite = np.where(np.isfinite(absmax) & (absmax > 0), absmax, 1).astype(np.float64)
        mantissa, exponent = np.frexp(finite)
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        scale = np.exp2(np.minimum(exponent, 127) - 15.0)  # 2**15 * 2**113 would be infinite
        scale = np.maximum(scale, self.smallest_scale).astype(np.float32)
        scale = np.where(absmax < SMALLEST[state], np.float32(0), scale)
        return np.where(np.isfinite(absmax), scale, np.float32("nan"))


# --- Adam(W), Kingma & Ba 2015, Loshchilov & Hutter 2019 -------------------------------------------------------------


@dataclass
class Adam:
    """Adam(W) in float64."""

    param: Array
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True
    bias_correction: bool = True

    def __post_init__(self) -> None:
        self.param = self.param.astype(np.float64)
        self.exp_avg = np.zeros_like(self.param)
        self.exp_avg_sq = np.zeros_like(self.param)
        self.steps = 0

    def step(self, grad: Array) -> None:
        grad = grad.astype(np.float64)
        self.steps += 1
        if self.decoupled_weight_decay:
            self.param = self.param * (1 - self.lr * self.weight_decay)
        else:
            grad = grad + self.weight_decay * self.param
        beta1, beta2 = self.betas
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * grad
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * grad**2
        correction1, correction2 = (1 - beta**self.steps if self.bias_correction else 1.0 for beta in self.betas)
        denominator = np.sqrt(self.exp_avg_sq / correction2) + self.eps
        self.param = self.param - self.lr * self.exp_avg / correction1 / denominator
