"""Runs the code of documentation pages from the pages themselves.

Two comments, which readers do not see, tell how a page's code is run:

* ``<!-- not run: why -->`` before a block: it is compiled, but not run.
* ``<!-- setup``, lines of Python, ``-->``: run in its place, for what the reader has and the tests have not.
"""

from __future__ import annotations

import sys
import textwrap
import types
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Block(NamedTuple):
    """A block of Python: the heading it is under, the number of its first line, counted from 1, and its code.

    ``hidden``: a setup. ``skipped``: why the block is not run; empty if it is.
    """

    section: str
    line: int
    code: str
    hidden: bool = False
    skipped: str = ""


def blocks_of(text: str, language: str) -> list[Block]:
    """The fenced blocks of a language, in the order of the page; those within lists are indented."""
    found: list[Block] = []
    section, fence, skipped, lines = "", "", "", []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if fence and stripped == ("-->" if fence == "<!-- setup" else "```"):
            hidden = fence == "<!-- setup"
            if (hidden and language == "python") or fence == f"```{language}":
                code = textwrap.dedent("\n".join([*lines, ""]))
                found.append(Block(section, number - len(lines), code, hidden, skipped))
            fence, skipped = "", ""
        elif fence:
            lines.append(line)
        elif stripped.startswith("```") or stripped == "<!-- setup":
            fence, lines = stripped, []
        elif stripped.startswith("<!-- not run: "):
            skipped = stripped.removeprefix("<!-- not run: ").removesuffix("-->").strip()
        elif line.startswith("#"):
            section = line.lstrip("# ")
    return found


def python_blocks(text: str) -> list[Block]:
    """The blocks that are fenced as Python, and the setups."""
    return blocks_of(text, "python")


def code_of(page: str, section: str) -> str:
    """The Python blocks under a heading of ``docs/<page>``, one after the other, down to the next heading."""
    blocks = python_blocks((DOCS / page).read_text())
    code = "\n".join(block.code for block in blocks if block.section == section and not block.hidden)
    assert code, f"{page} has no section {section!r} with code"
    return code


def run_section(page: str, section: str, **names: Any) -> dict[str, Any]:
    """Run a section's code, which may use ``names``. Returns all names when it has ended."""
    exec(compile(code_of(page, section), f"{page}: {section}", "exec"), names)
    return names


def run_page(page: str) -> None:
    """Run the blocks of ``docs/<page>``, in its order, as one module; tracebacks name the page and its lines."""
    path = DOCS / page
    module = types.ModuleType(f"page_{path.stem}")
    sys.modules[module.__name__] = module  # where classes are looked up, as by dataclasses and pickle
    try:
        for block in python_blocks(path.read_text()):
            code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
            if not block.skipped:
                exec(code, module.__dict__)
    finally:
        del sys.modules[module.__name__]
