"""``python -m fused_optim inspect``: what a checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from fused_optim.adam import MOMENTS
from fused_optim.adapters import adapter_of
from fused_optim.checkpoint.reading.sources import read_small
from fused_optim.checkpoint.storage import checksums
from fused_optim.checkpoint.storage.folders import PathLike
from fused_optim.layout import MASTER
from fused_optim.state.groups import DESCRIPTION
from fused_optim.state.summary import aligned, shown_bytes
from fused_optim.tools.contents import Optimizer, pieces_of, read_optimizer
from fused_optim.tools.progress import progress
from fused_optim.tools.reading import Checkpoint, FolderCheckpoint, open_checkpoint
from fused_optim.tools.values import Values

PARAMETER = "parameter"
_NOT_SETTINGS = ("params", "param_names", "step")
_NOT_SHOWN = ("parameters", *DESCRIPTION)
_EXAMPLES = 5


class Report(dict[str, Any]):
    """What a checkpoint holds: numbers, texts, lists and dicts of these. ``str()`` of it is for people.

    ``kind``: the files; ``layout``: who writes such states; ``ranks``: that wrote it; ``steps``, ``groups``: of the
    optimizer; ``formats``: a row for each mix; ``checksums``; ``parameters``: by name, with the states of each;
    ``others``: tensors that belong to neither, by key; ``not_finite``: names of tensors with NaN or infinite values.
    """

    def __str__(self) -> str:
        return "\n".join([*_head(self), *_table(self)])


def inspect_checkpoint(path: PathLike, *, model: PathLike | None = None, values: bool = True) -> Report:
    """Read a checkpoint, tensor by tensor, in host memory: one tensor is in it at any time.

    ``path``: a folder of torch.distributed.checkpoint, a file of torch.save, safetensors files. ``model``: the model's
    checkpoint where that is another one, which remainders need. ``values``: look at all values, and compare checksums
    where there are some; otherwise no more is read than what describes the tensors.

    Raises FileNotFoundError and ValueError for what is missing, truncated, damaged, newer, or no checkpoint.
    """
    checkpoint = open_checkpoint(path)
    optimizer = read_optimizer(checkpoint, None if model is None else open_checkpoint(model))
    summed = isinstance(checkpoint, FolderCheckpoint) and checkpoint.path.size(checksums.FILE) is not None
    if summed and values:
        checksums.verify_checksums(path, no_dist=True)
    report = Report(
        path=str(path),
        kind=checkpoint.kind,
        layout="no states of Adam" if optimizer is None else optimizer.layout,
        ranks=checkpoint.ranks,
        entries=len(checkpoint.entries),
        bytes=sum(map(checkpoint.nbytes, checkpoint.entries)),
        steps=[] if optimizer is None else steps_of(optimizer),
        groups=[] if optimizer is None else groups_of(optimizer),
        checksums=("compared: all bytes as written" if values else "there, not compared") if summed else "none",
        values=values,
    )
    report["parameters"] = {} if optimizer is None else _parameters(optimizer, values)
    report["others"] = _others(checkpoint, optimizer, values)
    report["formats"] = _formats(report["parameters"])
    report["not_finite"] = [
        name
        for name, found in _all_tensors(report)
        if "values" in found and found["values"]["nan"] + found["values"]["infinite"]
    ]
    return report


def steps_of(optimizer: Optimizer) -> list[int]:
    own = [parts["step"][""] for parts in optimizer.contents.states.values() if "step" in parts]
    steps = {int(step) for step in read_small(optimizer.checkpoint, own).values()}
    return sorted(steps | {int(of["step"]) for of in optimizer.contents.settings.values() if "step" in of})


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Settings that are alike, with the number of parameters that have them."""
    found: dict[str, dict[str, Any]] = {}
    for settings in optimizer.contents.settings.values():
        shown = {key: _plain(value) for key, value in settings.items() if key not in _NOT_SETTINGS}
        counted = found.setdefault(json.dumps(shown, sort_keys=True), {"parameters": 0, **shown})
        counted["parameters"] += 1
    return list(found.values())


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _parameters(optimizer: Optimizer, values: bool) -> dict[str, Any]:
    names = [*optimizer.states, *(name for name in optimizer.weights if name not in optimizer.states)]
    checkpoint, found = optimizer.checkpoint, {}
    sizes = {name: sum(state.nbytes for state in optimizer.states.get(name, {}).values()) for name in names}
    for name in progress(names, "reading", sizes.__getitem__):
        states, weight, row = optimizer.states.get(name, {}), optimizer.weights.get(name), {}
        if weight is not None and weight.checkpoint is checkpoint:
            row[PARAMETER] = _described(checkpoint, weight.key, values)
        for key, state in states.items():
            row[key] = {"format": state.format, "bytes": state.nbytes}
            if values and state.is_complete:
                row[key]["values"] = asdict(Values.of(state.pieces()))
        shape = next(iter(states.values())).shape if states else weight.stored.shape if weight else ()
        found[name] = {"shape": list(shape), **row}
    return found


