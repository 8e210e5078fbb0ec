"""What the format of Muon's momentum does to updates and to training: a small byte-level GPT.

    python benchmarks/muon_formats.py --output FILE

Updates: optimizers with each format are given the gradients of the run with FP32 momentum; after the last step their
momenta and what Newton-Schulz steps (in FP32) make of these are compared. Losses: runs with each format, beside AdamW.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_optim import FusedAdamW, FusedMuon, muon_param_groups
from fused_optim.matrices.newton_schulz import coefficients_of, orthogonalized
from fused_optim.rules import Orthogonalization
from step import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from byte_gpt import ByteGPT, evaluation_batches, load_corpus, training_batch

FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
HEADS = 4
# Width, layers, bytes of a window, windows of a batch.
SIZES = {"cuda": (256, 6, 256, 32), "cpu": (128, 2, 128, 8)}
LR, ADAMS_LR, WARMUP = 0.02, 2e-3, 20
BETA = 0.95


def unscaled(rows: int, columns: int) -> float:
    return 1.0


FORMS = {
    "original": Orthogonalization(coefficients_of("original", 5), 1e-7, torch.float32, unscaled),
    "polar_express": Orthogonalization(coefficients_of("polar_express", 6), 1e-7, torch.float32, unscaled),
}


def rate(step: int, steps: int) -> float:
    """Of the highest learning rate: a warm-up, then linearly to a tenth."""
    return min(1.0, (step + 1) / WARMUP) * (1.0 - 0.9 * step / steps)


def optimizer_of(model: nn.Module, kind: str) -> FusedMuon | FusedAdamW:
    if kind == "AdamW":
        return FusedAdamW(model.parameters(), lr=ADAMS_LR, betas=(0.9, 0.95), weight_decay=0.1)
    groups = muon_param_groups(model)
    for group in groups:
        if group["algorithm"] == "adamw":
            group |= {"lr": ADAMS_LR, "betas": (0.9, 0.95)}
    return FusedMuon(groups, lr=LR, momentum_dtype=kind)


class Shadow:
    """An optimizer of copies of a model's hidden matrices, which is given the model's gradients."""

    def __init__(self, matrices: list[Tensor], kind: str) -> None:
        self.copies = [nn.Parameter(matrix.detach().clone()) for matrix in matrices]
        self.optimizer = FusedMuon(self.copies, lr=0.0, momentum_dtype=kind)

    def step(self, matrices: list[Tensor]) -> None:
        for copy, matrix in zip(self.copies, matrices, strict=True):
            copy.grad = matrix.grad
        self.optimizer.step()

    def momenta(self) -> list[Tensor]:
        return [self.optimizer.get_unscaled_state(copy, "momentum_buffer") for copy in self.copies]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def errors_of(shadow: Shadow, exact: Shadow, matrices: list[Tensor]) -> dict[str, Any]:
    """Relative errors in the Frobenius norm, the median of all matrices."""
    found: dict[str, list[float]] = {}
    for own, right, matrix in zip(shadow.momenta(), exact.momenta(), matrices, strict=True):
        assert matrix.grad is not None
        found.setdefault("momentum", []).append(relative(own, right))
        nesterov = [momentum.lerp(matrix.grad.float(), 1.0 - BETA) for momentum in (own, right)]
        for name, how in FORMS.items():
            made = [orthogonalized(update.contiguous(), how) for update in nesterov]
            found.setdefault(f"update, {name}", []).append(relative(*made))
    return {key: statistics.median(values) for key, values in found.items()}


def train(kind: str, seed: int, steps: int, shadowed: bool, device: str) -> dict[str, Any]:
    torch.manual_seed(seed)
    width, layers, length, windows = SIZES[device]
    model = ByteGPT(width, layers, HEADS).to(device)
    optimizer = optimizer_of(model, kind)
    highest = [group["lr"] for group in optimizer.param_groups]
    matrices: list[Tensor] = [
        param for name, param in model.named_parameters() if "blocks" in name and param.dim() == 2
    ]
    shadows = {fmt: Shadow(matrices, fmt) for fmt in FORMATS} if shadowed else {}
    corpus, held_out = load_corpus()
    losses, start = [], time.perf_counter()
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, highest, strict=True):
            group["lr"] = lr * rate(step, steps)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(training_batch(corpus, seed, step, windows, length + 1).to(device))
        loss.backward()
        for shadow in shadows.values():
            shadow.step(matrices)
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        batches = evaluation_batches(held_out, 16, 16, length + 1)
        of_held_out = statistics.fmean(model(batch.to(device)).item() for batch in batches)
    result: dict[str, Any] = {
        "held_out_loss": of_held_out,
        "train_loss": statistics.fmean(map(float, losses[-20:])),
        "seconds": time.perf_counter() - start,
    }
    if isinstance(optimizer, FusedMuon):
        numel = sum(matrix.numel() for matrix in matrices)
        stored = [optimizer.state[matrix]["momentum_buffer"].nbytes for matrix in matrices]
        scales = [optimizer.store.layouts[matrix].scales.nbytes for matrix in matrices]
        result["momentum_bytes_per_element"] = (sum(stored) + sum(scales)) / numel
    if shadows:
        exact = shadows["float32"]
        result["errors"] = {fmt: errors_of(shadow, exact, matrices) for fmt, shadow in shadows.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--kinds", nargs="*", default=[*FORMATS, "AdamW"])
    parser.add_argument("--only-losses", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    about = machine(torch.device(args.device), args.commit)
    report: dict[str, Any] = {"machine": about, "steps": args.steps, "runs": {}}
    for seed in args.seeds:
        for kind in args.kinds:
            shadowed = not args.only_losses and kind == "float32" and seed == args.seeds[0]
            run = train(kind, seed, args.steps, shadowed, args.device)
            report["runs"].setdefault(kind, []).append({"seed": seed, **run})
            print(kind, seed, run, flush=True)
            args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
