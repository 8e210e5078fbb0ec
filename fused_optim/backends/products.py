"""Products of FP16 matrices: by the CUDA engine on Hopper GPUs, by torch on others.

Each matrix of a batch is multiplied as it would be alone: bits do not depend on how many there are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fused_optim.backends import forced_backend, load_engine
from fused_optim.backends.compiled import run_on
from fused_optim.backends.engine import CudaEngine
from fused_optim.formats.elements import ELEMENT_TYPES

MULTIPLE = 8  # of sizes, for the engine


class Product(NamedTuple):
    """``result = alpha * left @ right + beta * left + gamma * identity``, summed up in FP32; FP16 or BF16.

    Matrices: FP16, (batch, rows, columns), contiguous. ``left_transposed``: ``left.mT`` in place of ``left``; likewise
    ``right``; not both, and with a beta of 0. ``symmetric``: the result is.
    """

    left: Tensor
    right: Tensor
    result: Tensor
    alpha: float = 1.0
    beta: float = 0.0
    gamma: float = 0.0
    left_transposed: bool = False
    right_transposed: bool = False
    symmetric: bool = False


class Products(Protocol):
    """The matrix products of Newton-Schulz steps."""

    halves_symmetric: bool  # whether half of the work is done for results that are known to be symmetric

    def normalize(self, values: Sequence[Tensor], result: Tensor, factor: float, least: float) -> None:
        """Each matrix times ``factor / max(its Frobenius norm, least)``; ``values``: FP32 or BF16, contiguous."""

    def multiply(self, products: Sequence[Product]) -> None:
        """One after the other: each may read what those before it have made."""


class EngineProducts:
    """The engine's, on Hopper GPUs."""

    halves_symmetric = True

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine

    def normalize(self, values: Sequence[Tensor], result: Tensor, factor: float, least: float) -> None:
        sums = torch.empty(len(values) * self._engine.NORM_SUMS, dtype=torch.float32, device=result.device)
        self._engine.normalize(
            values=[each.data_ptr() for each in values],
            result=result.data_ptr(),
            sums=sums.data_ptr(),
            numel=result[0].numel(),
            factor=factor,
            least=least,
            type=ELEMENT_TYPES[values[0].dtype],
            **run_on(result.device),
        )

    def multiply(self, products: Sequence[Product]) -> None:
        self._engine.matrix_products(list(map(_as_row, products)), **run_on(products[0].result.device))


def _as_row(product: Product) -> tuple[int | float, ...]:
    """A row of the engine's table."""
    left, right, result, *factors_and_forms = product
    inner = left.shape[1 if product.left_transposed else 2]
    return (
        left.data_ptr(),
        right.data_ptr(),
        result.data_ptr(),
        *result.shape,
        inner,
        *factors_and_forms,
        ELEMENT_TYPES[result.dtype],
    )


class TorchProducts:
    """torch's, one matrix after the other. Sums are FP32's whatever the process has chosen for its model."""

    halves_symmetric = False

    def normalize(self, values: Sequence[Tensor], result: Tensor, factor: float, least: float) -> None:
        for x, own in zip(values, result, strict=True):
            norm = torch.linalg.vector_norm(x, dtype=torch.float32)
            own.copy_(x.float() / norm.clamp(min=least) * factor)

    def multiply(self, products: Sequence[Product]) -> None:
        with _exact_sums():
            for product in products:
                self._multiply(product)

    @staticmethod
    def _multiply(product: Product) -> None:
        alpha, beta = product.alpha, product.beta
        for left, right, own in zip(product.left, product.right, product.result, strict=True):
            a = left.T if product.left_transposed else left
            b = right.T if product.right_transposed else right
            found = torch.addmm(a if beta else a.new_zeros(()), a, b, alpha=alpha, beta=beta)
            if product.gamma:
                found.diagonal().add_(product.gamma)
            own.copy_(found)


@contextmanager
def _exact_sums() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    try:
        matmul.allow_fp16_reduced_precision_reduction = False
        with torch.autocast("cuda", enabled=False):
            yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before


@functools.cache
def products_on(device: torch.device) -> Products | None:
    """The products of a GPU; None for CPUs, whose FP16 is slow."""
    if device.type != "cuda":
        return None
    engine = load_engine("cuda")[0]
    if engine is not None and engine.has_products(device.index):
        return EngineProducts(engine)
    return TorchProducts()


def fast_products(device: torch.device) -> Products | None:
    """The products that updates of matrices on ``device`` are made of; None: other ones, as of the reference."""
    return None if forced_backend() == "torch" else products_on(device)
