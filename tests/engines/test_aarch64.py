"""The CPU engine's updates store the same bits on aarch64 as on x86-64, with all instruction sets; NaNs stay NaNs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from build_script import load_build_script

PROGRAM = "tests/engines/update_bits.cpp"
CROSS_COMPILER = "aarch64-linux-gnu-g++"


def find(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no {' or '.join(names)}: .ci/run installs g++-aarch64-linux-gnu and qemu-user-static")


def compile_program(script: Any, cxx: str, folder: Path) -> Path:
    """From the objects of the engine that updates need, each by setup.py's command."""
    folder.mkdir()
    plan = script.plan_cpu(cxx)
    objects = []
    for name in ["launch", "threads", *plan.details["isas"]]:
        source, command = plan.objects[name]
        objects.append(str(folder / f"{name}.o"))
        subprocess.run([*command, "-c", source, "-o", objects[-1]], check=True)
    program = folder / "update_bits"
    subprocess.run([cxx, *script.CXX_FLAGS, "-static", PROGRAM, *objects, "-o", program], check=True)
    return program


def stored_bits(command: list[str], isa: str) -> list[str]:
    environment = {**os.environ, "FUSED_OPTIM_CPU_ISA": isa}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.timeout(900)  # an emulated processor
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64, which this processor is not")
def test_updates_store_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cross, qemu = find(CROSS_COMPILER), find("qemu-aarch64", "qemu-aarch64-static")
    script = load_build_script(monkeypatch)
    monkeypatch.setattr(script, "bindings", lambda *_: None)
    native_program = str(compile_program(script, script.find_cxx(), tmp_path / "native"))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    runs = {isa: ([native_program], isa) for isa in ("baseline", "avx2", "avx512")}
    runs["aarch64"] = ([qemu, str(compile_program(script, cross, tmp_path / "aarch64"))], "")
    with ThreadPoolExecutor(2) as pool:
        bits = dict(zip(runs, pool.map(lambda run: stored_bits(*run), runs.values())))
    expected = bits.pop("baseline")
    assert len(set(expected)) == len(expected) > 100_000
    for name, lines in bits.items():
        assert len(lines) == len(expected), name
        differing = [f"{line} on {name}, not {own}" for line, own in zip(lines, expected) if line != own]
        assert not differing, f"{len(differing)} of {len(lines)} differ, such as\n" + "\n".join(differing[:20])
