"""What says which version this is, and what a release needs, without building one: `make release-check` does that."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

import fused_optim

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Page of the reference, module whose public names it lists.
REFERENCE = {"fused_optim": "fused_optim", "quantized": "fused_optim.quantized", "checkpoint": "fused_optim.checkpoint"}


def cff() -> dict[str, str]:
    """The top-level scalars of CITATION.cff, whose YAML needs no more to be read."""
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: \S", line))


def test_the_version_is_in_one_place() -> None:
    """And those that must repeat it for their readers do."""
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert cff()["version"] == fused_optim.__version__
    newest = re.findall(r"^## \[(\d\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == (fused_optim.__version__, cff()["date-released"])


def test_the_citation_is_valid() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert set(citation) >= {"message", "title", "authors", "version"}  # the first three are required
    assert all(set(author) <= {"name", "given-names", "family-names"} for author in citation["authors"])
    assert citation["license"] == PROJECT["license"] and citation["title"] == PROJECT["name"]


def test_the_sdist_is_told_of_every_folder() -> None:
    """setuptools finds the package and csrc/ by itself; the rest must be named. `make wheel` compares file by file."""
    named = set((ROOT / "MANIFEST.in").read_text().split())
    found = {".clang-format", ".ci", "benchmarks", "docs", "examples", "tests", *map(str, PROJECT["license-files"])}
    found |= {path.name for path in ROOT.glob("*.md")} | {"CITATION.cff", "Makefile", "mkdocs.yml"}
    automatic = {PROJECT["readme"], *PROJECT["license-files"]}
    assert found - automatic <= named and all((ROOT / name).exists() for name in found)


@pytest.mark.parametrize("page", REFERENCE)
def test_the_reference_lists_every_public_name(page: str) -> None:
    module = importlib.import_module(REFERENCE[page])
    listed = re.findall(r"^::: (\S+)$", (ROOT / f"docs/reference/{page}.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(f"{module.__name__}.{name}" for name in module.__all__ if name != "__version__")


@pytest.mark.parametrize("page", ["compat", "integrations"])
def test_the_reference_lists_names_that_are_there(page: str) -> None:
    listed = re.findall(r"^::: (\S+)$", (ROOT / f"docs/reference/{page}.md").read_text(), re.MULTILINE)
    for name in listed:
        module, _, attribute = name.rpartition(".")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^(class|def) {attribute}\b", source, re.MULTILINE), name
    assert len(listed) >= 2


def test_every_page_is_in_the_navigation() -> None:
    """The strict build says so, too, where it can run."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]
    assert not [str(page) for page in pages if f": {page}\n" not in navigation]
