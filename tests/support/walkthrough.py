"""Follows a page literally: runs its commands, in order, and compares what they print with the page.

Blocks fenced as ``sh`` are run in one folder, which has the repository's ``examples``. A block fenced as ``text`` is
what the command before it prints: its lines are there, in this order, others may lie between. Numbers may differ a
little, since machines round differently; ``...`` in a line stands for anything.

Python is one that has imported torch already (``fresh.py``), also in torchrun and its ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import fresh
from snippets import DOCS, ROOT

NUMBER = r"-?\d[\d,]*\.?\d*"
CLOSE = 0.05  # of a number, and at least this much
# Wherever torch is installed, and at any port.
TORCHRUN = 'torchrun() { python -m torch.distributed.run --standalone "$@"; }\n'
Command = tuple[str, list[str]]


def commands_of(text: str) -> list[Command]:
    """Each ``sh`` block with the lines that are expected of it."""
    found: list[Command] = []
    for language, code in re.findall(r"^```(sh|text)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if language == "sh":
            found.append((code, []))
        else:
            found[-1][1].extend(code.splitlines())
    return found


def same(expected: str, line: str) -> bool:
    """Whether a line is the expected one, numbers to within ``CLOSE``."""
    return fits([part for part in re.split(rf"(\s*\.\.\.\s*|{NUMBER})", expected) if part], line)


def fits(parts: list[str], line: str) -> bool:
    if not parts:
        return not line
    first, *others = parts
    if first.strip() == "...":
        return any(fits(others, line[start:]) for start in range(len(line) + 1))
    is_number = re.fullmatch(NUMBER, first)
    match = re.match(NUMBER if is_number else spaces(first), line)
    if match is None or (is_number and not close(number(first), number(match[0]))):
        return False
    return fits(others, line[match.end() :])


def close(expected: float, found: float) -> bool:
    return abs(expected - found) <= CLOSE * max(1.0, abs(expected))


def spaces(text: str) -> str:
    """As many as there are: widths of columns depend on what is in them."""
    return r"\s+".join(map(re.escape, re.split(r"\s+", text)))


def number(text: str) -> float:
    return float(text.replace(",", ""))


def missing(expected: list[str], output: str) -> str:
    """The first expected line that is not there, in its place; empty if all are."""
    lines = iter(re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines())
    for wanted in expected:
        if not any(same(wanted.strip(), line.strip()) for line in lines):
            return wanted
    return ""


def run_in_shell(code: str, folder: Path, environment: Mapping[str, str]) -> str:
    command = ["bash", "-ec", TORCHRUN + code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, f"{code}\n{output[-3000:]}"
    return output


def follow(page: str, folder: Path, replaced: Mapping[str, str] | None = None) -> None:
    """Run the commands of ``docs/<page>`` in an empty folder. ``replaced``: words of commands, by others."""
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(fresh.python()).parent), os.environ["PATH"]])
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    commands = commands_of((DOCS / page).read_text())
    assert any(expected for _, expected in commands), f"{page}: no output is expected of any command"
    for code, expected in commands:
        for word, by in (replaced or {}).items():
            code = code.replace(word, by)
        output = run_in_shell(code, folder, environment)
        lacking = missing(expected, output)
        assert not lacking, f"{page}: {code} does not print\n{lacking}\nbut\n{output[-3000:]}"
