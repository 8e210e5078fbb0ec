"""Builds the sdist, and from it a wheel for each Python, into a folder: `make wheels` and `make wheel`.

    python .ci/build_wheels.py dist python3.11 python3.12 python3.13 python3.14

A Python that is not on this machine, or lacks pip or headers, is named and left out; that none is there is an error.
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
FIND_HEADERS = """
import os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(0 if os.path.exists(header) else f"there is no {header}")
"""


class Unusable(Exception):
    """Says why there can be no wheel for a Python."""


def main() -> None:
    dist, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    empty(BUILD)
    environments = {name: path for name in names if (path := find(name))}
    if not environments:
        sys.exit("error: none of these Pythons is here")
    empty(dist)
    source = build_sdist(dist)
    for name, environment in environments.items():
        start = time.perf_counter()
        wheel = build_wheel(name, environment, source, dist)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - start:.0f} s", flush=True)


def empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def find(name: str) -> Path | None:
    try:
        environment = make_environment(name)
    except Unusable as error:
        print(f"{name}: left out: {error}", flush=True)
        return None
    print(f"{name}: {shutil.which(name)}", flush=True)
    return environment


def make_environment(name: str) -> Path:
    """A virtual environment, of a Python that can compile.

    Those of all Pythons are made before anything is compiled, which takes long: only this shows whether pip is found,
    and whether what a version manager has on the path is more than a message.
    """
    path = shutil.which(name)
    if path is None:
        raise Unusable("not here")
    environment = BUILD / f"venv-{name.replace('/', '-')}"
    # Distributions pack both apart from the interpreter, as python3-venv and python3-dev.
    attempt("no virtual environment", [path, "-m", "venv", str(environment)])
    attempt("no headers", [str(environment / "bin/python"), "-c", FIND_HEADERS])
    return environment


def attempt(failure: str, command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise Unusable(": ".join([failure, *done.stdout.strip().splitlines()[:1]]))


def build_sdist(dist: Path) -> Path:
    """The unpacked sdist: wheels are built from it, so that it holds all that is needed."""
    print("sdist", flush=True)
    run([sys.executable, "-m", "build", "--sdist", "--outdir", str(dist), str(ROOT)])
    (archive,) = dist.glob("*.tar.gz")
    run(["tar", "-xzf", str(archive), "-C", str(BUILD)])  # tarfile warns without filter=, which 3.11.2 has not
    return BUILD / archive.name.removesuffix(".tar.gz")


def build_wheel(name: str, environment: Path, source: Path, dist: Path) -> Path:
    print(f"wheel of {name}", flush=True)
    built = environment.with_name(environment.name.replace("venv", "built", 1))
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
