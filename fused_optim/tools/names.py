"""What can be asked of the tools, by name. Nothing here needs torch, so that ``--help`` is there at once."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

# Of plans: formats of the states, bits of the masters.
STATES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
MASTER_BITS = (32, 24, 0)
ALGORITHMS = ("adamw", "muon")

# Of conversions.
Layout = Literal["unscaled", "native", "torch", "safetensors", "masters"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
STORED_MASTERS = ("float32", "float16", "remainder16", "remainder8")


# Machines that were not measured, by their data sheets.
_BY_BANDWIDTH: dict[str, dict[str, Any]] = {
    "h100": {"name": "NVIDIA H100 SXM", "memory_bytes_per_s": 3.35e12},
    "a100": {"name": "NVIDIA A100 80GB SXM", "memory_bytes_per_s": 2.039e12},
}
_MEASURED = "h200"
_MEASURED_ON = {"memory_bytes_per_s": 4.8e12}  # by its data sheet
# What a machine may say: one of the first two, and what else was measured on it.
_RATES = ("memory_bytes_per_s", "copy_bytes_per_s", "host_s_per_parameter", "link_bytes_per_s")


@cache
def measured() -> dict[str, Any]:
    """What was measured, by machine."""
    found: dict[str, Any] = json.loads(files("fused_optim.tools").joinpath("measured.json").read_text())
    return found


def machine_names() -> tuple[str, ...]:
    return (*measured(), *_BY_BANDWIDTH)


def rates_of(machine: str) -> dict[str, Any]:
    """What times on a machine are predicted from: of one that is known by its name, else of a JSON file.

    What the file does not say is as it was measured on an H200: shares of the bandwidth of copies, and that of what the
    data sheet says; the host's time. The link's bandwidth and times of saves are not known then. Raises ValueError for
    other names, and for files that say something else.
    """
    if machine in measured():
        found: dict[str, Any] = measured()[machine]
        return found
    given: dict[str, Any] = _BY_BANDWIDTH.get(machine) or _read_machine(machine)
    known = measured()[_MEASURED]
    share = known["copy_bytes_per_s"] / _MEASURED_ON["memory_bytes_per_s"]
    memory = float(given.get("memory_bytes_per_s", 0.0))
    rates = {key: known[key] for key in ("share_of_copy", "host_s_per_parameter")}
    source = f"bandwidth of {given['name']}; shares of it as measured on {known['name']}"
    return {"copy_bytes_per_s": share * memory, **rates, **given, "sources": [source]}


def _read_machine(path: str) -> dict[str, Any]:
    names = ", ".join(machine_names())
    if not path.endswith(".json"):
        raise ValueError(f"machine: expected {names}, or a JSON file, got {path!r}")
    try:
        given = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"machine: {path} is no JSON ({error})") from error
    if not isinstance(given, dict) or not (given.keys() & {"memory_bytes_per_s", "copy_bytes_per_s"}):
        raise ValueError(f'machine: {path}: expected {{"name": ..., "memory_bytes_per_s": ...}}, or copy_bytes_per_s')
    for key, value in given.items():
        is_rate = isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < math.inf
        if key != "name" and not (key in _RATES and is_rate):
            raise ValueError(f"machine: {path}: expected positive numbers of {', '.join(_RATES)}, got {key}={value!r}")
    return {"name": Path(path).stem, **given}
