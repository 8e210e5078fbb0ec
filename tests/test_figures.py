"""Measured figures in the documents are those of the results that a comment below them names.

docs/contributing/releases.md, "Figures", says how such a comment is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "benchmarks/README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]

# What a unit on a page and the end of a key in the results amount to; a key of another end has the page's unit.
UNITS = {"%": 0.01, "us": 1e-6, "ms": 1e-3, "s": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB/s": 1e12}
KEYS = {"share_of_copy": 1.0, "_us": 1e-6, "_ms": 1e-3, "/ms": 1e-3, "_s": 1.0, "bytes": 1.0, "_gb": 1e9}
NUMBER = re.compile(r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)(?: ?(%|TB/s|us|ms|s|kB|MB|GB))?(?![\w.]*\w)")
COMMENT = re.compile(r"<!-- figures: (.*?)\s*-->", re.DOTALL)


@dataclass
class Claim:
    """A number on a page, its unit or "", and the path of its value in the results."""

    number: str
    unit: str
    path: str


def rows_of(table: str) -> list[list[str]]:
    """The cells of a table's body."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def table_claims(table: str, lines: list[str]) -> Iterator[Claim]:
    """``values:`` has the paths of a row's numbers; then, for each row, what stands for {0}, {1}, ... in them.

    Without such lines the first column stands for {0}.
    """
    values, *arguments = [*lines, ""][: len(lines) or 1]
    body = rows_of(table)
    if values.startswith("values: ") and not arguments:
        arguments = [cells[0] for cells in body]
    assert len(arguments) == len(body), f"{len(arguments)} lines for {len(body)} rows"
    for cells, line in zip(body, arguments):
        if line == "-":  # no results of this row
            continue
        paths = line.removeprefix("= ") if line.startswith("= ") else values.removeprefix("values: ")
        found = [number for cell in cells[1:] for number in NUMBER.findall(cell)]
        names = paths.format(*line.split(" | ")).split("; ")
        assert len(found) == len(names), f"{len(names)} paths for the {len(found)} numbers of {cells}"
        yield from (Claim(*number, path) for number, path in zip(found, names))


def text_claims(text: str, lines: list[str]) -> Iterator[Claim]:
    """``TEXT = PATH`` in the order of the text."""
    at, text = 0, " ".join(text.split())
    for line in lines:
        printed, path = line.split(" = ", 1)
        found = next((m for m in NUMBER.finditer(text, at) if m[0] == printed), None)
        assert found, f"{printed!r} is not in the text above, or not in this order"
        at = found.end()
        yield Claim(found[1], found[2] or "", path)


def claims_of(block: str, comment: str) -> Iterator[Claim]:
    """The numbers of a block, with full paths: ``FILE:KEY/KEY``."""
    first, *lines = [line.strip() for line in comment.splitlines()]
    files = {Path(name).stem: name for name in first.split()}
    claims = table_claims(block, lines) if block.startswith("|") else text_claims(block, lines)
    for claim in claims:
        least, stem, path = re.fullmatch(r"(min |max |)(?:(\w+):)?(.*)", claim.path).groups()  # type: ignore[union-attr]
        file = files[stem] if stem else next(iter(files.values()))
        yield Claim(claim.number, claim.unit, f"{least}{file}:{path}")


@cache
def results(file: str) -> Any:
    return json.loads((ROOT / file).read_text())


def steps_into(value: Any, key: str) -> list[Any]:
    """A member of an object ("*": all), or those members of a list that have this name or all of these values."""
    if isinstance(value, dict):
        return [*value.values()] if key == "*" else [value[key]] if key in value else []
    wanted = [part.split("=", 1) for part in (key if "=" in key else f"name={key}").split(" & ")]
    return [element for element in value if all(str(element.get(k)) == v for k, v in wanted)]


def value_of(path: str) -> float:
    """Of ``FILE:KEY/KEY``, the only one there; or with "min " or "max " in front the least or largest of several."""
    choose = {"min": min, "max": max}.get(path[:3])
    file, _, keys = path.removeprefix("min ").removeprefix("max ").partition(":")
    found = [results(file)]
    for key in keys.split("/"):
        found = [each for value in found for each in steps_into(value, key)]
    assert found, f"{path}: there is no such thing"
    assert choose or len(found) == 1, f"{path}: there are {len(found)}"
    return choose(found) if choose else found[0]


def factor(unit: str, path: str) -> float:
    key = re.sub(r"_above_\w+$", "", path)
    units = [KEYS[end] for end in KEYS if key.endswith(end)]
    return units[0] / UNITS[unit] if unit and units else 1.0


def difference(claim: Claim) -> str:
    """What is wrong with a figure, or nothing: it must be the value, rounded as it is printed."""
    value = value_of(claim.path) * factor(claim.unit, claim.path)
    decimals = len(claim.number.partition(".")[2])
    last_place = 1000.0 if claim.number.endswith(",000") else 10.0**-decimals
    if abs(value - float(claim.number.replace(",", ""))) <= 0.5001 * last_place:
        return ""
    return f"{claim.number} {claim.unit}: {claim.path} is {value:.6g}"


def blocks_of(page: str) -> list[str]:
    """What stands between blank lines, comments in one piece; without code."""
    text = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.DOTALL | re.MULTILINE)
    return [block for block in re.split(r"\n\s*\n", text) if block.strip()]


def differences(page: str) -> list[str]:
    """Of a whole page. Comments speak of the block above them, a table of measured figures must have one."""
    wrong = []
    blocks = blocks_of(page)
    for block, after in zip(blocks, [*blocks[1:], ""]):
        comments = COMMENT.findall(after) if COMMENT.match(after) else []
        if not comments and looks_measured(block):
            wrong.append(f"no comment says where these figures come from: {block.splitlines()[0]}")
        for comment in comments:
            if comment.startswith("none, "):
                continue
            try:
                wrong += filter(None, map(difference, claims_of(block, comment)))
            except AssertionError as error:
                wrong.append(f"{str(error).splitlines()[0]}, in the comment {comment.splitlines()[0]}")
    return wrong


def looks_measured(block: str) -> bool:
    if not block.startswith("|"):
        return False
    cells = [cell for row in rows_of(block) for cell in row[1:] if cell]
    return 2 * sum(NUMBER.match(cell) is not None for cell in cells) > len(cells)


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_results(page: str) -> None:
    assert differences((ROOT / page).read_text()) == []


def test_there_are_figures() -> None:
    commented = [page for page in PAGES if "<!-- figures: benchmarks/" in (ROOT / page).read_text()]
    assert {"README.md", "benchmarks/README.md", "docs/quantized.md"} <= set(commented)
