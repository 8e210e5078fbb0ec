"""Writes figures of the results here into the package: what `python -m fused_optim plan` predicts from, and which
sizes of layers gain from FP8 products.

    python benchmarks/measured.py

Tests compare the files with the results.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TARGET = Path(__file__).parents[1] / "fused_optim" / "tools" / "measured.json"
SIZES_TARGET = TARGET.parents[1] / "quantized" / "compute" / "measured_sizes.json"
STEPS = "2026-11-23-h200-peers/step.json"
SAVES = "2026-11-23-h200-saves/saves.json"
SIZES, EXPERTS = "2026-11-24-h100-fp8/sizes.json", "2026-11-24-h100-fp8/experts.json"
OFFLOAD = "2026-11-22-h200-offload/offload.json"

MASTERS = {"FP32": "float32", "16-bit remainder": "remainder16", "8-bit remainder": "remainder8", "no": "none"}
STATES = {"FP32": "float32", "BF16": "bfloat16", "FP16": "float16", "FP8": "float8_e4m3fn", "int8": "int8"}
NAME = re.compile(
    r"FusedAdamW (?P<master>FP32|16-bit remainder|8-bit remainder|no)(?: master)?, (?P<states>\w+) states"
)
_WAY = "Checkpointer, prepared"  # of saves


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def measured() -> dict[str, Any]:
    """By machine: shares of the copy bandwidth, host time per parameter, bytes per second of saves."""
    steps = read(STEPS)
    shares = {"none/float32": share(steps, "FusedAdamW FP32")}
    for row in steps["workloads"]["llama-1b"]:
        if match := NAME.fullmatch(row["name"]):
            shares[f"{MASTERS[match['master']]}/{STATES[match['states']]}"] = row["share_of_copy"]
    link = {"link_bytes_per_s": read(OFFLOAD)["link"]["both_ways_bytes_per_s"]} if (RESULTS / OFFLOAD).exists() else {}
    shard = [row for row in steps["workloads"]["llama-1b-shard"] if NAME.fullmatch(row["name"])]
    return {
        "h200": {
            "name": steps["machine"]["gpu"],
            "sources": [STEPS, SAVES, *([OFFLOAD] if link else [])],
            "copy_bytes_per_s": steps["copy_bytes_per_s"],
            "share_of_copy": shares,
            **link,
            "host_s_per_parameter": max(row["host_ms"] for row in shard) / 1e3 / 146,
            "save_bytes_per_s": save_rates("written_after_s"),
            "lost_bytes_per_s": save_rates("lost_s"),
        }
    }


def share(report: dict[str, Any], name: str) -> float:
    return next(row["share_of_copy"] for row in report["workloads"]["llama-1b"] if row["name"] == name)


def save_rates(duration: str) -> dict[str, float]:
    """Of the slowest save after the first, by form."""
    found: dict[str, float] = {}
    for row in read(SAVES)["saves"]:
        if row["way"] == _WAY and row["number"] > 1:
            rate = row["written_bytes"] / row[duration]
            found[row["form"]] = min(rate, found.get(row["form"], rate))
    return found


def sizes() -> dict[str, Any]:
    report = read(SIZES)
    what = "ms of a linear layer without the host, and of experts' layers in eager mode; forward and backward"
    sources = {"source": [SIZES, EXPERTS], "sizes": report["sizes"], "experts": read(EXPERTS)["experts"]}
    return {"what": what, "machine": report["machine"], **sources}


if __name__ == "__main__":
    SIZES_TARGET.write_text(json.dumps(sizes(), indent=2) + "\n")
    print(SIZES_TARGET)
    TARGET.write_text(json.dumps(measured(), indent=2) + "\n")
    print(TARGET)
