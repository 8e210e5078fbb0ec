"""Compares the figures of tables in documentation pages with the results that they come from.

A comment before a table names a JSON file below ``benchmarks/results``, where its list of records is (a path of keys,
with dots), and values that the records must have:

    <!-- figures: 2026-11-21-h200-quality/errors.json errors moments=both beta2=0.999 -->

The first column is a record's ``name`` (or ``format``), the headings of the others are those of ``COLUMNS``; columns
with other headings are text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

# Heading of a column -> key of the record, and how its value is written.
COLUMNS = {
    "ms per step": ("ms", "{:.2f}"),
    "host ms": ("host_ms", "{:.2f}"),
    "of copy": ("share_of_copy", "{:.0%}"),
    "state bytes": ("state_bytes_per_param", "{:.2f}"),
    "temporary bytes": ("temporary_bytes_per_param", "{:.2f}"),
    "forward ms": ("forward_ms", "{:.1f}"),
    "forward and backward ms": ("both_ms", "{:.1f}"),
    "error of the update": ("error", "{:.4f}"),
    "largest update": ("largest_update", "{:.2f}"),
    "held-out loss": ("held_out_loss", "{:.3f}"),
    "call s": ("call_s", "{:.2f}"),
    "lost s": ("lost_s", "{:.2f}"),
    "written after s": ("written_after_s", "{:.1f}"),
}


class Table(NamedTuple):
    source: str
    rows: list[dict[str, str]]  # by heading; the first one is ""


def tables(text: str) -> list[Table]:
    """The tables of a page that have a comment before them."""
    found = []
    for source, body in re.findall(r"<!-- figures: (.*?) -->\n+((?:\|.*\n)+)", text):
        cells = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in body.splitlines()]
        headings = ["", *cells[0][1:]]
        found.append(Table(source, [dict(zip(headings, row, strict=True)) for row in cells[2:]]))
    return found


def differences(table: Table) -> list[str]:
    """What a table says that its results do not."""
    file, path, *filters = table.source.split()
    found: Any = json.loads((RESULTS / file).read_text())
    for key in path.split("."):
        found = found[key]
    wanted = dict(each.split("=", 1) for each in filters)
    records = [each for each in found if all(str(each.get(key)) == value for key, value in wanted.items())]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for each in records:
        by_name.setdefault(each.get("name") or each.get("format") or each["way"], []).append(each)
    return [text for row in table.rows for text in _differences(row, by_name.get(row[""], []))]


def _differences(row: dict[str, str], records: list[dict[str, Any]]) -> list[str]:
    if not records:
        return [f"{row['']}: not in the results"]
    wrong = []
    for heading, (key, form) in COLUMNS.items():
        if heading not in row:
            continue
        values = sorted(form.format(each[key]) for each in records)
        expected = values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
        if row[heading] != expected:
            wrong.append(f"{row['']}: {heading} is {row[heading]}, the results have {expected}")
    return wrong
