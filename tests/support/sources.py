"""What Python sources say, for tests that read them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator


@functools.cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All of them; walked through once, as several tests ask for those of the same tree."""
    return list(ast.walk(tree))


def own_attributes(tree: ast.Module) -> Iterator[str]:
    """Of classes that are defined there: methods, fields, and what their methods set."""
    for kind in (node for node in nodes(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield from [node.attr] if ast.unparse(node.value) in ("self", "cls") else []
