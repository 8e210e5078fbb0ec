"""What it costs to take changes, and what is sent: takes, and files of two streams of real gradients.

``python benchmarks/changes.py --output FILE [--only takes streams]`` on one GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from byte_gpt import ByteGPT, load_corpus, training_batch
from fused_optim import FusedAdam, FusedAdamW
from fused_optim.compat import transformer_engine
from fused_optim.quantized import Float8BlockScaling, Float8DelayedScaling, MXFP8BlockScaling, quantize_model_
from fused_optim.state.published import parts_of
from fused_optim.wire import write_changes
from step import copy_bandwidth, llama_shapes, machine, timed

TAKES = 9
SLOWEST = 4  # kernels of a take that are named


class Weights(nn.Module):
    """Llama 3.2 1B's parameters, matrices as linear layers."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.norms = nn.ParameterList()
        for shape in llama_shapes():
            if len(shape) == 2:
                self.layers.append(nn.Linear(shape[1], shape[0], bias=False, device=device, dtype=dtype))
            else:
                self.norms.append(torch.ones(shape, device=device, dtype=dtype))


CASES: dict[str, tuple[torch.dtype, Any, dict[str, Any]]] = {
    "BF16, 16-bit remainder, int8 states": (torch.bfloat16, None, {"state_dtype": "int8"}),
    "BF16, FP32 master, FP32 states": (torch.bfloat16, None, {"master_weights": True}),
    "FP32": (torch.float32, None, {}),
    "MXFP8, FP32 master, int8 states": (torch.bfloat16, MXFP8BlockScaling(), {"state_dtype": "int8"}),
    "FP8 delayed, FP32 master, int8 states": (torch.bfloat16, Float8DelayedScaling(), {"state_dtype": "int8"}),
    "FP8 blocks of 128 x 128, FP32 master, int8 states": (
        torch.bfloat16,
        Float8BlockScaling(),
        {"state_dtype": "int8"},
    ),
}


def build(case: str, device: torch.device) -> tuple[Weights, FusedAdam]:
    dtype, recipe, options = CASES[case]
    torch.manual_seed(0)
    model = Weights(dtype, device)
    if recipe is not None:
        quantize_model_(model, recipe)
    kind = transformer_engine.FusedAdam if "master_weights" in options else FusedAdamW
    optimizer = kind(model.parameters(), lr=1e-6, weight_decay=0.01, **options)
    for param in model.parameters():
        param.grad = (1e-3 * torch.randn(param.shape, device=device)).to(dtype)
    return model, optimizer


