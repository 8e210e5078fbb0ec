"""Times the CPU engine's update of one thread as two revisions have it, turn by turn in one process.

What one core computes is what this shows: with 16,384 elements everything lies in its caches. Machines that are shared
disturb both revisions alike. In a git checkout, with g++:
``python benchmarks/cpu_update.py --before REVISION --output FILE``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from step import machine

SOURCES = Path("csrc/multi_tensor")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]  # as in setup.py
AVX2 = ["-mavx2", "-mf16c", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
ISAS = {"avx2": AVX2, "avx512": AVX512}


def compile_revision(revision: str, isa: str, folder: Path) -> Path:
    """A library with the update of ``revision``, or of the working tree if it is empty, for an instruction set."""
    sources = SOURCES
    if revision:
        packed = subprocess.run(["git", "archive", revision, str(SOURCES)], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
            archive.extractall(folder / revision)
        sources = folder / revision / SOURCES
    library = folder / f"{revision or 'now'}-{isa}.so"
    options = [*FLAGS, *ISAS[isa], f"-I{sources}", f"-DFUSED_OPTIM_ISA={isa}", "-shared", "-o", str(library)]
    subprocess.run(["g++", *options, str(sources / "cpu/apply.cpp")], check=True)
    return library


def measure(before: str, isa: str, elements: int, repeats: int, folder: Path) -> list[dict[str, Any]]:
    libraries = [compile_revision(revision, isa, folder) for revision in (before, "")]
    program = folder / "cpu_update"
    command = ["g++", "-O2", "-std=c++17", f"-I{SOURCES}", "benchmarks/cpu_update.cpp", "-o", str(program), "-ldl"]
    subprocess.run(command, check=True)
    arguments = [str(elements), str(repeats), *(f"{library}:{isa}" for library in libraries)]
    printed = subprocess.run([str(program), *arguments], check=True, capture_output=True, text=True).stdout
    rows = []
    for name, moved, old, new in (line.split("\t") for line in printed.splitlines()):
        times = {"before_ns_per_element": float(old), "ns_per_element": float(new)}
        rows.append({"name": name, "moved_bytes_per_element": int(moved), **times, "speedup": float(old) / float(new)})
    return rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="the revision to compare the working tree with")
    parser.add_argument("--isas", nargs="*", choices=ISAS, default=[*ISAS])
    parser.add_argument("--elements", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    facts = {**machine(torch.device("cpu"), ""), "threads": 1, "before": args.before}
    report: dict[str, Any] = {"machine": facts, "elements": args.elements, "repeats": args.repeats, "isas": {}}
    with tempfile.TemporaryDirectory() as folder:
        for isa in args.isas:
            rows = measure(args.before, isa, args.elements, args.repeats, Path(folder))
            report["isas"][isa] = rows
            for row in rows:
                times = f"{row['before_ns_per_element']:8.3f} {row['ns_per_element']:8.3f} {row['speedup']:6.2f}"
                print(f"{isa:<8}{row['name']:<32}{times}", flush=True)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
