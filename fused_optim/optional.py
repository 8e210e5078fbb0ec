"""Packages that come with an extra of this one: what needs one that is not there says so, in one line.

No registry is assumed to have fused_optim: its extras are installed from a checkout, or by their packages' names.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def optional(module: str, doing: str, extra: str) -> ModuleType:
    """Import a module. Raises ImportError that says what needs its package, and how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        text = (
            f"{doing} needs {package}: pip install {package}; or the extra, from a checkout: pip install '.[{extra}]'"
        )
        raise ImportError(text, name=package) from error
