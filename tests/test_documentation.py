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
from snippets import python_blocks, run_page

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
