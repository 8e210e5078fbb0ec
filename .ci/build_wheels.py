"""Builds the sdist, and from it a wheel for each Python, into a folder: `make wheels` and `make wheel`.

    python .ci/build_wheels.py dist python3.11 python3.12 python3.13 python3.14

A Python that is not on this machine, or lacks venv or headers, is named and left out; that none is there is an error.
What does not depend on the Python is compiled once. It needs what the extra `release` of pyproject.toml names.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "wheels"
SHOWN = "fused_optim: "  # what setup.py says of its progress
# Distributions pack both apart from the interpreter, as python3-venv and python3-dev.
NEEDED = "import ensurepip, os, sysconfig, venv; os.stat(os.path.join(sysconfig.get_path('include'), 'Python.h'))"


def main() -> None:
    dist = Path(sys.argv[1]).resolve()
    pythons = {name: path for name in sys.argv[2:] if (path := runs(name))}
    for name in sys.argv[2:]:
        print(f"{name}: {pythons.get(name, 'left out: not here, or without venv or headers')}", flush=True)
    if not pythons:
        sys.exit("error: none of these Pythons is here")
    for folder in (BUILD, dist):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    source = build_sdist(dist)
    for name, path in pythons.items():
        start = time.perf_counter()
        wheel = build_wheel(name, path, source, dist)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - start:.0f} s", flush=True)


def runs(name: str) -> str | None:
    """The program's path, where it is there and runs: those of version managers may only say that they do not."""
    path = shutil.which(name)
    if path is None or subprocess.run([path, "-c", NEEDED], capture_output=True).returncode:
        return None
    return path


def build_sdist(dist: Path) -> Path:
    """The unpacked sdist: wheels are built from it, so that it holds all that is needed."""
    print("sdist", flush=True)
    run([sys.executable, "-m", "build", "--sdist", "--outdir", str(dist), str(ROOT)])
    (archive,) = dist.glob("*.tar.gz")
    run(["tar", "-xzf", str(archive), "-C", str(BUILD)])  # tarfile warns without filter=, which 3.11.2 has not
    return BUILD / archive.name.removesuffix(".tar.gz")


def build_wheel(name: str, python: str, source: Path, dist: Path) -> Path:
    print(f"wheel of {name}", flush=True)
    environment, built = BUILD / f"venv-{name.replace('/', '-')}", BUILD / f"built-{name.replace('/', '-')}"
    run([python, "-m", "venv", str(environment)])
    run([str(environment / "bin/python"), "-m", "pip", "wheel", "-v", "--no-deps", "-w", str(built), str(source)])
    (wheel,) = built.glob("*.whl")
    run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(built / "repaired"), str(wheel)])
    (repaired,) = (built / "repaired").glob("*.whl")
    return Path(shutil.move(repaired, dist))


def run(command: list[str]) -> None:
    """Shows the progress of engines, and of a command that fails all that it printed."""
    printed: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if line.lstrip().startswith(SHOWN):
                print(line.strip(), flush=True)
    if process.returncode:
        sys.exit(f"{''.join(printed)}\nerror: {' '.join(command)}")


if __name__ == "__main__":
    main()
