"""The documented way to another update rule, examples/nadamw: without a build, and in an engine built with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NADAMW = ROOT / "examples/nadamw"

# The algorithm in double precision, sharded states, a state dict, and what an unknown option says.
REFERENCE = """
import sys, warnings
import pytest, torch
from torch import nn

sys.path.insert(0, sys.argv[1])
from nadamw import FusedNAdamW

torch.manual_seed(0)
param = nn.Parameter(torch.randn(40, 128))
expected, m, v = param.detach().double(), torch.zeros(40, 128).double(), torch.zeros(40, 128).double()
optimizer = FusedNAdamW([param], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for step in range(1, 21):
        param.grad = torch.randn(40, 128)
        g = param.grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        update = (0.9 * m + 0.1 * g) / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
        expected = expected * (1 - 1e-2 * 0.1) - 1e-2 * update
        optimizer.step()
has_engine = sys.argv[2] == "built"
assert [str(one.message).count("built without the update rule nadamw") for one in told] == ([] if has_engine else [1])
assert optimizer.summary()["formats"][0]["backend"] == ("cpu" if has_engine else "torch")
torch.testing.assert_close(param.detach().double(), expected, rtol=1e-5, atol=1e-5)
other = FusedNAdamW([nn.Parameter(param.detach().clone())], lr=1e-2, betas=(0.9, 0.99), state_dtype="int8")
other.load_state_dict(optimizer.state_dict())
assert other.state[other.param_groups[0]["params"][0]]["exp_avg"].dtype == torch.int8
assert other.param_groups[0]["step"] == 20
with pytest.raises(TypeError, match="offload_state.*did you mean offload_states"):
    FusedNAdamW([param], offload_state=True)
with pytest.raises(ValueError, match="another optimizer: expected the update rule adam, found nadamw"):
    from fused_optim import FusedAdamW
    FusedAdamW([param]).load_state_dict(optimizer.state_dict())
"""

# The same bits in all formats and masters.
ENGINE = """
import os, sys
import torch
from torch import nn

sys.path.insert(0, sys.argv[1])
from nadamw import FusedNAdamW

def trained(backend, dtype, **options):
    os.environ["FUSED_OPTIM_BACKEND"] = backend
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(33, 128, generator=generator).to(dtype))
    optimizer = FusedNAdamW([param], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, **options)
    for _ in range(4):
        param.grad = torch.randn(33, 128, generator=generator).to(dtype)
        optimizer.step()
    return [param.detach(), *optimizer.state[param].values()]

for dtype in (torch.float32, torch.bfloat16):
    for fmt in ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8"):
        for bits in (32, 24, 0):
            found = [trained(name, dtype, state_dtype=fmt, master_bits=bits) for name in ("torch", "cpu")]
            assert all(torch.equal(*pair) for pair in zip(*found)), (dtype, fmt, bits)
"""

BUILD = """
import subprocess, sys
subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], check=True)
"""


def run(code: str, tree: Path, *arguments: str, **environment: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_OPTIM_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tree,
        env={**kept, "PYTHONPATH": str(tree), **environment},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reference_needs_no_build() -> None:
    run(REFERENCE, ROOT, str(NADAMW), "not built")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_engine_is_built_with_the_rule(tmp_path: Path) -> None:
    """In a copy of the sources, of which nothing is changed."""
    if os.environ.get("CXX") is None and not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    shutil.copytree(ROOT / "fused_optim", tree / "fused_optim", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "setup.py", tree)
    table = str(NADAMW / "nadamw.toml")
    run(BUILD, tree, FUSED_OPTIM_RULES=table, FUSED_OPTIM_REQUIRE="cpu", FUSED_OPTIM_CUDA_ARCHS="none")
    run(REFERENCE, tree, str(NADAMW), "built")
    run(ENGINE, tree, str(NADAMW))
