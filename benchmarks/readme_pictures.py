"""Draws the pictures of the README from committed results: bytes per parameter and time per step.

    python benchmarks/readme_pictures.py

Writes memory.svg and step_time.svg into docs/pictures. Each has the colours of both modes, and a ground
of its own, so that it can be read on any page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
STEPS = RESULTS / "2026-11-23-h200-peers" / "step.json"
PICTURES = ROOT / "docs" / "pictures"

# What a bar is called, and the contender of `step.py` that it shows.
BARS = {
    "torch AdamW, all FP32": "torch AdamW fused, FP32",
    "TransformerEngine, BF16 states": "TransformerEngine 16-bit remainder, BF16 states",
    "FlashOptim, 24-bit master": "FlashAdamW 24-bit master",
    "torchao 8-bit, no master": "torchao AdamW8bit, no master",
    "bitsandbytes 8-bit, no master": "bitsandbytes AdamW8bit, no master",
    "fused_optim, all FP32": "FusedAdamW FP32",
    "fused_optim, int8, 24-bit master": "FusedAdamW 8-bit remainder, int8 states",
}

WIDTH, TOP, ROW, BAR = 420, 42, 23, 14
LABELS, NUMBERS = 206, 44  # what is left of the bars, and right of the longest one

STYLE = """\
  .ground { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328; font: 12px system-ui, sans-serif }
  .title { font-weight: 600; font-size: 13px }
  .peer rect { fill: #9aa4b0 }
  .ours rect { fill: #0a66c2 }
  .ours text { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; stroke: #30363d }
    text { fill: #e6edf3 }
    .peer rect { fill: #6e7681 }
    .ours rect { fill: #4493f8 }
  }"""


def bars(title: str, values: dict[str, float], digits: int) -> str:
    """An SVG of horizontal bars, in the order of ``values``."""
    height = TOP + ROW * len(values) + 6
    scale = (WIDTH - LABELS - NUMBERS) / max(values.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="14" y="26">{escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(values.items()):
        y, length = TOP + ROW * number, value * scale
        lines += [
            f'<g class="{"ours" if name.startswith("fused_optim") else "peer"}">',
            f'<text x="{LABELS - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>',
            f'<text x="{LABELS + length + 6:.1f}" y="{y + 12}">{value:.{digits}f}</text>',
            "</g>",
        ]
    return "\n".join([*lines, "</svg>", ""])


def pictures() -> dict[str, str]:
    """The files of docs/pictures that this script writes, by name."""
    rows: dict[str, dict[str, Any]] = {
        row["name"]: row for row in json.loads(STEPS.read_text())["workloads"]["llama-1b"]
    }
    chosen = {bar: rows[name] for bar, name in BARS.items()}
    memory = {bar: row["allocated_bytes_per_param"] for bar, row in chosen.items()}
    times = {bar: row["ms"] for bar, row in chosen.items()}
    return {
        "memory.svg": bars("Memory: bytes per parameter, gradient included", memory, 1),
        "step_time.svg": bars("Time: ms per step, 1.24 B parameters, H200", times, 1),
    }


def main() -> None:
    for name, text in pictures().items():
        (PICTURES / name).write_text(text)


if __name__ == "__main__":
    main()
