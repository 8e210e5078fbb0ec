"""torch's private names: those that the package uses are listed, and are where the list says."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_optim
from fused_optim.torch_versions import PRIVATE, RELEASES
from sources import nodes, own_attributes

PACKAGE, ROOT = Path(fused_optim.__file__).parent, Path(__file__).parents[1]
RELEASE = ".".join(torch.__version__.split(".")[:2])
# Private attributes of what is not torch's: of the standard library, Megatron and Accelerate.
OTHERS = {
    "_exit",
    "_register_atexit",
    "_fields",
    "_getframe",
    "_replace",
    "_param_name",
    "_shard_order",
    "_hf_hook",
    "_quantizer",
}
LISTED = tuple(f"{name}." for name in PRIVATE)


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


# --- what the package uses ----------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split(".")) and name != "_"


def names_of_torch(tree: ast.Module) -> dict[str, str]:
    """What stands for something of torch's: by imports, and by assignments such as ``aten = torch.ops.aten``."""
    found: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            of_torch = [alias for alias in node.names if f"{alias.name}.".startswith("torch.")]
            found |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in of_torch}
            found |= {alias.name: alias.name for alias in of_torch}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and dotted(node.value, found):
            found[node.targets[0].id] = dotted(node.value, found)
    return found


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The name in torch, or nothing."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    base = dotted(node.value, names) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def attributes(tree: ast.Module, names: dict[str, str]) -> Iterator[str]:
    """Of objects, not of torch's modules; also those that ``getattr`` and the like are asked for."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and not dotted(node, names):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", "pop")):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def unlisted(sources: Iterable[str]) -> list[str]:
    """Private names of torch's modules, and private attributes that no class of the sources has: as they are used."""
    trees = [ast.parse(source) for source in sources]
    own = {name for tree in trees for name in own_attributes(tree)} | OTHERS
    listed = {name.rpartition(".")[2] for name in PRIVATE}
    found: set[str] = set()
    for tree in trees:
        names = names_of_torch(tree)
        used = {*names.values(), *(dotted(node, names) for node in nodes(tree))}
        whole = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
        found |= {name for name in whole if is_private(name) and not f"{name}.".startswith(LISTED)}
        found |= {name for name in attributes(tree, names) if is_private(name) and name not in {*own, *listed}}
    return sorted(found)


def test_all_that_the_package_uses_is_listed() -> None:
    assert unlisted(path.read_text() for path in PACKAGE.rglob("*.py")) == []


def test_all_that_is_listed_is_used() -> None:
    """In the package, or by the engines."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "csrc").rglob("*.h")]
    words = {
        word for path in files if path.name != "torch_versions.py" for word in re.findall(r"\w+", path.read_text())
    }
    assert not [name for name in PRIVATE if name.rpartition(".")[2] not in words]


@pytest.mark.parametrize(
    "source, expected",
    [
        ("import torch\ntorch._no(1)", ["torch._no"]),
        ("import torch.distributed as dist\ndist._no.yes", ["torch.distributed._no.yes"]),
        ("import torch._no", ["torch._no"]),
        ("from torch._no import yes", ["torch._no.yes"]),
        ("def f():\n    from torch.optim import _no as yes", ["torch.optim._no"]),
        ("from torch import ops\naten = ops.aten\ndef f(): return aten._no.default", ["torch.ops.aten._no.default"]),
        ("def f(x): return x.grad._no", ["_no"]),
        ("def f(x): return getattr(x, '_no', None)", ["_no"]),
        ("class A:\n    def _no(self): self._yes = 1\ndef f(x): return x._no, x._yes, x.__dict__, x._version", []),
        ("def _no(): ...\ndef f(x): return x._no", ["_no"]),
        ("import torch\nfrom torch._ops import OpOverload\ntorch.ops.aten._to_copy.default, torch.__version__", []),
    ],
)
def test_uses_are_found(source: str, expected: list[str]) -> None:
    assert unlisted([source]) == expected
