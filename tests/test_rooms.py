"""Imports in fused_optim/ point downwards, and in no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import fused_optim

# Files and folders of fused_optim/ from the ground up; some room by room, their own ``__init__`` last.
# docs/development.md says what each is for.
ROOMS = """
torch_versions decorators optional wire roles formats rules sharding adapters memory backends matrices options
quantized.recipes quantized.tensor quantized.adapters quantized.fp8 quantized.model quantized.files
quantized.__init__ rebuild state step optimizer adam ademamix lion muon muon_groups release
checkpoint.folders checkpoint.metadata checkpoint.verify checkpoint.lock checkpoint.publish checkpoint.read
checkpoint.open checkpoint.plan checkpoint.load checkpoint.archives checkpoint.stage checkpoint.write checkpoint.export
checkpoint.termination checkpoint.extras checkpoint.collect checkpoint.saves checkpoint.commit checkpoint.checkpointer
checkpoint.__init__ compat integrations __init__ tools __main__
""".split()  # noqa: SIM905


def name_of(file: Path, folder: Path) -> str:
    """Of a module in the package: ``step.plan``, ``step.__init__``."""
    return ".".join(file.relative_to(folder).with_suffix("").parts)


def room_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return first if first in ROOMS else f"{first}.{rest.partition('.')[0]}"


def imports_of(file: Path, modules: set[str], package: str) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere in it.."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] != package:
                continue
            longest = [".".join(parts[1:end]) for end in range(len(parts), 0, -1)]  # a name in it, or a module
            yield next(each for part in longest for each in (part, f"{part}.__init__".lstrip(".")) if each in modules)


def wrong_imports(folder: Path) -> list[str]:
    files = {name_of(path, folder): path for path in sorted(folder.rglob("*.py"))}
    found = {module: [*imports_of(path, {*files}, folder.name)] for module, path in files.items()}
    height = {room: at for at, room in enumerate(ROOMS)}
    wrong = [f"{module} has no room" for module in files if room_of(module) not in height]
    if not wrong:
        upward = [(a, b) for a, targets in found.items() for b in targets if height[room_of(a)] < height[room_of(b)]]
        wrong = [f"{a} imports {b}, which is above it" for a, b in upward]
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        wrong.append(f"a circle: {' imports '.join(reversed(error.args[1]))}")
    return wrong


def test_imports_point_downwards() -> None:
    folder = Path(fused_optim.__file__).parent
    assert wrong_imports(folder) == []
    assert {room_of(name_of(path, folder)) for path in folder.rglob("*.py")} == {*ROOMS}
