"""``python -m fused_optim doctor``: what of a choice will fall back for a model, what that costs, and what to change.

The optimizer itself is asked, for one rank of many, with parameters on the meta device; nothing is trained or loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fused_optim.adam import FusedAdamW
from fused_optim.backends import COMPILED, why_reference
from fused_optim.formats.dtypes import as_dtype
from fused_optim.formats.elements import ELEMENT_TYPES
from fused_optim.formats.states import state_format
from fused_optim.memory.layout import MASTER
from fused_optim.muon_groups import muon_param_groups
from fused_optim.sharding.dtensor import shard_geometry
from fused_optim.state.summary import shown_bytes
from fused_optim.tools.inspector import Report, inspect_checkpoint
from fused_optim.tools.muon_plan import algorithm_counts, muon_names, optimizer_of
from fused_optim.tools.planner import Plan, plan_parameters
from fused_optim.tools.simulation import simulated
from fused_optim.torch_versions import RELEASES

Parameters = Sequence[tuple[str, Tensor]]
_EXAMPLES = 3


@dataclass(frozen=True)
class Finding:
    """Something that is not as it was asked for. ``costs``: "" where that is nothing to speak of."""

    what: str
    costs: str
    change: str

    def __str__(self) -> str:
        return f"- {self.what}" + f"\n    costs: {self.costs}" * bool(self.costs) + f"\n    change: {self.change}"


class Diagnosis(dict[str, Any]):
    """``findings``: each with ``what``, ``costs``, ``change``; ``plan``: as :class:`Plan`; None without parameters.

    ``algorithms``: with FusedMuon, the parameters' names by what updates them.
    """

    def __str__(self) -> str:
        plan, lines = self["plan"], [self["target"]]
        chosen = plan["chosen"]
        choice = f"state_dtype={chosen['state_dtype']}, master_bits={chosen['master_bits']}"
        own, adamws = (shown_bytes(_states(plan[key])) for key in ("chosen", "adamw"))
        sizes = f"{own} of states and masters, torch.optim.AdamW {adamws}"
        lines.append(
            f"  {plan['parameters']:,} parameters of {plan['elements']:,} elements on {plan['world_size']:,} ranks"
        )
        lines.append(f"  {'FusedMuon' if plan['muon'] else 'FusedAdamW'}({choice}): rank 0 holds {sizes}")
        lines += [f"  {algorithm_counts(plan['muon'])}"] if plan["muon"] else []
        lines += [f"    {kind}: {_shown(names)}" for kind, names in self["algorithms"].items()]
        lines += [str(Finding(**each)) for each in self["findings"]] or ["  nothing falls back"]
        return "\n".join(lines)


def _states(row: Mapping[str, Any]) -> int:
    return sum(row["bytes"][key] for key in ("masters", "states", "scales"))


def diagnose_target(
    target: str,
    *,
    world_size: int = 1,
    param_dtype: torch.dtype | str | None = None,
    state_dtype: torch.dtype | str = "int8",
    master_bits: int = 32,
    algorithm: str = "adamw",
) -> Diagnosis:
    """What would fall back of a model, ``module:function`` or ``file.py:function``, or of a checkpoint's parameters.

    The function takes no arguments and returns the model; it is called with the meta device as torch's default, and may
    shard the model. Of a checkpoint no more is read than what describes its tensors. ``param_dtype``: of parameters
    whose dtype the checkpoint does not say, bfloat16 by default; not for models, which have theirs. ``algorithm``:
    "muon" is FusedMuon with the groups of :func:`fused_optim.muon_param_groups`; of checkpoints, as names tell.

    Raises ValueError and OSError for a target that is none, and for choices that are none.
    """
    if param_dtype is not None and _is_factory(target):
        raise ValueError(f"param_dtype is for checkpoints that do not say it: {target} makes parameters of some dtype")
    report = None if _is_factory(target) else inspect_checkpoint(target, values=False)
    with simulated(world_size):
        if report is None:
            model = _of_factory(target)
            named: Parameters = list(model.named_parameters())
            muon = _muons_of(model, target) if algorithm == "muon" else muon_names(named, algorithm)
        else:
            named = list(_of_checkpoint(report, param_dtype or torch.bfloat16))
            muon = muon_names(named, algorithm)
        params = list(_sharded(named, world_size))
        plan = plan_parameters(
            params, state_dtype=state_dtype, master_bits=master_bits, machine=None, world_size=world_size, muon=muon
        )
        findings = [
            *_of_installation(),
            *_of_parameters(params, plan, muon),
            *(() if report is None else _of_files(report)),
        ]
    trained = [name for name, param in named if param.requires_grad]
    sorted_ = {kind: [name for name in trained if (name in muon) == (kind == "muon")] for kind in ("muon", "adamw")}
    return Diagnosis(
        target=target,
        plan=dict(plan),
        algorithms=sorted_ if algorithm == "muon" else {},
        findings=[asdict(each) for each in findings],
    )


# --- parameters -------------------------------------------------------------------------------------------------------


def _is_factory(target: str) -> bool:
    """Not where there is a file of that name, or an address such as s3://..."""
    return ":" in target and "://" not in target and not Path(target).exists()


