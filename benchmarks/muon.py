"""Muon's steps beside torch.optim.Muon's, orthogonalization by itself, and the passes over elements beside a copy.

    python benchmarks/muon.py --output FILE

Hidden matrices of Llama 3.2 1B and Llama 3 8B, and all parameters of Llama 3.2 1B, on one GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon as torch_muon

from fused_optim import FusedMuon
from fused_optim.backends.products import Products, TorchProducts, fast_products
from fused_optim.matrices.gram import orthogonalized_together
from fused_optim.matrices.newton_schulz import coefficients_of, orthogonalized
from fused_optim.rules import Orthogonalization
from muon_owners import layer
from step import copy_bandwidth, machine, timed, write

Shapes = list[tuple[int, ...]]
BF16 = torch.bfloat16
JORDAN = (3.4445, -4.7750, 2.0315)

MATRICES: dict[str, Shapes] = {
    "Llama 3.2 1B": layer(2048, 512, 8192) * 16,
    "Llama 3 8B": layer(4096, 1024, 14336) * 32,
}
_VOCABULARY = 128256
OTHERS: Shapes = [(_VOCABULARY, 2048), *[(2048,)] * 33]  # of Llama 3.2 1B


# --- steps ------------------------------------------------------------------------------------------------------------


def made(shapes: Shapes, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    params = []
    for shape in shapes:
        param = (0.02 * torch.randn(shape, device="cuda", generator=generator)).to(dtype).requires_grad_()
        param.grad = (1e-3 * torch.randn(shape, device="cuda", generator=generator)).to(dtype)
        params.append(param)
    return params


class Several:
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def torch_whole(params: list[Tensor]) -> Several:
    matrices = [param for param in params if param.dim() == 2 and len(param) != _VOCABULARY]
    others = [param for param in params if param.dim() == 1 or len(param) == _VOCABULARY]
    muon = torch.optim.Muon(matrices, lr=1e-3)
    return Several(muon, *([torch.optim.AdamW(others, lr=1e-3, fused=True)] if others else []))


def ours(params: list[Tensor], **options: Any) -> FusedMuon:
    matrices = [param for param in params if param.dim() == 2 and len(param) != _VOCABULARY]
    others = [param for param in params if param.dim() == 1 or len(param) == _VOCABULARY]
    groups: list[dict[str, Any]] = [{"params": matrices}]
    if others:
        groups.append({"params": others, "algorithm": "adamw"})
    return FusedMuon(groups, lr=1e-3, **options)


# Dtype of parameters, and what is made of them.
STEPS: dict[str, tuple[torch.dtype, Callable[[list[Tensor]], Any]]] = {
    "torch Muon BF16": (BF16, torch_whole),
    "FusedMuon BF16, BF16 momentum, no master": (BF16, partial(ours, state_dtype="bfloat16", master_bits=0)),
    "FusedMuon BF16, FP32 momentum": (BF16, ours),
    "FusedMuon BF16, FP8 momentum": (BF16, partial(ours, state_dtype="fp8")),
    "FusedMuon BF16, int8 momentum": (BF16, partial(ours, state_dtype="int8")),
    "torch Muon FP32": (torch.float32, torch_whole),
    "FusedMuon FP32": (torch.float32, ours),
    "FusedMuon FP32, int8 momentum": (torch.float32, partial(ours, state_dtype="int8")),
}


def measure_step(name: str, shapes: Shapes, repeats: int) -> dict[str, Any]:
    dtype, build = STEPS[name]
    params = made(shapes, dtype)
    numel = sum(param.numel() for param in params)
    before = torch.cuda.memory_allocated()
    optimizer = build(params)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    device, host = timed(optimizer.step, torch.device("cuda", 0), repeats)
    return {
        "ms": statistics.median(device),
        "all_ms": device,
        "host_ms": statistics.median(host),
        "state_bytes_per_param": (held - before) / numel,
        "temporary_bytes": torch.cuda.max_memory_allocated() - held,
        "kernels_ms": kernels_of(optimizer.step) if isinstance(optimizer, FusedMuon) else {},
    }


_KERNELS = {
    "matrix_product": "products",
    "normalize": "normalize",
    "add_squares": "normalize",
    "Rule)2": "momentum pass",
    "Rule)3": "descent pass",
}


def kernels_of(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of kernels in one step, by what they do."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        what = next((what for key, what in _KERNELS.items() if key in event.key), "other")
        found[what] = found.get(what, 0.0) + event.self_device_time_total / 1e3
    return found


def pass_bytes(name: str, numel: int) -> dict[str, float]:
    """Of gradients and momenta in, momenta and updates out; of updates and parameters in, parameters out."""
    element = 2 if "BF16," in name else 4
    state = 1 if "int8" in name or "FP8" in name else 2 if "BF16 momentum" in name else 4
    master = 2 if "BF16," in name and "no master" not in name else 0
    scales = 4 / 128 if state == 1 else 0.0
    return {
        "momentum pass": numel * (element + 2 * (state + scales) + 2),
        "descent pass": numel * (2 + 2 * (element + master)),
    }


def steps(workload: str, shapes: Shapes, names: Iterable[str], repeats: int, bandwidth: float) -> list[dict[str, Any]]:
    rows = []
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    for name in names:
        row: dict[str, Any] = {"name": name}
        try:
            row |= measure_step(name, shapes, repeats)
        except Exception as error:  # one that fails must not hide the others' results
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        shares = {
            what: 1e3 * size / bandwidth / row["kernels_ms"][what]
            for what, size in pass_bytes(name, numel).items()
            if row.get("kernels_ms", {}).get(what) and shapes in MATRICES.values()
        }
        row["passes_share_of_copy"] = shares
        rows.append(row)
        short = {key: round(value, 2) for key, value in row.get("kernels_ms", {}).items()}
        line = f"{row.get('ms', 0):9.2f} ms host {row.get('host_ms', 0):7.2f}"
        line += f" state {row.get('state_bytes_per_param', 0):5.2f} temp {row.get('temporary_bytes', 0) / 2**20:6.0f}"
        print(f"{workload:7}{name:42}{line} MB", short, row.get("error", ""), flush=True)
        print({key: round(value, 3) for key, value in shares.items()}, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return rows


# --- orthogonalization ------------------------------------------------------------------------------------------------


def how(name: str | tuple[float, float, float], count: int, dtype: torch.dtype = BF16) -> Orthogonalization:
    return Orthogonalization(coefficients_of(name, count), eps=1e-7, dtype=dtype, scale=unscaled)


def unscaled(rows: int, columns: int) -> float:
    return 1.0


def as_torch(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch_muon._zeropower_via_newtonschulz(x, JORDAN, 5, 1e-7) for x in values]


def plain(values: Sequence[Tensor], kind: Orthogonalization) -> list[Tensor]:
    return [orthogonalized(x, kind) for x in values]


def gram(values: Sequence[Tensor], kind: Orthogonalization, products: Products) -> list[Tensor]:
    return orthogonalized_together(values, kind, products)


def peers(values: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """gram-newton-schulz, where it is installed; its kernels need quack. It is given the matrices stacked."""
    if importlib.util.find_spec("gram_newton_schulz") is None:
        return {}
    has_kernels = importlib.util.find_spec("quack") is not None
    module = importlib.import_module("gram_newton_schulz")
    together = module.GramNewtonSchulz(ns_use_kernels=has_kernels, ns_coefficients=[[*JORDAN]] * 5)
    name = "gram-newton-schulz" if has_kernels else "gram-newton-schulz, torch's products"
    return {name: partial(together.__call__, torch.stack([*values]))}  # of the object: compiled


def sigmas(x: Tensor) -> Tensor:
    """Singular values in FP64."""
    x = x.double()
    square = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
    return torch.linalg.eigvalsh(square).clamp_(min=0.0).sqrt_()


def exact(x: Tensor, coefficients: Iterable[tuple[float, float, float]]) -> Tensor:
    values = sigmas(x)
    values = values / values.square().sum().sqrt()
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    return values


def decaying(shape: tuple[int, int]) -> Tensor:
    """A matrix whose singular values fall off as those of gradients do, over four decades."""
    rows, columns = shape
    rank = min(shape)
    left, right = torch.randn(rows, rank, device="cuda"), torch.randn(rank, columns, device="cuda")
    return left * torch.logspace(0, -4, rank, device="cuda") @ right


def orthogonalizations(repeats: int, has_errors: bool) -> list[dict[str, Any]]:
    products = fast_products(torch.device("cuda", 0))
    assert products is not None
    cases: list[tuple[str, tuple[int, int], int]] = [
        ("4 square", (2048, 2048), 4),
        ("6 wide", (2048, 8192), 6),
        ("6 tall", (8192, 2048), 6),
        ("8 small", (512, 2048), 8),
        ("2 square", (4096, 4096), 2),
        ("2 wide", (4096, 14336), 2),
    ]
    rows = []
    for title, shape, count in cases:
        for kind in ("normal", "decaying") if has_errors else ("normal",):
            torch.manual_seed(0)
            make = decaying if kind == "decaying" else partial(torch.randn, device="cuda")
            values = [make(shape).to(BF16) for _ in range(count)]
            row: dict[str, Any] = {"case": title, "shape": shape, "values": kind}
            forms: dict[str, tuple[Callable[[], Any], Orthogonalization]] = {
                "torch": (partial(as_torch, values), how(JORDAN, 5)),
                "plain": (partial(plain, values, how(JORDAN, 5)), how(JORDAN, 5)),
                "Gram, cuBLAS": (partial(gram, values, how(JORDAN, 5), TorchProducts()), how(JORDAN, 5)),
                "ours": (partial(gram, values, how(JORDAN, 5), products), how(JORDAN, 5)),
                "plain, Polar Express": (
                    partial(plain, values, how("polar_express", 6)),
                    how("polar_express", 6),
                ),
                "ours, Polar Express": (
                    partial(gram, values, how("polar_express", 6), products),
                    how("polar_express", 6),
                ),
                **{name: (do, how(JORDAN, 5)) for name, do in peers(values).items()},
            }
            for name, (do, kind_of) in forms.items():
                if kind == "normal":
                    do()
                    row[f"{name}: ms"] = statistics.median(timed(do, torch.device("cuda", 0), repeats)[0])
                if has_errors and min(shape) <= 2048 and name != "Gram, cuBLAS":
                    found, wanted = sigmas(do()[0]), exact(values[0], kind_of.coefficients)
                    row[f"{name}: mean |sigma - 1|"] = float((found - 1.0).abs().mean())
                    row[f"{name}: exact mean |sigma - 1|"] = float((wanted - 1.0).abs().mean())
                    row[f"{name}: largest sigma"] = float(found.max())
                    row[f"{name}: error of sigma"] = float((found.sort().values - wanted.sort().values).abs().mean())
            rows.append(row)
            print(title, kind, {key: round(value, 4) for key, value in row.items() if ": ms" in key}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parts = ["orthogonalization", "1B", "8B", "whole"]
    parser.add_argument("--only", nargs="*", default=parts, help="'times': of orthogonalizations, without their errors")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    bandwidth = copy_bandwidth(device)
    report: dict[str, Any] = {"machine": machine(device, args.commit), "copy_bytes_per_s": bandwidth, "steps": {}}
    print(report["machine"], f"copy {bandwidth / 1e12:.2f} TB/s")
    torch.cuda.empty_cache()
    if not {"orthogonalization", "times"}.isdisjoint(args.only):
        report["orthogonalization"] = orthogonalizations(args.repeats, has_errors="orthogonalization" in args.only)
    few = ["torch Muon BF16", "FusedMuon BF16, FP32 momentum", "FusedMuon BF16, int8 momentum"]
    for workload, shapes, names in (
        ("1B", MATRICES["Llama 3.2 1B"], list(STEPS)),
        ("8B", MATRICES["Llama 3 8B"], few),
        ("whole", MATRICES["Llama 3.2 1B"] + OTHERS, few),
    ):
        if workload in args.only:
            report["steps"][workload] = steps(workload, shapes, names, args.repeats, bandwidth)
        write(report, args.output)


if __name__ == "__main__":
    main()
