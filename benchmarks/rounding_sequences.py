"""Errors of 8-bit second moments by how their rounding thresholds move: the golden ratio per step, or random bits.

Gradients of 1,024 elements: dense noise, or a spike every so many steps. Each second moment is compared with FP64's:
the RMS of the logarithm of their ratio, over the second half of 4,000 steps.

    python benchmarks/rounding_sequences.py --output FILE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from fused_optim.formats.rounding import GOLDEN_RATIO, rounding_bits, rounding_key
from fused_optim.formats.states import STATE_FORMATS, Kind, decode_state, encode_state
from step import machine

BETA2, STEPS, ELEMENTS, BLOCK = 0.999, 4000, 1024, 128
PERIODS = (1, 20, 21, 34, 55, 60, 89)  # 1: a gradient at every step
FORMATS = (torch.float8_e4m3fn, torch.int8)


def thresholds(sequence: str, step: int, generator: torch.Generator) -> Tensor:
    if sequence == "random":
        return torch.randint(2**32, (ELEMENTS,), generator=generator)
    return rounding_bits(rounding_key(0, 0), torch.arange(ELEMENTS), step * GOLDEN_RATIO & 2**32 - 1)


def error(dtype: torch.dtype, sequence: str, period: int) -> float:
    generator = torch.Generator().manual_seed(0)
    fmt, exact, stored = STATE_FORMATS[dtype], torch.zeros(ELEMENTS, dtype=torch.float64), torch.zeros(ELEMENTS)
    squares = []
    for step in range(1, STEPS + 1):
        grad = torch.randn(ELEMENTS, generator=generator) * (step % period == 0)
        exact = BETA2 * exact + (1 - BETA2) * grad.double().square()
        value = BETA2 * stored + (1 - BETA2) * grad.square()
        bits, scale = encode_state(value, Kind.SQUARE, fmt, BLOCK, thresholds(sequence, step, generator))
        stored = decode_state(bits, scale, Kind.SQUARE, fmt, BLOCK)
        if step > STEPS // 2:
            squares.append((stored.double() / exact).log().square().mean())
    return float(torch.stack(squares).mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="", help="of the sources, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = [
        {"format": str(dtype).removeprefix("torch."), "sequence": sequence, "period": period}
        | {"error": error(dtype, sequence, period)}
        for dtype in FORMATS
        for sequence in ("golden ratio", "random")
        for period in PERIODS
    ]
    for row in rows:
        print("{format:<16}{sequence:<14}{period:>4}{error:8.3f}".format(**row))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine(torch.device("cpu"), args.commit), "beta2": BETA2, "steps": STEPS, "rows": rows}
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
