"""The code of README and docs runs, page by page from top to bottom; commands and links are looked up."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import distributed
import fresh
import snippets
from fused_optim.tools.commands import add_commands
from snippets import Block, blocks_of, code_of, misnamed, python_blocks, run_page

# As `snippets.run_page` takes them: relative to docs/.
PAGES = ["../README.md", *sorted(str(path.relative_to(snippets.DOCS)) for path in snippets.DOCS.rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in (snippets.DOCS / page).read_text()]
# The others run in this process, without a process group.
ON_RANKS = [
    ("checkpoints.md", 1),
    ("checkpoints.md", 2),
    ("quantized.md", 1),
    ("quantized.md", 2),
    ("how_to/resume.md", 2),
]


def run_within(page: str, folder: str) -> None:
    torch.manual_seed(0)
    with contextlib.chdir(folder):
        run_page(page)


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page not in dict(ON_RANKS)])
def test_pages_run(page: str, tmp_path: Path) -> None:
    run_within(page, str(tmp_path))


@pytest.mark.parametrize(("page", "ranks"), ON_RANKS)
def test_pages_run_on_ranks(page: str, ranks: int, tmp_path: Path) -> None:
    distributed.run(ranks, run_within, page, str(tmp_path), timeout=120)


def test_the_readme_trains_under_torchrun_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(snippets.code_of("../README.md", "Train and resume with FSDP2"))

    def train(processes: int) -> list[str]:
        printed = fresh.torchrun(processes, "train.py", folder=tmp_path)
        return re.findall(r"^step (\d+), loss \d+\.\d+$", printed, re.M)

    assert train(2) == [str(step) for step in range(10, 101, 10)]
    shutil.rmtree(tmp_path / "run" / "step-00000100")
    assert train(1) == [str(step) for step in range(60, 101, 10)]  # goes on from step 50, on another number of ranks


@pytest.mark.parametrize("page", WITH_CODE)
def test_no_block_is_missed(page: str) -> None:
    text = (snippets.DOCS / page).read_text()
    blocks = python_blocks(text)
    assert sum(not block.hidden for block in blocks) == text.count("```python")
    assert sum(bool(block.skipped) for block in blocks) == text.count("<!-- not run")
    assert sum(block.hidden for block in blocks) == text.count("<!-- setup")


@pytest.mark.parametrize("page", WITH_CODE)
def test_what_is_not_run_is_there(page: str) -> None:
    assert not misnamed(python_blocks((snippets.DOCS / page).read_text()))


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    for line in re.findall(r"^(?:    |\$ )?python -m fused_optim ([^#\n]*)", (snippets.DOCS / page).read_text(), re.M):
        try:
            parser.parse_args(shlex.split(line))
        except SystemExit:
            pytest.fail(f"python -m fused_optim {line}: {capsys.readouterr().err}")


# --- links --------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return set(plain)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = snippets.DOCS / page
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(linked.read_text()), f"{page}: {target}"


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
    assert [block.code for block in blocks_of(PAGE, "sh")] == ["not python\n"]


def test_blocks_share_their_names_and_errors_name_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snippets, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    run_page("page.md")
    assert code_of("page.md", "Lists").startswith("def f()") and "x = [1]" not in code_of("page.md", "Lists")
    (tmp_path / "page.md").write_text(f"{PAGE}\n```python\n\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as error:
        run_page("page.md")
    assert error.traceback[-1].lineno + 1 == 32 and error.traceback[-1].path == tmp_path / "page.md"


HIDDEN = """
<!-- setup
count = 1
-->

<!-- not run: needs 1,000 GPUs -->

```python
count = 1000
```

