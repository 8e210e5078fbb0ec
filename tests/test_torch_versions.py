"""torch's private names: those that the package uses are listed, and are where the list says."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_optim
from fused_optim.torch_versions import PRIVATE, RELEASES

PACKAGE, ROOT = Path(fused_optim.__file__).parent, Path(__file__).parents[1]
RELEASE = ".".join(torch.__version__.split(".")[:2])


# --- what torch has -----------------------------------------------------------------------------------------------


def has(name: str) -> bool:
    """Whether there is a module or an attribute of this name; of objects, one that their class declares or sets."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:-1]:
            found = getattr(found, part, None)
        return count == len(parts) or hasattr(found, parts[-1]) or _is_set(found, parts[-1])
    return False


def _is_set(kind: Any, attribute: str) -> bool:
    if not inspect.isclass(kind):
        return False
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # of C++
        return False
    return attribute in getattr(kind, "__annotations__", {}) or bool(re.search(rf"\.{attribute}\b[^=\n]*=[^=]", source))


@pytest.mark.parametrize("name", PRIVATE)
def test_torch_has_it(name: str) -> None:
    """A torch newer than those that were tried has what the newest of them had."""
    if "._cuda_" in name and torch.version.cuda is None:
        assert not has(name)
        return
    known = RELEASE if RELEASE in RELEASES else RELEASES[-1]
    assert has(name) == (known in PRIVATE[name])


def test_what_is_not_there_is_found_missing() -> None:
    for name in ("torch._no_such", "torch._no.such", "torch.Tensor._no", "torch.nn.modules.module.Module._no"):
        assert not has(name)
    assert has("torch.optim.optimizer.Optimizer._optimizer_step_pre_hooks")  # which only objects have


def test_the_releases_are_those_of_the_readme() -> None:
    (major, first, last), *_ = re.findall(r"torch (\d+)\.(\d+) to \1\.(\d+)", (ROOT / "README.md").read_text())
    assert [f"{major}.{minor}" for minor in range(int(first), int(last) + 1)] == list(RELEASES)
