"""Pages whose commands are run as they stand there, and what they print is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

import walkthrough
from walkthrough import commands_of, follow, missing

pytestmark = pytest.mark.timeout(900)  # many processes, each of which imports torch


# The tutorial trains with the script of how_to/fsdp2.md, which goes on on another number of ranks, too: three times.
PAGES = ["how_to/fsdp2.md", "tutorials/resume_on_another_cluster.md", "tutorials/8b_on_one_gpu.md"]


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_pages_can_be_followed(page: str, tmp_path: Path) -> None:
    follow(page, tmp_path)


PAGE = """
```sh
printf 'a\\nstep 1: loss 2.50 (1,000 bytes)\\n'
```

```text
step 1: loss 2.48 (1,010 bytes)
```

```sh
echo again
```
"""


def test_commands_and_their_output_are_found() -> None:
    (first, expected), (second, nothing) = commands_of(PAGE)
    assert first.startswith("printf") and expected == ["step 1: loss 2.48 (1,010 bytes)"]
    assert (second, nothing) == ("echo again\n", [])


@pytest.mark.parametrize(
    ("expected", "output", "lacks"),
    [
        (["step 1: loss 2.48"], "other\nstep 1: loss 2.50\n", ""),
        (["step 1: loss 2.48"], "step 1: loss 3.50\n", "step 1: loss 2.48"),
        (["step 1: loss 2.48"], "step 1: error 2.48\n", "step 1: loss 2.48"),
        (["a", "b"], "b\na\n", "b"),  # in their order
        (["a", "a"], "a\n", "a"),
        (["... int8 ... 56.7 GB ..."], "*  int8   x  16.1 GB  56.71 GB  7.06\n", ""),
        (["... int8 ... 56.7 GB ..."], "*  int8   x  16.1 GB  96.71 GB  7.06\n", "... int8 ... 56.7 GB ..."),
        (["a  b"], "\x1b[32ma    b\x1b[0m\n", ""),
    ],
)
def test_outputs_are_compared(expected: list[str], output: str, lacks: str) -> None:
    assert missing(expected, output) == lacks


def test_what_differs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(walkthrough, "DOCS", tmp_path / "docs")
    (tmp_path / "docs/page.md").write_text(PAGE)
    for name, words in (("good", {}), ("printed", {"2.50": "9.50"}), ("failed", {"echo again": "false"})):
        (tmp_path / name).mkdir()
        if name == "good":
            follow("page.md", tmp_path / name, words)
            continue
        with pytest.raises(AssertionError, match="does not print" if name == "printed" else "false"):
            follow("page.md", tmp_path / name, words)
