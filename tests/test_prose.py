"""`.ci/check_prose.py`, which `make lint` runs over the documents, finds what it names and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / ".ci" / "check_prose.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_prose", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`fused` is accepted and\nmeans nothing.", [(2, "means nothing")]),
        ("Fast: 97% of copy.\n\n0.63 us at commit `265ee85`.", [(1, "of copy"), (3, "commit `265ee85`")]),
        ("97% of copy bandwidth, `in place of`, [x](in/anew.md), going on to say, commit `1234567`, `abcdefa`", []),
        ("<!-- figures: anew\nanew -->\n\n```python\nanew = 1  # anew\n```\n\nBegin anew.", [(8, "anew")]),
        ("<!-- prose: off -->\nanew\n<!-- prose: on -->\nIt goes on.", [(4, "goes on")]),
        ("weights are quantised, initialised or wise", [(1, "initialised"), (1, "quantised")]),
    ],
)
def test_phrases_are_found_in_running_text(text: str, found: list[tuple[int, str]], check: ModuleType) -> None:
    assert sorted((line, phrase) for line, phrase, _ in check.found_in(text)) == found


def test_findings_fail(check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = check.ROOT / "docs" / "contributing" / "style.md"
    assert check.main([str(page)]) == 0 and not capsys.readouterr().out
    text = page.read_text()
    assert text.count("\n| ") >= 14 and list(check.found_in(text.replace("<!-- prose: off -->\n", "")))


def test_the_documents_are_clean(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0, capsys.readouterr().out
