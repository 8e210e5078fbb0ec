"""Writes into the package, from the results here, which sizes of layers gain from FP8 products.

    python benchmarks/measured.py

Tests compare the file with the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TARGET = Path(__file__).parents[1] / "fused_optim" / "quantized" / "fp8" / "measured_sizes.json"
SIZES, EXPERTS = "2026-11-24-h100-fp8/sizes.json", "2026-11-24-h100-fp8/experts.json"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def sizes() -> dict[str, Any]:
    report = read(SIZES)
    what = "ms of a linear layer without the host, and of experts' layers in eager mode; forward and backward"
    sources = {"source": [SIZES, EXPERTS], "sizes": report["sizes"], "experts": read(EXPERTS)["experts"]}
    return {"what": what, "machine": report["machine"], **sources}


if __name__ == "__main__":
    TARGET.write_text(json.dumps(sizes(), indent=2) + "\n")
    print(TARGET)
