"""Machine code of the CUDA engine's kernels in two builds: what is identical, and what differs.

``python benchmarks/sass.py BEFORE AFTER --output sass.json``: folders in which the engine was built in place, with
``FUSED_OPTIM_CUDA_ARCHS=90``. Needs cuobjdump and c++filt. Kernels are matched by their template arguments, also those
of builds that had other names for these; kernels that mark changes are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

MASTERS = ("no master", "FP32", "remainder16", "remainder8", "FP16")  # by number
FORMATS = {"kFloat32": "FP32", "kFloat16": "FP16", "kFloat8": "FP8", "kInt8": "int8"}
RULES = ("Adam", "Lion", "Muon", "Descent")
# Names of today, by earlier ones.
RENAMED = {"AnyMix": "AnyCombination", "OneMix": "OneCombination", "Mix<": "Combination<"}
RENAMED |= {"multi_tensor_adam_scalars": "multi_tensor_update_scalars", "decode_octets": "decode_groups8"}


class Kernel(NamedTuple):
    """``lines``: the text of each instruction, empty where it goes on, and 64 bits of its encoding."""

    lines: list[tuple[str, str]]
    registers: int
    local_bytes: int  # stack and spills

    @property
    def instructions(self) -> list[str]:
        return [text for text, _ in self.lines if text]


def kernels(build: Path) -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for path in sorted(build.glob("build/*/cuda/*.o")):
        if path.stem.startswith("bindings") or "racked" in path.stem:
            continue
        names, usage = {}, dict(_usage(_output("cuobjdump", "-res-usage", path)))
        code = _output("cuobjdump", "-sass", path).split("Function : ")[1:]
        symbols = [text.split()[0] for text in code]
        for symbol, shown in zip(symbols, _output("c++filt", *symbols).splitlines(), strict=True):
            names[symbol] = named(path.stem, shown)
        for symbol, text in zip(symbols, code, strict=True):
            lines = re.findall(r"^\s*(?:/\*[0-9a-f]{4,}\*/\s+(.*?;)\s*)?/\* (0x[0-9a-f]{16}) \*/", text, re.MULTILINE)
            found[names[symbol]] = Kernel(lines, *usage[symbol])
    return found


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _usage(text: str) -> list[tuple[str, tuple[int, int]]]:
    rows = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return [(symbol, (int(registers), int(stack) + int(local))) for symbol, registers, stack, local in rows]


def named(file: str, shown: str) -> str:
    """What a kernel is, by the object that it is in and its demangled name."""
    text = re.sub(r"\(anonymous namespace\)::|fused_optim::|^void ", "", shown)
    for before, now in RENAMED.items():
        text = text.replace(before, now)
    rule = next((rule for rule in RULES if f"_k{rule}" in file), "Adam")
    if "AnyCombination" in text:
        return f"update, {rule}, any combination"
    if "OneCombination" in text:
        master = MASTERS[int(re.findall(r"\(Master\)(\d)", text)[0])]
        states = next(shown for name, shown in FORMATS.items() if file.endswith(name))
        weights = ", weights" if re.findall(r"\b(true|false)\b", text)[0] == "true" else ""
        return f"update, {rule}, states {states}, master {master}{weights}"
    name, arguments = re.findall(r"^(\w+)(?:<(.*?)>\()?", text)[0]
    numbers = re.sub(r"\(\w+\)|WeightCodec<|[> ]", "", arguments)
    if name == "multi_tensor_update_scalars":
        return f"scalars, {RULES[int(numbers or 0)]}"
    return f"{name} {numbers}".strip()


def compared(before: Kernel, after: Kernel) -> dict[str, Any]:
    row: dict[str, Any] = {"instructions": [len(before.instructions), len(after.instructions)]}
    row |= {"registers": [before.registers, after.registers], "local_bytes": [before.local_bytes, after.local_bytes]}
    counts = [Counter(map(opcode, kernel.instructions)) for kernel in (before, after)]
    if before.lines == after.lines:
        return {"verdict": "identical", **row}
    if counts[0] == counts[1]:
        return {"verdict": "the same instructions, otherwise ordered or in other registers", **row}
    return {"verdict": "other instructions", **row, "more": counts[1] - counts[0], "fewer": counts[0] - counts[1]}


def opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].rstrip(";")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    before, after = kernels(options.before), kernels(options.after)
    rows = {name: compared(before[name], after[name]) for name in sorted(before.keys() & after.keys())}
    for name, row in rows.items():
        (b, a), (c, d) = row["instructions"], row["registers"]
        print(f"{name:58} {b:6} {a:6} {c:4} {d:4}  {row['verdict']}")
    only = {"before": sorted(before.keys() - after.keys()), "after": sorted(after.keys() - before.keys())}
    print(Counter(row["verdict"] for row in rows.values()), only)
    if options.output:
        options.output.write_text(json.dumps({"kernels": rows, "only": only}, indent=1) + "\n")


if __name__ == "__main__":
    main()
