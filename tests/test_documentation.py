"""The code of the documentation runs, in the order of its pages, on one rank and on two."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import distributed
import snippets
from snippets import Block, code_of, python_blocks, run_page

# Pages whose blocks need nothing but each other, from top to bottom.
PAGES = ["quantized.md", "checkpoints.md"]


def run_within(page: str, folder: str) -> None:
    torch.manual_seed(0)
    with contextlib.chdir(folder):
        run_page(page)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_pages_run(page: str, ranks: int, tmp_path: Path) -> None:
    distributed.run(ranks, run_within, page, str(tmp_path), timeout=120)


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_missed(page: str) -> None:
    text = (snippets.DOCS / page).read_text()
    assert len(python_blocks(text)) == text.count("```python") > 1


# --- the mechanism itself -----------------------------------------------------------------------------------------

PAGE = """
```python
x = [1]
```

## Lists

* in a list

  ```python
  def f():
      return x
  ```

```sh
not python
```

```python
from dataclasses import dataclass

@dataclass
class C:
    y: int = 2

f().append(C().y)
assert f() == [1, 2]
```
"""


def test_blocks_and_their_lines_are_found() -> None:
    blocks = python_blocks(PAGE)
    assert [block.line for block in blocks] == [3, 11, 20]
    assert blocks[1] == Block("Lists", 11, "def f():\n    return x\n")
    assert [block.section for block in blocks] == ["", "Lists", "Lists"]


def test_blocks_share_their_names_and_errors_name_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snippets, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    run_page("page.md")
    assert code_of("page.md", "Lists").startswith("def f()") and "x = [1]" not in code_of("page.md", "Lists")
    (tmp_path / "page.md").write_text(f"{PAGE}\n```python\n\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as error:
        run_page("page.md")
    assert error.traceback[-1].lineno + 1 == 32 and error.traceback[-1].path == tmp_path / "page.md"
