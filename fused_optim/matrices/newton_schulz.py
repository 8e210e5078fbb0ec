"""Orthogonalization by Newton-Schulz steps: the nearest matrix whose singular values are 1, or about 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fused_optim.rules import Orthogonalization

Triple = tuple[float, float, float]

_JORDAN: Triple = (3.4445, -4.7750, 2.0315)
_LAST: Triple = (1.875, -1.25, 0.375)  # of Newton-Schulz with three terms: its fixed point is 1
# Amsel et al., "The Polar Express", 2025 (arXiv 2505.16932), for singular values from 0.001 of the largest on.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
# Singular values that rounding has made a little larger than 1 must not leave the range where the steps converge.
_SAFETY = 1.01
# By name: the steps, of which the last is repeated.
_SEQUENCES: dict[str, tuple[Triple, ...]] = {
    "original": (_JORDAN,),
    "polar_express": (*((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS), _LAST),
    "deepseek_v4": (*(_JORDAN,) * 8, (2.0, -1.5, 0.5)),
}


def _original(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, rows / columns))


def _match_rms_adamw(rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns))


# By `adjust_lr_fn`, as of torch.optim.Muon: the factor of an update by its matrix's (rows, columns).
SCALES = {None: _original, "original": _original, "match_rms_adamw": _match_rms_adamw}


def coefficients_of(given: Any, steps: int) -> tuple[Triple, ...]:
    """(a, b, c) of each step, from one triple, several, or a name. Of too few the last one is repeated.

    Raises TypeError or ValueError for all else.
    """
    if isinstance(given, str):
        if given not in _SEQUENCES:
            raise ValueError(f"ns_coefficients: expected one of {', '.join(_SEQUENCES)} or numbers, got {given!r}")
        sequence: Sequence[Any] = _SEQUENCES[given]
    elif not isinstance(given, Sequence) or not given:
        raise TypeError(f"ns_coefficients: expected three numbers or a name, got {type(given).__name__}")
    else:
        sequence = given if isinstance(given[0], Sequence) else (given,)
    if not all(isinstance(triple, Sequence) and len(triple) == 3 for triple in sequence):
        raise ValueError("ns_coefficients: expected three numbers for each step")
    triples = [(float(a), float(b), float(c)) for a, b, c in sequence]
    return tuple(triples[min(step, len(triples) - 1)] for step in range(steps))


@torch.no_grad()
def orthogonalized(matrix: Tensor, how: Orthogonalization) -> Tensor:
    """``how.scale`` times the orthogonalized matrix: a new one of the same shape, ``how.dtype``, contiguous.

    ``matrix``: (rows, columns), any floating-point dtype, contiguous. The bits depend on its values, its shape and
    ``how`` alone: one product after the other, each of one matrix.
    """
    rows, columns = matrix.shape
    scale, dtype = how.scale(rows, columns), how.dtype
    x = matrix if rows <= columns else matrix.T.contiguous()
    with _own_precision(matrix.device.type):
        norm = torch.linalg.vector_norm(x, dtype=torch.float32).clamp_(min=how.eps)
        x = (x.float() / norm).to(dtype)
        for step, (a, b, c) in enumerate(how.coefficients, start=1):
            factor = scale if step == len(how.coefficients) else 1.0  # in the last sum, which is rounded anyway
            gram = x @ x.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a * factor, alpha=factor)
    if not how.coefficients:
        x = x * scale
    return x if rows <= columns else x.T.contiguous()


@contextmanager
def _own_precision(device_type: str) -> Iterator[None]:
    """FP32 products in FP32, all in the dtype of their matrices, whatever the process has chosen for its model."""
    settings: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [each.fp32_precision for each in settings]
    try:
        for each in settings:
            each.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for each, precision in zip(settings, before, strict=True):
            each.fp32_precision = precision
