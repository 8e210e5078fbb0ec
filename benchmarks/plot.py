"""Draws what `step.py` measured: time per step and the copy bound, and bytes per parameter.

python benchmarks/plot.py step.json step.svg --only 'FP32$|BF16 states|int8|Flash|FP8 states'
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]

OURS, PEER, BOUND = "#1f77b4", "#9aa0a6", "#d9480f"
PARTS = ("parameter and gradient", "states and master", "temporary")
SHADES = (0.45, 1.0, 0.2)
INCHES_PER_ROW, INCHES_AROUND = 0.27, 1.3

# The same figure gives the same file, and its text stays text.
matplotlib.rcParams.update({"svg.hashsalt": "fused_optim", "svg.fonttype": "none", "font.family": "sans-serif"})


def color(row: Row) -> str:
    return OURS if row["name"].startswith("FusedAdam") else PEER


def copy_bound(row: Row) -> float:
    return row["ms"] * row["share_of_copy"]


def bytes_of_parts(row: Row) -> list[float]:
    state, temporary = row.get("state_bytes_per_param", 0.0), row.get("temporary_bytes_per_param", 0.0)
    return [row.get("allocated_bytes_per_param", state) - state, state, temporary]


def draw_times(axes: Axes, rows: Sequence[Row]) -> None:
    times = [row["ms"] for row in rows]
    axes.barh(range(len(rows)), times, color=[color(row) for row in rows])
    for position, row in enumerate(rows):
        bound = axes.vlines(copy_bound(row), position - 0.4, position + 0.4, color=BOUND, linewidth=2)
        axes.text(row["ms"], position, f" {row['ms']:.2f}", va="center", fontsize=8)
    bound.set_label("copying the same bytes")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set(xlabel="ms per step", xlim=(0, 1.12 * max(times)))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)


def draw_bytes(axes: Axes, rows: Sequence[Row]) -> None:
    lefts = [0.0] * len(rows)
    for part, shade in enumerate(SHADES):
        sizes = [bytes_of_parts(row)[part] for row in rows]
        if not any(sizes):  # not measured, or nobody has any
            continue
        axes.barh(range(len(rows)), sizes, left=lefts, color=[color(row) for row in rows], alpha=shade)
        axes.bar(0, 0, color=OURS, alpha=shade, label=PARTS[part])
        lefts = [left + size for left, size in zip(lefts, sizes)]
    for position, total in enumerate(lefts):
        axes.text(total, position, f" {total:.2f}", va="center", fontsize=8)
    axes.set(xlabel="bytes per parameter", xlim=(0, 1.15 * max(lefts)))
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(PARTS), fontsize=8)


def draw(report: dict[str, Any], workload: str, only: str) -> Figure:
    """One row per contender that ran and whose name matches ``only``, the fastest on top."""
    rows = [row for row in report["workloads"][workload] if "ms" in row and re.search(only, row["name"])]
    if not rows:
        raise SystemExit(f"no results of {workload} match {only!r}")
    rows.sort(key=lambda row: row["ms"])
    facts = report["machine"]
    figure = Figure(figsize=(12, INCHES_AROUND + INCHES_PER_ROW * len(rows)), layout="constrained")
    times, sizes = figure.subplots(1, 2, sharey=True, width_ratios=(1.5, 1))
    draw_times(times, rows)
    draw_bytes(sizes, rows)
    times.invert_yaxis()
    where = facts.get("gpu") or facts.get("cpu")
    title = f"{workload}, {where}, torch {facts['torch']}, commit {facts['commit']}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    for axes in (times, sizes):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON that step.py wrote")
    parser.add_argument("picture", type=Path, help="SVG to write")
    parser.add_argument("--workload", default="llama-1b")
    parser.add_argument("--only", default="", help="optimizers whose name this regular expression matches")
    args = parser.parse_args()
    figure = draw(json.loads(args.results.read_text()), args.workload, args.only)
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
