"""What optimizers with few bits do on inputs that fall silent, are rare, or lie beside much larger ones.

1. Silent halves: after 50 steps half of each block's gradients are exactly 0, the others go on. How far these
   parameters still move per step, in units of the learning rate: the mean over the last 50 of 600 steps.
2. Rare rows: a gradient every 100th step. The error of the way that parameters have gone, relative to FP32's.
3. Wide ranges: one column is K times larger. The largest update of the others in units of the learning rate, and the
   error of their way.
4. Small updates: BF16 weights of 1 after 2,000 steps of a constant gradient, by masters: their mean distance from
   where they should be, in units of the distance that they should have gone.

FP32 parameters in the first three, so that updates can be read off; torch.optim.AdamW in FP32 is the reference.

    python benchmarks/silent_inputs.py --output FILE
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_optim import FusedAdamW
from step import machine

SHAPE = (64, 256)  # 16,384 elements: peers leave smaller tensors in FP32
BETAS, LR = (0.9, 0.95), 1e-3
FACTORS = (1, 100, 1_000, 10_000, 100_000)
RATES = (5e-6, 1e-5)
Make = Callable[..., Any]

STATES: dict[str, Make] = {
    "torch AdamW, FP32": torch.optim.AdamW,
    **{
        f"FusedAdamW, {name} states": partial(FusedAdamW, state_dtype=name)
        for name in ("fp32", "bf16", "fp16", "fp8", "int8")
    },
}
MASTERS: dict[str, Make] = {
    "torch AdamW, BF16, no master": torch.optim.AdamW,
    **{f"FusedAdamW, master_bits={bits}": partial(FusedAdamW, master_bits=bits) for bits in (32, 24, 0)},
}
# Modules, classes and options, of states and of masters.
STATE_PEERS = {
    "FlashAdamW": ("flashoptim", "FlashAdamW", {"master_weight_bits": None}),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", {}),
    "torchao AdamWFp8": ("torchao.optim", "AdamWFp8", {}),
    "torchao AdamW4bit": ("torchao.optim", "AdamW4bit", {}),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
}
MASTER_PEERS = {
    "FlashAdamW, 24-bit master": ("flashoptim", "FlashAdamW", {"master_weight_bits": 24}),
    "FlashAdamW, 32-bit master": ("flashoptim", "FlashAdamW", {"master_weight_bits": 32}),
    "torchao AdamW8bit, stochastic rounding": ("torchao.optim", "AdamW8bit", {"bf16_stochastic_round": True}),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
}


def installed(peers: dict[str, tuple[str, str, dict[str, Any]]], device: torch.device) -> dict[str, Make]:
    """Peers need a GPU."""
    found = {}
    for name, (module, cls, options) in peers.items():
        if device.type != "cuda" or importlib.util.find_spec(module.partition(".")[0]) is None:
            print(f"skipped {name}: it is not installed, or needs a GPU")
            continue
        found[name] = partial(getattr(importlib.import_module(module), cls), **options)
    return found


def noise(steps: int, device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(steps):
        yield torch.randn(SHAPE, device=device, generator=generator)


def updates(make: Make, gradients: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    """In units of the learning rate."""
    param = nn.Parameter(torch.zeros(SHAPE, device=device))
    optimizer = make([param], lr=LR, betas=BETAS, weight_decay=0.0)
    for grad in gradients:
        before = param.detach().clone()
        param.grad = grad
        optimizer.step()
        yield (param.detach() - before) / LR


def silent_halves(make: Make, device: torch.device) -> float:
    def gradients() -> Iterator[Tensor]:
        for step, grad in enumerate(noise(600, device)):
            yield grad if step < 50 else grad * (torch.arange(SHAPE[1], device=device) % 128 >= 64)

    moved = [update.view(-1, 128)[:, :64].abs().mean() for update in updates(make, gradients(), device)]
    return float(torch.stack(moved[-50:]).mean())


def error_of_way(make: Make, gradients: Callable[[], Iterator[Tensor]], chosen: Tensor) -> tuple[float, float]:
    """The largest update, and the error of the way, of the ``chosen`` elements."""
    device = chosen.device
    way, exact, largest = torch.zeros(SHAPE, device=device), torch.zeros(SHAPE, device=device), 0.0
    for update, reference in zip(
        updates(make, gradients(), device), updates(torch.optim.AdamW, gradients(), device), strict=True
    ):
        way, exact = way + update, exact + reference
        largest = max(largest, float(update[chosen].abs().max()))
    return largest, float((way - exact)[chosen].norm() / exact[chosen].norm())


def rare_rows(make: Make, device: torch.device) -> float:
    rows = torch.arange(SHAPE[0], device=device)

    def gradients() -> Iterator[Tensor]:
        for step, grad in enumerate(noise(1000, device)):
            yield grad * (rows % 100 == step % 100)[:, None]

    return error_of_way(make, gradients, torch.ones(SHAPE, dtype=torch.bool, device=device))[1]


def wide_range(make: Make, factor: int, device: torch.device) -> tuple[float, float]:
    is_wide = torch.arange(SHAPE[1], device=device) % 128 == 0

    def gradients() -> Iterator[Tensor]:
        return (torch.where(is_wide, factor * grad, grad) for grad in noise(400, device))

    return error_of_way(make, gradients, ~is_wide.expand(SHAPE))


def small_updates(make: Make, lr: float, device: torch.device) -> float:
    param = nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16, device=device))
    optimizer = make([param], lr=lr, betas=BETAS, weight_decay=0.0)
    for _ in range(2000):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return abs(float(param.detach().float().mean()) - (1 - 2000 * lr)) / (2000 * lr)


def state_row(name: str, make: Make, device: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "silent": silent_halves(make, device), "rare": rare_rows(make, device)}
    for factor in FACTORS:
        row[f"largest_{factor}"], row[f"error_{factor}"] = wide_range(make, factor, device)
    return row


def master_row(name: str, make: Make, device: torch.device) -> dict[str, Any]:
    return {"name": name, **{f"error_{lr:g}": small_updates(make, lr, device) for lr in RATES}}


def rows_of(
    makes: dict[str, Make], row: Callable[[str, Make, torch.device], dict[str, Any]], device: torch.device
) -> Sequence[dict[str, Any]]:
    """A peer that fails is a row that says so."""
    rows = []
    for name, make in makes.items():
        try:
            rows.append(row(name, make, device))
        except Exception as error:
            rows.append({"name": name, "failed": f"{type(error).__name__}: {error}"[:200]})
        numbers = (f"{key} {value:.3g}" if isinstance(value, float) else str(value) for key, value in rows[-1].items())
        print("  ".join(numbers), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    report = {
        "machine": machine(device, args.commit),
        "states": rows_of(STATES | installed(STATE_PEERS, device), state_row, device),
        "masters": rows_of(MASTERS | installed(MASTER_PEERS, device), master_row, device),
    }
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
