"""Brings docs/quality.md up to date with results of `pretraining.py`: their summary, the curves, the tables.

    python benchmarks/pretraining_page.py benchmarks/results/2026-11-22-h200-pretraining

Writes summary.json and curves.svg there. On the page, a table stands between the comments `<!-- pretraining: NAME -->`
and `<!-- end -->`, with the comment below it that tests/test_figures.py reads.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretraining import results_in, summary_of, write_json

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "quality.md"
TYPES = ("attention qkv", "attention out", "MLP", "embedding", "head")

matplotlib.rcParams.update({"svg.hashsalt": "fused_optim", "svg.fonttype": "none", "font.family": "sans-serif"})

Table = tuple[list[list[str]], list[str]]  # rows of cells, the first one the title; lines of the comment


def digits(value: float, count: int = 2) -> str:
    """At least ``count`` significant ones, without an exponent."""
    places = max(0, count - 1 - math.floor(math.log10(value))) if value else 0
    return f"{value:,.{places}f}"


def gap_of(row: dict[str, Any]) -> tuple[str, str]:
    """Its text and the key of its value. Gaps are printed without a sign."""
    if row["name"] == "fp32":
        return "", ""
    side = "above" if "percent_above_fp32" in row else "below"
    key = f"percent_{side}_fp32"
    return f"{row[key]:.2f}% {side}", key


def runs_table(summary: dict[str, Any]) -> Table:
    cells = [["optimizer", "bytes per parameter", "held-out loss", "compared with FP32", "tokens/s"]]
    lines = []
    for row in summary["runs"]:
        gap, key = gap_of(row)
        name = f"{row['label']}, seed {row['seed']}" if row["name"].startswith("fp32") else row["label"]
        figures = (
            f"{row['held_bytes_per_param']:.2f}",
            f"{row['held_out_loss']:.4f}",
            gap,
            f"{row['tokens_per_s']:,.0f}",
        )
        cells.append([name, *figures])
        keys = filter(None, ("held_bytes_per_param", "held_out_loss", key, "tokens_per_s"))
        lines.append("= " + "; ".join(f"runs/name={row['name']}/{key}" for key in keys))
    return cells, ["values: -", *lines]


def errors_table(summary: dict[str, Any]) -> Table:
    rows = {(row["format"], row["beta2"], row["type"]): row for row in summary["errors"]}
    pairs = [pair for pair in dict.fromkeys((name, beta2) for name, beta2, _ in rows) if pair[0] != "FP32"]
    cells, lines = [["states, beta2", *TYPES, "largest update"]], []
    for name, beta2 in sorted(
        pairs, key=lambda pair: (list(dict.fromkeys(p[0] for p in pairs)).index(pair[0]), pair[1])
    ):
        largest = max((rows[name, beta2, kind] for kind in TYPES), key=lambda row: row["largest_update"])
        values = [rows[name, beta2, kind]["error"] for kind in TYPES]
        cells.append([f"{name}, {beta2}", *map(digits, values), digits(largest["largest_update"], 3)])
        one = f"errors/format={name} & beta2={beta2} & type={{}}/{{}}"
        paths = [one.format(kind, "error") for kind in TYPES] + [one.format(largest["type"], "largest_update")]
        lines.append("= " + "; ".join(paths))
    return cells, ["values: -", *lines]


def as_text(table: Table, source: str) -> str:
    cells, lines = table
    rows = ["| " + " | ".join(row) + " |" for row in cells]
    rule = "|" + "---|" * len(cells[0])
    return "\n".join([rows[0], rule, *rows[1:], "", f"<!-- figures: {source}", *lines, "-->"])


def replaced(page: str, name: str, text: str) -> str:
    pattern = re.compile(rf"(<!-- pretraining: {name} -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
    page, count = pattern.subn(lambda match: match[1] + text + match[2], page)
    if count != 1:
        raise SystemExit(f"the page has {count} places for the table of {name}, expected one")
    return page


# --- curves -------------------------------------------------------------------------------------------------------


def draw_losses(axes: Axes, runs: Sequence[dict[str, Any]], colors: dict[str, Any]) -> None:
    for run in runs:
        per_step = run["trained_tokens"] / run["steps"] / 1e6
        steps, losses = zip(*run["training"])
        axes.plot([per_step * step for step in steps], losses, color=colors[run["name"]], linewidth=0.8, alpha=0.7)
    top = sorted(loss for run in runs for _, loss in run["training"])
    axes.set(
        xlabel="million tokens", ylabel="training loss, nats per token", ylim=(top[0] - 0.1, top[int(0.97 * len(top))])
    )


def draw_gaps(axes: Axes, runs: Sequence[dict[str, Any]], colors: dict[str, Any]) -> None:
    """The figures of the table: of the evaluation after training. Runs that were stopped have none."""
    whole = [run for run in runs if run["held_out_loss"] is not None]
    exact = next(run["held_out_loss"] for run in whole if run["name"] == "fp32")
    for row, run in enumerate(whole):
        gap = 100 * (run["held_out_loss"] / exact - 1)
        axes.plot([0, gap], [row, row], color=colors[run["name"]], linewidth=1.5)
        axes.plot(gap, row, "o", color=colors[run["name"]])
        side, align = (6, "left") if gap >= 0 else (-6, "right")
        axes.annotate(
            f"{gap:+.2f}%", (gap, row), (side, 0), textcoords="offset points", va="center", ha=align, fontsize=7
        )
    labels = [
        f"{run['label']}, seed {run['seed']}" if run["name"].startswith("fp32") else run["label"] for run in whole
    ]
    axes.set_yticks(range(len(whole)), labels, fontsize=7)
    axes.yaxis.tick_right()
    axes.invert_yaxis()
    axes.axvline(0, color="#9aa0a6", linewidth=0.8)
    axes.margins(x=0.2)
    axes.set(xlabel="held-out loss after training, compared with FP32's (seed 0), %")


def draw(runs: Sequence[dict[str, Any]]) -> Figure:
    palette = [matplotlib.colormaps["tab20"](i) for i in (0, 2, 4, 6, 8, 10, 12, 16, 18, 1, 3, 5, 7, 9)]
    colors: dict[str, Any] = {"fp32": "#202124", "fp32-seed1": "#9aa0a6"}
    colors |= dict(zip((run["name"] for run in runs if run["name"] not in colors), palette))
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_losses(left, runs, colors)
    draw_gaps(right, runs, colors)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    facts = runs[0]["machine"]
    where = f"{facts.get('gpu') or facts.get('cpu')}, torch {facts['torch']}"
    title = f"{runs[0]['parameters'] / 1e6:.0f} M parameters, {where}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    return figure


def update(folder: Path, page: Path) -> None:
    summary = summary_of([folder])
    write_json(folder / "summary.json", summary)
    runs = results_in([folder]) + results_in([folder], "partial.json")
    draw(runs).savefig(folder / "curves.svg", metadata={"Date": None})
    source = (folder / "summary.json").resolve()
    name = str(source.relative_to(ROOT)) if source.is_relative_to(ROOT) else source.name
    text = replaced(page.read_text(), "runs", as_text(runs_table(summary), name))
    if "errors" in summary:
        text = replaced(text, "errors", as_text(errors_table(summary), name))
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the JSON files that pretraining.py wrote")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    update(args.folder, args.page)


if __name__ == "__main__":
    main()
