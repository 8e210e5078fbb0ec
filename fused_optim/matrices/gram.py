"""Newton-Schulz steps on Gram matrices: what steps do to X (n x m) they do to R = X X^T, which is smaller.

A step is X <- Z X with Z = a I + b R + c R R, and then R <- Z R Z. So Q, the product of several Z, is found from R
alone, and X <- Q X once, with all matrices but X itself n x n and symmetric. Rounding adds up in R, whose small
eigenvalues it may make negative ones that grow: after three steps at most R is made from X anew.

Values are FP16, whose rounding is an eighth of BF16's. R is scaled so that its diagonal is about 1.

Rounding leaves R a little asymmetric. In polynomials of R steps make that smaller, as any other error; with R^T in
place of some R they would make it larger, a hundred times each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fused_optim.backends.products import Products
from fused_optim.rule import Orthogonalization

Triple = tuple[float, float, float]

_MOST_STEPS = 3  # without making R anew
_LARGEST_SQUARE = 2.0**12  # that R is multiplied by: its largest eigenvalue then is that at most


class _Stack:
    """The matrices of one shape, normalized, and where their Gram matrices lie among those of all shapes."""

    def __init__(self, numbers: list[int], first: int, values: Sequence[Tensor]) -> None:
        self.numbers = numbers
        self.place = slice(first, first + len(numbers))
        like = values[numbers[0]]
        self.rows, self.columns = like.shape
        self.is_tall = self.rows > self.columns
        self.x = torch.empty(len(numbers), *like.shape, dtype=torch.float16, device=like.device)

    def normalize(self, values: Sequence[Tensor], products: Products, factor: float, least: float) -> None:
        products.normalize([values[number] for number in self.numbers], self.x, factor, least)

    def make_gram(self, gram: Tensor, products: Products) -> None:
        own, tall = gram[self.place], self.is_tall
        products.multiply(self.x, self.x, own, left_transposed=tall, right_transposed=not tall, symmetric=True)

    def multiply(self, by: Tensor, products: Products, factor: float, dtype: torch.dtype) -> None:
        made = torch.empty_like(self.x, dtype=dtype)
        left, right = (self.x, by[self.place]) if self.is_tall else (by[self.place], self.x)
        products.multiply(left, right, made, alpha=factor)
        self.x = made


@torch.no_grad()
def orthogonalized_together(values: Sequence[Tensor], how: Orthogonalization, products: Products) -> list[Tensor]:
    """Each as :func:`fused_optim.matrices.newton_schulz.orthogonalized` makes it, within the error of FP16 products.

    ``values``: FP32 or BF16, contiguous, all with the same smaller size. The bits of each depend on its values, its
    shape and ``how`` alone.
    """
    size = min(values[0].shape)
    by_shape: dict[torch.Size, list[int]] = {}
    for number, each in enumerate(values):
        by_shape.setdefault(each.shape, []).append(number)
    firsts = accumulate(map(len, by_shape.values()), initial=0)
    stacks = [_Stack(own, first, values) for own, first in zip(by_shape.values(), firsts, strict=False)]
    square = min(4.0 ** math.floor(math.log2(size) / 2), _LARGEST_SQUARE)
    for stack in stacks:
        stack.normalize(values, products, math.sqrt(square), how.eps)
    for first, end in pairwise(_cuts(len(how.coefficients))):
        gram = torch.empty(len(values), size, size, dtype=torch.float16, device=values[0].device)
        for stack in stacks:
            stack.make_gram(gram, products)
        by = _polynomial(gram, how.coefficients[first:end], square, products)
        is_last = end == len(how.coefficients)
        for stack in stacks:
            factor = how.scale(stack.rows, stack.columns) if is_last else 1.0
            stack.multiply(by, products, factor / math.sqrt(square), how.dtype if is_last else torch.float16)
        square = 1.0
    return [made for _, made in sorted(pair for stack in stacks for pair in zip(stack.numbers, stack.x, strict=True))]


def _polynomial(gram: Tensor, steps: Sequence[Triple], square: float, products: Products) -> Tensor:
    """What the steps multiply matrices by, whose Gram matrices, times ``square``, are ``gram``."""
    found: Tensor | None = None
    for number, (a, b, c) in enumerate(steps, start=1):
        by = torch.empty_like(gram)
        products.multiply(gram, gram, by, alpha=c / square**2, beta=b / square, gamma=a, symmetric=True)
        found = by if found is None else _times(found, by, products)
        if number < len(steps):
            gram = _times(_times(gram, by, products), by, products, 1.0 / square)
            square = 1.0
    assert found is not None
    return found


def _times(left: Tensor, right: Tensor, products: Products, factor: float = 1.0) -> Tensor:
    """Of symmetric matrices whose product is one."""
    result = torch.empty_like(left)
    products.multiply(left, right, result, alpha=factor, symmetric=True)
    return result


def _cuts(steps: int) -> list[int]:
    """Where R is made: parts of the steps, as even as can be, longer ones first.

    What rounding has left of small singular values grows in the steps after it: the last R should serve few of them.
    """
    count = -(-steps // _MOST_STEPS)
    short, longer = divmod(steps, count)
    return list(accumulate([short + 1] * longer + [short] * (count - longer), initial=0))