def _muons_of(model: nn.Module, target: str) -> set[str]:
    """The names of the parameters that are for Muon. Raises ValueError for those that cannot be placed."""
    try:
        groups = muon_param_groups(model)
    except ValueError as error:
        raise ValueError(f"{target}: {error}") from error
    return {name for group in groups if group["algorithm"] == "muon" for name, _ in group["params"]}


def _of_factory(target: str) -> nn.Module:
    module, _, name = target.rpartition(":")
    function = getattr(_imported(module), name, None)
    if not callable(function):
        raise ValueError(
            f"{target}: expected MODULE:FUNCTION or FILE.py:FUNCTION, and {module} has no function {name!r}"
        )
    try:
        with torch.device("meta"):
            model = function()
    except Exception as error:
        raise ValueError(f"{target}() raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target}(): expected a torch.nn.Module, got {type(model).__name__}")
    named = list(model.named_parameters())
    if lazy := [name for name, param in named if is_lazy(param)]:
        raise ValueError(f"{target}: {lazy[0]} is not initialised: run a lazy module once before it is returned")
    if not named:
        raise ValueError(f"{target}: the model has no parameters")
    try:
        FusedAdamW(named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{target}: the optimizer does not take its parameters: {error}") from error
    return model


def _imported(name: str) -> ModuleType:
    """The user's own code, which runs."""
    try:
        if not name.endswith(".py"):
            sys.path.insert(0, "")
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _of_checkpoint(report: Report, param_dtype: torch.dtype | str) -> Iterator[tuple[str, Tensor]]:
    """Of its optimizer; without one, all that could be parameters."""
    default = as_dtype(param_dtype)
    if default not in ELEMENT_TYPES:
        raise ValueError(f"param_dtype: expected float32, bfloat16 or float16, got {param_dtype}")
    own = report["parameters"]
    others = {key: {**row, "parameter": row} for key, row in report["others"].items()}
    for name, row in (own or others).items():
        dtype = as_dtype(row.get("parameter", {}).get("format", "")) or default
        if dtype in ELEMENT_TYPES and row["shape"]:
            yield name, nn.Parameter(torch.empty(row["shape"], dtype=dtype, device="meta"))


def _sharded(named: Parameters, world_size: int) -> Iterator[tuple[str, Tensor]]:
    """By rows, by FSDP2 itself, which knows what quantized ones are made of; unless they are sharded."""
    mesh = init_device_mesh("cpu", (world_size,))
    for name, param in named:
        is_done = isinstance(param, DTensor) or world_size == 1 or not param.dim()
        yield name, param if is_done else _sharded_by_rows(name, param, mesh)


def _sharded_by_rows(name: str, param: Tensor, mesh: DeviceMesh) -> Tensor:
    alone = nn.Module()
    alone.register_parameter("param", nn.Parameter(param, requires_grad=param.requires_grad))
    try:
        fully_shard(alone, mesh=mesh)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{name}: FSDP2 cannot shard it over {mesh.size()} ranks: {error}") from error
    return alone.get_parameter("param")


# --- findings ---------------------------------------------------------------------------------------------------------


def _of_installation() -> Iterator[Finding]:
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in RELEASES:
        known = f"{RELEASES[0]} to {RELEASES[-1]}"
        yield Finding(f"torch {torch.__version__} was not tried: known are {known}", "", f"install a torch of {known}")
    for kind in COMPILED if torch.cuda.is_available() else ("cpu",):
        if problem := why_reference(kind):
            slower = "steps 150 to 300 times as long" if kind == "cuda" else "many times longer steps"
            what = f"parameters on {kind} are updated by the PyTorch reference: {problem}"
            yield Finding(what, slower, "`python -m fused_optim info` says what was built")
    for package, doing in {"numpy": "writing safetensors files", "safetensors": "safetensors files"}.items():
        if importlib.util.find_spec(package) is None:
            yield Finding(f"{package} is missing, for {doing}", "", "pip install safetensors numpy")


def _of_parameters(params: Parameters, plan: Plan, muon: Collection[str]) -> Iterator[Finding]:
    chosen = plan["chosen"]
    options = {key: chosen[key] for key in ("state_dtype", "master_bits")}
    optimizer = optimizer_of(params, muon, **options)
    store, wanted = optimizer.store, state_format(chosen["state_dtype"])
    groups = {param: group for group in store.groups for param in group["params"]}
    short: list[tuple[str, int]] = []
    unblocked: dict[bool, list[tuple[str, int]]] = {True: [], False: []}  # by whether sharding is why
    for name, param in params:
        if store.is_frozen(param):
            continue
        layout = store.new_layout(param, groups[param])
        extra = sum(
            layout.geometry.numel * (fmt.dtype(spec.kind).itemsize - wanted.dtype(spec.kind).itemsize)
            for spec, fmt in zip(layout.specs, layout.formats, strict=True)
        )
        if extra > 0 and param.dim() < 2:
            short.append((name, extra))
        elif extra > 0:
            unblocked[shard_geometry(torch.empty(param.shape, device="meta")).block > 0].append((name, extra))
    if short:
        yield Finding(
            _named(short, "with one dim keep FP32 states"), _bytes(short), "nothing: norms and biases are small"
        )
    if cut := unblocked[True]:
        what = _named(cut, "keep FP32 states: their shards cut rows into pieces that no block of 32 divides")
        yield Finding(what, _bytes(cut), "shard by rows (dim 0), or into columns of a multiple of 32")
    if odd := unblocked[False]:
        what = _named(odd, "keep FP32 states: no block of 32 divides their rows (all that follows dim 0)")
        yield Finding(what, _bytes(odd), "make the rows' length a multiple of 128, 64 or 32, by padding for instance")
    yield from _of_masters(params, chosen["master_bits"])


def _of_masters(params: Parameters, bits: int) -> Iterator[Finding]:
    others = [name for name, param in params if param.dtype != torch.bfloat16]
    if bits == 24 and others:
        what = f"{len(others):,} parameters are not BF16: FP32 ones are their own masters, FP16 ones have FP32 masters"
        yield Finding(what, "", "train BF16 parameters, or leave master_bits=32")
    if bits == 0 and any(param.dtype != torch.float32 for _, param in params):
        what = "16-bit parameters have no masters (master_bits=0): small updates move them by chance only"
        yield Finding(what, "accuracy", "master_bits=24 takes 1 byte per BF16 parameter, 32 takes 2")


def _of_files(report: Report) -> Iterator[Finding]:
    rows = report["parameters"].values()
    lonely = [row for row in rows if "remainder" in row.get(MASTER, {}).get("format", "") and "parameter" not in row]
    if lonely:
        what = f"{len(lonely):,} remainders without the BF16 parameters that they complete"
        yield Finding(what, "", "load the model's checkpoint first; tools take it as --model")
    if not rows:
        yield Finding("there are no states of an optimizer in it", "", "nothing, for a new run: they start at zero")


def _named(found: Sequence[tuple[str, int]], what: str) -> str:
    return f"{len(found):,} parameters ({_shown([name for name, _ in found])}) {what}"


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_EXAMPLES]) + ", ..." * (len(names) > _EXAMPLES)


def _bytes(found: Sequence[tuple[str, int]]) -> str:
    return f"{shown_bytes(sum(extra for _, extra in found))} more on rank 0"
