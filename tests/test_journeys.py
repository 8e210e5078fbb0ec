"""Steps, saves and loads enter no more files and functions than benchmarks/journeys.py last found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LEEWAY = 3  # functions of a save or a load, by how its threads happen to meet


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["journey"]: row for row in json.loads(path.read_text())["journeys"]}


def test_journeys_grow_no_longer(tmp_path: Path) -> None:
    *_, newest = sorted((ROOT / "benchmarks" / "results").glob("*/journeys.json"))
    command = [sys.executable, ROOT / "benchmarks" / "journeys.py", "--output", tmp_path / "now.json"]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    recorded, found = rows_of(newest), rows_of(tmp_path / "now.json")
    assert found.keys() == recorded.keys()
    for name, row in found.items():
        leeway = LEEWAY if "save" in name or "load" in name else 0
        assert row["files"] <= recorded[name]["files"], name
        assert row["functions"] <= recorded[name]["functions"] + leeway, name
