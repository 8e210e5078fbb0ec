"""``python -m fused_optim inspect``: the contents of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from fused_optim.adapters import adapter_of
from fused_optim.checkpoint.folders import PathLike, folder_at
from fused_optim.checkpoint.open import Source, open_checked
from fused_optim.checkpoint.plan import NOT_SETTINGS, read_steps
from fused_optim.checkpoint.verify import FILE as CHECKSUMS
from fused_optim.checkpoint.verify import verify_checksums
from fused_optim.memory.layout import MASTER
from fused_optim.rules import known_states
from fused_optim.state.groups import DESCRIPTION
from fused_optim.state.summary import aligned, shown_bytes
from fused_optim.tools.progress import progress
from fused_optim.tools.saved_optimizer import SavedOptimizer, SavedTensor, pieces_of, read_optimizer
from fused_optim.tools.values import Values

PARAMETER = "parameter"
_TENSORS = (PARAMETER, *known_states(), MASTER)  # of a parameter
_NOT_SHOWN = ("parameters", *DESCRIPTION)
_EXAMPLES = 5


class Report(dict[str, Any]):
    """Contents of a checkpoint: numbers, texts, lists and dicts of these. ``str()`` of it is for people.

    ``kind``: the files; ``layout``: the writer of such states; ``ranks``: how many wrote it; ``steps``, ``groups``: of
    the optimizer; ``formats``: a row for each mix; ``checksums``; ``parameters``: by name, with the states of each;
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
    source = open_checked(path)
    optimizer = read_optimizer(source, None if model is None else open_checked(model))
    summed = folder_at(path).size(CHECKSUMS) is not None
    if summed and values:
        verify_checksums(path, no_dist=True)
    report = Report(
        path=str(path),
        kind=source.kind,
        layout="no states of an optimizer" if optimizer is None else optimizer.layout,
        ranks=source.ranks,
        entries=len(source.entries),
        bytes=sum(map(source.nbytes, source.entries)),
        steps=[] if optimizer is None else steps_of(optimizer),
        groups=[] if optimizer is None else groups_of(optimizer),
        checksums=("compared: all bytes as written" if values else "there, not compared") if summed else "none",
        values=values,
    )
    report["parameters"] = {} if optimizer is None else _parameters(optimizer, values)
    report["others"] = _others(source, optimizer, values)
    report["formats"] = _formats(report["parameters"])
    report["not_finite"] = [
        name
        for name, row in _all_tensors(report)
        if "values" in row and row["values"]["nan"] + row["values"]["infinite"]
    ]
    return report


def steps_of(optimizer: SavedOptimizer) -> list[int]:
    return sorted(set(read_steps(optimizer.source, optimizer.contents).values()))


def groups_of(optimizer: SavedOptimizer) -> list[dict[str, Any]]:
    """Distinct settings, each with the number of parameters that have them."""
    groups: dict[str, dict[str, Any]] = {}
    for settings in optimizer.contents.settings.values():
        shown = {key: _plain(value) for key, value in settings.items() if key not in NOT_SETTINGS}
        counted = groups.setdefault(json.dumps(shown, sort_keys=True), {"parameters": 0, **shown})
        counted["parameters"] += 1
    return list(groups.values())


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _parameters(optimizer: SavedOptimizer, values: bool) -> dict[str, Any]:
    names = [*optimizer.states, *(name for name in optimizer.weights if name not in optimizer.states)]
    rows = {}
    sizes = {name: sum(state.nbytes for state in optimizer.states.get(name, {}).values()) for name in names}
    for name in progress(names, "reading", sizes.__getitem__):
        states, weight, row = optimizer.states.get(name, {}), optimizer.weights.get(name), {}
        if weight is not None and weight.source is optimizer.source:
            row[PARAMETER] = _described(weight, values)
        for key, state in states.items():
            row[key] = {"format": state.format, "bytes": state.nbytes}
            if values and state.is_complete:
                row[key]["values"] = asdict(Values.from_pieces(state.pieces()))
        shape = next(iter(states.values())).shape if states else weight.info.shape if weight else ()
        rows[name] = {"shape": list(shape), **row}
    return rows


def _others(source: Source, optimizer: SavedOptimizer | None, values: bool) -> dict[str, Any]:
    tensors = {tensor.key: tensor for tensor in other_tensors(source, optimizer)}
    return {
        key: {"shape": list(tensors[key].info.shape), **_described(tensors[key], values)}
        for key in progress(tensors, "reading", source.nbytes)
    }


def other_tensors(source: Source, optimizer: SavedOptimizer | None) -> Iterator[SavedTensor]:
    """Tensors that are neither parameters nor states."""
    known: set[str] = set()
    if optimizer is not None:
        known = optimizer.contents.state_keys | {of.key for of in optimizer.weights.values() if of.source is source}
    for key, info in source.entries.items():
        if info is not None and key not in known:
            yield SavedTensor(source, key)


def _described(tensor: SavedTensor, values: bool) -> dict[str, Any]:
    dtype = tensor.info.dtype
    row: dict[str, Any] = {
        "format": str(dtype).removeprefix("torch."),
        "bytes": tensor.source.nbytes(tensor.key),
    }
    if values and not dtype.is_complex:
        value = tensor.value()
        if adapter_of(value) is not None:
            row["format"] = type(value).__name__
        row["values"] = asdict(Values.from_pieces(pieces_of(value)))
    return row


def _states_in(parameters: Mapping[str, Any]) -> list[str]:
    """The names of the states that some parameter has."""
    return [name for name in known_states() if any(name in found for found in parameters.values())]


def _formats(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    states = _states_in(parameters)
    for parameter in parameters.values():
        mix = tuple(parameter.get(name, {}).get("format", "none") for name in (PARAMETER, *states, MASTER))
        names = dict(zip((PARAMETER, *states, "master"), mix, strict=True))
        row = rows.setdefault(mix, {**names, "parameters": 0, "elements": 0, "bytes": 0})
        row["parameters"] += 1
        row["elements"] += math.prod(parameter["shape"])
        row["bytes"] += sum(parameter[name]["bytes"] for name in (PARAMETER, *states, MASTER) if name in parameter)
    return sorted(rows.values(), key=lambda row: -int(row["elements"]))


def _all_tensors(report: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, rows in report["parameters"].items():
        yield from ((f"{key} of {name}", rows[key]) for key in _TENSORS if key in rows)
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
    columns = (PARAMETER, *_states_in(report["parameters"]), "master")
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
        rows = [(key, found[key]) for key in _TENSORS if key in found]
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
