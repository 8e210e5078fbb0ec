"""Draws the diagrams of docs/concepts.md, readable in light and dark mode: python docs/pictures/diagrams.py [FOLDER]"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

LINE = 17  # pixels
STYLE = """<style>
text { fill: #1f2328; font: 13px system-ui, sans-serif; text-anchor: middle }
.name { font-weight: 600 }
.note { fill: #59636e; font-size: 12px }
.box { fill: #ffffff; stroke: #8c959f }
.ours { fill: #ddf4ff; stroke: #0969da }
.group { fill: #f6f8fa; stroke: #d1d9e0 }
.arrow { fill: none; stroke: #59636e; stroke-width: 1.5; marker-end: url(#head) }
#head path { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .note { fill: #9198a1 }
  .box { fill: #0d1117; stroke: #656c76 }
  .ours { fill: #121d2f; stroke: #4493f8 }
  .group { fill: #151b23; stroke: #3d444d }
  .arrow { stroke: #9198a1 }
  #head path { fill: #9198a1 }
}
</style>
<defs>
<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 8 4 0 8z"/>
</marker>
</defs>"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Lines around a middle."""
    lines = words.split("\n")
    first = y - (len(lines) - 1) * LINE / 2 + 4.5
    kind = f' class="{kind}"' if kind else ""
    return "\n".join(f'<text x="{x:g}" y="{first + i * LINE:g}"{kind}>{escape(t)}</text>' for i, t in enumerate(lines))


def box(x: float, y: float, width: float, height: float, words: str, kind: str = "box") -> str:
    frame = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    return f"{frame}\n{text(x + width / 2, y + height / 2, words)}"


def group(x: float, y: float, width: float, height: float, title: str) -> str:
    frame = f'<rect class="group" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>'
    return f"{frame}\n{text(x + width / 2, y + 16, title, 'name')}"


def arrow(*points: tuple[float, float]) -> str:
    return f'<path class="arrow" d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}"/>'


def picture(width: int, height: int, title: str, *parts: str) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(title)}</title>\n{STYLE}'
    return "\n".join([start, *parts, "</svg>\n"])


def update() -> str:
    read = ["gradient", "parameter", "master or remainder", "exp_avg and scales", "exp_avg_sq and scales"]
    parts = [group(4, 4, 190, 208, "memory, read once"), group(262, 4, 176, 208, "registers, FP32")]
    parts += [group(506, 4, 190, 208, "memory, written once")]
    parts += [box(14, 32 + 35 * i, 170, 29, words) for i, words in enumerate(read)]
    parts += [box(516, 67 + 35 * i, 170, 29, words) for i, words in enumerate(read[1:])]
    steps = ["decode", "update of the rule", "encode"]
    parts += [box(280, 42 + 57 * i, 140, 38, words, "ours") for i, words in enumerate(steps)]
    parts += [arrow((350, 80 + 57 * i), (350, 98 + 57 * i)) for i in range(2)]
    parts += [arrow((194, 61), (278, 61)), arrow((420, 175), (504, 175))]
    return picture(700, 216, "One pass reads, decodes, updates, encodes and writes", *parts)


def sharding() -> str:
    parts = [group(4, 4, 692, 76, "one parameter of 6 rows")]
    for i, rows in enumerate(("rows 0 and 1", "rows 2 and 3", "rows 4 and 5")):
        x = 16 + 226 * i
        parts += [box(x, 32, 216, 36, rows), arrow((x + 108, 68), (x + 108, 104))]
        parts += [box(x, 106, 216, 66, f"rank {i}\nparameter, gradient,\nstates, scales of {rows}", "ours")]
    return picture(700, 178, "Each rank holds parameter, gradient, states and scales of its rows", *parts)


def saves() -> str:
    forms = ["unscaled (default)\nFP32 tensors, any tool reads them", "native\nthe stored bits and scales, smallest"]
    forms.append("torch\nAdamW's own form, no masters")
    parts = [box(4, 66, 150, 62, "running states\ncodes, scales,\nremainders", "ours")]
    parts += [box(546, 57, 150, 80, "any world size,\nany formats,\nany masters", "ours")]
    for i, words in enumerate(forms):
        y = 33 + 64 * i
        parts += [box(214, y - 26, 272, 52, words), arrow((154, 97), (212, y)), arrow((486, y), (544, 97))]
    return picture(700, 194, "Three forms of checkpoints, each of which loads anywhere", *parts)


def checkpointer() -> str:
    lanes = ["training", "copies", "writer"]
    parts = [text(44, 40 + 52 * i, words, "name") for i, words in enumerate(lanes)]
    parts += [box(96, 20, 96, 40, "step n"), box(212, 20, 210, 40, "forward, backward n + 1")]
    parts += [box(442, 20, 100, 40, "step n + 1"), box(562, 20, 134, 40, "forward ...")]
    parts += [box(212, 72, 190, 40, "to page-locked memory", "ours")]
    parts += [box(422, 124, 274, 40, "files, checksums, then a new name", "ours")]
    parts += [arrow((202, 40), (202, 92), (210, 92)), text(150, 80, "save(n) returns", "note")]
    parts += [arrow((402, 92), (432, 92), (432, 40), (440, 40)), text(512, 84, "the step waits for copies", "note")]
    parts += [
        arrow((317, 112), (317, 144), (420, 144)),
        text(560, 182, "a checkpoint is visible once it is complete", "note"),
    ]
    return picture(700, 196, "A Checkpointer copies and writes while training continues", *parts)


DIAGRAMS = {"update": update, "sharding": sharding, "saves": saves, "checkpointer": checkpointer}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, draw in DIAGRAMS.items():
        (folder / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
