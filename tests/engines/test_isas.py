"""The CPU engine gives the same bits with every instruction set that it was compiled for, and refuses other names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fused_optim.backends import load_engine

ROOT = Path(__file__).parents[2]
INFO = ROOT / "fused_optim" / "_build_info.json"
STEPS = """
import hashlib, torch
from cases import FORMATS, MASTERS, values
from peers import FusedAdam

digest = hashlib.sha256()
for master in MASTERS[::2]:
    shapes = [(5, 256), (7, 96)]
    groups = [
        {"params": [torch.nn.Parameter(values(shape, master.param_dtype, "cpu", seed=1)) for shape in shapes],
         "exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype}
        for fmt in FORMATS
    ]
    optimizer = FusedAdam(groups, lr=0.01, use_decoupled_grad=True, **master.options)
    for step in range(2):
        for i, param in enumerate(optimizer.store.params):
            param.decoupled_grad = values(tuple(param.shape), torch.float32, "cpu", seed=100 * step + i, spread=2.0)
        optimizer.step()
    for param in optimizer.store.params:
        layout = optimizer.store.layouts[param]
        for tensor in (param, layout.scales, *optimizer.state[param].values()):
            if tensor is not None:
                digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def start(isa: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = {**os.environ, "PYTHONPATH": paths, "FUSED_OPTIM_CPU_ISA": isa, "FUSED_OPTIM_BACKEND": "cpu"}
    command = [sys.executable, "-c", STEPS]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
@pytest.mark.skipif(load_engine("cpu")[0] is None, reason="no cpu engine")
def test_instruction_sets_give_the_same_bits() -> None:
    isas = json.loads(INFO.read_text())["cpu"]["isas"]
    processes = {isa: start(isa) for isa in [*isas, "sse9"]}
    outputs = {isa: process.communicate() for isa, process in processes.items()}
    assert processes.pop("sse9").returncode != 0
    assert "FUSED_OPTIM_CPU_ISA=sse9: expected baseline, avx2 or avx512" in outputs.pop("sse9")[1]
    assert [process.returncode for process in processes.values()] == [0] * len(isas), outputs
    assert len({digest for digest, _ in outputs.values()}) == 1, outputs
