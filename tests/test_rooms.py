"""Who may import whom in fused_optim/: downwards only, in no circle, in the open. Helpers serve tests, not tests."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fused_optim
from fused_optim.torch_versions import PRIVATE
from sources import nodes, own_attributes

# Files and folders of fused_optim/ from the ground up; docs/development.md says what each is for. A folder whose rooms
# have an order of their own is given room by room, its own ``__init__`` last.
ROOMS = (
    *(
        "torch_versions",
        "decorators",
        "optional",
        "wire",
        "roles",
        "formats",
        "rule",
        "sharding",
        "adapters",
        "memory",
        "backends",
    ),
    *("matrices", "options"),
    *(f"quantized.{room}" for room in ("recipes", "tensor", "compute", "adapters", "model", "files", "__init__")),
    *(
        "rebuild",
        "state",
        "step",
        "publishing",
        "optimizer",
        "adam",
        "lion",
        "muon",
        "muon_groups",
        "known_rules",
        "release",
    ),
    *(f"checkpoint.{room}" for room in ("storage", "reading", "writing")),
    *(f"checkpoint.{room}" for room in ("termination", "collect", "extras", "random_states", "saves")),
    *(f"checkpoint.{room}" for room in ("loads", "checkpointer", "__init__")),
    *("compat", "integrations", "__init__", "tools", "__main__"),
)
HOUSES = {room.split(".")[0] for room in ROOMS if "." in room}  # folders that are given room by room
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 520, 60
# Rooms, or files in them, that may import while they run, and what: adapters of parameters that are met, packages and
# engines that may be missing, quantized code where it is asked for, what a command needs, and a user's own model.
LAZY = {
    **{
        "adapters": "",
        "optional": "",
        "backends": "fused_optim._engine_",
        "tools.commands": "fused_optim.",
        "tools.doctor": "",
    },
    **{"__init__": "fused_optim.quantized", "rebuild": "fused_optim.quantized"},
}

# Private attributes of objects of others: torch's, which have a list of their own; the standard library's, which
# documents them; those of TransformerEngine's tensors, which have no other names.
OTHERS_OWN = {part for name in PRIVATE for part in name.split(".") if part.startswith("_")} | {
    *("_exit", "_register_atexit", "_fields", "_getframe", "_replace"),
    *("_data", "_reset_caches", "_scale_inv"),
}
# Attributes that are asked for by name, as not all objects there have them, and why these are of no class of ours.
BY_NAME = {
    "backends.compiled": {"__dlpack_c_exchange_api__": "of torch's, whose stubs do not have it"},
    "backends.tables": {"TABLES": "an engine of an older release has none"},
    "checkpoint.extras": dict.fromkeys(("load_state_dict", "state_dict"), "of others, which may be forwarded"),
    "decorators": {"hooked": "torch sets it on what it has decorated"},
    "integrations.megatron": {"__wrapped__": "of functions of Megatron's, or what replaces them"},
    "muon_groups": {"in_features": "modules of models have what they like"},
    "optimizer": {"decoupled_grad": "set by users"},
    "options.reading": dict.fromkeys(("item", "size", "tolist"), "of arrays of NumPy, which may not be installed"),
    "quantized.adapters.transformer_engine": dict.fromkeys(
        ("amax_reduction_group", "get_high_precision_init_val", "with_amax_reduction"),
        "some kinds and releases of TransformerEngine's tensors have it",
    ),
    "quantized.model.selection": {
        "weight": "modules of models have what they like",
        **dict.fromkeys(("_hf_hook", "hooks", "offload"), "of hooks that Accelerate puts on modules"),
    },
    "quantized.tensor.patches": {"recipe": "of weights that are kept, whose class is above"},
    "roles": {
        "experts": "modules of models have what they like",
        "adapter_layer_names": "of layers that PEFT has put adapters beside",
    },
    "step.amp": {
        **dict.fromkeys(("found_inf", "grad_scale"), "set by torch.amp.GradScaler, and only for a step"),
        "use_decoupled_grad": "of optimizers that are not ours, too",
    },
    "sharding.fsdp": dict.fromkeys(("_fsdp_param_groups", "_unsharded_param"), "not in all releases, not at all times"),
    "sharding.uneven": {"_shard_order": "Megatron-FSDP's note on a mesh"},
    "wire.apply": dict.fromkeys(
        ("components", "plain"), "of weights that are quantized, whose classes a server need not have"
    ),
    "options.checks": {"_is_flat_param": "FSDP1's mark on parameters"},
}


@dataclass(frozen=True)
class Import:
    source: str  # module
    line: int
    target: str  # module; the beginning of its name, where the rest is computed
    when: str  # "always", "typing" (under TYPE_CHECKING) or "called" (in a function, or by importlib)

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target or 'what is computed'}"


class Package:
    """The source files of a package, and what they import of it."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.files: dict[str, Path] = {}
        for path in sorted(folder.rglob("*.py")):
            parts = [self.name, *path.relative_to(folder).with_suffix("").parts]
            self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    @functools.cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {module: ast.parse(path.read_text()) for module, path in self.files.items()}

    @functools.cached_property
    def imports(self) -> list[Import]:
        found = (each for module, tree in self.trees.items() for each in self._imports_of(module, tree, "always"))
        return [each for each in found if f"{each.target}.".startswith(f"{self.name}.") or not each.target]

    def room_of(self, module: str) -> str:
        """The first name below the package, or ``__init__``; two names where a folder is given room by room."""
        _, first, *others = f"{module}.__init__".split(".")
        return f"{first}.{others[0]}" if first in HOUSES else first

    def _imports_of(self, module: str, node: ast.AST, when: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = when
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inner = "called"
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and when == "always":
                inner = "typing"
            elif isinstance(child, ast.Import):
                yield from (Import(module, child.lineno, alias.name, when) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = self._absolute(module, child)
                names = [f"{base}.{alias.name}" for alias in child.names]  # modules, or attributes of one
                targets = dict.fromkeys(name if name in self.files else base for name in names)
                yield from (Import(module, child.lineno, target, when) for target in targets)
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(("import_module", "__import__")):
                yield Import(module, child.lineno, _beginning(child.args[0]), "called")
            yield from self._imports_of(module, child, inner)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.files[module].name == "__init__.py"
        above = module.split(".")[: len(module.split(".")) - node.level + is_package]
        return ".".join([*above, node.module] if node.module else above)


def _beginning(name: ast.expr) -> str:
    """What is known of a string that is given or computed."""
    if isinstance(name, ast.JoinedStr) and name.values:
        name = name.values[0]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


# --- what is wrong ----------------------------------------------------------------------------------------------


def other_rooms(package: Package) -> list[str]:
    """Rooms that the order does not know, or that are not there."""
    rooms = {package.room_of(module) for module in package.files}
    return sorted(rooms.symmetric_difference(ROOMS))


def upward_imports(package: Package) -> list[str]:
    height = {room: at for at, room in enumerate(ROOMS)}
    known = [each for each in package.imports if each.target]
    rooms = [(each, package.room_of(each.source), package.room_of(each.target)) for each in known]
    return [f"{each}: {a} is below {b}" for each, a, b in rooms if height.get(a, 0) < height.get(b, 0)]


def circles(package: Package) -> list[str]:
    """Files that import each other, also in a roundabout way."""
    reached: dict[str, set[str]] = {module: set() for module in package.files}
    for each in package.imports:
        if each.target in reached:
            reached[each.source].add(each.target)
    for via in reached:
        for targets in reached.values():
            if via in targets:
                targets |= reached[via]
    found = {frozenset(other for other in reached[module] if module in reached[other]) for module in reached}
    return sorted(" <-> ".join(sorted(circle)) for circle in found if circle)


def lazy_imports(package: Package) -> list[str]:
    """Imports while the code runs, elsewhere than ``LAZY`` says."""
    called = [each for each in package.imports if each.when == "called"]
    allowed = {each: LAZY.get(each.source.partition(".")[2], LAZY.get(package.room_of(each.source))) for each in called}
    return [f"{each} when called" for each, of in allowed.items() if of is None or not each.target.startswith(of)]


def imports_of_quantized(package: Package) -> list[str]:
    """Imports from outside, but for the package's lazy attribute and weights in files. Adapters have names only."""
    inside = f"{package.name}.quantized"
    from_outside = [
        each
        for each in package.imports
        if f"{each.target}.".startswith(f"{inside}.") and not f"{each.source}.".startswith(f"{inside}.")
    ]
    may = (package.name, f"{package.name}.rebuild")
    return [str(each) for each in from_outside if each.source not in may or each.when == "always"]


def private_attributes(package: Package) -> list[str]:
    """Private attributes of objects, and private names of modules, that are used where no class has them."""
    found = []
    for module, tree in package.trees.items():
        known = {*own_attributes(tree), *OTHERS_OWN}
        for node in _in_order(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in known:
                if ast.unparse(node.value) not in ("self", "cls", "super()"):
                    found.append(f"{module}:{node.lineno} uses {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package.name}."):
                names = [alias.name for alias in node.names if _is_private(alias.name)]
                found += [f"{module}:{node.lineno} uses {node.module}.{name}" for name in names]
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@functools.cache
def _in_order(tree: ast.Module) -> list[ast.AST]:
    """The nodes that have lines, by these."""
    return sorted((node for node in nodes(tree) if hasattr(node, "lineno")), key=lambda node: node.lineno)


def attributes_by_name(package: Package) -> list[str]:
    """``getattr(x, "name")`` and the like, where ``x.name`` or a Protocol says more; but for ``BY_NAME``."""
    found = []
    for module, tree in package.trees.items():
        inner = module.partition(".")[2]
        allowed = BY_NAME.get(inner, {})
        for node in _in_order(tree):
            name = _asked_for(node)
            if name is not None and name not in allowed:
                found.append(f"{module}:{node.lineno} has {ast.unparse(node)}")
    return found


def _asked_for(node: ast.AST) -> str | None:
    """The name that a call asks an object for, where it is written there."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    if ast.unparse(node.func) not in ("getattr", "setattr", "hasattr", "delattr"):
        return None
    return _beginning(node.args[1]) or None if isinstance(node.args[1], ast.Constant) else None


def tables_spelled_twice(package: Package) -> list[str]:
    """Tables of modules and classes with the same three or more strings, or names: one can be made of the other."""
    found: dict[tuple[str, ...], list[str]] = {}
    for module, tree in package.trees.items():
        for table in _tables(tree):
            elements = table.keys if isinstance(table, ast.Dict) else table.elts
            key = tuple(sorted({ast.unparse(each) for each in elements if each is not None}))
            if len(key) >= 3 and all(map(_is_spelled, elements)):
                found.setdefault(key, []).append(f"{module}:{table.lineno}")
    return [f"{' and '.join(places)} spell {', '.join(key)}" for key, places in found.items() if len(places) > 1]


def _tables(node: ast.AST) -> Iterator[ast.Dict | ast.Tuple | ast.List | ast.Set]:
    """Outside of functions, but for what a module exports."""
    for child in ast.iter_child_nodes(node):
        exports = isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "__all__"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or exports:
            continue
        if isinstance(child, ast.Dict | ast.Tuple | ast.List | ast.Set):
            yield child
        yield from _tables(child)


def _is_spelled(element: ast.expr | None) -> bool:
    """A string, or a name of another module's."""
    if isinstance(element, ast.Constant):
        return isinstance(element.value, str)
    return isinstance(element, ast.Attribute) and ast.unparse(element).replace(".", "").isidentifier()


def long_files(package: Package) -> list[str]:
    """Files that are not read in one sitting."""
    lines = {module: len(path.read_text().splitlines()) for module, path in package.files.items()}
    return [f"{module} has {count} lines" for module, count in lines.items() if count > MOST_LINES]


def long_functions(package: Package) -> list[str]:
    """Functions that are not read at a glance, without their signatures and docstrings."""
    found = []
    for module, tree in package.trees.items():
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                count = sum((each.end_lineno or 0) - each.lineno + 1 for each in body)
                if count > MOST_LINES_OF_A_FUNCTION:
                    found.append(f"{module}:{node.lineno} {node.name} has {count} lines")
    return found


Check = Callable[[Package], list[str]]
CHECKS: list[Check] = [
    *(other_rooms, upward_imports, circles, lazy_imports, imports_of_quantized),
    *(private_attributes, attributes_by_name, tables_spelled_twice),
    *(long_files, long_functions),
]


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(Path(fused_optim.__file__).parent)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_rooms_keep_their_order(check: Check, package: Package) -> None:
    assert len(package.files) > len(ROOMS) and len(package.imports) > len(package.files)
    assert check(package) == []


# --- the checks themselves --------------------------------------------------------------------------------------

# What is wrong in a package of some files, beside what all of these have.
WRONG: dict[str, tuple[Check, dict[str, str], list[str]]] = {
    "upwards": (
        upward_imports,
        {"rule": "import os\n\nfrom fused_optim.adam import FusedAdam"},
        ["fused_optim.rule:3 imports fused_optim.adam: rule is below adam"],
    ),
    "upwards, a module of a package": (
        upward_imports,
        {"state/states": "from fused_optim.step import plan", "step/plan": ""},
        ["fused_optim.state.states:1 imports fused_optim.step.plan: state is below step"],
    ),
    "upwards, for types": (
        upward_imports,
        {"state/states": "import typing\nif typing.TYPE_CHECKING:\n    from fused_optim.adam import FusedAdam"},
        ["fused_optim.state.states:3 imports fused_optim.adam: state is below adam"],
    ),
    "upwards, in a function": (
        upward_imports,
        {"sharding/dtensor": "def f():\n    if True:\n        import fused_optim.adam as a"},
        ["fused_optim.sharding.dtensor:3 imports fused_optim.adam: sharding is below adam"],
    ),
    "upwards, relative": (
        upward_imports,
        {"sharding/dtensor": "from ..adam import FusedAdam", "sharding/__init__": "from .. import adam"},
        [
            "fused_optim.sharding:1 imports fused_optim.adam: sharding is below adam",
            "fused_optim.sharding.dtensor:1 imports fused_optim.adam: sharding is below adam",
        ],
    ),
    "upwards, the package": (
        upward_imports,
        {"checkpoint/extras": "from fused_optim import FusedAdam\nimport fused_optim"},
        [
            "fused_optim.checkpoint.extras:1 imports fused_optim: checkpoint.extras is below __init__",
            "fused_optim.checkpoint.extras:2 imports fused_optim: checkpoint.extras is below __init__",
        ],
    ),
    "a circle of two": (
        circles,
        {
            "step/plan": "from fused_optim.step import scalars",
            "step/scalars": "from typing import *\nif TYPE_CHECKING:\n    from fused_optim.step.plan import P",
        },
        ["fused_optim.step.plan <-> fused_optim.step.scalars"],
    ),
    "a circle of three, and one who looks on": (
        circles,
        {
            "step/a": "from fused_optim.step.b import x",
            "step/b": "def f():\n    from fused_optim.step import c",
            "step/c": "import fused_optim.step.a",
            "step/d": "import fused_optim.step.a",
        },
        ["fused_optim.step.a <-> fused_optim.step.b <-> fused_optim.step.c"],
    ),
    "a circle with its package": (
        circles,
        {
            "backends/__init__": "from fused_optim.backends import a",
            "backends/a": "from fused_optim.backends import X",
        },
        ["fused_optim.backends <-> fused_optim.backends.a"],
    ),
    "hidden": (
        lazy_imports,
        {"step/clip": "class C:\n    def f(self):\n        from fused_optim.formats.states import STATE_FORMATS"},
        ["fused_optim.step.clip:3 imports fused_optim.formats.states when called"],
    ),
    "hidden, by name": (
        lazy_imports,
        {"step/clip": "import importlib\nX = importlib.import_module('fused_optim.formats.states')"},
        ["fused_optim.step.clip:2 imports fused_optim.formats.states when called"],
    ),
    "hidden, computed": (
        lazy_imports,
        {"step/clip": "from importlib import import_module\nf = lambda name: import_module(name)"},
        ["fused_optim.step.clip:2 imports what is computed when called"],
    ),
    "hidden where other things may be": (
        lazy_imports,
        {
            "backends/__init__": "def f():\n    import fused_optim.backends.one",
            "backends/one": "",
            "__init__": "def f():\n    from fused_optim import adam",
            "tools/inspector": "def f():\n    import fused_optim.adam",
        },
        [
            "fused_optim:2 imports fused_optim.adam when called",
            "fused_optim.backends:2 imports fused_optim.backends.one when called",
            "fused_optim.tools.inspector:2 imports fused_optim.adam when called",
        ],
    ),
    "quantized code": (
        imports_of_quantized,
        {"step/plan": "from fused_optim import quantized", "__init__": "import fused_optim.quantized.tensor"},
        [
            "fused_optim:1 imports fused_optim.quantized.tensor",
            "fused_optim.step.plan:1 imports fused_optim.quantized",
        ],
    ),
    "the optimizer's own": (
        private_attributes,
        {
            "checkpoint/extras": "def f(self, optimizer):\n    return optimizer._slots, self.optimizer._params()",
            "integrations/megatron": "def f(adam):\n    adam._x = 1",
        },
        [
            "fused_optim.checkpoint.extras:2 uses optimizer._slots",
            "fused_optim.checkpoint.extras:2 uses self.optimizer._params",
            "fused_optim.integrations.megatron:2 uses adam._x",
        ],
    ),
    "another's own": (
        private_attributes,
        {
            "state/states": "class S:\n    def f(self):\n        self._own = 1\n\ndef f(s):\n    return s._own",
            "step/plan": "from fused_optim.state import states\ndef f(s):\n    s._own += 1\n    states._f(s)",
            "step/clip": "from fused_optim.step.skip import _f\nfrom torch._ops import OpOverload",
        },
        [
            "fused_optim.step.clip:1 uses fused_optim.step.skip._f",
            "fused_optim.step.plan:3 uses s._own",
            "fused_optim.step.plan:4 uses states._f",
        ],
    ),
    "by name": (
        attributes_by_name,
        {
            "step/a": "def f(x, n):\n    setattr(x, 'a', 1)\n    getattr(x, n)\n    hasattr(x, 'b'), delattr(x, 'c')",
            "options/checks": "def f(x):\n    return getattr(x, '_is_flat_param', 0), getattr(x, 'step')",
        },
        [
            "fused_optim.options.checks:2 has getattr(x, 'step')",
            "fused_optim.step.a:2 has setattr(x, 'a', 1)",
            "fused_optim.step.a:4 has hasattr(x, 'b')",
            "fused_optim.step.a:4 has delattr(x, 'c')",
        ],
    ),
    "tables": (
        tables_spelled_twice,
        {
            "step/clip": "A = ('a', 'b', 'c')\nB = {t.x: 1, t.y: 2, t.z: 3}\nC = ('a', 'b')\nF = f(t.x, t.y, t.z)",
            "options/v": "class V:\n    k: Literal['c', 'a', 'b']\n    C = 'a', 'b'\n    def f(): return 'a', 'b', 'c'",
            "rule": "D = [t.z, t.x, t.y]\nN = (1, 2, 3)\nM = (1, 2, 3)",
        },
        [
            "fused_optim.options.v:2 and fused_optim.step.clip:1 spell 'a', 'b', 'c'",
            "fused_optim.rule:1 and fused_optim.step.clip:2 spell t.x, t.y, t.z",
        ],
    ),
    "upwards, within a folder": (
        upward_imports,
        {"quantized/recipes/a": "from fused_optim.quantized.tensor import b", "quantized/tensor/b": ""},
        [
            "fused_optim.quantized.recipes.a:1 imports fused_optim.quantized.tensor.b: "
            "quantized.recipes is below quantized.tensor"
        ],
    ),
    "upwards, to a folder's own": (
        upward_imports,
        {"quantized/model/a": "from fused_optim.quantized import quantize_model_"},
        ["fused_optim.quantized.model.a:1 imports fused_optim.quantized: quantized.model is below quantized.__init__"],
    ),
    "long": (
        long_files,
        {"step/plan": "\n" * MOST_LINES, "step/run": "\n" * (MOST_LINES + 1)},
        [f"fused_optim.step.run has {MOST_LINES + 1} lines"],
    ),
    "long functions": (
        long_functions,
        {
            "step/plan": "def f():\n" + "    a\n" * 60,
            "step/run": "class C:\n    def f(a):\n        '''A.\n\n        '''\n" + "        a\n" * 61,
        },
        ["fused_optim.step.run:2 f has 61 lines"],
    ),
    "rooms that nobody knows": (
        other_rooms,
        {"cellar/wine": "", "quantized/attic/a": "", "quantized/loft": ""},
        ["cellar", "quantized.attic", "quantized.loft"],
    ),
}
# What all have: imports that are as they should be.
RIGHT = {
    **{f"{room}/__init__": "" for room in ("memory", "backends", "matrices", "options", "quantized", "state", "step")},
    **{f"{room}/__init__": "" for room in ("formats", "sharding", "integrations")},
    **dict.fromkeys(
        (
            "__main__",
            "torch_versions",
            "decorators",
            "roles",
            "rule",
            "publishing",
            "optimizer",
            "lion",
            "muon",
            "muon_groups",
            "known_rules",
            "release",
        ),
        "",
    ),
    **{f"quantized/{room}/__init__": "" for room in ("recipes", "tensor", "compute", "adapters", "model", "files")},
    **{f"checkpoint/{room}/__init__": "" for room in ("storage", "reading", "writing")},
    **{f"checkpoint/{room}": "" for room in ("termination", "collect", "extras", "random_states", "saves", "loads")},
    **{f"checkpoint/{room}": "" for room in ("checkpointer", "__init__")},
    **{f"{room}/__init__": "" for room in ("compat", "tools", "wire")},
    "__init__": """
from typing import TYPE_CHECKING
from fused_optim.adam import FusedAdam
if TYPE_CHECKING:
    from fused_optim import quantized as quantized

def __getattr__(name):
    from fused_optim.quantized import tensor
""",
    "formats/states": "from __future__ import annotations\nimport os.path",
    "sharding/dtensor": "from fused_optim.formats.states import X\nfrom torch import Tensor",
    "adapters": "import importlib\ndef adapter(module):\n    return importlib.import_module(module)",
    "backends/engines": "import importlib\nf = lambda name: importlib.import_module(f'fused_optim._engine_{name}')",
    "optional": "from importlib import import_module\noptional = lambda module: import_module(module)",
    "rebuild": "def f():\n    from fused_optim.quantized import tensor",
    "tools/commands": "def f():\n    from fused_optim.adam import A",
    "quantized/tensor/a": "from ..recipes import b\nfrom ...sharding import dtensor",
    "quantized/recipes/b": "from fused_optim.formats.states import X",
    "quantized/__init__": "from .tensor import a",
    "adam": "class A:\n    def f(self, b):\n        self._slots = b._slots\n        return b.x._local_tensor",
    "compat/apex": "import fused_optim.adam\nclass A(fused_optim.adam.A):\n    x = lambda self: self._slots",
    "integrations/megatron": """
import importlib
def install(optimizer):
    import megatron.core
    optimizer.__class__ = importlib.import_module('megatron.core.optimizer').X
""",
}


def test_what_is_allowed_is_there(package: Package) -> None:
    """Lists of exceptions that nothing needs any more hide what comes later."""
    for module, names in BY_NAME.items():
        found = {_asked_for(node) for node in nodes(package.trees[f"{package.name}.{module}"])}
        assert found >= set(names), module


def write(folder: Path, files: dict[str, str]) -> Package:
    for name, text in files.items():
        path = folder / "fused_optim" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Package(folder / "fused_optim")


@pytest.mark.parametrize("check, files, expected", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(check: Check, files: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    assert check(write(tmp_path, RIGHT | files)) == expected


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_is_right_is_not(check: Check, tmp_path: Path) -> None:
    package = write(tmp_path, RIGHT)
    assert {each.when for each in package.imports} == {"always", "typing", "called"}
    assert check(package) == []


# --- tests ------------------------------------------------------------------------------------------------------


def test_tests_import_no_tests() -> None:
    """What they share stands in tests/support, where it is found from everywhere."""
    for path in Path(__file__).parent.rglob("*.py"):
        text = path.read_text()
        if not re.search(r"^\s*(from|import)\b.*\btest_", text, re.MULTILINE):
            continue  # not parsed, as most are not
        for node in ast.walk(ast.parse(text)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("test_") for name in names), f"{path.name} imports {names}"
