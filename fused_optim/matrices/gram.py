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
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fused_optim.backends.products import Product, Products
from fused_optim.rules import Orthogonalization

Triple = tuple[float, float, float]

_MOST_STEPS = 3  # without making R anew
_LARGEST_SQUARE = 2.0**12  # that R is multiplied by: its largest eigenvalue then is that at most


_MEMORIES = 4  # of Gram matrices, that steps take


class _Stack:
    """The matrices of one shape, normalized, and where their Gram matrices lie among those of all shapes.

    What products read is written again by later ones alone: they are enqueued later.
    """

    def __init__(self, numbers: list[int], first: int, values: Sequence[Tensor]) -> None:
        self.numbers = numbers
        self.place = slice(first, first + len(numbers))
        like = values[numbers[0]]
        self.rows, self.columns = like.shape
        self.is_tall = self.rows > self.columns
        self.x, self._other = (
            torch.empty(len(numbers), *like.shape, dtype=torch.float16, device=like.device) for _ in range(2)
        )

    def normalize(self, values: Sequence[Tensor], products: Products, factor: float, least: float) -> None:
        products.normalize([values[number] for number in self.numbers], self.x, factor, least)

    def gram(self, result: Tensor) -> Product:
        own, tall = result[self.place], self.is_tall
        return Product(self.x, self.x, own, left_transposed=tall, right_transposed=not tall, symmetric=True)

    def multiplied(self, by: Tensor, factor: float, dtype: torch.dtype) -> Product:
        """The product that makes what the stack consists of then; ``dtype``: of 16 bits, too."""
        x = self.x
        self.x, self._other = self._other.view(dtype), x
        left, right = (x, by[self.place]) if self.is_tall else (by[self.place], x)
        return Product(left, right, self.x, alpha=factor)


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
    memory = [
        torch.empty(len(values), size, size, dtype=torch.float16, device=values[0].device) for _ in range(_MEMORIES)
    ]
    products.multiply(list(_steps(stacks, how, square, memory)))
    return [made for _, made in sorted(pair for stack in stacks for pair in zip(stack.numbers, stack.x, strict=True))]


def _steps(
    stacks: Sequence[_Stack], how: Orthogonalization, square: float, memory: Sequence[Tensor]
) -> Iterator[Product]:
    """The products of all steps, of which the stacks' matrices are the last ones' results."""
    for first, end in pairwise(_cuts(len(how.coefficients))):
        gram, *free = memory
        yield from (stack.gram(gram) for stack in stacks)
        by = yield from _polynomial(gram, how.coefficients[first:end], square, free)
        is_last = end == len(how.coefficients)
        for stack in stacks:
            factor = how.scale(stack.rows, stack.columns) if is_last else 1.0
            yield stack.multiplied(by, factor / math.sqrt(square), how.dtype if is_last else torch.float16)
        square = 1.0


def _polynomial(
    gram: Tensor, steps: Sequence[Triple], square: float, free: list[Tensor]
) -> Generator[Product, None, Tensor]:
    """The polynomial by which the steps multiply matrices whose Gram matrices, times ``square``, are ``gram``.

    ``free``: memory for it, and for two more. ``gram`` is overwritten.
    """
    found: Tensor | None = None
    for number, (a, b, c) in enumerate(steps, start=1):
        by = free.pop()
        yield Product(gram, gram, by, alpha=c / square**2, beta=b / square, gamma=a, symmetric=True)
        if found is None:
            found = by
        else:
            last, found = found, free.pop()
            yield Product(last, by, found, symmetric=True)
            free.append(last)
        if number < len(steps):
            left = free.pop()
            yield Product(gram, by, left, symmetric=True)  # as all products of two polynomials of one matrix
            yield Product(left, by, gram, alpha=1.0 / square, symmetric=True)
            free.append(left)
            square = 1.0
        if found is not by:
            free.append(by)
    assert found is not None
    return found


def _cuts(steps: int) -> list[int]:
    """Where R is made: parts of the steps, as even as can be, longer ones first.

    What rounding has left of small singular values grows in the steps after it: the last R should serve few of them.
    """
    count = -(-steps // _MOST_STEPS)
    short, longer = divmod(steps, count)
    return list(accumulate([short + 1] * longer + [short] * (count - longer), initial=0))
