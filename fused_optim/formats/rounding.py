"""Rotating rounding (Weyl-sequence dithering): the 32-bit fraction of each element, key and step, as int64 tensors."""

from __future__ import annotations

import functools
from typing import TypeVar

import torch
from torch import Tensor

from fused_optim.formats.arithmetic import MASK32

GOLDEN_RATIO = 0x9E3779B9  # 2^32 * 0.6180339887
SQUARE_ROOT_OF_TWO = 0x6A09E667  # 2^32 * 0.4142135623
NEAREST = 0x80000000  # u = 1/2: round to nearest, ties up
Int = TypeVar("Int", int, Tensor)


def finalize(h: Int) -> Int:
    """MurmurHash3's 32-bit finalizer, of a number or of an int64 tensor."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B & MASK32
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35 & MASK32
    return h ^ (h >> 16)


@functools.lru_cache(maxsize=65536)
def rounding_key(seed: int, param_index: int) -> int:
    """The 32-bit key of one parameter's rounding sequence."""
    folded = finalize(seed & MASK32 ^ finalize(seed >> 32 & MASK32))
    return finalize((folded + param_index * GOLDEN_RATIO) & MASK32)


def _hash_of_eight(key: int, elements: Tensor) -> Tensor:
    eight = elements >> 3
    return finalize(((eight & MASK32) + (eight >> 32) * GOLDEN_RATIO & MASK32) ^ key)


def rounding_bits(key: int, elements: Tensor, offset: int | Tensor | None) -> Tensor:
    """32-bit rounding fractions of ``elements`` (int64 global indices); ``offset`` None means round to nearest."""
    if offset is None:
        return torch.full_like(elements, NEAREST)
    return _hash_of_eight(key, elements) + (elements & 7) * SQUARE_ROOT_OF_TWO + offset & MASK32


def master_rounding(before: Tensor, after: Tensor, u: Tensor) -> Tensor:
    """How an FP16 master rounds: ``u``, flat int64 fractions, where the update is small; elsewhere to nearest.

    The threshold rotates for the sake of updates below the last place, which would be lost otherwise. From two units
    of the last place on none is lost, and rounding to nearest errs half as much.
    """
    return torch.where((after - before).abs() >= after.abs() * 2.0**-9, NEAREST, u.view_as(after)).view(-1)