def _others(checkpoint: Checkpoint, optimizer: Optimizer | None, values: bool) -> dict[str, Any]:
    known: set[str] = set()
    if optimizer is not None:
        known = optimizer.own_keys | {of.key for of in optimizer.weights.values() if of.checkpoint is checkpoint}
    keys = [key for key, stored in checkpoint.entries.items() if stored is not None and key not in known]
    found = {}
    for key in progress(keys, "reading", checkpoint.nbytes):
        stored = checkpoint.entries[key]
        assert stored is not None
        found[key] = {"shape": list(stored.shape), **_described(checkpoint, key, values)}
    return found


def _described(checkpoint: Checkpoint, key: str, values: bool) -> dict[str, Any]:
    stored = checkpoint.entries[key]
    assert stored is not None
    row: dict[str, Any] = {"format": str(stored.dtype).removeprefix("torch."), "bytes": checkpoint.nbytes(key)}
    if values and not stored.dtype.is_complex:
        value = checkpoint.value(key)
        if adapter_of(value) is not None:
            row["format"] = type(value).__name__
        row["values"] = asdict(Values.of(pieces_of(value)))
    return row


def _formats(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for found in parameters.values():
        mix = tuple(found.get(name, {}).get("format", "none") for name in (PARAMETER, *MOMENTS, MASTER))
        names = dict(zip((PARAMETER, *MOMENTS, "master"), mix, strict=True))
        row = rows.setdefault(mix, {**names, "parameters": 0, "elements": 0, "bytes": 0})
        row["parameters"] += 1
        row["elements"] += _product(found["shape"])
        row["bytes"] += sum(found[name]["bytes"] for name in (PARAMETER, *MOMENTS, MASTER) if name in found)
    return sorted(rows.values(), key=lambda row: -int(row["elements"]))


def _product(shape: list[int]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


def _all_tensors(report: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, found in report["parameters"].items():
        yield from ((f"{key} of {name}", found[key]) for key in (PARAMETER, *MOMENTS, MASTER) if key in found)
    yield from report["others"].items()


# --- for people -------------------------------------------------------------------------------------------------------


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    ranks = "" if report["ranks"] is None else f", written by {report['ranks']} rank" + "s" * (report["ranks"] != 1)
    yield f"{report['path']}: {report['kind']}{ranks}, {shown_bytes(report['bytes'])} in {report['entries']:,} entries"
    steps = ", ".join(map(str, report["steps"]))
    yield f"  {report['layout']}" + (f", step {steps}" if steps else "") + f"; checksums: {report['checksums']}"
    for group in report["groups"]:
        settings = ", ".join(f"{key}={value}" for key, value in group.items() if key not in _NOT_SHOWN)
        yield f"  {group['parameters']:,} parameters with {settings}"
    columns = (PARAMETER, *MOMENTS, "master")
    table = [(*columns, "parameters", "elements", "bytes")]
    for row in report["formats"]:
        numbers = (f"{row['parameters']:,}", f"{row['elements']:,}", shown_bytes(row["bytes"]))
        table.append((*(row[key] for key in columns), *numbers))
    yield from ("  " + line for line in aligned(table) if report["formats"])
    if report["not_finite"]:
        more = f" and {len(report['not_finite']) - _EXAMPLES} more" * (len(report["not_finite"]) > _EXAMPLES)
        yield f"  NOT FINITE: {', '.join(report['not_finite'][:_EXAMPLES])}{more}"
    elif report["values"]:
        yield "  all values are finite"


def _table(report: Mapping[str, Any]) -> Iterator[str]:
    table = []
    for name, found in report["parameters"].items():
        rows = [(key, found[key]) for key in (PARAMETER, *MOMENTS, MASTER) if key in found]
        table += [(name if i == 0 else "", _shape(found) if i == 0 else "", *_row(*row)) for i, row in enumerate(rows)]
    table += [(key, _shape(found), *_row("other", found)) for key, found in report["others"].items()]
    if table:
        yield ""
        yield from aligned(table)


def _shape(found: Mapping[str, Any]) -> str:
    return " x ".join(map(str, found["shape"])) or "number"


def _row(what: str, found: Mapping[str, Any]) -> tuple[str, str, str, str]:
    values = str(Values(**found["values"])) if "values" in found else ""
    return what, found["format"], shown_bytes(found["bytes"]), values
