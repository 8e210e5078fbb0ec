"""Many matrices are orthogonalized: in which form, and which of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fused_optim.backends.products import MULTIPLE, Products, fast_products
from fused_optim.matrices.gram import orthogonalized_together
from fused_optim.matrices.newton_schulz import orthogonalized
from fused_optim.rules import Orthogonalization

# Elements of the Gram matrices that there are at once, but for one that has more: five such buffers take memory. The
# more there are, the more evenly they fill the GPU.
_TOGETHER = 1 << 27
# Of matrices whose products are torch's, one by one: the launches of smaller ones take longer than what is saved.
_LEAST_SIZE = 2048


def orthogonalize(values: Sequence[Tensor], how: Sequence[Orthogonalization]) -> list[Tensor]:
    """``how.scale`` times each matrix, orthogonalized; FP32 or BF16, contiguous.

    Steps on Gram matrices where they take less time, which shape, dtype and device alone decide; else one matrix after
    the other.
    """
    made: dict[int, Tensor] = {}
    together: dict[tuple[Orthogonalization, int, Products], list[int]] = {}
    for number, (x, own) in enumerate(zip(values, how, strict=True)):
        products = fast_products(x.device)
        if products is None or not _gains(x, own, products):
            made[number] = orthogonalized(x, own)
        else:
            together.setdefault((own, min(x.shape), products), []).append(number)
    for (own, size, products), numbers in together.items():
        for some in _in_parts(numbers, max(1, _TOGETHER // size**2)):
            made |= zip(some, orthogonalized_together([values[i] for i in some], own, products), strict=True)
    return [made[number] for number in range(len(values))]


def _gains(x: Tensor, how: Orthogonalization, products: Products) -> bool:
    """True if steps on Gram matrices take less time: where symmetric products are made by half they always do."""
    if how.dtype == torch.float32 or not how.coefficients:
        return False
    smaller, larger = sorted(x.shape)
    if products.halves_symmetric:
        return smaller % MULTIPLE == 0 and larger % MULTIPLE == 0
    return smaller >= _LEAST_SIZE and larger >= 2 * smaller


def _in_parts(numbers: list[int], most: int) -> Iterator[list[int]]:
    """As even as can be."""
    count = -(-len(numbers) // most)
    ends = [len(numbers) * part // count for part in range(count + 1)]
    return (numbers[first:end] for first, end in pairwise(ends))