def takes(device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        model, optimizer = build(case, device)
        row: dict[str, Any] = {"case": case, "parameters": sum(param.numel() for param in model.parameters())}
        row["copy_ms"] = copy_of_weights(model, device)
        for where in ("device", "host"):
            optimizer.step()  # which makes states
            before = torch.cuda.memory_allocated(device)
            optimizer.track_changes(where=where)
            row[where] = {"bytes_on_device": torch.cuda.memory_allocated(device) - before}
            for lr in (1e-6, 3e-4):
                optimizer.param_groups[0]["lr"] = lr
                row[where][str(lr)] = found = take(model, optimizer, device)
                print(case, where, lr, found, file=sys.stderr, flush=True)
            optimizer.track_changes(False)
        rows.append(row)
        del model, optimizer
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def take(model: Weights, optimizer: FusedAdam, device: torch.device) -> dict[str, Any]:
    """Milliseconds until the changes of one step are there, and how many those are; of one take those of the device."""
    times, on_host, changed = [], [], 0
    for _ in range(TAKES):
        optimizer.take_changes(model)
        optimizer.step()
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        taken = optimizer.take_changes(model)
        on_host.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
        changed = sum(each.indices.numel() for each in taken.values())
        del taken
    optimizer.step()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.take_changes(model)
        torch.cuda.synchronize(device)
    launched: dict[str, list[float]] = {}
    for event in profile.events() or ():
        if event.device_time_total:
            launched.setdefault(event.name, []).append(event.device_time_total / 1e3)
    slowest = sorted(launched.items(), key=lambda item: -sum(item[1]))[:SLOWEST]
    return {
        "take_ms": statistics.median(times),
        "take_returns_ms": statistics.median(on_host),
        "take_device_ms": sum(map(sum, launched.values())),
        "take_launches": sum(map(len, launched.values())),
        "take_slowest": {name[:100]: [len(each), sum(each)] for name, each in slowest},
        "changed": changed,
    }


def copy_of_weights(model: Weights, device: torch.device) -> float:
    """What a snapshot of all that is published takes on the device."""
    tensors = []
    for param in model.parameters():
        tensors += [*getattr(param, "components", {"": param.detach()}).values()]
    targets = [torch.empty_like(tensor) for tensor in tensors]
    return statistics.median(timed(lambda: torch._foreach_copy_(targets, tensors), device, 10)[0])


# --- streams ------------------------------------------------------------------------------------------------------


def stream(name: str, device: torch.device, recipe: Any = None) -> dict[str, Any]:
    """A byte-level GPT in BF16: pretrained at 3e-4, then with advantages at 1e-6, as policy gradients are."""
    torch.manual_seed(0)
    width, layers, steps = (768, 8, 100) if device.type == "cuda" else (192, 3, 40)
    model = ByteGPT(width, layers, width // 64).to(device, torch.bfloat16)
    if recipe is not None:
        quantize_model_(model, recipe, lambda module, _: isinstance(module, nn.Linear) and module.out_features > 256)
    corpus, _ = load_corpus()
    optimizer = FusedAdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.track_changes()
    numel = sum(param.numel() for param in model.parameters())
    parts = [parts_of(param) for param in model.parameters()]
    full = sum(part.nbytes for each in parts for part in each.values())
    found: dict[str, Any] = {"name": name, "parameters": numel, "full_bytes": full}
    found["pretraining, each step"] = _publish(model, optimizer, corpus, range(steps + 10), 1, steps, device)
    found["pretraining, every 10 steps"] = _publish(model, optimizer, corpus, range(200, 230), 10, 200, device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.999), weight_decay=0.0)
    optimizer.track_changes()
    found["RL-like, each step"] = _publish(model, optimizer, corpus, range(1000, 1020), 1, 1005, device, True)
    return found


def _publish(
    model: ByteGPT,
    optimizer: FusedAdam,
    corpus: Any,
    steps: range,
    every: int,
    measured: int,
    device: torch.device,
    advantages: bool = False,
) -> dict[str, float]:
    """Means over the publications from step ``measured`` on."""
    sizes, changed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for step in steps:
            gradients(model, corpus, step, device, advantages)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % every == 0:
                taken = optimizer.take_changes(model)
                if step >= measured:
                    sizes.append(write_changes(taken, os.path.join(folder, "file"), base=step, step=step + 1))
                    changed.append(sum(each.indices.numel() for each in taken.values()))
    return {"file_bytes": statistics.mean(sizes), "changed": statistics.mean(changed), "publications": len(sizes)}


def gradients(model: ByteGPT, corpus: Any, step: int, device: torch.device, advantages: bool) -> None:
    """Of the loss, or, one sequence after the other, of it times an advantage: normal numbers with mean 0."""
    rows = 32 if device.type == "cuda" else 8
    batch: Tensor = training_batch(corpus, 0, step, rows, 129).to(device)
    if not advantages:
        model(batch).backward()
        return
    weights = torch.randn(rows, generator=torch.Generator().manual_seed(step))
    weights = ((weights - weights.mean()) / weights.std()).tolist()
    for sequence, weight in zip(batch.split(1), weights, strict=True):
        (model(sequence) * weight / rows).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--only", nargs="+", choices=("copy_bandwidth", "takes", "streams"))
    parser.add_argument("--cases", nargs="+", help="those of CASES whose names begin so")
    parser.add_argument("--device", default="cuda:0", help="of the streams, which say the same on a CPU")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    for case in [*CASES] if arguments.cases else ():
        if not case.startswith(tuple(arguments.cases)):
            del CASES[case]
    parts: dict[str, Callable[[], Any]] = {
        "copy_bandwidth": lambda: copy_bandwidth(device),
        "takes": lambda: takes(device),
        "streams": lambda: [stream("BF16", device), stream("FP8 blocks of 128 x 128", device, Float8BlockScaling())],
    }
    result: dict[str, Any] = {"machine": machine(device, arguments.commit)}
    for name in arguments.only or parts:
        part = parts[name]
        result[name] = part()
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
