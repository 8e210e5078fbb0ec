"""Runs the code of documentation pages from the pages themselves."""

from __future__ import annotations

import sys
import textwrap
import types
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[1] / "docs"


class Block(NamedTuple):
    """A block of Python: the heading it is under, the number of its first line, counted from 1, and its code."""

    section: str
    line: int
    code: str


def python_blocks(text: str) -> list[Block]:
    """The blocks that are fenced as Python, in the order of the page; those within lists are indented."""
    found: list[Block] = []
    section, fence, lines = "", "", []
    for number, line in enumerate(text.splitlines(), start=1):
        if fence and line.strip() == "```":
            if fence == "```python":
                found.append(Block(section, number - len(lines), textwrap.dedent("\n".join([*lines, ""]))))
            fence = ""
        elif fence:
            lines.append(line)
        elif line.lstrip().startswith("```"):
            fence, lines = line.strip(), []
        elif line.startswith("#"):
            section = line.lstrip("# ")
    return found


def code_of(page: str, section: str) -> str:
    """The Python blocks under a heading of ``docs/<page>``, one after the other, down to the next heading."""
    code = "\n".join(block.code for block in python_blocks((DOCS / page).read_text()) if block.section == section)
    assert code, f"{page} has no section {section!r} with code"
    return code


def run_section(page: str, section: str, **names: Any) -> dict[str, Any]:
    """Run a section's code, which may use ``names``. Returns all names when it has ended."""
    exec(compile(code_of(page, section), f"{page}: {section}", "exec"), names)
    return names


def run_page(page: str) -> None:
    """Run all blocks of ``docs/<page>``, in its order, as one module; tracebacks name the page and its lines."""
    path = DOCS / page
    module = types.ModuleType(f"page_{path.stem}")
    sys.modules[module.__name__] = module  # where classes are looked up, as by dataclasses and pickle
    try:
        for block in python_blocks(path.read_text()):
            exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
