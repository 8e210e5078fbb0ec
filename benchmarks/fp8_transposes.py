"""When FP8 weights are transposed for input gradients: in each backward pass, once per step, or by the optimizer.

Input gradients need the codes of a weight by columns. Three ways to have them, on the stack of ``fp8_training.py``:

    in backward        each weight is transposed where its gradient is computed, and dropped: what the layers do
    once per step      all are transposed after the optimizer's step, or after the gather, and kept until the next
    by the optimizer   the pass that writes codes writes those of the transposes, too

The first two are measured as they are. The third has no kernel: the update goes along the memory of a weight, and not
tile by tile. What it would add is bounded from below by the bytes that it writes, at a copy's bandwidth; and measured
where a kernel has tiles: a cast of BF16 weights that writes codes, with and without those of the transpose.

    python benchmarks/fp8_transposes.py --output FILE
    python benchmarks/fp8_transposes.py --device cpu --width 128 --hidden 256 --tokens 128 --blocks 1  # a trial
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8_training import DELAYED_NAME, RECIPES, Contender, Runner, Timer, add_sizes, ours
from fused_optim import FusedAdamW
from fused_optim.quantized.fp8 import casts, products
from fused_optim.quantized.tensor import QuantizedTensor
from step import machine, write

WARMUP = 3


def weights_of(model: nn.Module) -> list[QuantizedTensor]:
    return [param for param in model.parameters() if isinstance(param, QuantizedTensor)]


class KeptTransposes:
    """Of weights, all made by ``make()``; while they are ``used()``, backward passes make none."""

    def __init__(self, weights: list[QuantizedTensor]) -> None:
        self._codes = [products.weight_codes(weight).data for weight in weights]
        self._kept: dict[int, Tensor] = {}

    def make(self) -> None:
        self._kept = {codes.data_ptr(): casts.transpose(codes) for codes in self._codes}

    @property
    def bytes(self) -> int:
        return sum(codes.nbytes for codes in self._codes)

    @contextmanager
    def used(self) -> Iterator[None]:
        make = casts.transpose

        def kept(codes: Tensor, after: Tensor | None = None) -> Tensor:
            found = self._kept.get(codes.data_ptr())
            return make(codes, after) if found is None else found

        casts.transpose = kept
        try:
            yield
        finally:
            casts.transpose = make


def median_ms(timer: Timer, function: Callable[[], Any], steps: int) -> float:
    for _ in range(WARMUP):
        function()
    return statistics.median(timer(function, steps))


def copy_bandwidth(timer: Timer, device: torch.device, steps: int) -> float:
    """Bytes read and written per ms."""
    source = torch.empty(2**29 if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(timer, lambda: target.copy_(source), steps)


def casts_ms(timer: Timer, weights: list[QuantizedTensor], steps: int, columns: bool) -> float:
    """Of BF16 weights whose largest magnitudes are known, with the codes of the transposes or without."""
    plain = [torch.randn(weight.shape, device=weight.device).bfloat16() for weight in weights]
    absmax = [casts.absmax_of(values) for values in plain]

    def run() -> None:
        for values, largest in zip(plain, absmax, strict=True):
            casts.cast_tensor(values, largest, torch.float8_e4m3fn, True, columns)

    return median_ms(timer, run, steps)


def measure(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    timer = Timer(device)
    runner = Runner(Contender(DELAYED_NAME, ours(RECIPES[DELAYED_NAME]), compiled=False), args, device)
    weights = weights_of(runner.model)
    kept = KeptTransposes(weights)
    yield {"name": "weights", "count": len(weights), "codes_bytes": kept.bytes}
    for number in range(3):  # in turn: clocks change
        yield {"name": f"in backward, both, {number}", "ms": median_ms(timer, runner.both, args.steps)}
        kept.make()
        with kept.used():
            yield {"name": f"kept, both, {number}", "ms": median_ms(timer, runner.both, args.steps)}
    yield {"name": "all transposes", "ms": median_ms(timer, kept.make, args.steps)}
    del kept
    optimizer = FusedAdamW(weights, lr=1e-4, state_dtype="int8")
    for weight in weights:
        weight.grad = torch.full(weight.shape, 1e-3, device=device).bfloat16()
    yield {"name": "optimizer's step", "ms": median_ms(timer, optimizer.step, args.steps)}
    del optimizer
    bandwidth = copy_bandwidth(timer, device, args.steps)
    written = sum(weight.numel() for weight in weights)
    yield {"name": "bound of what the optimizer's pass would write", "ms": written / bandwidth}
    for columns in (False, True, False, True):
        name = "cast with transposes" if columns else "cast"
        yield {"name": name, "ms": casts_ms(timer, weights, args.steps, columns)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_sizes(parser)
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    torch.manual_seed(0)
    options = {key: value for key, value in vars(args).items() if key not in ("output", "commit")}
    report: dict[str, Any] = {"machine": machine(device, args.commit), "options": options, "transposes": []}
    print(report["machine"], flush=True)
    for row in measure(args, device):
        print(
            ", ".join(f"{value:.3f} {key}" if isinstance(value, float) else str(value) for key, value in row.items()),
            flush=True,
        )
        report["transposes"].append(row)
        write(report, args.output)


if __name__ == "__main__":
    main()
