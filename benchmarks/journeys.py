"""How far one reads to follow a step, a save or a load: files and functions of the package that it enters.

A journey is made until its caches are warm, then once more while ``sys.setprofile`` sees each call of the package's
Python. ``jumps``: consecutive calls in different files. Counts are the same on every machine; saves and loads include
their threads, whose order moves jumps a little. On CPUs: ``python benchmarks/journeys.py [--output journeys.json]``.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fused_optim
from fused_optim import FusedAdamW, FusedMuon, muon_param_groups
from fused_optim.checkpoint import Checkpointer
from fused_optim.quantized import Float8CurrentScaling, quantize_model_
from fused_optim.wire import apply_changes, write_changes
from step import machine, write

ROOT = Path(__file__).parents[1]
PACKAGE = str(Path(fused_optim.__file__).parent)
KINDS = {"python": (".py",), "cpp": (".h", ".cpp", ".cu", ".cuh")}
Row = dict[str, Any]


@contextmanager
def journey(rows: list[Row], name: str) -> Iterator[None]:
    """Appends a row for the calls that are made inside, those of threads that start inside included."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    files = [file for file, _ in calls]
    jumps = sum(before != after for before, after in zip([None, *files], files, strict=False))
    counts = {"files": len(set(files)), "functions": len(set(calls)), "calls": len(calls), "jumps": jumps}
    rows.append({"journey": name, **counts})


def model_of(layers: int, width: int = 64, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers))).bfloat16()


def loss_of(model: nn.Module, width: int = 64) -> Tensor:
    return model(torch.randn(8, width, dtype=torch.bfloat16)).float().square().mean()  # type: ignore[no-any-return]


def steps(rows: list[Row]) -> None:
    model = model_of(73)  # 146 tensors
    optimizer = FusedAdamW(model.named_parameters(), lr=1e-3, state_dtype="int8", master_bits=24)
    for last in (False, False, False, True):
        loss_of(model).backward()
        if last:
            with journey(rows, "AdamW, a usual step"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    for last in (False, True):
        loss_of(model).backward()
        if last:
            with journey(rows, "clip_grad_norm_"):
                optimizer.clip_grad_norm_(1.0)
        else:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def muon(rows: list[Row]) -> None:
    """On one rank: what is entered is the same as on more."""
    mesh, model = init_device_mesh("cpu", (1,)), model_of(4)
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    optimizer = FusedMuon(muon_param_groups(model, lr=1e-3), lr=1e-3)
    for last in (False, False, False, True):
        loss_of(model).backward()
        if last:
            with journey(rows, "Muon under FSDP2, a usual step"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()


def checkpoints(rows: list[Row], folder: str) -> None:
    model = model_of(10)
    optimizer = FusedAdamW(model.named_parameters(), lr=1e-3, state_dtype="int8", master_bits=24)
    loss_of(model).backward()
    optimizer.step()
    with journey(rows, "first save, constructor included"):
        checkpointer = Checkpointer(model, optimizer, folder)
        checkpointer.save(1)
        checkpointer.wait()
    optimizer.step()
    with journey(rows, "second save"):
        checkpointer.save(2)
        checkpointer.wait()
    with journey(rows, "load_latest"):
        checkpointer.load_latest()
    checkpointer.close()


def quantized(rows: list[Row], compute: str) -> None:
    model, width = model_of(2, 128, bias=False), 128
    quantize_model_(model, Float8CurrentScaling(compute=compute))
    for _ in range(2):
        loss_of(model, width).backward()
    x = torch.randn(32, width, dtype=torch.bfloat16, requires_grad=True)
    with journey(rows, f"quantized linear, {compute}, forward"):
        out = model[1](x)
    loss = out.float().square().mean()
    with journey(rows, f"quantized linear, {compute}, backward"):
        loss.backward()


def changes(rows: list[Row], folder: str) -> None:
    model = model_of(10)
    server = copy.deepcopy(model)
    optimizer = FusedAdamW(model.named_parameters(), lr=1e-3, state_dtype="int8", master_bits=24)
    optimizer.track_changes()
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    with journey(rows, "take_changes"):
        taken = optimizer.take_changes(model)
    write_changes(taken, f"{folder}/changes.safetensors", base=0, step=2)
    with journey(rows, "apply_changes"):
        apply_changes(server, f"{folder}/changes.safetensors", base=0)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), server.parameters(), strict=True))


def lines_by_room() -> dict[str, Counter[str]]:
    """Lines of the files that git knows: by kind, then by the folder below the package, csrc/ or tests/."""
    found: dict[str, Counter[str]] = {"python": Counter(), "cpp": Counter(), "tests": Counter()}
    listed = subprocess.run(
        ["git", "ls-files", "fused_optim", "csrc", "tests"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.split():
        path = ROOT / name
        kinds = [kind for kind, ends in KINDS.items() if path.suffix in ends]
        if not kinds or not path.exists():
            continue
        top, *folders = path.relative_to(ROOT).parent.parts
        kind = "tests" if top == "tests" else kinds[0]
        found[kind]["/".join((top, *folders[-1 if top == "csrc" else 0 :][:1]))] += len(path.read_bytes().splitlines())
    return found


def all_journeys() -> list[Row]:
    rows: list[Row] = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        steps(rows)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        muon(rows)
        dist.destroy_process_group()
        checkpoints(rows, f"{folder}/run")
        for compute in ("decode", "fp8"):
            quantized(rows, compute)
        changes(rows, folder)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    rows, lines = all_journeys(), lines_by_room()
    print(f"{'journey':36}{'files':>6}{'functions':>11}{'calls':>8}{'jumps':>7}")
    for row in rows:
        print(f"{row['journey']:36}{row['files']:6}{row['functions']:11}{row['calls']:8}{row['jumps']:7}")
    for kind, rooms in lines.items():
        print(f"{kind}: {sum(rooms.values())} lines")
    write({"machine": machine(torch.device("cpu"), ""), "journeys": rows, "lines": lines}, output)
