"""The package needs torch and what torch depends on; an extra that is missing is named in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import torch
from torch import nn

import fresh
from fused_optim import FusedAdamW, save_master_safetensors
from fused_optim.__main__ import main
from fused_optim.quantized import load_quantized_safetensors, save_quantized_safetensors
from fused_optim.tools.conversion import convert_checkpoint

ROOT = Path(__file__).parents[1]
BLOCKING = "import sys\nfor name in {names!r}:\n    sys.modules.setdefault(name, None)\n"


def depends_on(package: str) -> set[str]:
    """Names of distributions, itself included: without those of extras, and whether they are installed or not."""
    found, left = set(), [package]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            try:
                needed = requires(name) or []
            except PackageNotFoundError:
                continue
            left += [normal(each) for each in needed if "extra ==" not in each]
    return found


def normal(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def block_others(folder: Path) -> str:
    """A folder in ``folder`` for PYTHONPATH: nothing can be imported that is installed beside torch."""
    allowed = depends_on("torch") | {"fused-optim"}
    blocked = [name for name, of in packages_distributions().items() if not allowed & {normal(each) for each in of}]
    assert {"numpy", "safetensors", "tqdm", "pytest"} <= set(blocked) and not {"torch", "sympy"} & set(blocked)
    (folder / "startup").mkdir(exist_ok=True)
    (folder / "startup" / "sitecustomize.py").write_text(BLOCKING.format(names=blocked))
    return str(folder / "startup")


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python that has imported torch, and could import nothing else."""
    return fresh.python(fresh.TORCH, (block_others(tmp_path_factory.mktemp("forked")),))


def python(folder: Path, *arguments: str | Path, program: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """A new process, in which nothing can be imported that is installed beside torch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([block_others(folder), str(ROOT)])}
    command = [program, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def test_all_that_needs_no_extra_works(forked: str, tmp_path: Path) -> None:
    for program in (sys.executable, forked):
        blocked = python(tmp_path, "-c", "import numpy", program=program)
        assert "ModuleNotFoundError" in blocked.stderr and "numpy" in blocked.stderr
    done = python(tmp_path, ROOT / ".ci" / "smoke.py", program=forked)
    assert done.returncode == 0, done.stderr


# --- what commands import -----------------------------------------------------------------------------------------


def imported_by(folder: Path, *command: str) -> set[str]:
    done = python(folder, "-X", "importtime", "-m", "fused_optim", *command)
    assert done.returncode == 0, done.stderr
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize("command", ["--version", "--help", "info --help", "inspect --help", "plan --help"])
def test_help_needs_no_torch(command: str, tmp_path: Path) -> None:
    found = imported_by(tmp_path, *command.split())
    assert "fused_optim.tools.commands" in found and "torch" not in found


def test_info_needs_no_optimizer(tmp_path: Path) -> None:
    """Nor what torch takes long to import: a third of the time, or more, would be that of code for DTensors."""
    found = imported_by(tmp_path, "info")
    assert {"torch", "fused_optim.backends"} <= found
    assert not {"torch.distributed.tensor", "torch.distributed.checkpoint", "sympy", "fused_optim.adam"} & found


@pytest.mark.parametrize("arguments", ["", "fused_optim", "-m fused_optim"])
def test_other_programs_get_the_whole_package(arguments: str, forked: str, tmp_path: Path) -> None:
    """Also those that Python is told to run as a module."""
    (tmp_path / "startup" / "program").mkdir(parents=True)
    for name in ("__init__", "__main__"):
        path = tmp_path / "startup" / "program" / f"{name}.py"
        path.write_text("import fused_optim\nprint(fused_optim.FusedAdamW.__name__)\n")
    done = python(tmp_path, "-m", "program", *arguments.split(), program=forked)
    assert done.stdout.split() == ["FusedAdamW"] * 2, done.stderr


# --- extras that are missing --------------------------------------------------------------------------------------


def block(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint, and a file that pretends to be one of safetensors."""
    model = nn.Linear(64, 32)
    optimizer = FusedAdamW(model.named_parameters(), exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.int8)
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


# What is refused, and what is not there, of which the first is named.
COMMANDS = {
    "convert saved.pt new --to masters": ("convert --to masters", "safetensors", "numpy"),
    "convert saved.pt new --to safetensors": ("convert --to safetensors", "safetensors"),
    "convert saved.pt another --to masters": ("convert --to masters", "numpy"),
    "convert model.safetensors new --to torch": ("reading model.safetensors", "safetensors"),
    "inspect model.safetensors": ("reading model.safetensors", "safetensors"),
    "inspect saved.pt --compare model.safetensors": ("reading model.safetensors", "safetensors"),
}


def needs(what: str, package: str, extra: str) -> str:
    return f"{what} needs {package}: pip install {package}; or the extra, from a checkout: pip install '.[{extra}]'"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_the_extra(
    command: str, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what, package, *others = COMMANDS[command]
    for name in (package, *others):
        block(monkeypatch, name)
    monkeypatch.chdir(saved)
    before = sorted(saved.iterdir())
    monkeypatch.setattr(sys, "argv", ["fused_optim", *command.split()])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == f"error: {needs(what, package, 'tools')}"
    assert capsys.readouterr().out == "" and sorted(saved.iterdir()) == before


def test_it_is_one_line(forked: str, saved: Path) -> None:
    """Torch's own warning that there is no numpy is not shown."""
    done = python(saved, "-m", "fused_optim", "convert", "saved.pt", "new", "--to", "masters", program=forked)
    error = f"error: {needs('convert --to masters', 'safetensors', 'tools')}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", error)


def masters(folder: Path) -> None:
    model = nn.Linear(8, 4).bfloat16()
    save_master_safetensors(model, FusedAdamW(model.parameters()), folder)


FUNCTIONS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "saving masters to {0}": (masters, "safetensors", "safetensors"),
    "saving quantized weights to {0}": (
        lambda folder: save_quantized_safetensors(nn.Linear(8, 4), folder),
        *("safetensors", "safetensors"),
    ),
    "loading {0}": (
        lambda folder: load_quantized_safetensors(nn.Linear(8, 4), folder),
        *("safetensors", "safetensors"),
    ),
    "convert --to masters": (lambda folder: convert_checkpoint("saved.pt", folder, "masters"), "safetensors", "tools"),
}


@pytest.mark.parametrize("doing", FUNCTIONS)
def test_functions_name_the_extra(doing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, package, extra = FUNCTIONS[doing]
    block(monkeypatch, package)
    text = needs(doing.format(tmp_path / "new"), package, extra)
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$") as raised:
        function(tmp_path / "new")
    assert raised.value.name == package and not any(tmp_path.iterdir())