```python
assert count == 1
```
"""


def test_setups_run_and_marked_blocks_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(block.line, block.hidden, block.skipped) for block in python_blocks(HIDDEN)] == [
        (3, True, ""),
        (9, False, "needs 1,000 GPUs"),
        (13, False, ""),
    ]
    monkeypatch.setattr(snippets, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text(HIDDEN)
    run_page("page.md")
    (tmp_path / "page.md").write_text(HIDDEN.replace("count = 1000", "count = = 1000"))
    with pytest.raises(SyntaxError):
        run_page("page.md")


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("from fused_optim import FusedAdamX", ["fused_optim.FusedAdamX"]),
        ("from fused_optim.integrations.torchtitan import lacking", ["fused_optim.integrations.torchtitan.lacking"]),
        ("from fused_optim.integrations.torchtitan import default_fused_adamw", []),
        ("import fused_optim\nfused_optim.load_optimizer_checkpoint(m, o, p, verfy=True)",
         ["fused_optim.load_optimizer_checkpoint(verfy=)"]),
        ("from fused_optim import FusedAdamW\no = FusedAdamW(p, lr=1, exp_avg_dtyp=2)", ["FusedAdamW(exp_avg_dtyp=)"]),
        ("optimizer.sumary()\noptimizer.state_dict()\noptimizer.param_groups[0]", ["FusedAdamW.sumary"]),
        ("optimizer = Other()\noptimizer.sumary()", []),
        ("from fused_optim.checkpoint import Checkpointer\nwith Checkpointer(m, o, f) as c:\n    c.save(1, forse=True)",
         ["c.save(forse=)"]),
    ],
)  # fmt: skip
def test_names_that_are_not_there_are_found(code: str, wrong: list[str]) -> None:
    assert misnamed([Block("", 1, code)]) == wrong


# --- error messages -----------------------------------------------------------------------------------------------


def quoted_messages() -> list[str]:
    """The messages of docs/errors.md: what is in code in the first columns, torch's apart."""
    text = (snippets.DOCS / "errors.md").read_text().split("## Messages of torch")[0]
    rows = re.findall(r"^\| (`.*?) \|", text, re.M)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" for `")[0])]


def texts_of(tree: ast.AST) -> list[str]:
    """All texts of a source, as one that is put together from parts; where values go in there is a NUL."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[sd]", "\0", node.value))
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            found.append("".join(map(str, parts)))
    return found


def test_messages_are_those_of_the_sources() -> None:
    sources = (snippets.ROOT / "fused_optim").rglob("*.py")
    texts = "\n".join(text for source in sources for text in texts_of(ast.parse(source.read_text())))
    messages = quoted_messages()
    assert len(messages) > 80
    wrong = []
    for message in messages:
        fragments = [part.strip() for part in message.split("...") if part.strip(" ,;:.")]
        wrong += [(message, part) for part in fragments if part not in texts]
        assert max(map(len, fragments)) >= 8, message
    assert not wrong


# --- the sources ----------------------------------------------------------------------------------------------------

DEVELOPMENT = (snippets.DOCS / "development.md").read_text()


def test_rooms_are_the_folders() -> None:
    """docs/development.md has a line for each folder of sources, and for no other."""
    rows = set(re.findall(r"^\| `([\w/]+)` \|", DEVELOPMENT, re.M))
    folders = set()
    for root in ("fused_optim", "csrc"):
        folder = snippets.ROOT / root
        files = [path for path in folder.rglob("*") if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh"}]
        sources = [path for path in files if path.name != "__init__.py"]
        folders |= {str(path.parent.relative_to(folder)) for path in sources} - {"."}
    assert rows == folders, sorted(rows ^ folders)


def undefined(text: str) -> list[str]:
    """Of "`name` ([file](path))", with ``Class.name`` and ``Class::name``, those that the file does not define."""
    wrong = []
    for name, path in re.findall(r"`([\w.:]+)`\s+\(\[[\w.]+\]\(\.\./([^)]+)\)\)", text):
        source = (snippets.ROOT / path).read_text()
        for part in re.split(r"\.|::", name):
            defined = rf"^\s*(?:class|struct|def) {part}\b|^[ \w:<>,*&]+ {part}(?:\(|<Rule)"
            if not re.search(defined, source, re.M):
                wrong.append(f"{name} in {path}")
    return wrong


def test_journeys_name_what_is_there() -> None:
    assert undefined(DEVELOPMENT) == []


def test_names_that_are_gone_are_found() -> None:
    text = "`Plan.fits` ([plan.py](../fused_optim/step/plan.py)), `Plan.fit`\n([plan.py](../fused_optim/step/plan.py))"
    assert undefined(text) == ["Plan.fit in fused_optim/step/plan.py"]
