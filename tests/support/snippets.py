"""Runs the code of documentation pages from the pages themselves.

Two comments, which readers do not see, tell how a page's code is run:

* ``<!-- not run: why -->`` before a block: it is compiled, and what it asks of fused_optim is looked up
  (:func:`misnamed`), but it is not run.
* ``<!-- setup``, lines of Python, ``-->``: run in its place, for what the reader has and the tests have not.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fused_optim

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


# --- what blocks ask of fused_optim -------------------------------------------------------------------------------


def misnamed(blocks: list[Block]) -> list[str]:
    """Names that blocks ask of fused_optim and it does not have: imports, attributes, methods, keywords of calls.

    Names that were imported or assigned in one block are known in those after it. ``optimizer`` is a FusedAdamW until
    it is something else.
    """
    finder = _Finder()
    for block in blocks:
        finder.visit(ast.parse(block.code))
    return list(dict.fromkeys(finder.wrong))  # calls are looked at twice


class _Instance(NamedTuple):
    of: type


class _Finder(ast.NodeVisitor):
    def __init__(self) -> None:
        self.known: dict[str, Any] = {"optimizer": _Instance(fused_optim.FusedAdamW)}
        self.wrong: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "fused_optim":
                _module(alias.name)
                self.known["fused_optim"] = fused_optim

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "fused_optim":
            assert node.module is not None
            for alias in node.names:
                module = _module(node.module)
                if hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{alias.name}"):
                    _module(f"{node.module}.{alias.name}")  # so that the package has it
                self.known[alias.asname or alias.name] = self._attribute(module, alias.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.generic_visit(node)
        self.known[node.name] = None

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, item.context_expr)
        for statement in node.body:
            self.visit(statement)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        self._meaning(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = self._meaning(node.func)
        if called is None or isinstance(called, _Instance) or not callable(called):
            return
        taken = inspect.signature(called).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            name = ast.unparse(node.func)
            self.wrong += [f"{name}({each.arg}=)" for each in node.keywords if each.arg and each.arg not in taken]

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            called = self._meaning(value.func) if isinstance(value, ast.Call) else None
            self.known[target.id] = _Instance(called) if isinstance(called, type) else None

    def _meaning(self, node: ast.expr) -> Any:
        """What an expression is, or None for what is not fused_optim's."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._meaning(node.value), node.attr)
        return None

    def _attribute(self, owner: Any, name: str) -> Any:
        """An attribute of a module, a class or an instance of one."""
        if isinstance(owner, _Instance):
            if not hasattr(owner.of, name) and name not in _set_in(owner.of):
                self.wrong.append(f"{owner.of.__name__}.{name}")
            return getattr(owner.of, name, None)
        if not isinstance(owner, (type, types.ModuleType, _Source)):
            return None
        if not hasattr(owner, name):
            self.wrong.append(f"{owner.__name__}.{name}")
        return getattr(owner, name, None)


def _set_in(of: type) -> set[str]:
    """The attributes that the methods of a class, and of those it inherits from, set."""
    sources = [inspect.getsource(each) for each in of.__mro__ if each is not object]
    return {name for source in sources for name in re.findall(r"\bself\.(\w+)[^=(]*= ", source)}


class _Source:
    """A module that imports what is not installed: the names that its file defines, as None."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        self.__name__ = name
        for each in _defined(ast.parse(Path(spec.origin).read_text())):
            setattr(self, each, None)


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


def _module(name: str) -> types.ModuleType | _Source:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "fused_optim").split(".")[0] == "fused_optim":
            raise
        return _Source(name)
